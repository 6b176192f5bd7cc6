"""When the chief saves: every so many seconds or global steps, and at the end. `tq.Session` adds this hook by itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchquorum.errors import ConfigError, LostVariablesError, TorchQuorumError
from torchquorum.session.hooks import Hook, Ran
from torchquorum.session.join import say

if TYPE_CHECKING:
    from torchquorum.session.session import Session

EVERY_S = 60.0
LAST_SAVE_S = 120.0


class CheckpointHook(Hook):
    """Saves while training goes on, and once more at the end if anything has changed since.

    Args:
        every_s: Seconds between checkpoints, 60 by default; 0 saves only at the end.
        every_steps: Global steps between them, instead.
    """

    def __init__(self, *, every_s: float | None = None, every_steps: int | None = None) -> None:
        if every_s is not None and every_steps is not None:
            raise ConfigError(f"save_every_s={every_s} and save_every_steps={every_steps}: give one of the two")
        if every_s is not None and every_s < 0:
            raise ConfigError(f"save_every_s={every_s}: must be 0 or more; 0 saves only at the end")
        if every_steps is not None and every_steps < 1:
            raise ConfigError(f"save_every_steps={every_steps}: must be 1 or more")
        self._every_steps = every_steps
        self._every_s = every_s if every_s is not None else (0.0 if every_steps else EVERY_S)
        self._saved_at, self._saved_step = 0.0, 0

    def after_create_session(self, session: Session) -> None:
        """Starts the clock."""
        self._saved_at, self._saved_step = time.monotonic(), session.global_step

    def after_run(self, session: Session, ran: Ran) -> None:
        """Saves if it is time to."""
        now = time.monotonic()
        due = bool(self._every_s) and now - self._saved_at >= self._every_s
        if self._every_steps:
            due = ran.step.version - self._saved_step >= self._every_steps
        if due and not ran.step.stop:
            self._saved_at, self._saved_step = now, ran.step.version
            session.save()

    def end(self, session: Session) -> None:
        """Saves the last version; a failure is said, and is not the end of the world: training has been done."""
        if session.global_step == session.saved_step:
            return
        try:
            session.save(wait_s=LAST_SAVE_S)
        except LostVariablesError:
            raise  # the run is not at its end any more, or its end is nowhere
        except TorchQuorumError as error:
            say(f"{session.task}: {error}")
