"""The state of a run for people, `torchquorum status` and the report."""

from __future__ import annotations

from typing import Any

from torchquorum.formats.ledger import name_life
from torchquorum.server.leader import Leader


def describe_run(leader: Leader) -> dict[str, Any]:
    """Returns the state of the run for people and reports."""
    quorum, counts = leader.quorum, leader.history.tally
    names = leader.plan.names
    for index, worker in quorum.workers.items():
        wait = quorum.waits_for(index)
        of = counts.worker(index)
        of.state = "dead" if worker.gone else "left" if worker.left else "waiting" if wait else "computing"
        of.waits_for = wait.to_dict() if wait and worker.alive else None
        if of.waits_for is not None and wait is not None and worker.held and names[wait.track]:
            of.waits_for["optimizer"] = names[wait.track]
    transports = sorted({w.transport for w in counts.workers.values() if w.transport})
    return {
        "rule": str(leader.plan.rule),
        "global_step": quorum.version,
        "last_step": quorum.last_step,
        "live": quorum.alive,
        "joined": len(quorum.workers),
        "heard": {str(i): [w.last_seen, name_life(w.incarnation)] for i, w in quorum.workers.items() if w.alive},
        "stopped": quorum.stopped,
        "transport": "+".join(transports),
        **({"aggregate": quorum.needed} if quorum.rule.auto else {}),
        **leader.membership.status(),
        **({"data": leader.data.status()} if leader.data else {}),
        **({"epoch": leader.barrier_waits.barriers.epoch} if leader.barrier_waits.barriers.used else {}),
        **({"optimizers": _describe_each(leader)} if leader.plan.more else {}),
        **counts.snapshot(),
    }


def _describe_each(leader: Leader) -> dict[str, dict[str, Any]]:
    """Returns the state of each of several optimizers, by name."""
    counts = leader.history.tally
    return {
        name: {
            "rule": str(track.rule),
            "version": track.version,
            "round": [len(track.round), track.needed] if track.rule.once_per_round else None,
            **counts.optimizer(name).counts(),
        }
        for name, track in zip(leader.plan.names, leader.quorum.tracks, strict=True)
    }
