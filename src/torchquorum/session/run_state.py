"""The run's variables, buffers and checkpoints, as a program asks for them inside its session.

Owned by the session's lifecycle; on the thread of the training loop. What always holds: a ps task that is lost in the middle of a call is
found again, and the call is made once more; after `averaged` and `shared_buffers` the model holds what it held before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from torchquorum.cluster.signals import Signals
from torchquorum.errors import ConfigError, InterruptedRunError, TorchQuorumError
from torchquorum.session.attach import Attachment
from torchquorum.session.config import Setup

_Answer = TypeVar("_Answer")


class _Surviving(Protocol):
    def __call__(self, ask: Callable[[], _Answer]) -> _Answer: ...


class RunState:
    """What a worker takes from the run, and has saved of it.

    Args:
        setup: What the task brings to the run.
        attachment: Has the link to the ps tasks.
        signals: After one, a checkpoint that fails is not tried again.
        surviving: Asks the ps tasks; if one is lost meanwhile, recovers and asks once more.

    Attributes:
        saved_step: The global step of the last checkpoint that was waited for or restored, -1 for none.
    """

    def __init__(self, setup: Setup, attachment: Attachment, signals: Signals, surviving: _Surviving) -> None:
        self._setup, self._attachment, self._signals, self._surviving = setup, attachment, signals, surviving
        self._connection = attachment.connection
        self.saved_step = -1
        self._wants_save = self._loop_begun = False

    def pull(self, *, keep_written: bool = False) -> int:
        """Takes the cluster's current version into the model's parameters, or leaves them if they were written to; returns it."""
        if keep_written and self._surviving(lambda: self._connection.running.member.writes.left_over()):
            return self._connection.running.version
        return self._surviving(lambda: self._connection.running.pull())

    def prefetch(self, ids: Any) -> None:
        """Asks for the rows of a later batch, see `tq.Session.prefetch`."""
        self._attachment.initializer.prefetch(ids)

    @contextmanager
    def averaged(self) -> Iterator[int]:
        """Inside this block the model holds the moving averages and the run's buffers."""
        with self.shared_buffers():
            version = self._surviving(lambda: self._connection.running.pull(averaged=True))
            try:
                yield version
            finally:
                self.pull()

    @contextmanager
    def shared_buffers(self) -> Iterator[None]:
        """Inside this block the model's buffers are the run's."""
        with self._attachment.buffers.shared(self._ask_buffers):
            yield

    def pull_buffers(self) -> None:
        """Takes the run's buffers into the model, to stay."""
        self._attachment.buffers.take(self._ask_buffers)

    def _ask_buffers(self) -> dict[str, torch.Tensor]:
        return self._surviving(lambda: self._connection.running.take_buffers())

    def save_at_loop(self) -> None:
        """Makes a checkpoint where the program's loop begins anew; at once if nothing has said since the last time where that is."""
        if self._wants_save and not self._loop_begun:
            self._wants_save = False
            self.save(wait_s=0.0)
        else:
            self._wants_save, self._loop_begun = True, False

    def loop_begins(self) -> None:
        """The program's loop begins anew: a checkpoint that is wanted is made of this place of the log."""
        self._loop_begun = True
        optimizers = self._setup.optimizers
        if len(optimizers) > 1 and any(optimizer.local is not None for optimizer in optimizers):
            # Local steps of one optimizer may go on where another has just made a version: it is here that a run goes on.
            self._connection.running.positions.at_loop(self._connection.running.place)
        if self._wants_save:
            self._wants_save = not self._surviving(self._begin_save)

    def _begin_save(self) -> bool:
        link, folder = self._connection.running, self._folder()
        link.positions.send(link.place)
        return link.begin_save(self._setup.task.random_bits(48), folder, self._setup.save.keep)

    def _folder(self) -> str:
        if self._setup.logdir is None:
            raise ConfigError("session.save(): the session has no logdir to save into")
        self._attachment.initializer.has_saved = True
        return self._setup.logdir

    def save(self, wait_s: float) -> str | None:
        """Makes a checkpoint of the current version; returns its path if it was waited for."""
        folder, keep = self._folder(), self._setup.save.keep
        link, draw, retries = self._connection.running, self._setup.task.random_bits, self._check_retries
        link.positions.send(link.place, final=wait_s > 0)
        state = self._surviving(
            lambda: self._connection.running.save(draw(48), folder, keep, wait_s=wait_s, retries=retries)
        )
        if state is None:
            return None
        if state.state != "done":
            raise TorchQuorumError(f"no checkpoint at step {state.step}: {state.text}")
        self.saved_step = state.step
        return state.path

    def _check_retries(self, why: str) -> None:
        """The last checkpoint is tried again: not after a signal."""
        if self._signals.asked:
            raise InterruptedRunError(f"{self._setup.task}: {self._signals.name}: the last step is not saved: {why}")
