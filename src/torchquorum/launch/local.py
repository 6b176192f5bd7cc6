"""A cluster on this machine: one process per task, their output, and their end.

Called by `torchquorum train` and `torchquorum run`. What always holds: the ports of the ps tasks are held from the moment
they are chosen until the ps has them; when `wait` returns, by whatever way, no process of the cluster is left.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from torchquorum import env
from torchquorum.cluster import ClusterSpec, TaskId, launcher_task
from torchquorum.errors import ConfigError

PS_GRACE_S = 20.0
WORKER_GRACE_S = 5.0
STOP_GRACE_S = 5.0
POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


@dataclass(kw_only=True)
class Options:
    """What to start.

    Attributes:
        command: The program and its arguments, as one task runs it.
        ps: How many ps tasks.
        workers: How many workers.
        transport: auto, shm or tcp.
        threads: Threads of an operation in each task; None divides the cores among the workers.
        report: Where ps task 0 writes the report.
        logdir: The run's folder, for programs that name none.
    """

    command: Sequence[str]
    ps: int = 1
    workers: int = 2
    transport: str = "auto"
    threads: int | None = None
    report: str | None = None
    logdir: str | None = None

    def __post_init__(self) -> None:
        for name in ("ps", "workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be 1 or more")


@dataclass
class Running:
    """A started task."""

    task: TaskId
    process: subprocess.Popen[bytes]
    reader: threading.Thread = field(init=False)

    @property
    def code(self) -> int | None:
        """Returns the exit code, negative for a signal, or None while it runs."""
        return self.process.poll()


class LocalCluster:
    """The processes of a local cluster.

    Args:
        options: What to start.
        output: Takes every line that a task prints, with the task.
    """

    def __init__(self, options: Options, output: Callable[[TaskId, str], None]) -> None:
        self.options, self._output = options, output
        self.started_at = time.time()
        self._sockets = [_listening_socket() for _ in range(options.ps)]
        ports = [s.getsockname()[1] for s in self._sockets]
        names = _unused_ports(options.workers, set(ports))
        self.cluster = ClusterSpec(
            {"ps": [f"127.0.0.1:{p}" for p in ports], "worker": [f"127.0.0.1:{p}" for p in names]}
        )
        self.tasks: list[Running] = []
        self.messages: list[str] = []

    def start(self) -> None:
        """Starts every task."""
        for task in [*self.cluster.tasks("ps"), *self.cluster.tasks("worker")]:
            self.tasks.append(self._start(task))
        for held in self._sockets:
            held.close()
        self._sockets = []

    def _start(self, task: TaskId) -> Running:
        held = self._sockets[task.index] if task.job == "ps" else None
        fds = [held.fileno()] if held is not None else []
        threads = self.options.threads or max(1, (os.cpu_count() or 1) // self.options.workers)
        extra: dict[str, str | None] = {
            env.TASK: launcher_task(self.cluster, task, self.options.transport, fds[0] if fds else None),
            env.STARTED_AT: repr(self.started_at),
            env.REPORT: self.options.report,
            env.LOGDIR: self.options.logdir,
            env.TF_CONFIG: None,
            "PYTHONUNBUFFERED": "1",
        }
        if not env.has_omp_num_threads():
            extra[env.OMP_NUM_THREADS] = str(threads)
        process = subprocess.Popen(
            list(self.options.command),
            env=env.child_environment(**extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=fds,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        running = Running(task, process)
        assert process.stdout is not None
        running.reader = threading.Thread(
            target=self._read, args=(task, process.stdout), name=f"torchquorum-output-{task}", daemon=True
        )
        running.reader.start()
        return running

    def _read(self, task: TaskId, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._output(task, line.decode(errors="replace").rstrip("\r\n"))

    # -- the end ------------------------------------------------------------------------------------------------------

    def wait(self, each: Callable[[], None] | None = None) -> int:
        """Waits until every task has ended; ends those that have no reason to go on.

        Args:
            each: Called every now and then while waiting.

        Returns:
            The exit code of the run: 0 if it reached its end.
        """
        workers_gone_at: float | None = None
        ps_gone_at: float | None = None
        told: set[TaskId] = set()
        try:
            while True:
                running = [t for t in self.tasks if t.code is None]
                self._tell_of_deaths(told)
                if not running:
                    break
                if all(t.task.job == "ps" for t in running):
                    workers_gone_at = workers_gone_at or time.monotonic()
                    failed = all(t.code for t in self.tasks if t.task.job == "worker")
                    if failed or time.monotonic() - workers_gone_at > PS_GRACE_S:
                        self.messages.append("the workers are gone before the run was over: ending the ps tasks")
                        break
                if any(t.task.job == "ps" and t.code for t in self.tasks):
                    ps_gone_at = ps_gone_at or time.monotonic()
                    if time.monotonic() - ps_gone_at > WORKER_GRACE_S:
                        self.messages.append("a ps task is gone: ending the other tasks")
                        break
                if each is not None:
                    each()
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            self.messages.append("interrupted")
            self.stop(signal.SIGINT)
            return 130
        finally:
            self.stop(signal.SIGTERM)
        self._tell_of_deaths(told)
        return self._code()

    def _tell_of_deaths(self, told: set[TaskId]) -> None:
        for t in self.tasks:
            if t.code not in (None, 0) and t.task not in told:
                told.add(t.task)
                self.messages.append(f"{t.task} {_describe(t.code or 0)}")

    def _code(self) -> int:
        """A run is a success if every ps ended well and no program failed; a worker lost to a signal is survived."""
        if any(t.code != 0 for t in self.tasks if t.task.job == "ps"):
            return 1
        codes = [t.code or 0 for t in self.tasks if t.task.job == "worker"]
        return 1 if any(c > 0 for c in codes) or all(c != 0 for c in codes) else 0

    def stop(self, first: signal.Signals) -> None:
        """Ends whatever still runs: politely, then not."""
        for sign, grace_s in ((first, STOP_GRACE_S), (signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, STOP_GRACE_S)):
            alive = [t for t in self.tasks if t.code is None]
            if not alive:
                break
            for t in alive:
                t.process.send_signal(sign)
            deadline = time.monotonic() + grace_s
            while any(t.code is None for t in alive) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        for held in self._sockets:
            held.close()
        for t in self.tasks:
            t.reader.join(timeout=STOP_GRACE_S)


def python_command(script: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command that runs a Python script in this interpreter."""
    if not Path(script).is_file():
        raise ConfigError(f"script {script!r}: there is no such file; give the path of a Python program")
    return [sys.executable, script, *arguments]


def _listening_socket() -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.bind(("127.0.0.1", 0))
    held.listen(128)
    return held


def _unused_ports(count: int, taken: set[int]) -> list[int]:
    """Returns numbers for the addresses of workers, which never listen; they only have to differ."""
    ports: list[int] = []
    candidate = 20000
    while len(ports) < count:
        if candidate not in taken:
            ports.append(candidate)
        candidate += 1
    return ports


def _describe(code: int) -> str:
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _die_with_parent() -> None:
    """In the child: ends it when the launcher dies, so that kill -9 of the launcher leaves nothing behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    prctl = getattr(libc, "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
