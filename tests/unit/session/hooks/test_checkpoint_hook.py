"""When the chief saves, on a clock that the test moves."""

from typing import Any

import pytest

from tests.manual_clock import ManualClock
from torchquorum.errors import DeadlineError, LostVariablesError, SavedElsewhereError, UpdateError
from torchquorum.session.config import SaveOptions
from torchquorum.session.hooks.checkpoint_hook import EVERY_S, CheckpointHook
from torchquorum.session.hooks.hook import Ran
from torchquorum.wire.rpc import Patience
from torchquorum.worker.step import Step


class Pretended:
    """A session that counts its checkpoints."""

    task, patience = "/job:worker/task:0", Patience(round_s=900.0)

    def __init__(self, error: Exception | None = None) -> None:
        self.global_step, self.saved_step, self.saves, self._error = 0, -1, [], error
        self.optimizers = [None]

    def save(self, *, wait_s: float = 0.0) -> None:
        self.saves.append((self.global_step, wait_s))
        if self._error is not None:
            raise self._error


def start(options: SaveOptions, clock: ManualClock) -> tuple[Any, Any]:
    session: Any = Pretended()
    hook = CheckpointHook(options, clock)
    hook.after_create_session(session)

    def step(seconds: float, *, stop: bool = False) -> None:
        clock.sleep(seconds)
        session.global_step += 1
        hook.after_run(session, Ran(Step(session.global_step, 0, True, "fresh", 0, 0.1, stop), None, 0.0))

    return session, step


def test_by_default_it_saves_every_minute() -> None:
    session, step = start(SaveOptions(), ManualClock())
    for _ in range(5):
        step(EVERY_S / 2)
    assert session.saves == [(2, 0.0), (4, 0.0)]


def test_by_steps_the_time_does_not_matter_and_the_last_step_is_left_to_the_end() -> None:
    session, step = start(SaveOptions(every_steps=3), ManualClock())
    for _ in range(5):
        step(EVERY_S * 10)
    step(0.0, stop=True)
    assert session.saves == [(3, 0.0)]


def test_with_0_seconds_it_saves_only_at_the_end_and_only_what_is_new() -> None:
    session, step = start(SaveOptions(every_s=0.0), ManualClock())
    step(EVERY_S * 10)
    assert session.saves == []
    hook = CheckpointHook(SaveOptions())
    hook.end(session)
    assert session.saves == [(1, 900.0)]
    session.saved_step = 1
    hook.end(session)
    assert len(session.saves) == 1


def test_a_last_checkpoint_that_fails_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    late: Any = Pretended(DeadlineError("the disk is slow"))
    with pytest.raises(DeadlineError):
        CheckpointHook(SaveOptions()).end(late)
    CheckpointHook(SaveOptions(required=False)).end(late)
    assert "/job:worker/task:0: the disk is slow" in capsys.readouterr().err
    CheckpointHook(SaveOptions()).end(Pretended(SavedElsewhereError("by ps task 0")))  # type: ignore[arg-type]
    for error in (LostVariablesError("back at step 3"), UpdateError("no such rate")):
        lost: Any = Pretended(error)
        with pytest.raises(type(error)):
            CheckpointHook(SaveOptions(required=False)).end(lost)
