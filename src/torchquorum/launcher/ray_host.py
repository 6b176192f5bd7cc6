"""The actor of one task on a machine of Ray: runs the unchanged program as a child process and reports to the launcher.

`ray_cluster` creates one `TaskHost` per task; Ray restarts it, on another machine if needed, when its machine is lost. Imports
torch only to run functions, and ray only to find this machine's address. What always holds: the child inherits the socket whose
address was announced; at most one child runs; it dies with this process, and its own children die with it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torchquorum import env
from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster import ClusterSpec, TaskId, launcher_task
from torchquorum.cluster.spec import PS
from torchquorum.launcher.process import Process, die_with_parent
from torchquorum.wire.address import bind_place

if TYPE_CHECKING:
    from torchquorum.launcher.fork import Result

LINES_HELD = 10_000
LINES_AT_ONCE = 1_000
LAST_LINES_S = 2.0
POLL_S = 0.02
LONGEST_SLEEP_S = 5.0


@dataclass(frozen=True, kw_only=True)
class HostEndpoint:
    """Where a task runs.

    Attributes:
        machine: The address of the machine, for messages.
        address: host:port at which the task can listen.
    """

    machine: str
    address: str


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """What a host runs as its child.

    Attributes:
        command: The program and its arguments, without Python.
        folder: The launcher's working directory; used if this machine has it.
        cluster: The addresses of all tasks.
        min_workers: How many workers the run needs to begin.
        transport: auto, shm or tcp.
        variables: Changes to the child's environment; None removes a variable.
        report: Whether to return the report.
        call: A function instead of a program.
    """

    command: tuple[str, ...]
    folder: str
    cluster: dict[str, list[str]]
    min_workers: int
    transport: str
    variables: dict[str, str | None] = field(repr=False)
    report: bool = False
    call: Callable[[], Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class ChildStatus:
    """What a child has done since it was last asked.

    Attributes:
        lines: The lines that it printed.
        code: Its exit code, negative for a signal; None while it runs.
        report: The report that it wrote.
        result: What its function returned.
    """

    lines: list[str]
    code: int | None = None
    report: bytes | None = None
    result: bytes = b""


class TaskHost:
    """Runs a task's program on this machine. The launcher calls its methods, each on a thread of Ray.

    Args:
        task: The task's name.
        host: The address of this machine by which others reach it; None asks Ray.
        clock: Used for all waits.
    """

    def __init__(self, task: str, host: str | None = None, clock: Clock = SYSTEM) -> None:
        self._task = TaskId.parse(task)
        self._host, self._clock = host, clock
        self._socket: socket.socket | None = None
        self._child: Process | None = None
        self._lock = threading.Lock()  # guards the child's pid, so that no signal reaches a reused one
        self._lines: queue.Queue[str | ChildStatus] = queue.Queue(LINES_HELD)

    def endpoint(self, before: str | None = None) -> HostEndpoint:
        """Returns where this task runs; a ps keeps its port bound from now on, a worker listens nowhere.

        Args:
            before: The address of its earlier incarnation, used again if it is free.
        """
        host = self._host or _own_address()
        if self._socket is None and self._task.job == PS:
            self._socket = _listen(host, before)
        return HostEndpoint(machine=host, address=f"{host}:{self._socket.getsockname()[1] if self._socket else 0}")

    def start(self, spec: ChildSpec) -> int:
        """Starts the child; returns its pid.

        Raises:
            FileNotFoundError: This machine has no such program.
        """
        assert self._child is None or self._poll(self._child) is not None
        self._lines = queue.Queue(LINES_HELD)
        begun: queue.Queue[int | Exception] = queue.Queue()
        # The kernel kills a child with the thread that started it (PR_SET_PDEATHSIG), so that thread lives until the child ends.
        threading.Thread(
            target=self._keep, args=(spec, self._lines, begun), name="torchquorum-keeper", daemon=True
        ).start()
        outcome = begun.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def follow(self, wait_s: float) -> ChildStatus:
        """Returns what the child has printed since the last call and, at the end, how it ended; waits up to `wait_s`."""
        lines: list[str] = []
        deadline = self._clock.now() + wait_s
        while len(lines) < LINES_AT_ONCE:
            try:
                came = self._lines.get(timeout=0 if lines else max(0.0, deadline - self._clock.now()))
            except queue.Empty:
                break
            if isinstance(came, ChildStatus):
                return ChildStatus(lines=lines, code=came.code, report=came.report, result=came.result)
            lines.append(came)
        return ChildStatus(lines=lines)

    def signal(self, number: int) -> None:
        """Sends the child a signal, if it runs."""
        with self._lock:
            if self._child is not None:
                self._child.send_signal(number)

    def close(self) -> None:
        """Releases the port."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _poll(self, child: Process) -> int | None:
        with self._lock:
            return child.poll()

    def _keep(
        self, spec: ChildSpec, lines: queue.Queue[str | ChildStatus], begun: queue.Queue[int | Exception]
    ) -> None:
        """Starts the child, waits for its end and reports it; runs on a separate thread."""
        result = None
        with contextlib.ExitStack() as stack:
            report = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "report" if spec.report else None
            try:
                child, result = self._spawn(spec, {env.REPORT: None if report is None else str(report)})
            except Exception as error:
                begun.put(error)
                return
            self._child = child
            assert child.stdout is not None
            reader = threading.Thread(target=_read, args=(child.stdout, lines), name="torchquorum-lines", daemon=True)
            reader.start()
            begun.put(child.pid)
            while (code := self._poll(child)) is None:
                _wait_for_end(child.pid, self._clock)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # its own children end with it
            reader.join(LAST_LINES_S)
            written = report.read_bytes() if report is not None and report.is_file() else None
        lines.put(ChildStatus(lines=[], code=code, report=written, result=b"" if result is None else result.get()))

    def _spawn(self, spec: ChildSpec, more: dict[str, str | None]) -> tuple[Process, Result | None]:
        fd = self._socket.fileno() if self._socket is not None else None
        who = launcher_task(ClusterSpec(spec.cluster, min_workers=spec.min_workers), self._task, spec.transport, fd)
        variables = {**spec.variables, **more, env.TASK: who}
        folder = spec.folder if os.path.isdir(spec.folder) else os.getcwd()
        if spec.call is not None:
            from torchquorum.launcher.fork import fork_task

            os.chdir(folder)
            return fork_task(spec.call, self._task, variables)
        if not (Path(folder) / spec.command[0]).is_file():
            raise FileNotFoundError(f"there is no {spec.command[0]} in {folder}")
        return subprocess.Popen(
            [sys.executable, *spec.command],
            cwd=folder,
            env=env.child_environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[] if fd is None else [fd],
            start_new_session=True,
            preexec_fn=_begin_as_child,
        ), None


def _wait_for_end(pid: int, clock: Clock) -> None:
    """Sleeps until a child may have ended; without polling where the kernel has pidfds."""
    try:
        watched = os.pidfd_open(pid)
    except (OSError, AttributeError):  # out of file descriptors, or no Linux
        clock.sleep(POLL_S)
        return
    try:
        select.select([watched], [], [], LONGEST_SLEEP_S)
    finally:
        os.close(watched)


def _begin_as_child() -> None:
    """In the child: makes it die with its host, and unblocks the signals that Ray's processes block or ignore."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # an ignored signal stays ignored after exec
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _read(pipe: IO[bytes], lines: queue.Queue[str | ChildStatus]) -> None:
    with pipe:
        for line in pipe:
            lines.put(line.decode(errors="replace").rstrip("\r\n"))


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _listen(host: str, before: str | None) -> socket.socket:
    bound, _ = bind_place(f"{host}:0")
    held = socket.socket(socket.AF_INET6 if ":" in bound else socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    old_host, _, old_port = (before or "").rpartition(":")
    try:
        held.bind((bound, int(old_port) if old_host == host else 0))
    except OSError:
        held.bind((bound, 0))  # another process has taken the port
    held.listen(128)
    return held
