"""A session of the evaluator: the same program, run as `/job:evaluator/task:0`, evaluates the run's checkpoints and trains nothing.

`tq.Session` becomes this where the task is an evaluator. It follows the run's folder when its block is entered: each new
checkpoint is taken into the model and the hooks' `after_checkpoint` is called; when the run is over the block begins,
`should_stop()` is true, and what the program does afterwards finds the last checkpoint in the model. What always holds: an
evaluator changes nothing of the run, no task waits for it, and it ends when the run has.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torchquorum.cluster.spec import TaskId
from torchquorum.errors import ConfigError, TorchQuorumError
from torchquorum.formats.checkpoint import CheckpointError, CheckpointInfo, Reader, list_checkpoints
from torchquorum.formats.checkpoint import age_order as age
from torchquorum.formats.storage import Location, locate
from torchquorum.session.hooks import Hook, end_all
from torchquorum.session.join import say
from torchquorum.session.session import Session
from torchquorum.session.states import State
from torchquorum.session.summary_asks import Asks
from torchquorum.worker.client import Step

if TYPE_CHECKING:
    from torchquorum.worker.client import Client

LOOK_EVERY_S = 1.0
SAY_EVERY_S = 30.0
# A ps that was heard and is silent for so long was not only started again: the run is over, or dead.
GONE_S = 60.0


class _NoClient:
    """What stands in the optimizer for the ps tasks: whatever is pushed goes nowhere."""

    def __init__(self, session: EvaluatorSession, lr: list[float]) -> None:
        self._session, self.lr = session, lr
        self.allow_nonfinite = True

    def push(self, loss: float | None) -> Step:
        """Returns that the run is over and nothing was taken."""
        return Step(self._session.global_step, 0, False, "evaluator", 0, self.lr[0] if self.lr else 0.0, True)


class EvaluatorSession(Session):
    """Follows a run's checkpoints; see `tq.Session` for what it is given."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.logdir is None:
            raise ConfigError(
                f"{self.task}: an evaluator follows the checkpoints in the run's folder: give tq.Session(logdir=...)"
            )
        self.hooks.remove(self._devices)
        self._step, self._seen = -1, (0.0, -1)
        self._reader: Reader | None = None  # of the checkpoint that is being evaluated
        self._path: Location | None = None

    # -- the life of the session --------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        self._begin_once()
        if not any(map(_evaluates, self.hooks)):
            say(
                f"{self.task}: the program gives nothing to evaluate with; add hooks=[tq.EvaluateHook(...)] to its session"
            )
        self._signals.install()
        self._go(State.WAITING)
        self._go(State.RUNNING)
        client: Any = _NoClient(self, self.optimizer.lr)
        self.optimizer.attach(client)
        try:
            self._follow()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._go(State.STOPPING if kind is None else State.FAILED)
        try:
            if kind is None and self._step >= 0:
                end_all([hook for hook in self.hooks if _evaluates(hook)], self)
            if kind is None:
                self._go(State.CLOSED)
        finally:
            self.optimizer.attach(None)
            self._signals.remove()

    def _follow(self) -> None:
        """Evaluates the newest checkpoint and every one that comes, until the run is over."""
        assert self.logdir is not None
        folder, watch = locate(self.logdir), _Watch(self)
        say(f"{self.task}: following the checkpoints in {self.logdir}")
        try:
            newest = sorted(list_checkpoints(folder), key=age)[-1:]
            while True:
                over = watch.is_over()  # asked first: what the run saved before it ended is still looked at
                for info in newest:
                    self._take(info)
                if over or self._signals.asked or (watch.last_step is not None and self._step >= watch.last_step):
                    return
                time.sleep(LOOK_EVERY_S)
                newest = [info for info in sorted(list_checkpoints(folder), key=age) if age(info) > self._seen]
        finally:
            watch.close()

    def _take(self, info: CheckpointInfo) -> None:
        """Takes a checkpoint into the model and evaluates it; one that is damaged, or gone meanwhile, is passed over."""
        self._seen = age(info)
        try:
            with Reader(info.path) as reader:
                self._load(reader.state_dict())
                self._step, self._path, self._reader = info.step, info.path, reader
                for hook in self.hooks:
                    hook.after_checkpoint(self)
        except CheckpointError as error:
            say(f"{self.task}: passing over {info.path}: {error}")
        finally:
            self._reader = None

    def _load(self, values: dict[str, Any]) -> None:
        missing, unexpected = self.model.load_state_dict(values, strict=False)
        known = dict(self.model.named_parameters(remove_duplicate=False))
        lacking = [name for name in missing if name in known]
        if lacking or unexpected:
            what = ", ".join(
                [*(f"no {n}" for n in lacking[:3]), *(f"{n}, which the model has not" for n in unexpected[:3])]
            )
            raise TorchQuorumError(f"{self.task}: the checkpoints in {self.logdir} are of another model: {what}")

    # -- what a program asks of its session ---------------------------------------------------------------------------

    def should_stop(self) -> bool:
        """True: an evaluator does not train."""
        return True

    @property
    def global_step(self) -> int:
        """Returns the global step of the checkpoint in the model, 0 before the first."""
        return max(0, self._step)

    @property
    def local_step(self) -> int:
        """Returns 0: an evaluator computes no gradients."""
        return 0

    @property
    def saved_step(self) -> int:
        """Returns the global step of the checkpoint in the model, -1 for none."""
        return self._step

    @property
    def leads(self) -> bool:
        """True: what it measures is noted."""
        return True

    @property
    def transports(self) -> list[str]:
        """Returns nothing: an evaluator pulls nothing."""
        return []

    def pull(self) -> int:
        """Returns the global step of the checkpoint in the model."""
        return self.global_step

    def pull_buffers(self) -> None:
        """Does nothing: the run's buffers came with the checkpoint."""

    @contextmanager
    def averaged(self) -> Iterator[int]:
        """Inside this block the model's parameters are the checkpoint's moving averages."""
        with self._open() as reader:
            self._load(reader.state_dict(averages=True))
            try:
                yield self.global_step
            finally:
                self._load(reader.state_dict())

    @contextmanager
    def shared_buffers(self) -> Iterator[None]:
        """Does nothing: the run's buffers came with the checkpoint."""
        yield

    def save(self, *, wait_s: float = 0.0) -> str | None:
        """Does nothing: an evaluator saves nothing."""
        return None

    @contextmanager
    def _open(self) -> Iterator[Reader]:
        if self._reader is not None:
            yield self._reader
            return
        if self._path is None:
            raise ConfigError(f"{self.task}: no checkpoint has come yet")
        with Reader(self._path) as reader:
            yield reader

    def _known(self) -> Client:
        raise ConfigError(f"{self.task}: an evaluator has no connection to the ps tasks")


def _evaluates(hook: Hook) -> bool:
    return type(hook).after_checkpoint is not Hook.after_checkpoint


class _Watch:
    """Tells whether the run is over: its report is new, or its ps task 0 says so, or is gone."""

    def __init__(self, session: EvaluatorSession) -> None:
        assert session.logdir is not None
        self._session, self._report = session, locate(session.logdir) / "report.json"
        cluster, connect = session.task.cluster, session.task.connect
        first = cluster.address(TaskId("ps", 0))
        name = f"evaluator/{time.monotonic_ns():x}".encode()
        self._asks = Asks(lambda _: connect(first, name), 1)
        self._before = self._read_report()
        self._began_at = self._told_at = time.monotonic()
        self._heard_at: float | None = None
        self.last_step = session.last_step

    def is_over(self) -> bool:
        """Asks."""
        status, now = self._asks.status(), time.monotonic()
        if status:
            self._heard_at = now
            self.last_step = status.get("last_step") or self.last_step
        if self._read_report() != self._before:
            return True
        patience_s = GONE_S if self._heard_at is not None else self._session.patience.start_s
        silent_s = now - (self._heard_at or self._began_at)
        if silent_s > patience_s:
            say(
                f"{self._session.task}: no answer from ps task 0 for {silent_s:.0f} s: the run is over, or dead; ending"
            )
            return True
        if self._heard_at is None and now - self._told_at > SAY_EVERY_S:
            self._told_at = now
            say(f"{self._session.task}: waiting for ps task 0 and its run: {silent_s:.0f} s")
        return False

    def close(self) -> None:
        """Gives the connection up."""
        self._asks.close()

    def _read_report(self) -> bytes:
        try:
            return self._report.read_bytes()
        except OSError:
            return b""
