"""When the chief saves: after a number of seconds or global steps, and at the end. `tq.Session` adds this hook by itself."""

from __future__ import annotations

from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import LostVariablesError, SavedElsewhereError, TorchQuorumError, UpdateError
from torchquorum.session.config import SaveOptions
from torchquorum.session.hooks.hook import Hook, HookSession, Ran
from torchquorum.session.join import say

EVERY_S = 60.0


class CheckpointHook(Hook):
    """Saves while training continues, and once more at the end if anything has changed since.

    Args:
        options: Seconds between checkpoints, 60 by default, 0 saves only at the end; or global steps between them.
        clock: Tells the time.
    """

    def __init__(self, options: SaveOptions, clock: Clock = SYSTEM) -> None:
        self._every_steps, self._required, self._clock = options.every_steps, options.required, clock
        default_s = 0.0 if options.every_steps else EVERY_S
        self._every_s = options.every_s if options.every_s is not None else default_s
        self._saved_at, self._saved_step = 0.0, 0

    def after_create_session(self, session: HookSession) -> None:
        """Starts the clock."""
        self._saved_at, self._saved_step = self._clock.now(), session.global_step

    def after_run(self, session: HookSession, ran: Ran) -> None:
        """Saves if it is due."""
        now = self._clock.now()
        due = bool(self._every_s) and now - self._saved_at >= self._every_s
        if self._every_steps:
            due = ran.step.version - self._saved_step >= self._every_steps
        if due and not ran.step.stop:
            self._saved_at, self._saved_step = now, ran.step.version
            # Of several optimizers the others may be about to complete what the loop has begun.
            session.save() if len(session.optimizers) == 1 else session.save_at_loop()

    def end(self, session: HookSession) -> None:
        """Saves the last version; if that fails, ps task 0 tries again for `Patience.save_s`, and then the run has failed."""
        if session.global_step == session.saved_step and len(session.optimizers) == 1:
            return  # of several optimizers others may have made updates since
        try:
            session.save(wait_s=session.patience.round_s)
        except (LostVariablesError, UpdateError):
            raise  # the run is not at its end any more, or its end is nowhere
        except TorchQuorumError as error:
            if self._required and not isinstance(error, SavedElsewhereError):
                raise
            say(f"{session.task}: {error}")
