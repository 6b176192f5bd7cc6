"""When the chief saves, on a clock that the test moves."""

from typing import Any

import pytest

from tests.manual_clock import ManualClock
from torchquorum.errors import DeadlineError, LostVariablesError
from torchquorum.session.config import SaveOptions
from torchquorum.session.hooks.checkpoint_hook import EVERY_S, LAST_SAVE_S, CheckpointHook
from torchquorum.session.hooks.hook import Ran
from torchquorum.worker.step import Step


class Pretended:
    """A session that counts its checkpoints."""

    task = "/job:worker/task:0"

    def __init__(self, error: Exception | None = None) -> None:
        self.global_step, self.saved_step, self.saves, self._error = 0, -1, [], error

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
    assert session.saves == [(1, LAST_SAVE_S)]
    session.saved_step = 1
    hook.end(session)
    assert len(session.saves) == 1


def test_a_last_checkpoint_that_fails_costs_a_line_unless_the_run_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    late: Any = Pretended(DeadlineError("the disk is slow"))
    CheckpointHook(SaveOptions()).end(late)
    assert "/job:worker/task:0: the disk is slow" in capsys.readouterr().err
    lost: Any = Pretended(LostVariablesError("back at step 3"))
    with pytest.raises(LostVariablesError):
        CheckpointHook(SaveOptions()).end(lost)
