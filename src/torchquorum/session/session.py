"""`tq.Session`: the run around a training loop: it begins, saves, says when to stop, and ends.

The public face: it groups its arguments into options, chooses the task's part in the run and passes every call on to it. That part is a
worker's `torchquorum.session.lifecycle`, or, for an evaluator, `torchquorum.session.evaluator`. What always holds: after the block the
model's parameters are ordinary tensors of this process, at the last version it took (or, after an error that broke a connection in the
middle of a version, with parts of two); a run with a folder ends with a checkpoint of its last version.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from torchquorum.cluster.signals import Signals
from torchquorum.cluster.spec import EVALUATOR
from torchquorum.data.batches import Batches
from torchquorum.devices.model_placement import Placement
from torchquorum.devices.options import ConfigProto, read_device_options
from torchquorum.errors import ConfigError
from torchquorum.session.accelerated import check_accelerate, unwrapped
from torchquorum.session.config import MemberOptions, SaveOptions, Setup, StopOptions
from torchquorum.session.durable import read_durable, read_restore
from torchquorum.session.epochs import EPOCHS, EpochLoop
from torchquorum.session.evaluator import Evaluator
from torchquorum.session.folder import check_folder
from torchquorum.session.hooks.checkpoint_hook import CheckpointHook
from torchquorum.session.hooks.device_hook import SessionDevices
from torchquorum.session.hooks.hook import Hook, HookCalls
from torchquorum.session.hooks.summaries import asked_hooks
from torchquorum.session.join import Task, say
from torchquorum.session.lifecycle import Lifecycle
from torchquorum.session.models_and_optimizers import Given, read_model, read_optimizers
from torchquorum.session.position import Resumable
from torchquorum.session.prefetch import ahead
from torchquorum.session.recording import read_record
from torchquorum.session.results import Results
from torchquorum.session.share import Share, make_share
from torchquorum.session.states import SessionState
from torchquorum.session.stop_condition import StopCondition
from torchquorum.wire.rpc import Patience
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.row_reading import Reading

_Answer = TypeVar("_Answer")
_Batch = TypeVar("_Batch")


class Session:
    """A training run, as a context manager, or between `start` and `close`.

    Args:
        task: What `tq.join()` returned.
        model: The module to train; or several, in a list or by name.
        optimizer: A `tq.Optimizer` over its parameters; or several, in a list or by name, each with parameters of its own and a rule
            of its own. `global_step` and `last_step` count the updates of the first.
        logdir: The run's folder, for checkpoints, the ledger and the report; the ps tasks write there. A path, or an address
            such as s3://bucket/run1.
        last_step: The global step at which the run is over, exactly; None trains until the loop ends.
        num_steps: The same, counted from the step at which the run begins or continues; instead of last_step.
        max_seconds: The run is over after this time, for all workers, by the chief's clock.
        liveness_s: A worker that is silent for longer counts as dead, and the others continue.
        save_every_s: Seconds between checkpoints, written while training continues; 0 for one at the end only.
        save_every_steps: Global steps between checkpoints, instead of seconds.
        keep: How many checkpoints are kept.
        full_every: One of so many checkpoints has all rows of the model's tables, those between only rows that have changed; 8 by default,
            1 for all rows in each.
        require_save: Whether a run whose last step cannot be saved has failed, in every task. It is tried again for
            `Patience.save_s`. False prints that it failed, and ends well.
        restore: Whether to continue from the newest good checkpoint in the folder.
        wait_for_workers: Train only when this many workers have joined. By default a sync run whose tasks a launcher starts
            (`torchquorum run`, `tq.launch`, Ray, Slurm, torchrun) waits for all of them at its first start, so that it is the
            same every time; where workers may come and go (`--workers 2:8`), for the least number. Otherwise, and where tasks
            are started by hand, the first starts alone.
        start_afresh: Whether to begin again at step 0 when a ps was restarted and there is no checkpoint, or all checkpoints are
            damaged; else an error.
        accept_loss: Whether a durable run goes on when updates that workers were told of cannot be restored; else an error.
        data: Sources whose position belongs to a checkpoint: `tq.Batches`, or anything with state_dict and load_state_dict;
            one, or several by name.
        buffers: Whose persistent buffers, such as batch norm's running statistics, are the run's, to be saved, exported and
            evaluated: those of the `chief`; the `average` over the workers; or `local`: each worker's stay with it, unsaved.
        durable: Journal every update in the run's folder, so that a ps that is killed at any moment comes back with every
            version that a worker has seen: True or `write`; `fsync` survives a loss of power too, and waits for the disk.
        record: Record the run in its folder, so that `torchquorum replay` makes it again, bit for bit; docs/simulate.md says what
            that costs. By default as `torchquorum run --record` says.
        patience: How long to wait for what: `tq.types.Patience`.
        hooks: Called around the loop, in this order; see `torchquorum.session.hooks.hook`.
        placement: Puts parts of the model on devices, see `tq.devices.place`: a device, or a mapping from names to devices.
        log_device_placement: Print, once, where every variable lives and every operation of the first step runs.
        allow_soft_placement: Use the CPU for a device that is not there or cannot run an operation, instead of an error.
        gpu_memory_fraction: The share of each GPU's memory that this process may take, so that several can share one.
        config: The last three as TensorFlow's ConfigProto.
        rows: How old rows of tables may be that are read, and how many this worker keeps: `tq.rows.Reading`. By default none, and as new
            as the ps tasks have them.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizer: Given,
        *,
        logdir: str | Path | None = None,
        last_step: int | None = None,
        num_steps: int | None = None,
        max_seconds: float | None = None,
        liveness_s: float = 5.0,
        save_every_s: float | None = None,
        save_every_steps: int | None = None,
        keep: int = 5,
        full_every: int | None = None,
        require_save: bool = True,
        restore: bool = True,
        wait_for_workers: int | None = None,
        start_afresh: bool = False,
        accept_loss: bool = False,
        data: Resumable | Mapping[str, Resumable] | None = None,
        buffers: str = "chief",
        durable: bool | str | None = None,
        record: bool | None = None,
        patience: Patience | None = None,
        hooks: Sequence[Hook] = (),
        placement: Placement | None = None,
        log_device_placement: bool | None = None,
        allow_soft_placement: bool | None = None,
        gpu_memory_fraction: float | None = None,
        config: ConfigProto | None = None,
        rows: Reading | None = None,
    ) -> None:
        check_accelerate()
        module, (first, *more) = read_model(model), read_optimizers(unwrapped(optimizer))
        folder = check_folder(task, logdir)
        self.epoch_loop = EpochLoop(self, wait_for_workers)
        mode = read_durable(durable, folder)
        setup = Setup(
            task=task,
            model=module,
            optimizer=first,
            more_optimizers=more,
            logdir=folder,
            patience=patience or Patience(),
            stop=StopOptions(last_step=last_step, num_steps=num_steps, max_seconds=max_seconds),
            save=SaveOptions(
                every_s=save_every_s,
                every_steps=save_every_steps,
                keep=keep,
                required=require_save,
                full_every=full_every,
            ),
            restore=read_restore(mode, restore=restore, start_afresh=start_afresh, accept_loss=accept_loss),
            member=MemberOptions(
                liveness_s=liveness_s,
                wait_for_workers=wait_for_workers,
                buffers=buffers,
                record=task.replay is None and read_record(record, folder),
            ),
            data={
                **(dict(data) if isinstance(data, Mapping) else {"data": data} if data else {}),
                EPOCHS: self.epoch_loop,
            },
            reading=rows,
        )
        for source in setup.data.values():
            if isinstance(source, Batches):
                source.prefetch_to = self.prefetch
        device_options = read_device_options(
            config,
            log_device_placement=log_device_placement,
            allow_soft_placement=allow_soft_placement,
            gpu_memory_fraction=gpu_memory_fraction,
        )
        self.task, self.model, self.optimizer, self.optimizers = task, module, first, [first, *more]
        self.logdir, self.patience, self.hooks = folder, setup.patience, [*hooks, *asked_hooks(task, folder, hooks)]
        self._stop = StopCondition(setup.stop, setup.clock)
        self._results = Results(setup, self.hooks)
        self._part = self._choose_part(setup, SessionDevices(device_options, module, placement))

    def _choose_part(self, setup: Setup, devices: SessionDevices) -> Lifecycle | Evaluator:
        """An evaluator follows the run's checkpoints, every other task trains."""
        calls = HookCalls(self)
        if self.task.job == EVALUATOR:
            return Evaluator(setup, self._stop, calls)
        if setup.logdir is not None and self.task.is_chief:
            self.hooks.append(CheckpointHook(setup.save, setup.clock))
        self.hooks.append(devices)
        self.hooks.insert(0, self.epoch_loop)
        part = Lifecycle(setup, self._stop, calls, devices, self._results.recorded)
        part.presence = self.task.presence
        return part

    def __enter__(self) -> Session:
        self._part.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        # A loader that ends because the run does ends a loop over it; a program that calls `next(batches)` by itself ends here.
        over = isinstance(error, StopIteration) and self.state is SessionState.RUNNING and self.should_stop()
        self._part.end(None if over else error)
        return over or None

    def start(self) -> Session:
        """Begins the session without a `with` block, for programs that cannot indent their loop; `close` ends it.

        A program that ends without `close` leaves the run as a `with` block is left by an exception.
        """
        self._part.begin()
        atexit.register(self._end_with_program)
        return self

    def close(self) -> None:
        """Ends what `start` began, as the end of a `with` block does; harmless if the session is over.

        Called while an exception is handled, as in a `finally` block, it ends the session as that exception would.
        """
        if self.state is SessionState.NEW:
            raise ConfigError("session.close() before session.start(): the session has not begun")
        atexit.unregister(self._end_with_program)
        if self.state not in (SessionState.CLOSED, SessionState.FAILED):
            self._part.end(sys.exc_info()[1])

    def _end_with_program(self) -> None:
        """The program ends and has not called `close`: by an error, or it was forgotten."""
        error: BaseException | None = getattr(sys, "last_value", None)
        if error is None:
            error = ConfigError("the program ended without session.close()")
            say(
                f"{self.task}: {error}: the run is left unfinished; call it after the loop, or use `with tq.Session(...)`"
            )
        if self.state not in (SessionState.CLOSED, SessionState.FAILED):
            self._part.end(error)

    def surviving(self, ask: Callable[[], _Answer]) -> _Answer:
        """Asks the ps tasks for something; if one is lost meanwhile, recovers and asks once more."""
        return self._part.surviving(ask)

    def save(self, *, wait_s: float = 0.0) -> str | None:
        """Makes a checkpoint of the current version, while training continues.

        Args:
            wait_s: How long to wait until it is there; 0 does not wait.

        Returns:
            Its path, if it was waited for.
        """
        return self._part.run.save(wait_s)

    def save_at_loop(self) -> None:
        """Makes a checkpoint where the program's loop begins anew, which is where it asks `should_stop`, or takes its next batch.

        A program that goes on from a checkpoint begins its loop there. Of several optimizers some are ahead at other places; those that
        the session makes by itself are made this way.
        """
        self._part.run.save_at_loop()

    def should_stop(self) -> bool:
        """Whether the run is over: the last step has been reached, or a stop was requested. Ask where the loop begins."""
        return self._part.should_stop()

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
        """Hands data out to the workers that are there, batch by batch, however they come and go.

        Iterate over it in place of a DataLoader: `for x, y in session.share(dataset, batch_size=100, epochs=3)`. Every batch of
        every epoch is used in one update exactly once; docs/elastic.md says what that means when workers die.

        Args:
            data: Tensors of the same length, or anything with a length and items by index, the same on every worker; or a
                DataLoader over such, whose batch size, order, collate_fn and processes are then used.
            batch_size: How many rows make a batch.
            epochs: How many passes over the data all workers make together; None for no end.
            seed: Of the order of the rows; the same on every worker.
            shuffle: Whether every epoch has its own order; it has, unless this is False.
            drop_last: Whether rows that do not fill a batch are left out.
            name: Tells several shares of a session apart.

        Raises:
            ConfigError: The data cannot be shared out, or an argument is out of range.
        """
        _ = self._part.running_link  # an error outside the block
        return make_share(
            self, data, batch_size, epochs=epochs, seed=seed, shuffle=shuffle, drop_last=drop_last, name=name
        )

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Goes through epochs: `for epoch in session.epochs(10)`, and in it a loop over any DataLoader, or `session.share(...)`.

        Workers leave an epoch together: one that has no batch left is paused, and rounds need the gradients of the others only. When a loop
        over the training data ends, the model holds the version that all workers have made of the epoch, so an evaluation after it sees
        that. A run that goes on does so in its epoch, after the batches that its variables have. Ends early when the session should stop.

        Args:
            count: How many epochs the run has, the earlier ones of a run that goes on among them; None for no end.

        Yields:
            The number of the epoch, from 0.
        """
        _ = self._part.running_link  # an error outside the block
        return self.epoch_loop.run(count)

    def barrier(self, timeout_s: float | None = None) -> None:
        """Waits until every live worker has come to its barrier; meanwhile rounds need the gradients of the others only.

        Args:
            timeout_s: When to give up; by default when nothing has happened in the run for `Patience.round_s`.

        Raises:
            DeadlineError: Some did not come; it says who.
        """
        _ = self._part.running_link
        self.epoch_loop.barrier(timeout_s)

    def prefetch(self, ids: torch.Tensor | Mapping[str | nn.Module, torch.Tensor]) -> None:
        """Asks for the rows of the next batch, and goes on; call it before this batch is computed.

        When the next batch is looked up its rows are there; those that have changed since are fetched again, unless
        `rows=tq.rows.Reading(max_staleness=...)` allows them to be older. Rows of two batches can be on their way.

        Args:
            ids: The ids that the next batch has. Of a model with several tables, a mapping from each module, or its name, to ids.

        Raises:
            ConfigError: A module has no rows on the ps tasks.
        """
        _ = self._part.running_link
        self._part.run.prefetch(ids)

    def prefetched(self, batches: Iterable[_Batch], ids: Callable[[_Batch], Any]) -> Iterator[_Batch]:
        """Goes through a DataLoader, or other batches, and asks for the rows of each one batch ahead.

        Args:
            batches: What yields batches. Not inside a loop over `session.epochs`, which counts the batches that are taken.
            ids: Returns a batch's ids, as `prefetch` takes them: `session.prefetched(loader, lambda batch: batch[0])`.

        Yields:
            The batches.
        """
        if self.epoch_loop.running or isinstance(batches, Share):
            raise ConfigError(
                "session.prefetched() takes batches before they are computed, and session.epochs() and session.share() count those that "
                "are taken: call session.prefetch(ids) in the loop, with ids that the program knows, or leave it out"
            )
        return ahead(batches, lambda batch: self.prefetch(ids(batch)))

    def end_at(self, last_step: int) -> None:
        """Sets the global step at which the run is over, if there is none; called before the session begins."""
        self._stop.end_at(last_step)

    def request_stop(self) -> None:
        """Makes this worker's loop end: `should_stop` is true from now on."""
        self._part.request_stop()

    @property
    def state(self) -> SessionState:
        """Returns the session's state."""
        return self._part.states.state

    @property
    def signals(self) -> Signals:
        """Returns whether Ctrl-C or SIGTERM has asked for the end."""
        return self._part.signals

    @property
    def flat(self) -> FlatParameters | None:
        """Returns the parameters as they lie in memory while the session runs."""
        return self.optimizer.flat

    @property
    def incarnation(self) -> int:
        """Returns the id of this start of the worker."""
        return self._part.link.incarnation

    @property
    def global_step(self) -> int:
        """Returns the cluster's version, as of this worker's last push or pull."""
        return self._part.link.version

    @property
    def local_step(self) -> int:
        """Returns how many gradients this worker has computed."""
        return self._part.link.local_step

    @property
    def inner_step(self) -> int:
        """Returns how many steps this worker's own optimizer has made, under `tq.Local`; else how many gradients it has computed."""
        return self.optimizer.inner_step

    @property
    def saved_step(self) -> int:
        """Returns the global step of the last checkpoint that was waited for or restored, -1 for none."""
        return self._part.run.saved_step

    @property
    def leads(self) -> bool:
        """Whether this worker does the chief's work: it is the chief, or stands in while that is dead, or done before the run is."""
        return self._part.leads

    @property
    def last_step(self) -> int | None:
        """Returns the global step at which the run is over, if this worker knows one."""
        return self._stop.last_step

    @property
    def results(self) -> dict[str, float]:
        """Returns what `record` has noted."""
        return dict(self._results.recorded)

    @property
    def transports(self) -> list[str]:
        """Returns how this worker talks to each ps task: shm or tcp."""
        return self._part.link.transports

    def pull(self, *, keep_written: bool = False) -> int:
        """Takes the cluster's current version into the model's parameters; returns it.

        Args:
            keep_written: Leaves the parameters as they are if the program has written to them, as with the best model or an average.
        """
        return self._part.run.pull(keep_written=keep_written)

    def assign(self) -> int:
        """Makes what the chief has written to the model's parameters the next version, for all workers; returns it.

        All workers call this at the same place of the program, after they have written, as with `load_state_dict` or
        `torch.nn.init`. The chief's values count, of the parameters that were written to; the others wait for them and take them.
        Optimizer state stays as it is. Under Sync the assignment lies between two rounds; under Async what others have pushed since
        is overwritten in those parameters, and the ps says so. While the chief is dead the values of the first worker alive count.
        """
        self._part.assign()
        return self.global_step

    def averaged(self) -> AbstractContextManager[int]:
        """Inside this block the model's parameters are the moving averages; afterwards they are the variables again.

        Inside it the buffers are the run's, as in `shared_buffers`.
        """
        return self._part.run.averaged()

    def shared_buffers(self) -> AbstractContextManager[None]:
        """Inside this block the model's buffers are the run's, see `buffers=`; afterwards they are this worker's again."""
        return self._part.run.shared_buffers()

    def pull_buffers(self) -> None:
        """Takes the run's buffers, see `buffers=`, into the model, to stay."""
        self._part.run.pull_buffers()

    def record(self, **results: Any) -> None:
        """Notes this worker's final `loss` and `accuracy` for the report."""
        self._results.record(results)

    def measure(self, global_step: int | None = None, **values: float) -> None:
        """Notes numbers measured along the way, such as `session.measure(accuracy=0.97)`, for the pictures of the run.

        They go to `measures.jsonl` in the run's folder, from the chief or the worker that stands in for it only, and to hooks that
        take numbers.

        Args:
            global_step: The version they belong to; this worker's current one by default.
            **values: The numbers by name.
        """
        step = self.global_step if global_step is None else global_step
        self._results.measure(step, values, write=self.leads)
