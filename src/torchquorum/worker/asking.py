"""What a worker waits for by asking again and again: the others, a checkpoint, that none is being written any more.

Called by the client, on the worker's thread. What always holds: every wait ends with an answer or with an error that says
who was waited for and what to do.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torchquorum.transport.messages as m
from torchquorum.errors import DeadlineError

if TYPE_CHECKING:
    from torchquorum.worker.client import Client

WORKERS_S = 120.0
WORKERS_EVERY_S = 0.02
SAVE_EVERY_S = 0.05


def wait_for_workers(client: Client, count: int, at_most_s: float | None) -> None:
    """Waits until so many workers have joined, this one counted; `at_most_s` goes on without the others then.

    Raises:
        DeadlineError: They did not come.
    """
    patience, started, plan = client.patience, time.monotonic(), client.plan
    told, elastic = started, plan is not None and plan.elastic  # then it is the run's beginning that is waited for
    limit_s = patience.start_s if elastic else min(WORKERS_S, patience.start_s)
    while count > 1:
        body = client.ask(0, m.StatusRequest(), [], m.Status, patience.round_s, "the other workers").body
        now, live = time.monotonic(), body.get("live", [])
        if len(live) >= count or body.get("stopped") or body.get("global_step", 0) > client.version:
            return
        if elastic and body.get("updates", 0) > 0:
            return
        if at_most_s is not None and now - started > at_most_s:
            return
        if now - started > limit_s:
            raise DeadlineError(
                f"{client.task}: waited {now - started:.0f} s for {count} workers and gave up; {len(live)} have joined. "
                "Start the others, or ask the session for fewer with wait_for_workers."
            )
        if now - told >= patience.say_s:
            told = now
            client.say(f"waiting for {count} workers, {len(live)} have joined: {now - started:.0f} s")
        time.sleep(WORKERS_EVERY_S)


def wait_for_save(client: Client, request: m.Save, wait_s: float) -> m.SaveState:
    """Waits for a checkpoint, which every ps task writes a part of; returns how it went.

    Raises:
        DeadlineError: It was not there in time.
    """
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        state = client.ask(0, request, [], m.SaveState, wait_s, "a checkpoint")
        if state.number == request.number and state.state != "running":
            return state
        for k in range(1, client.cluster.num_tasks("ps")):  # one that is gone is noticed here
            client.ask(k, m.StatusRequest(), [], m.Status, wait_s, "its part of a checkpoint")
        time.sleep(SAVE_EVERY_S)
    first = client.cluster.tasks("ps")[0]
    raise DeadlineError(
        f"{client.task}: waited {wait_s:.0f} s for {first} ({client.cluster.address(first)}) to write a checkpoint into "
        f"{request.folder} and gave up"
    )


def wait_until_settled(client: Client) -> None:
    """Waits until ps task 0 is making no checkpoint, so that the newest in the folder stays the newest.

    Raises:
        DeadlineError: It was still at it.
    """
    limit_s = client.patience.start_s
    started = told = time.monotonic()
    while not client.ask(0, m.Settle(), [], m.Settled, limit_s, "a checkpoint that is being published").done:
        now = time.monotonic()
        if now - started > limit_s:
            first = client.cluster.tasks("ps")[0]
            raise DeadlineError(
                f"{client.task}: waited {limit_s:.0f} s for {first} ({client.cluster.address(first)}) to publish a checkpoint "
                "and gave up; see whether its disk still answers"
            )
        if now - told >= client.patience.say_s:
            told = now
            client.say(f"waiting for a checkpoint that is being published: {now - started:.0f} s")
        time.sleep(SAVE_EVERY_S)
