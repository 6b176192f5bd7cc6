"""A task's place on a machine of Ray: an actor that runs the unchanged program as a child and tells the launcher about it.

`on_ray` makes one of `TaskHost` for each task; Ray runs it, and runs it again elsewhere when its machine is lost. Imports no
torch but for functions, and no ray but to ask for this machine's address. What always holds: the socket that was announced is
the one that the child is given; at most one child runs; it dies with this process, and what it started dies with it.
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
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torchquorum import env
from torchquorum.cluster import ClusterSpec, TaskId, launcher_task
from torchquorum.cluster.spec import PS
from torchquorum.launcher.local import Process, die_with_parent
from torchquorum.transport.zmq_channel import bind_host

if TYPE_CHECKING:
    from torchquorum.launcher.functions import Result

LINES_HELD = 10_000
LINES_AT_ONCE = 1_000
LAST_LINES_S = 2.0
POLL_S = 0.02
LONGEST_SLEEP_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a task is.

    Attributes:
        machine: The address of the machine, for people.
        address: host:port at which the task can listen.
    """

    machine: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a host shall run.

    Attributes:
        command: The program and its arguments, without Python.
        folder: Where the launcher was started; used if this machine has it.
        cluster: The addresses of all tasks.
        min_workers: How many workers must be there to begin.
        transport: auto, shm or tcp.
        variables: What changes in the child's environment; None takes one out.
        report: Whether the report shall come back.
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
class News:
    """What has come of a child.

    Attributes:
        lines: What it printed.
        code: Its exit code, negative for a signal; None while it runs.
        report: The report that it wrote.
        result: What its function returned.
    """

    lines: list[str]
    code: int | None = None
    report: bytes | None = None
    result: bytes = b""


class TaskHost:
    """Runs a task's program on this machine. Its methods are called by the launcher, each on a thread of Ray's.

    Args:
        task: The task's name.
        host: The address of this machine by which others reach it; None asks Ray.
    """

    def __init__(self, task: str, host: str | None = None) -> None:
        self._task = TaskId.parse(task)
        self._host = host
        self._socket: socket.socket | None = None
        self._child: Process | None = None
        self._lock = threading.Lock()  # over the child's number, so that no signal goes to another's
        self._lines: queue.Queue[str | News] = queue.Queue(LINES_HELD)

    def place(self, before: str | None = None) -> Place:
        """Returns where this task is; a ps holds its port from now on, a worker listens nowhere.

        Args:
            before: The address that it had in an earlier life, which it takes again if it can.
        """
        host = self._host or _own_address()
        if self._socket is None and self._task.job == PS:
            self._socket = _listen(host, before)
        return Place(machine=host, address=f"{host}:{self._socket.getsockname()[1] if self._socket else 0}")

    def start(self, order: Order) -> int:
        """Starts the child; returns its number.

        Raises:
            FileNotFoundError: This machine has no such program.
        """
        assert self._child is None or self._poll(self._child) is not None
        self._lines = queue.Queue(LINES_HELD)
        begun: queue.Queue[int | Exception] = queue.Queue()
        # The system ends a child with the thread that started it, so one thread does both: start it and see it end.
        threading.Thread(target=self._keep, args=(order, self._lines, begun), name="keeper", daemon=True).start()
        outcome = begun.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def follow(self, wait_s: float) -> News:
        """Returns what the child has printed since the last time and, at last, how it ended; waits a while for it."""
        lines: list[str] = []
        deadline = time.monotonic() + wait_s
        while len(lines) < LINES_AT_ONCE:
            try:
                came = self._lines.get(timeout=0 if lines else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(came, News):
                return News(lines=lines, code=came.code, report=came.report, result=came.result)
            lines.append(came)
        return News(lines=lines)

    def signal(self, number: int) -> None:
        """Sends the child a signal, if it runs."""
        with self._lock:
            if self._child is not None:
                self._child.send_signal(number)

    def _poll(self, child: Process) -> int | None:
        with self._lock:
            return child.poll()

    def _keep(self, order: Order, lines: queue.Queue[str | News], begun: queue.Queue[int | Exception]) -> None:
        """Starts the child, waits for its end and tells it; on a thread of its own."""
        result = None
        with contextlib.ExitStack() as stack:
            report = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "report" if order.report else None
            try:
                child, result = self._spawn(order, {env.REPORT: None if report is None else str(report)})
            except Exception as error:
                begun.put(error)
                return
            self._child = child
            assert child.stdout is not None
            reader = threading.Thread(target=_read, args=(child.stdout, lines), name="reader", daemon=True)
            reader.start()
            begun.put(child.pid)
            while (code := self._poll(child)) is None:
                _wait_for_end(child.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # what it has started goes with it
            reader.join(LAST_LINES_S)
            written = report.read_bytes() if report is not None and report.is_file() else None
        lines.put(News(lines=[], code=code, report=written, result=b"" if result is None else result.get()))

    def _spawn(self, order: Order, more: dict[str, str | None]) -> tuple[Process, Result | None]:
        fd = self._socket.fileno() if self._socket is not None else None
        who = launcher_task(ClusterSpec(order.cluster, min_workers=order.min_workers), self._task, order.transport, fd)
        variables = {**order.variables, **more, env.TASK: who}
        folder = order.folder if os.path.isdir(order.folder) else os.getcwd()
        if order.call is not None:
            from torchquorum.launcher.functions import fork_task

            os.chdir(folder)
            return fork_task(order.call, self._task, variables)
        if not (Path(folder) / order.command[0]).is_file():
            raise FileNotFoundError(f"there is no {order.command[0]} in {folder}")
        return subprocess.Popen(
            [sys.executable, *order.command],
            cwd=folder,
            env=env.child_environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[] if fd is None else [fd],
            start_new_session=True,
            preexec_fn=_begin_as_child,
        ), None


def _wait_for_end(pid: int) -> None:
    """Sleeps until a child of ours may have ended; without waking up meanwhile, where the system can tell."""
    try:
        watched = os.pidfd_open(pid)
    except (OSError, AttributeError):  # no file is left for it, or it is another system
        time.sleep(POLL_S)
        return
    try:
        select.select([watched], [], [], LONGEST_SLEEP_S)
    finally:
        os.close(watched)


def _begin_as_child() -> None:
    """In the child: ends with its host, and hears signals, which Ray's processes have blocked or ignore."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # what is ignored stays so in a new program, until it says otherwise
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _read(pipe: IO[bytes], lines: queue.Queue[str | News]) -> None:
    with pipe:
        for line in pipe:
            lines.put(line.decode(errors="replace").rstrip("\r\n"))


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _listen(host: str, before: str | None) -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound = bind_host(f"{host}:0")
    old_host, _, old_port = (before or "").rpartition(":")
    try:
        held.bind((bound, int(old_port) if old_host == host else 0))
    except OSError:
        held.bind((bound, 0))  # somebody has taken the port meanwhile
    held.listen(128)
    return held
