"""`tq.join()`: finds out which task this process is. A ps task serves here until the job ends; a worker gets its `Task` and continues.

Called once, at the top of a program. What always holds: without a cluster the program trains alone, with a ps inside this process; flags
of the cluster are removed from sys.argv, so that the program's own parser sees only its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torchquorum import env
from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster import ClusterSpec, Resolved, TaskArguments, TaskId, resolve, slurm, torchrun
from torchquorum.cluster.environment import LAUNCHER, explain_alone
from torchquorum.cluster.joined_tasks import tell
from torchquorum.cluster.program import fill_in, own_flags, read_program_flags
from torchquorum.cluster.secret import OPEN, Access
from torchquorum.devices.inventory import configure, limit_gpu_memory
from torchquorum.devices.options import ConfigProto, read_device_options
from torchquorum.errors import ConfigError, InterruptedRunError, TorchQuorumError
from torchquorum.lines import text_of, write_line
from torchquorum.server.serve import PsTask, ServeOptions, serve
from torchquorum.session import position
from torchquorum.session.presence import Presence
from torchquorum.session.rendezvous import exchange_addresses
from torchquorum.session.replayed import Replayed, read_replay
from torchquorum.wire.channel import Channel
from torchquorum.wire.entry_channel import EntryChannel
from torchquorum.wire.inprocess import InProcessNetwork
from torchquorum.wire.transports import connector

ENDS_IN_S, SAVES_IN_S = 5.0, 600.0  # a ps in this process, when its one worker has left; longer while it saves
INTERRUPTED = 130  # the exit code of a task that Ctrl-C or SIGTERM has ended in good order


@dataclass(frozen=True, kw_only=True)
class Task:
    """This process's place in the cluster.

    Attributes:
        cluster: Who exists.
        id: Which task this is; its text is /job:worker/task:0.
        transport: auto, shm or tcp.
        source: Where this was found: flags, launcher, TF_CONFIG, CLUSTER_SPEC, torchrun, SLURM_*, arguments, defaults, or
            alone.
        flags: The values of the program's own flags, if `tq.join(parser=...)` was given its parser.
        connect: Makes a channel to a ps task.
        separate: Whether the tasks are processes of their own.
        access: The cluster's secret, if it has one, and whether this task may do without.
        clock: Tells the time to all that waits in this task's session.
        pid: The process that is this task; a fork of it is not.
        random_bits: Returns a random number of so many bits, for ids.
        thread: Makes the thread that says that this task is alive.
        presence: Says between two sessions that the program goes on; None where nobody has to know.
        began: The random state of the process when it joined, for a record.
        replay: Which recorded life this process is, if it is replayed.
    """

    cluster: ClusterSpec
    id: TaskId
    transport: str = "auto"
    source: str = "arguments"
    flags: argparse.Namespace = field(default_factory=argparse.Namespace, repr=False, compare=False)
    connect: Callable[[str, bytes], Channel] = field(default=lambda address, _name: EntryChannel(address), repr=False)
    separate: bool = field(default=False, repr=False)
    alone: Alone | None = field(default=None, repr=False)
    access: Access = field(default=OPEN, repr=False)
    clock: Clock = field(default=SYSTEM, repr=False, compare=False)
    pid: int = field(default_factory=os.getpid, repr=False, compare=False)
    random_bits: Callable[[int], int] = field(default=secrets.randbits, repr=False, compare=False)
    thread: Callable[..., threading.Thread] = field(default=threading.Thread, repr=False, compare=False)
    presence: Presence | None = field(default=None, repr=False, compare=False)
    began: position.Captured | None = field(default=None, repr=False, compare=False)
    replay: Replayed | None = field(default=None, repr=False, compare=False)

    def new_incarnation(self) -> int:
        """Returns the id of a life that begins; of one that is replayed, its own."""
        return self.random_bits(62) if self.replay is None else self.replay.file.incarnation

    @property
    def job(self) -> str:
        """Returns ps, worker or evaluator."""
        return self.id.job

    @property
    def index(self) -> int:
        """Returns the task's number within its job."""
        return self.id.index

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, which creates the variables."""
        return self.id == TaskId("worker", 0)

    @property
    def launched(self) -> bool:
        """Whether a launcher starts all tasks of the cluster: one of ours, Slurm or torchrun."""
        return self.source in (LAUNCHER, slurm.SOURCE, torchrun.SOURCE)

    @property
    def num_workers(self) -> int:
        """Returns how many workers the cluster names."""
        return self.cluster.num_tasks("worker")

    @property
    def min_workers(self) -> int:
        """Returns how many of them must be there for the run to begin; fewer where workers may come and go."""
        return self.cluster.min_workers

    @property
    def num_ps(self) -> int:
        """Returns how many ps tasks the cluster names."""
        return self.cluster.num_tasks("ps")

    def __str__(self) -> str:
        return str(self.id)


class Alone:
    """A ps inside this process, for a program without a cluster."""

    def __init__(self, report: str | None) -> None:
        self._report = report or env.report()
        self.cluster = ClusterSpec({"ps": ["localhost:1"], "worker": ["localhost:2"]})
        self.network = InProcessNetwork()
        self._thread: threading.Thread | None = None
        self._ps: PsTask | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Starts the ps for one session."""
        listener = self.network.listen(self.cluster.address(TaskId("ps", 0)))
        options = ServeOptions(say=say, report=self._report, started_at=env.started_at(), alone=True)
        self._ps = ps = PsTask(self.cluster, 0, options, listener=listener)
        self._error = None

        def run() -> None:
            try:
                ps.serve()
            except BaseException as error:
                self._error = error
            finally:
                ps.close()

        self._thread = threading.Thread(target=run, name="torchquorum-ps", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Sees whether the ps is at work; called while its one worker waits for it.

        Raises:
            TorchQuorumError: It has ended by an error, which is the cause of this one.
        """
        if (error := self._error) is not None:
            text = f"{type(error).__name__}: {text_of(error)}"
            raise TorchQuorumError(f"the ps in this process has failed, and the run with it: {text}") from error

    @property
    def failure(self) -> BaseException | None:
        """Returns what an update failed with, if one did."""
        failure = self._ps.service.failure if self._ps is not None else None
        return failure.__cause__ or failure if failure is not None else None

    def finish(self) -> None:
        """Waits for the ps to end, which it does when its one worker has left and all is saved; ends it if it does not.

        The next session of this program has a ps of its own.
        """
        thread, ps = self._thread, self._ps
        if thread is None or ps is None:
            return
        self._thread = None
        if ps.service.run is not None:
            thread.join(ENDS_IN_S)
            deadline = SYSTEM.now() + SAVES_IN_S
            while thread.is_alive() and ps.is_saving and SYSTEM.now() < deadline:
                thread.join(0.5)
        if thread.is_alive():
            ps.end("its one worker has gone without a word")
            thread.join(ENDS_IN_S)


def say(line: str) -> None:
    """Prints a line for people, at once, on standard error."""
    write_line(line, sys.stderr)


def join(
    argv: list[str] | None = None,
    *,
    parser: argparse.ArgumentParser | None = None,
    cluster: ClusterSpec | Mapping[str, Any] | None = None,
    job_name: str | None = None,
    task_index: int | None = None,
    transport: str | None = None,
    report: str | None = None,
    secret_file: str | None = None,
    insecure: bool | None = None,
    min_workers: int | None = None,
    allow_soft_placement: bool | None = None,
    gpu_memory_fraction: float | None = None,
    config: ConfigProto | None = None,
) -> Task:
    """Finds this process's place in the cluster; a ps task serves here and never returns.

    Args:
        argv: Where to look for flags (--job_name, --task_id, --ps_hosts, --worker_hosts, --min_workers, --transport,
            --secret_file, --insecure). By default sys.argv, from which they are then removed, so that your own parser sees only its own.
        parser: Your program's own parser. Its flags are read here, on a ps too, into `task.flags`. It may declare the
            cluster's flags: then they are in its help, and their defaults apply where nothing else names a cluster.
        cluster: The cluster: {"ps": ["host:port"], "worker": ["host:port", ...]}.
        job_name: ps or worker.
        task_index: The task's number.
        transport: auto, shm or tcp.
        report: Where ps task 0 writes the report as JSON when the job ends.
        secret_file: The file with the cluster's secret; tasks off loopback need one.
        insecure: True lets this task listen for other hosts without a secret.
        min_workers: This many workers must be there for the run to begin; the others of the cluster may come and go.
        allow_soft_placement: Use the CPU for a device that is not there or cannot run an operation, in the whole program.
        gpu_memory_fraction: The share of each GPU's memory that this process may take, so that several can share one.
        config: The last two as TensorFlow's ConfigProto.

    Returns:
        The task. Without a cluster, one that trains alone with a ps inside this process.

    Raises:
        TorchQuorumError: The cluster or the flags make no sense; the message says what to change.
        SystemExit: When a ps task has served until the end of the job.
    """
    _show_errors_without_traceback()
    _check_own_program()
    options = read_device_options(
        config, allow_soft_placement=allow_soft_placement, gpu_memory_fraction=gpu_memory_fraction
    )
    arguments = sys.argv[1:] if argv is None else argv
    flags, defaults = read_program_flags(parser, arguments) if parser is not None else (argparse.Namespace(), None)
    replayed = read_replay()
    if replayed is not None:
        cluster, job_name, task_index = replayed.cluster, "worker", replayed.file.worker
        transport, secret_file, min_workers = "auto", None, None
    found = resolve(
        arguments,
        TaskArguments(
            cluster=cluster,
            job_name=job_name,
            task_index=task_index,
            transport=transport,
            secret_file=secret_file,
            insecure=insecure,
            min_workers=min_workers,
        ),
        defaults=defaults,
        exchange=lambda rendezvous: exchange_addresses(rendezvous, say=say),
        own=own_flags(parser),
    )
    fill_in(flags, found)
    if found is None or found.task.job != "ps":
        configure(task=found.task if found and found.task.job == "worker" else TaskId("worker", 0), soft=options.soft)
        limit_gpu_memory(options.memory_fraction)
    if found is None:
        return _join_alone(report, flags)
    tell(found.task)
    if argv is None:
        sys.argv[1:] = found.remaining
    if replayed is None:
        _announce(found)
    if found.task.job == "ps":
        _serve(found, report)
    connect = connector(found.cluster, found.access)
    return Task(
        cluster=found.cluster,
        id=found.task,
        transport=found.transport,
        source=found.source,
        flags=flags,
        connect=connect,
        separate=True,
        access=found.access,
        presence=Presence(found.cluster, found.task.index, connect)
        if found.task.job == "worker" and not replayed
        else None,
        began=_place(replayed),
        replay=replayed,
    )


def _place(replayed: Replayed | None) -> position.Captured:
    """Returns the random state of this process; one that is replayed is given that of its life first."""
    if replayed is not None:
        position.restore(replayed.file.joined, {}, say)
    return position.capture({})


def _check_own_program() -> None:
    """A child that multiprocessing spawns imports the program again: that must not make it a second process of the same task.

    Raises:
        ConfigError: It does.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "tq.join() is called while a child process of multiprocessing (a DataLoader's worker with spawn, for example) imports the "
            "program. Put what only the task itself does below `if __name__ == '__main__':`"
        )


def _join_alone(report: str | None, flags: argparse.Namespace) -> Task:
    alone = Alone(report)
    say(f"torchquorum: {explain_alone()}: training alone, with a ps in this process")
    return Task(
        cluster=alone.cluster,
        id=TaskId("worker", 0),
        source="alone",
        flags=flags,
        connect=alone.network.connect,
        alone=alone,
        began=_place(None),
    )


def _announce(found: Resolved) -> None:
    """Prints where the cluster was found, unless the user knows, and a note about its secret."""
    if "defaults" in found.source:
        ps, workers = (" ".join(addresses) for addresses in found.cluster.as_dict().values())
        say(f"{found.task}: what no flag says is the program's default: ps at {ps}, workers at {workers}")
    elif found.source not in ("launcher", "arguments") or "not used" in found.why:
        say(f"{found.task}: {found.why}")
    if found.access.note:
        say(f"{found.task}: {found.access.note}")


def _serve(found: Resolved, report: str | None) -> None:
    options = ServeOptions(
        listen_fd=found.listen_fd,
        say=say,
        report=(report or env.report()) if found.task.index == 0 else None,
        started_at=env.started_at(),
        access=found.access,
    )
    try:
        serve(found.cluster, found.task.index, options)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    raise SystemExit(0)


def _is_interrupt(error: BaseException) -> bool:
    """Whether an error is Ctrl-C; a module that is being imported may make an ImportError of it."""
    cause = error.__cause__ or error.__context__
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, ImportError) and isinstance(cause, KeyboardInterrupt)
    )


def _show_errors_without_traceback() -> None:
    """A user's mistake is shown as a message without a traceback; everything else is shown as before."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, TorchQuorumError):
            write_line(f"torchquorum: error: {error}", sys.stderr)
        elif isinstance(error, InterruptedRunError):
            write_line(f"torchquorum: {error}", sys.stderr)
            raise SystemExit(INTERRUPTED)
        elif _is_interrupt(error):
            write_line("torchquorum: interrupted", sys.stderr)
        else:
            before(kind, error, trace)

    if getattr(before, "__name__", "") != "torchquorum_hook":
        hook.__name__ = "torchquorum_hook"
        sys.excepthook = hook
