"""The state of a run for people, `torchquorum status` and the report."""

from __future__ import annotations

from typing import Any

from torchquorum.formats.ledger import name_life
from torchquorum.server.leader import Leader


def describe_run(leader: Leader) -> dict[str, Any]:
    """Returns the state of the run for people and reports."""
    quorum, counts = leader.quorum, leader.history.tally
    for index, worker in quorum.workers.items():
        wait = quorum.waits_for(index)
        of = counts.worker(index)
        of.state = "dead" if worker.gone else "left" if worker.left else "waiting" if wait else "computing"
        of.waits_for = wait.to_dict() if wait and worker.alive else None
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
        **({"epoch": leader.meeting.gates.epoch} if leader.meeting.gates.used else {}),
        **counts.snapshot(),
    }
