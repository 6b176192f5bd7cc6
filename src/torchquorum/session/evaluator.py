"""An evaluator's part in a run: `/job:evaluator/task:0` runs the same program, evaluates the run's checkpoints and trains nothing.

`tq.Session` calls this, in place of `torchquorum.session.lifecycle`, where the task is an evaluator. It follows the run's folder when
the session's block is entered: each new checkpoint is taken into the model and the hooks' `after_checkpoint` is called; when the run is
over the block begins, `should_stop()` is true, and what the program does afterwards finds the last checkpoint in the model. What always
holds: an evaluator changes nothing of the run, no task waits for it, and it ends when the run has.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torchquorum.cluster.signals import Signals
from torchquorum.cluster.spec import TaskId
from torchquorum.errors import ConfigError, InterruptedRunError, TorchQuorumError
from torchquorum.formats.checkpoint import CheckpointError, CheckpointInfo, CheckpointReader, list_checkpoints
from torchquorum.formats.checkpoint import age_order as age
from torchquorum.formats.storage import Location, locate
from torchquorum.session.config import Setup
from torchquorum.session.hooks.hook import HookCalls, evaluates
from torchquorum.session.hooks.summary_asks import Asks, OverConnection
from torchquorum.session.states import SessionState, StateMachine
from torchquorum.session.stop_condition import StopCondition
from torchquorum.worker.link import Link
from torchquorum.worker.run_view import TrackView
from torchquorum.worker.step import Step
from torchquorum.worker.variable_names import plain_names

LOOK_EVERY_S = 1.0
SAY_EVERY_S = 30.0
# A ps that has answered before and is silent for this long was not just restarted: the run is over, or dead.
GONE_S = 60.0


class _NoLink:
    """Stands for the ps tasks, to which an evaluator has no connection: what is pushed goes nowhere.

    Attributes:
        version: The global step of the checkpoint in the model, 0 before the first.
    """

    local_step, joined = 0, None

    def __init__(self, rates: Sequence[list[float]]) -> None:
        self.version, self.tracks = 0, [TrackView(lr=lr, used_lr=lr) for lr in rates]
        self.transports: list[str] = []

    def residuals_of(self, track: int) -> None:
        """Returns that nothing is kept of what is pushed."""

    def leads(self) -> bool:
        """Returns that the settings of its program do not count."""
        return False

    def push(
        self,
        loss: float | None,
        settings: object = None,
        *,
        allow_nonfinite: bool = False,
        track: int = 0,
        of: object = None,
    ) -> Step:
        """Returns that the run is over and nothing was taken."""
        lr = self.tracks[track].lr
        return Step(self.version, 0, False, "evaluator", 0, lr[0] if lr else 0.0, True)


class EvaluatedRun:
    """The checkpoint that is in the model, with the methods of a worker's `RunState`.

    Attributes:
        saved_step: Its global step, -1 for none.
    """

    def __init__(self, setup: Setup, link: _NoLink) -> None:
        self._setup, self._link, self.saved_step = setup, link, -1
        self._reader: CheckpointReader | None = None  # of the checkpoint that is being evaluated
        self._path: Location | None = None

    @contextmanager
    def taking(self, info: CheckpointInfo) -> Iterator[None]:
        """Takes a checkpoint into the model; inside this block its file is open."""
        try:
            with CheckpointReader(info.path) as reader:
                self._load(reader.state_dict())
                self.saved_step = self._link.version = info.step
                self._path, self._reader = info.path, reader
                yield
        finally:
            self._reader = None

    def _load(self, values: dict[str, Any]) -> None:
        model = self._setup.model
        plain = plain_names(model)
        own = {plain(name): name for name in model.state_dict()}
        values = {own.get(name, name): value for name, value in values.items()}
        missing, unexpected = model.load_state_dict(values, strict=False)
        known = dict(model.named_parameters(remove_duplicate=False))
        lacking = [name for name in missing if name in known]
        if lacking or unexpected:
            what = ", ".join(
                [*(f"no {n}" for n in lacking[:3]), *(f"{n}, which the model has not" for n in unexpected[:3])]
            )
            raise TorchQuorumError(
                f"{self._setup.task}: the checkpoints in {self._setup.logdir} are of another model: {what}"
            )

    def pull(self, *, keep_written: bool = False) -> int:
        """Returns the global step of the checkpoint in the model, which nothing else comes into."""
        return self._link.version

    def prefetch(self, ids: Any) -> None:
        """Does nothing: an evaluator has the rows of a checkpoint."""

    def pull_buffers(self) -> None:
        """Does nothing: the run's buffers came with the checkpoint."""

    @contextmanager
    def averaged(self) -> Iterator[int]:
        """Inside this block the model's parameters are the checkpoint's moving averages."""
        with self._open() as reader:
            self._load(reader.state_dict(averages=True))
            try:
                yield self._link.version
            finally:
                self._load(reader.state_dict())

    @contextmanager
    def shared_buffers(self) -> Iterator[None]:
        """Does nothing: the run's buffers came with the checkpoint."""
        yield

    def save(self, wait_s: float) -> str | None:
        """Does nothing: an evaluator saves nothing."""
        return None

    def save_at_loop(self) -> None:
        """Does nothing, too."""

    @contextmanager
    def _open(self) -> Iterator[CheckpointReader]:
        if self._reader is not None:
            yield self._reader
            return
        if self._path is None:
            raise ConfigError(f"{self._setup.task}: no checkpoint has come yet")
        with CheckpointReader(self._path) as reader:
            yield reader


class Evaluator:
    """Follows a run's checkpoints, with the methods of a worker's `Lifecycle`.

    Attributes:
        run: The checkpoint in the model.
        leads: True: what an evaluator measures is written.
    """

    def __init__(self, setup: Setup, stop: StopCondition, hooks: HookCalls) -> None:
        if setup.logdir is None:
            raise ConfigError(
                f"{setup.task}: an evaluator follows the checkpoints in the run's folder: give tq.Session(logdir=...)"
            )
        self._setup, self._stop, self._hooks = setup, stop, hooks
        self._folder = locate(setup.logdir)
        self.states = StateMachine()
        self.signals = Signals(setup.say, "leaving the run")
        self.link: Any = _NoLink([optimizer.lr for optimizer in setup.optimizers])
        self.run = EvaluatedRun(setup, self.link)
        self._seen, self.leads = (0.0, -1), True

    # -- begin and end ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Follows the run until it is over."""
        self.states.begin()
        self._hooks.begin()
        if not any(map(evaluates, self._hooks.all)):
            self._setup.say(
                "the program gives nothing to evaluate with; add hooks=[tq.EvaluateHook(...)] to its session"
            )
        self.signals.install()
        self.states.go(SessionState.WAITING)
        self.states.go(SessionState.RUNNING)
        for track, optimizer in enumerate(self._setup.optimizers):
            optimizer.attach(self.link, track=track)
        try:
            self._follow()
        except BaseException as error:
            self.end(error)
            raise

    def end(self, error: BaseException | None) -> None:
        """Ends the hooks that evaluate, unless there was an error or no checkpoint."""
        self.states.go(SessionState.STOPPING if error is None else SessionState.FAILED)
        try:
            if error is None and self.run.saved_step >= 0:
                self._hooks.end([hook for hook in self._hooks.all if evaluates(hook)])
            if error is None:
                self.states.go(SessionState.CLOSED)
        finally:
            for optimizer in self._setup.optimizers:
                optimizer.attach(None)
            self.signals.remove()
        if error is None and self.signals.asked:
            raise InterruptedRunError(f"{self._setup.task}: {self.signals.name}: has left the run")

    def _follow(self) -> None:
        """Evaluates the newest checkpoint and every one that comes, until the run is over."""
        watch = _Watch(self._setup, self._folder, self._stop.last_step)
        self._setup.say(f"following the checkpoints in {self._setup.logdir}")
        try:
            newest = sorted(list_checkpoints(self._folder), key=age)[-1:]
            while True:
                over = watch.is_over()  # asked first: what the run saved before it ended is still evaluated
                for info in newest:
                    self._take(info)
                if (
                    over
                    or self.signals.asked
                    or (watch.last_step is not None and self.run.saved_step >= watch.last_step)
                ):
                    return
                self._setup.clock.sleep(LOOK_EVERY_S)
                newest = [info for info in sorted(list_checkpoints(self._folder), key=age) if age(info) > self._seen]
        finally:
            watch.close()

    def _take(self, info: CheckpointInfo) -> None:
        """Takes a checkpoint into the model and evaluates it; a damaged or deleted one is skipped."""
        self._seen = age(info)
        try:
            with self.run.taking(info):
                self._hooks.after_checkpoint()
        except CheckpointError as error:
            self._setup.say(f"passing over {info.path}: {error}")

    # -- what a program asks of its session ---------------------------------------------------------------------------

    @property
    def running_link(self) -> Link:
        """Raises ConfigError: there is none."""
        raise ConfigError(f"{self._setup.task}: an evaluator has no connection to the ps tasks")

    def surviving(self, ask: Callable[[], Any]) -> Any:
        """Asks."""
        return ask()

    def should_stop(self) -> bool:
        """True: an evaluator does not train."""
        return True

    def request_stop(self) -> None:
        """Does nothing: its loop does not run."""

    def assign(self) -> bool:
        """Does nothing: an evaluator has no values to give."""
        return False


class _Watch:
    """Tells whether the run is over: its report is new, or its ps task 0 says so, or is gone."""

    def __init__(self, setup: Setup, folder: Location, last_step: int | None) -> None:
        self._setup, self._report, self.last_step = setup, folder / "report.json", last_step
        cluster, connect = setup.task.cluster, setup.task.connect
        first = cluster.address(TaskId("ps", 0))
        name = f"evaluator/{secrets.token_hex(8)}".encode()
        self._asks = Asks(OverConnection(lambda _: connect(first, name)), 1)
        self._before = self._read_report()
        self._started_at = self._said_at = setup.clock.now()
        self._heard_at: float | None = None

    def is_over(self) -> bool:
        """Asks."""
        status, now = self._asks.status(), self._setup.clock.now()
        if status:
            self._heard_at = now
            self.last_step = status.get("last_step") or self.last_step
        if self._read_report() != self._before:
            return True
        patience_s = GONE_S if self._heard_at is not None else self._setup.patience.start_s
        silent_s = now - (self._heard_at or self._started_at)
        if silent_s > patience_s:
            self._setup.say(f"no answer from ps task 0 for {silent_s:.0f} s: the run is over, or dead; ending")
            return True
        if self._heard_at is None and now - self._said_at > SAY_EVERY_S:
            self._said_at = now
            self._setup.say(f"waiting for ps task 0 and its run: {silent_s:.0f} s")
        return False

    def close(self) -> None:
        """Closes the connection."""
        self._asks.close()

    def _read_report(self) -> bytes:
        try:
            return self._report.read_bytes()
        except OSError:
            return b""
