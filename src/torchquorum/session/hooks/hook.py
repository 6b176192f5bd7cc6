"""Hooks: what a run does around its training loop. The life cycle; the ready-made ones are in `torchquorum.session.hooks.standard`.

A session calls its hooks in the order in which they were given: `begin` before anything is connected,
`after_create_session` when the variables are there (again after a recovery), `before_run` and `after_run` around every
`optimizer.step()`, `end` when the block ends without an exception. On an evaluator, which makes no steps, it calls
`after_checkpoint` instead. What always holds: an exception in a hook is the run's exception; `end` of every hook is called
even if that of an earlier one failed, and the first failure is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from torchquorum.session.join import Task
from torchquorum.session.states import SessionState
from torchquorum.wire.rpc import Patience
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.optimizer import Optimizer
from torchquorum.worker.step import Step


class HookSession(Protocol):
    """What a hook may use of its session; `tq.Session` describes each of these."""

    task: Task
    model: nn.Module
    optimizer: Optimizer
    optimizers: list[Optimizer]
    logdir: str | None
    patience: Patience
    hooks: list[Hook]

    @property
    def state(self) -> SessionState:
        """Returns where the session stands."""
        ...

    @property
    def flat(self) -> FlatParameters | None:
        """Returns the parameters as they lie in memory."""
        ...

    @property
    def global_step(self) -> int:
        """Returns the cluster's version."""
        ...

    @property
    def local_step(self) -> int:
        """Returns how many gradients this worker has computed."""
        ...

    @property
    def saved_step(self) -> int:
        """Returns the global step of the last checkpoint, -1 for none."""
        ...

    @property
    def last_step(self) -> int | None:
        """Returns the global step at which the run is over."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this worker does the chief's work."""
        ...

    @property
    def results(self) -> dict[str, float]:
        """Returns what `record` has noted."""
        ...

    @property
    def transports(self) -> list[str]:
        """Returns how this worker talks to each ps task."""
        ...

    def should_stop(self) -> bool:
        """Whether the run is over."""
        ...

    def request_stop(self) -> None:
        """Ends this worker's loop."""
        ...

    def end_at(self, last_step: int) -> None:
        """Sets the last step, if there is none."""
        ...

    def pull(self) -> int:
        """Takes the current version into the model."""
        ...

    def averaged(self) -> AbstractContextManager[int]:
        """The model holds the moving averages inside this block."""
        ...

    def shared_buffers(self) -> AbstractContextManager[None]:
        """The model holds the run's buffers inside this block."""
        ...

    def save(self, *, wait_s: float = 0.0) -> str | None:
        """Makes a checkpoint."""
        ...

    def save_at_loop(self) -> None:
        """Makes a checkpoint where the program's loop begins anew."""
        ...

    def record(self, **results: Any) -> None:
        """Notes final results for the report."""
        ...

    def measure(self, global_step: int | None = None, **values: float) -> None:
        """Notes numbers along the way."""
        ...


@dataclass(frozen=True, slots=True)
class Ran:
    """What one `optimizer.step()` did: the outcome of the gradients, the loss if the program passed it, and how long it took."""

    step: Step
    loss: float | None
    seconds: float


class Hook:
    """Does nothing; override what you need. Called on the thread of the training loop.

    Attributes:
        every_optimizer: Whether `after_run` follows the steps of all optimizers of a session; else those of the first, which are the global
            steps.
    """

    every_optimizer = False

    def begin(self, session: HookSession) -> None:
        """The session is about to connect."""

    def after_create_session(self, session: HookSession) -> None:
        """The variables are there and the model holds them."""

    def before_run(self, session: HookSession) -> None:
        """A step is about to be pushed: the model's parameters have their gradients."""

    def after_run(self, session: HookSession, ran: Ran) -> None:
        """A step has been made: the model holds the version that followed."""

    def after_checkpoint(self, session: HookSession) -> None:
        """On an evaluator only: a checkpoint of the run has been taken into the model, whose step is `global_step`."""

    def end(self, session: HookSession) -> None:
        """The loop has ended without an exception; the model holds the last version, and the session still works."""


@runtime_checkable
class ScalarSink(Protocol):
    """A hook that takes numbers from other hooks, as `tq.SummaryHook` does."""

    def scalar(self, name: str, value: float, global_step: int) -> None:
        """Takes a number and the global step it belongs to."""
        ...


def give_scalar(hooks: Sequence[Hook], name: str, value: float, global_step: int) -> None:
    """Gives a number to every hook that takes numbers."""
    for hook in hooks:
        if isinstance(hook, ScalarSink):
            hook.scalar(name, value, global_step)


def evaluates(hook: Hook) -> bool:
    """Whether a hook does something with a checkpoint."""
    return type(hook).after_checkpoint is not Hook.after_checkpoint


class HookCalls:
    """The hooks of one session, called in order. The list is the session's own and may grow."""

    def __init__(self, session: HookSession) -> None:
        self._session, self.all = session, session.hooks

    def begin(self) -> None:
        """The session is about to connect."""
        for hook in self.all:
            hook.begin(self._session)

    def after_create_session(self) -> None:
        """The variables are there, for the first time or again."""
        for hook in self.all:
            hook.after_create_session(self._session)

    def before_run(self) -> None:
        """A step is about to be pushed."""
        for hook in self.all:
            if type(hook).before_run is not Hook.before_run:
                hook.before_run(self._session)

    def after_run(self, step: Step, loss: float | None, seconds: float, track: int = 0) -> None:
        """A step has been made, of the optimizer of this track."""
        for hook in self.all:
            if type(hook).after_run is not Hook.after_run and (track == 0 or hook.every_optimizer):
                hook.after_run(self._session, Ran(step, loss, seconds))

    def after_checkpoint(self) -> None:
        """A checkpoint is in the model of an evaluator."""
        for hook in self.all:
            hook.after_checkpoint(self._session)

    def end(self, hooks: Sequence[Hook] | None = None) -> None:
        """Calls `end` of every hook, or of these; raises the first failure after all have been called."""
        first: BaseException | None = None
        for hook in self.all if hooks is None else hooks:
            try:
                hook.end(self._session)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
