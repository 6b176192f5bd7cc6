"""`tq.Session`: the run around a training loop: it begins, saves, says when to stop, and ends.

The chief restores the newest good checkpoint or initialises the variables, the others wait for that; then every worker
joins, trains and leaves. `torchquorum.session.states` has the states and the steps between them. What always holds: after
the block the model's parameters are ordinary tensors of this process, at the last version it took (or, after an error that
broke a connection in the middle of a version, with parts of two); a run with a folder ends with a checkpoint of its last
version.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from torch import nn

from torchquorum import env
from torchquorum.cluster.signals import Signals
from torchquorum.cluster.spec import EVALUATOR
from torchquorum.errors import (
    ConfigError,
    DeadlineError,
    LostCreationError,
    LostPlaceError,
    SavedElsewhereError,
    TaskLostError,
    TorchQuorumError,
)
from torchquorum.formats.measures import Measure, append_measures
from torchquorum.formats.storage import locate
from torchquorum.session import position
from torchquorum.session.buffers import RunBuffers
from torchquorum.session.checkpoint_hook import CheckpointHook
from torchquorum.session.config import ConfigProto, read_device_options
from torchquorum.session.connection import Connection
from torchquorum.session.devices import SessionDevices
from torchquorum.session.durable import is_saved, read_durable
from torchquorum.session.folder import check_folder
from torchquorum.session.goal import Goal
from torchquorum.session.hooks import Hook, Ran, end_all
from torchquorum.session.join import Task, say
from torchquorum.session.origin import Origin
from torchquorum.session.position import Resumable
from torchquorum.session.ready import give_scalar
from torchquorum.session.recovery import TRY_EVERY_S, check_still_over, find_again, lost_at_the_end
from torchquorum.session.share import Share, make_share
from torchquorum.session.states import State, check_step
from torchquorum.transport.messages import Plan
from torchquorum.worker.client import Client, Patience, Step
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.optimizer import Optimizer
from torchquorum.worker.place import Placement

_Answer = TypeVar("_Answer")


class Session:
    """A training run, as a context manager.

    Args:
        task: What `tq.join()` returned.
        model: The module to train.
        optimizer: A `tq.Optimizer` over its parameters.
        logdir: The run's folder, for checkpoints, the ledger and the report; the ps tasks write there. A path, or an address
            such as s3://bucket/run1.
        last_step: The global step at which the run is over, exactly; None trains until the loop ends.
        num_steps: The same, counted from the step that the run begins or goes on at; instead of last_step.
        max_seconds: The run is over after this time, for everybody; the chief looks at its clock.
        liveness_s: A worker that is silent for longer counts as dead, and the others go on.
        save_every_s: Seconds between checkpoints, made while training goes on; 0 for none but at the end.
        save_every_steps: Global steps between checkpoints, instead of seconds.
        keep: How many checkpoints are kept.
        restore: Whether to go on from the newest good checkpoint in the folder.
        wait_for_workers: Train only when so many workers have joined; by default the first goes ahead alone, which a
            sync run that shall be the same every time does not want. Where workers may come and go (`--workers 2:8`),
            the least of them by default, at the run's beginning.
        start_afresh: Whether to begin again at step 0 when a ps was restarted and there is no checkpoint; else an error.
        data: What has a position that belongs to a checkpoint: `tq.Batches`, or anything with state_dict and
            load_state_dict; one, or several by name.
        buffers: Whose persistent buffers, such as batch norm's running statistics, are the run's, to be saved, exported and
            evaluated: those of the `chief`; the `average` over the workers; or `local`: each worker's stay with it, unsaved.
        durable: Journal every update in the run's folder, so that a ps that is killed at any instant comes back with all that
            a worker was told of: True or `write`; `fsync` survives a loss of power too, and waits for the disk.
        patience: How long to wait for what.
        hooks: What to do around the loop, in this order; see `torchquorum.session.hooks`.
        placement: Puts parts of the model on devices, see `tq.place`: a device, or a mapping from names to devices.
        log_device_placement: Print, once, where every variable lives and every operation of the first step runs.
        allow_soft_placement: Use the CPU for a device that is not there or cannot run an operation, instead of an error.
        gpu_memory_fraction: The share of each GPU's memory that this process may take, so that several can share one.
        config: The last three as TensorFlow's ConfigProto.
    """

    client_class = Client

    def __new__(cls, task: Task, *given: Any, **named: Any) -> Self:
        """A session of the evaluator follows the run's checkpoints instead."""
        if cls is Session and task.job == EVALUATOR:
            from torchquorum.session.evaluator import EvaluatorSession

            return cast(Self, object.__new__(EvaluatorSession))
        return object.__new__(cls)

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        logdir: str | Path | None = None,
        last_step: int | None = None,
        num_steps: int | None = None,
        max_seconds: float | None = None,
        liveness_s: float = 5.0,
        save_every_s: float | None = None,
        save_every_steps: int | None = None,
        keep: int = 5,
        restore: bool = True,
        wait_for_workers: int | None = None,
        start_afresh: bool = False,
        data: Resumable | Mapping[str, Resumable] | None = None,
        buffers: str = "chief",
        durable: bool | str | None = None,
        patience: Patience | None = None,
        hooks: Sequence[Hook] = (),
        placement: Placement | None = None,
        log_device_placement: bool | None = None,
        allow_soft_placement: bool | None = None,
        gpu_memory_fraction: float | None = None,
        config: ConfigProto | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer={type(optimizer).__name__}: wrap it first: tq.Optimizer(optimizer, rule=tq.Sync())"
            )
        self._goal = Goal(last_step, num_steps, max_seconds)
        if liveness_s <= 0:
            raise ConfigError(f"liveness_s={liveness_s}: must be more than 0 seconds")
        self.task, self.model, self.optimizer = task, model, optimizer
        self.logdir = check_folder(task, logdir if logdir is not None else env.logdir())
        mode = read_durable(durable, self.logdir)
        self.patience = patience or Patience()
        self._connection = Connection(task, self.client_class, self.patience, min(1.0, liveness_s / 4))
        self._results: dict[str, float] = {}
        self.flat: FlatParameters | None = None
        self.hooks = list(hooks)
        self.state = State.NEW
        self._stop_asked = self._after_loop = False
        self._reached = 0
        self._data: dict[str, Resumable] = dict(data) if isinstance(data, Mapping) else {"data": data} if data else {}
        if wait_for_workers is None:
            wait_for_workers = task.min_workers if task.cluster.elastic else 1
        if not 1 <= wait_for_workers <= task.num_workers:
            raise ConfigError(f"wait_for_workers={wait_for_workers}: the cluster has {task.num_workers} workers")
        self._keep, self._wait_for_workers = keep, wait_for_workers
        self._buffers = RunBuffers(self, buffers)
        self._origin = Origin(
            self,
            self._buffers,
            self._goal,
            restore=restore,
            start_afresh=start_afresh,
            keep=keep,
            durable=mode,
            liveness_s=liveness_s,
        )
        self._signals = Signals(
            lambda line: say(f"{task}: {line}"), "saving and ending the run" if task.is_chief else "leaving the run"
        )
        self._saved_step = -1
        saver = CheckpointHook(every_s=save_every_s, every_steps=save_every_steps)
        if self.logdir is not None and task.is_chief:
            self.hooks.append(saver)
        options = read_device_options(
            config,
            log_device_placement=log_device_placement,
            allow_soft_placement=allow_soft_placement,
            gpu_memory_fraction=gpu_memory_fraction,
        )
        self._devices = SessionDevices(options, model, placement)
        self.hooks.append(self._devices)

    def _begin_once(self) -> None:
        """The first thing that a session does; it can be done once."""
        if self.state is not State.NEW:
            raise ConfigError("this session has begun already; make a new tq.Session for another run")
        self._go(State.CONNECTING)
        for hook in self.hooks:
            hook.begin(self)

    def __enter__(self) -> Session:
        self._begin_once()
        if self.task.alone is not None:
            self.task.alone.start()
        try:
            client = self._begin()
        except BaseException:
            self._go(State.FAILED)
            self._end()
            raise
        self.optimizer.attach(client, self)
        self._signals.install()
        self._goal.start_clock()
        self._go(State.RUNNING)
        try:
            for hook in self.hooks:
                hook.after_create_session(self)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def before_run(self) -> None:
        """Tells the hooks that a step is about to be pushed; the optimizer calls this."""
        for hook in self.hooks:
            if type(hook).before_run is not Hook.before_run:
                hook.before_run(self)

    def after_run(self, step: Step, loss: float | None, seconds: float) -> None:
        """Tells the hooks what a step did; the optimizer calls this."""
        for hook in self.hooks:
            if type(hook).after_run is not Hook.after_run:
                hook.after_run(self, Ran(step, loss, seconds))

    def _connect(self) -> Client:
        return self._connection.open(self._prepare)

    def _prepare(self, client: Client) -> None:
        client.while_waiting = self._obey_signals
        self._buffers.connect(client)

    def _begin(self) -> Client:
        """Takes this worker's place in the run; if a ps task is lost on the way, from the beginning."""
        deadline = time.monotonic() + self.patience.start_s
        while True:
            client = self._connect()
            try:
                self._take_place(client)
                return client
            except (TaskLostError, LostCreationError) as error:
                if time.monotonic() > deadline:
                    raise
                say(f"{error}\n{self.task}: trying to begin for {self.patience.start_s:.0f} s")
                self._connection.close()
                self._go(State.CONNECTING)
                time.sleep(TRY_EVERY_S)

    def _take_place(self, client: Client) -> None:
        plan, parameters = self._origin.plan()
        self.flat = FlatParameters(plan.layout(), parameters) if self.flat is None else self.flat
        created = client.hello()
        if self.task.is_chief:
            self._go(State.CREATING)
            self._create(client, plan, self.flat, created)
        self._go(State.WAITING)
        self._connection.join(plan, self.flat)
        self._buffers.begin(client)
        client.wait_for_workers(self._wait_for_workers)
        self._take_position(client, restore=True)
        self._saved_step = client.version if client.version > 0 else -1

    def _take_position(self, client: Client, *, restore: bool) -> None:
        """Goes to the position that came with a checkpoint, if there is one, and takes positions from now on."""
        if restore and client.position is not None:
            position.restore(client.position, self._data, lambda line: say(f"{self.task}: {line}"))
        if self.logdir is not None:
            client.begin_positions(lambda: position.capture(self._data, self._buffers.local))

    def create_only(self) -> Plan:
        """Restores or initialises the variables without joining, as the client of a graph does; returns the plan."""
        client = self._connect()
        try:
            plan, parameters = self._origin.plan()
            self.flat = FlatParameters(plan.layout(), parameters)
            self._create(client, plan, self.flat, client.hello())
            return plan
        finally:
            client.close()

    def _create(self, client: Client, plan: Plan, flat: FlatParameters, created: list[bool]) -> None:
        """The chief makes the variables, or goes on with live ones."""
        self._origin.create(client, plan, flat, created)

    def recover(self, error: Exception) -> Step:
        """A ps task was lost: waits for it, and goes on from what it holds or from a checkpoint.

        The optimizer calls this, and whatever else asks the ps tasks. If the variables are where they were, a gradient that
        was being pushed is pushed again unless it had arrived; if they are back at a checkpoint, it is given up.

        Raises:
            LostVariablesError: There is nothing to go on from; or the loop is over and the run is back before its end.
        """
        stopping = self._after_loop = self.state is State.STOPPING
        self._go(State.RECOVERING)
        say(f"{error}\n{self.task}: trying to go on for {self.patience.start_s:.0f} s")
        deadline = time.monotonic() + self.patience.start_s
        before = self._known()
        self._reached = before.version
        try:
            found = find_again(
                self._rejoin,
                before,
                self._buffers,
                wait_for_workers=self._wait_for_workers,
                after_loop=stopping,
                shares=any(isinstance(hook, Share) for hook in self.hooks),
                deadline=deadline,
            )
        except (TaskLostError, LostPlaceError, DeadlineError) as last:
            if not stopping:
                raise
            self._go(State.STOPPING)
            raise lost_at_the_end(last) from None
        client = found.client
        self._take_position(client, restore=found.steps_back > 0)
        if stopping:
            check_still_over(self.task, client.version, self.last_step)
        self.optimizer.attach(client, self)
        self._go(State.STOPPING if stopping else State.RUNNING)
        back = f", {found.steps_back} steps before where it was" if found.steps_back else ""
        say(f"{self.task}: going on at global step {found.version}{back}")
        for hook in self.hooks if not stopping else ():
            hook.after_create_session(self)
        lost = Step(client.version, client.local_step, False, "ps lost", 0, client.lr[0], client.stopped)
        return found.taken_up or lost

    @property
    def incarnation(self) -> int:
        """Returns the id of this life of the worker."""
        return self._known().incarnation

    def surviving(self, ask: Callable[[], _Answer]) -> _Answer:
        """Asks the ps tasks for something; if one is lost meanwhile, finds it again and asks once more."""
        while True:
            try:
                return ask()
            except (LostPlaceError, TaskLostError) as error:
                self.recover(error)

    def _rejoin(self) -> Client:
        self._connection.close()
        client = self._connect()
        plan, _ = self._origin.plan()
        assert self.flat is not None
        created = client.hello()
        if self.task.is_chief and not all(created):
            self._create(client, plan, self.flat, created)
        self._connection.join(plan, self.flat)
        return client

    def _go(self, state: State) -> None:
        """The only place where the state changes."""
        self.state = check_step(self.state, state)

    def _obey_signals(self) -> None:
        """A signal has asked this worker to stop, or the time is up: the chief ends the run for everybody."""
        if self._connection.asked_to_leave and not self._stop_asked:
            self._stop_asked = True
            say(f"{self.task}: asked to leave the run, because fewer workers are wanted")
        if (self._signals.asked or (self._goal.is_late and self.task.is_chief)) and not self._stop_asked:
            self._stop_asked = True
            if self.task.is_chief:
                self._known().stop()
        missed_the_end = self.state is State.RECOVERING and self._after_loop and self.task.is_chief
        if missed_the_end and is_saved(self.logdir, self._reached):
            self._go(State.STOPPING)
            raise SavedElsewhereError(f"step {self._reached} was saved without this task; the ps tasks have ended")

    def save(self, *, wait_s: float = 0.0) -> str | None:
        """Makes a checkpoint of the current version, while training goes on.

        Args:
            wait_s: How long to wait until it is there; 0 does not wait.

        Returns:
            Its path, if it was waited for.
        """
        folder = self.logdir
        if folder is None:
            raise ConfigError("session.save(): the session has no logdir to save into")
        self._origin.has_saved = True
        self._running().send_position()
        state = self.surviving(lambda: self._running().save(secrets.randbits(48), folder, self._keep, wait_s=wait_s))
        if state is None:
            return None
        if state.state != "done":
            raise TorchQuorumError(f"no checkpoint at step {state.step}: {state.text}")
        self._saved_step = state.step
        return state.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finished = kind is None
        if self.state is not State.FAILED:
            self._go(State.STOPPING if finished else State.FAILED)
        try:
            if finished and self._known().pipeline:
                self.pull()
            if finished:
                end_all(self.hooks, self)
            self._known().leave(finished=finished, **self._results)
            if finished:
                self._go(State.CLOSED)
        except BaseException as failure:
            if finished:
                self._go(State.FAILED)
                self._known().leave(finished=False)
                raise
            if not isinstance(failure, TorchQuorumError):
                raise
        finally:
            self.optimizer.attach(None)
            self._end()
        if (explained := self._devices.explain(error)) is not None:
            raise explained from error

    def _end(self) -> None:
        self._devices.close()
        self._signals.remove()
        for hook in self.hooks:
            if isinstance(hook, Share):
                hook.close()
        self._connection.close()
        if self.task.alone is not None:
            self.task.alone.finish()

    # -- inside the block ---------------------------------------------------------------------------------------------

    def should_stop(self) -> bool:
        """Whether the run is over: the last step has been reached, or somebody asked to stop."""
        self._obey_signals()
        return self._stop_asked or self._running().stopped

    def share(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        epochs: int | None = 1,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        name: str = "data",
    ) -> Share:
        """Shares data out to the workers that are there, batch by batch, however they come and go.

        Iterate over it in place of a DataLoader: `for x, y in session.share(dataset, batch_size=100, epochs=3)`. Every batch of
        every epoch is used in one update exactly once; docs/elastic.md says what that means when workers die.

        Args:
            data: Tensors of the same length, or anything with a length and items by index, the same on every worker; or a
                DataLoader over such, whose batch size, order, collate_fn and processes then hold.
            batch_size: How many rows make a batch.
            epochs: How often the data is gone through, by all workers together; None for no end.
            seed: Of the order of the rows; the same on every worker.
            shuffle: Whether every epoch has an order of its own; it has, unless this is False.
            drop_last: Whether rows that do not fill a batch are left out.
            name: Tells several shares of a session apart.

        Raises:
            ConfigError: The data cannot be shared out, or an argument is out of range.
        """
        self._running()
        return make_share(
            self, data, batch_size, epochs=epochs, seed=seed, shuffle=shuffle, drop_last=drop_last, name=name
        )

    def end_at(self, last_step: int) -> None:
        """Makes this the global step at which the run is over, if none was given; called before the session begins."""
        self._goal.end_at(last_step)

    def request_stop(self) -> None:
        """Makes this worker's loop end: `should_stop` is true from now on."""
        self._stop_asked = True

    @property
    def global_step(self) -> int:
        """Returns the cluster's version, as of this worker's last push or pull."""
        return self._known().version

    @property
    def local_step(self) -> int:
        """Returns how many gradients this worker has computed."""
        return self._known().local_step

    @property
    def saved_step(self) -> int:
        """Returns the global step of the last checkpoint that was waited for or restored, -1 for none."""
        return self._saved_step

    @property
    def leads(self) -> bool:
        """Whether this worker does what is the chief's to do: it is the chief, or stands in for it while it is dead."""
        return self.task.index == self._connection.lead

    @property
    def last_step(self) -> int | None:
        """Returns the global step at which the run is over, if this worker was given one."""
        return self._goal.last_step

    @property
    def results(self) -> dict[str, float]:
        """Returns what `record` has noted."""
        return dict(self._results)

    @property
    def transports(self) -> list[str]:
        """Returns how this worker talks to each ps task: shm or tcp."""
        return self._known().transports

    def pull(self) -> int:
        """Takes the cluster's current version into the model's parameters; returns it."""
        return self.surviving(lambda: self._running().pull())

    @contextmanager
    def averaged(self) -> Iterator[int]:
        """Inside this block the model's parameters are the moving averages; afterwards they are the variables again.

        Its buffers are the run's meanwhile, as in `shared_buffers`.
        """
        with self.shared_buffers():
            version = self.surviving(lambda: self._running().pull(averaged=True))
            try:
                yield version
            finally:
                self.pull()

    @contextmanager
    def shared_buffers(self) -> Iterator[None]:
        """Inside this block the model's buffers are the run's, see `buffers=`; afterwards they are this worker's again."""
        with self._buffers.shared(lambda: self.surviving(lambda: self._running().take_buffers())):
            yield

    def pull_buffers(self) -> None:
        """Takes the run's buffers, see `buffers=`, into the model, to stay."""
        self._buffers.take(lambda: self.surviving(lambda: self._running().take_buffers()))

    def record(self, **results: Any) -> None:
        """Notes this worker's final `loss` and `accuracy` for the report."""
        unknown = set(results) - {"loss", "accuracy"}
        if unknown:
            raise ConfigError(f"session.record({', '.join(sorted(unknown))}=...): allowed are loss and accuracy")
        self._results.update({k: float(v) for k, v in results.items()})

    def measure(self, global_step: int | None = None, **values: float) -> None:
        """Notes numbers measured along the way, such as `session.measure(accuracy=0.97)`, for the pictures of the run.

        They go to `measures.jsonl` in the run's folder, from the chief or who stands in for it only, and to hooks that
        take numbers.

        Args:
            global_step: The version they belong to; this worker's current one by default.
            **values: The numbers by name.
        """
        step = self.global_step if global_step is None else global_step
        for name, value in values.items():
            give_scalar(self, name, float(value), step)
        if self.logdir is None or not self.leads:
            return
        now = time.time()
        try:
            append_measures(locate(self.logdir), [Measure(n, float(v), step, now) for n, v in values.items()])
        except OSError as error:
            say(f"{self.task}: {', '.join(values)} could not be noted in {self.logdir}: {error.strerror}")

    def _known(self) -> Client:
        return self._connection.known

    def _running(self) -> Client:
        return self._connection.running
