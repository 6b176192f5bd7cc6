"""What a worker waits for by asking again and again: other workers, a checkpoint, the end of its publication.

Called by the link, on the worker's thread. What always holds: every wait ends with an answer or with an error that says
what was waited for and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torchquorum.wire.messages as m
from torchquorum.errors import DeadlineError, TaskLostError
from torchquorum.worker.ps_channels import PsChannels

WORKERS_S = 120.0
WORKERS_EVERY_S = 0.02
SAVE_EVERY_S = 0.05
PLACE_EVERY_S = 0.1
PLACE_S = 10.0
NOTICE_EVERY_S = 1.0
SILENT_S = 3.0

_Answer = TypeVar("_Answer")


def wait_for_workers(
    channels: PsChannels, count: int, *, version: int, begins: bool, at_most_s: float | None = None
) -> None:
    """Waits until so many workers have joined, this one counted, or the run has gone on.

    Args:
        channels: How ps task 0 is asked.
        count: How many workers.
        version: The version that this worker holds: a later one says that others train.
        begins: Whether only the beginning of a run is waited for: not in one that has made updates.
        at_most_s: Go on without the others after this time; None is an error then.

    Raises:
        DeadlineError: They did not come.
    """
    if count <= 1:
        return
    patience, clock = channels.end.patience, channels.end.clock
    started = clock.now()

    def ask() -> dict[str, Any]:
        limit_s = patience.round_s
        return channels.ask(0, m.StatusRequest(), kind=m.Status, what="the other workers", limit_s=limit_s).body

    def ready(body: dict[str, Any]) -> bool:
        runs = body.get("stopped") or body.get("global_step", 0) > version or (begins and body.get("updates", 0) > 0)
        late = at_most_s is not None and clock.now() - started > at_most_s
        # One that was there and has died since is not waited for: it may never come back.
        return max(len(body.get("live", [])), body.get("joined", 0)) >= count or bool(runs) or late

    def reason(body: dict[str, Any], waited_s: float) -> str:
        return (
            f"waited {waited_s:.0f} s for {count} workers and gave up; {len(body.get('live', []))} have joined. "
            "Start the others, or ask the session for fewer with wait_for_workers."
        )

    _poll(
        channels,
        ask,
        ready,
        every_s=WORKERS_EVERY_S,
        limit_s=patience.start_s if begins else min(WORKERS_S, patience.start_s),
        progress=lambda body: f"{count} workers, {len(body.get('live', []))} have joined",
        reason=reason,
    )


def wait_for_place(channels: PsChannels, life: str) -> None:
    """A task that begins makes sure that no other process is at work in its place, in a run that is alive.

    One that is ending, or whose death is not noticed yet, is waited for.

    Args:
        channels: How ps task 0 is asked.
        life: The name of this task's own incarnation.

    Raises:
        DeadlineError: Another process is at work there, and stays.
    """
    end = channels.end
    heard = -1.0, end.clock.now()  # when ps task 0 heard the other last, and since when that is known here

    def ready(body: dict[str, Any]) -> bool:
        nonlocal heard
        seen, other = body.get("heard", {}).get(str(end.index), (None, life))
        if other == life:
            return True
        if seen != heard[0]:
            heard = seen, end.clock.now()
        return end.clock.now() - heard[1] > SILENT_S

    what = f"the end of another process that is {end.task}"
    _poll(
        channels,
        lambda: channels.ask(0, m.StatusRequest(), kind=m.Status, what=what, limit_s=end.patience.start_s).body,
        ready,
        every_s=PLACE_EVERY_S,
        limit_s=PLACE_S,
        progress=lambda _: what,
        reason=lambda _, waited_s: (
            f"another process is at work as {end.task} in the run that {end.where(0)} serves, and was still heard after "
            f"{waited_s:.0f} s. Start each task once; for a second run give other --ps_hosts, or end the first"
        ),
    )


def wait_for_save(
    channels: PsChannels, request: m.Save, wait_s: float, retries: Callable[[str], None] = lambda _: None
) -> m.SaveState:
    """Waits for a checkpoint, which every ps task writes a part of; returns how it went.

    Args:
        channels: How the ps tasks are asked.
        request: What is asked of ps task 0.
        wait_s: When to give up.
        retries: Is called with what went wrong while ps task 0 tries again; may raise to end the wait.

    Raises:
        DeadlineError: It was not there in time.
    """

    def ask() -> m.SaveState:
        state = channels.ask(0, request, kind=m.SaveState, what="a checkpoint", limit_s=wait_s)
        if state.state == "running" and state.text:
            retries(state.text)
        if not ready(state):
            notice_losses(channels, "its part of a checkpoint", wait_s)
        return state

    def ready(state: m.SaveState) -> bool:
        return state.number == request.number and state.state != "running"

    return _poll(
        channels,
        ask,
        ready,
        every_s=SAVE_EVERY_S,
        limit_s=wait_s,
        progress=lambda _: "a checkpoint",
        reason=lambda _, waited_s: (
            f"waited {waited_s:.0f} s for {channels.end.where(0)} to write a checkpoint into {request.folder} and gave up"
        ),
    )


def wait_until_saved(channels: PsChannels) -> str:
    """Waits until the last version of a run that is over is saved, by the chief or by ps task 0 in its place.

    Returns:
        Why it is not saved; empty if it is.

    Raises:
        DeadlineError: The chief is still at something else.
    """
    limit_s, what = channels.end.patience.round_s, "the last checkpoint"
    answer = _poll(
        channels,
        lambda: channels.ask(0, m.StatusRequest(), kind=m.Status, what=what, limit_s=limit_s).body,
        lambda body: body.get("saved_step") == body.get("global_step") or bool(body.get("not_saved")),
        every_s=SAVE_EVERY_S,
        limit_s=limit_s,
        progress=lambda _: what,
        reason=lambda _, waited_s: f"waited {waited_s:.0f} s for the chief to save the last step",
    )
    return str(answer.get("not_saved", ""))


def wait_until_settled(channels: PsChannels) -> None:
    """Waits until ps task 0 is making no checkpoint, so that the newest in the folder stays the newest.

    Raises:
        DeadlineError: It was still at it.
    """
    limit_s, what = channels.end.patience.start_s, "a checkpoint that is being published"
    _poll(
        channels,
        lambda: channels.ask(0, m.Settle(), kind=m.Settled, what=what, limit_s=limit_s),
        lambda answer: answer.done,
        every_s=SAVE_EVERY_S,
        limit_s=limit_s,
        progress=lambda _: what,
        reason=lambda _, waited_s: (
            f"waited {waited_s:.0f} s for {channels.end.where(0)} to publish a checkpoint and gave up; see whether its disk "
            "still answers"
        ),
    )


def notice_losses(channels: PsChannels, what: str, limit_s: float) -> None:
    """Asks all ps tasks but the first how they are: in a wait in which only that is asked, one of the others that is gone is noticed here.

    Raises:
        TaskLostError: One is gone.
    """
    for k in range(1, len(channels.end.ps)):
        body = channels.ask(k, m.StatusRequest(), kind=m.Status, what=what, limit_s=limit_s).body
        if not body.get("ready", True):
            raise TaskLostError(
                f"{channels.end.task}: {channels.end.where(k)} was started again and holds no variables"
            )


def _poll(
    channels: PsChannels,
    ask: Callable[[], _Answer],
    ready: Callable[[_Answer], bool],
    *,
    every_s: float,
    limit_s: float,
    progress: Callable[[_Answer], str],
    reason: Callable[[_Answer, float], str],
) -> _Answer:
    """Asks every `every_s` until an answer is what was waited for; says every `say_s` how it stands; gives up after `limit_s`."""
    end = channels.end
    seen = end.patience.seen_time(end.clock)
    started = reported = seen.now()
    while not ready(answer := ask()):
        now = seen.turn()
        if now - started > limit_s:
            raise DeadlineError(f"{end.task}: {reason(answer, now - started)}")
        if now - reported >= end.patience.say_s:
            reported = now
            end.tell(f"waiting for {progress(answer)}: {now - started:.0f} s")
        end.clock.sleep(every_s)
    return answer
