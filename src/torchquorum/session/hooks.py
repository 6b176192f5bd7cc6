"""Hooks: what a run does around its training loop. The life cycle; the ready-made ones are in `torchquorum.session.ready`.

A session calls its hooks in the order in which they were given: `begin` before anything is connected,
`after_create_session` when the variables are there (again after a recovery), `before_run` and `after_run` around every
`optimizer.step()`, `end` when the block ends without an exception. On an evaluator, which makes no steps, it calls
`after_checkpoint` instead. What always holds: an exception in a hook is the run's exception; `end` of every hook is called
even if that of an earlier one failed, and the first failure is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchquorum.worker.client import Step

if TYPE_CHECKING:
    from torchquorum.session.session import Session


@dataclass(frozen=True, slots=True)
class Ran:
    """What one `optimizer.step()` did: what became of the gradients, the loss if it was given, and how long it took."""

    step: Step
    loss: float | None
    seconds: float


class Hook:
    """Does nothing; override what you need. Called on the thread of the training loop."""

    def begin(self, session: Session) -> None:
        """The session is about to connect."""

    def after_create_session(self, session: Session) -> None:
        """The variables are there and the model holds them."""

    def before_run(self, session: Session) -> None:
        """A step is about to be pushed: the model's parameters have their gradients."""

    def after_run(self, session: Session, ran: Ran) -> None:
        """A step has been made: the model holds the version that followed."""

    def after_checkpoint(self, session: Session) -> None:
        """On an evaluator only: a checkpoint of the run has been taken into the model, whose step is `global_step`."""

    def end(self, session: Session) -> None:
        """The loop has ended without an exception; the model holds the last version, and the session still works."""


def end_all(hooks: Sequence[Hook], session: Session) -> None:
    """Calls `end` of every hook; raises the first failure after all have been called."""
    first: BaseException | None = None
    for hook in hooks:
        try:
            hook.end(session)
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
