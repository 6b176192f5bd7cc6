"""A process that has imported torch and torchquorum once and forks the tasks that tests start.

Importing costs a second and a half per process, and the tests start hundreds of them. `fork_python` gives a child what
`python SCRIPT ...` or `python -m MODULE ...` would have: its own arguments, environment, folder, streams and signals, the
script as `__main__`, and the interpreter's own end. What always holds: the zygote has one thread, so that a fork has all
there is; one serves one process, pytest or the fault matrix, and ends with it. Tests of the command line start real processes
instead.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

_MAX_REQUEST_BYTES = 1 << 20
_START_S = 120.0
_CODE = struct.Struct("i")
_LENGTH = struct.Struct("I")
_PR_SET_PDEATHSIG, _CLONE_NEWNET = 1, 0x40000000


# -- in pytest ------------------------------------------------------------------------------------------------------------


class Forked:
    """A fork of the zygote, with the methods of subprocess.Popen that the tests use."""

    stdout: IO[str]

    def __init__(self, pid: int, command: Sequence[str], status: int) -> None:
        self.pid, self.args = pid, list(command)
        self.returncode: int | None = None
        self._status: int | None = status
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal, or None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (
            code := self._look(1.0 if deadline is None else min(1.0, max(0.0, deadline - time.monotonic())))
        ) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _look(self, timeout_s: float) -> int | None:
        with self._lock:
            if self._status is not None and select.select([self._status], [], [], timeout_s)[0]:
                code = os.read(self._status, _CODE.size)
                os.close(self._status)
                self._status = None
                if not code:
                    raise AssertionError(f"the zygote has ended, and with it all word of process {self.pid}")
                self.returncode = _CODE.unpack(code)[0]
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


class Zygote:
    """The zygote as pytest sees it; may be asked on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
            # With more, numpy's own threads begin when it is imported, and forks would lack them.
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        self.pid = self._process.pid
        self._socket.settimeout(_START_S)

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, fds: Sequence[int], **more: Any
    ) -> Forked:
        """Starts a Python command, the interpreter's path first; `fds` are its standard output and errors.

        Args:
            command: The interpreter's path, then what follows it.
            environment: All of the child's.
            folder: Where it runs.
            fds: Its standard output and errors.
            **more: What `_confine` reads: a network namespace, limits, whether it ends with the zygote.
        """
        status, child_status = os.pipe()
        try:
            asked = {"command": list(command), "environment": dict(environment), "folder": str(folder), **more}
            body = json.dumps(asked).encode()
            with self._lock:
                socket.send_fds(self._socket, [_LENGTH.pack(len(body))], [*fds, child_status])
                self._socket.sendall(body)
                pid = _CODE.unpack(_receive(self._socket, _CODE.size))[0]
        finally:
            os.close(child_status)
        return Forked(pid, command, status)

    def fileno(self) -> int:
        """Returns the descriptor through which it is asked."""
        return self._socket.fileno()

    def end(self) -> None:
        """Ends it."""
        self._socket.close()
        self._process.wait(30)


_zygote: Zygote | None = None
_zygote_lock = threading.Lock()


def the_zygote() -> Zygote:
    """Returns this process's zygote, which is started when it is first needed."""
    global _zygote
    with _zygote_lock:
        if _zygote is None:
            _zygote = Zygote()
            atexit.register(_zygote.end)
        return _zygote


def fork_python(command: Sequence[str], environment: Mapping[str, str], *, netns: str | None = None) -> Forked:
    """Starts a Python command as a fork of the zygote, in a network namespace if need be, with both output streams in one pipe."""
    out, child_out = os.pipe()
    try:
        process = the_zygote().fork(command, environment, Path.cwd(), [child_out, child_out], netns=netns)
    finally:
        os.close(child_out)
    process.stdout = os.fdopen(out, "r", encoding="utf-8", errors="replace")
    return process


def fork_in_terminal(command: Sequence[str], environment: Mapping[str, str], terminal: int) -> Forked:
    """Starts a Python command as a fork of the zygote that prints to a terminal."""
    return the_zygote().fork(command, environment, Path.cwd(), [terminal, terminal])


def fork_task(
    argv: Sequence[str],
    output: Path,
    *,
    netns: str | None = None,
    limits: Mapping[str, int] | None = None,
    env: Mapping[str, str] | None = None,
) -> Forked:
    """Starts a script as a fork of the zygote, whose end is its end too; both its output streams are added to a file.

    Args:
        argv: The script and its arguments.
        output: The file.
        netns: A network namespace to be in.
        limits: Such as {"NOFILE": 64}.
        env: Variables of its environment beside those of this process.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    more = {"netns": netns, "limits": dict(limits or {}), "ends_with_zygote": True}
    with output.open("ab") as file:
        fds = [file.fileno(), file.fileno()]
        return the_zygote().fork([sys.executable, *argv], environment, Path.cwd(), fds, **more)


def run_python(
    command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a Python command as a fork of the zygote to its end, as subprocess.run would."""
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        process = the_zygote().fork(command, environment, cwd or Path.cwd(), [out.fileno(), err.fileno()])
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait(30)
        shown = []
        for stream in (out, err):
            stream.seek(0)
            shown.append(stream.read())
    return subprocess.CompletedProcess(list(command), code, *shown)


def zygote_pid() -> int | None:
    """Returns the zygote's own number, None if there is none yet."""
    return None if _zygote is None else _zygote.pid


def zygote_socket() -> int | None:
    """Returns the descriptor through which the zygote is asked, None if there is none yet."""
    return None if _zygote is None else _zygote.fileno()


def _receive(source: socket.socket, size: int) -> bytes:
    body = b""
    while len(body) < size:
        part = source.recv(size - len(body))
        if not part:
            raise EOFError
        body += part
    return body


# -- in the zygote --------------------------------------------------------------------------------------------------------


def serve(asks: socket.socket) -> dict[str, Any] | None:
    """Forks as asked. In a child it returns what was asked for; in the zygote itself None, when nobody can ask any more."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal is pytest's
    status_of: dict[int, int] = {}
    while True:
        ready = select.select([asks, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _reap(status_of)
        if asks in ready:
            try:
                size, fds = _receive_size_and_fds(asks)
                asked = json.loads(_receive(asks, size))
            except EOFError:
                return None
            out, errors, status = fds
            pid = os.fork()
            if pid == 0:
                _confine(asked)
                _become(asked, out, errors)
                return asked
            os.close(out)
            os.close(errors)
            status_of[pid] = status
            asks.sendall(_CODE.pack(pid))


def _receive_size_and_fds(asks: socket.socket) -> tuple[int, list[int]]:
    body, ancillary, _, _ = asks.recvmsg(_LENGTH.size, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    if not body:
        raise EOFError
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data)
    return _LENGTH.unpack(body + _receive(asks, _LENGTH.size - len(body)))[0], list(fds)


def _reap(status_of: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        pipe = status_of.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, _CODE.pack(os.waitstatus_to_exitcode(status)))
        os.close(pipe)


def _confine(asked: Mapping[str, Any]) -> None:
    """In the child: gives it the network, the limits and the end that were asked for."""
    libc = ctypes.CDLL(None, use_errno=True)
    if asked.get("ends_with_zygote"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if asked.get("netns"):
        namespace = os.open(f"/run/netns/{asked['netns']}", os.O_RDONLY)
        if libc.setns(namespace, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    for name, value in asked.get("limits", {}).items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def _become(asked: dict[str, Any], out: int, errors: int) -> None:
    """In the child: makes it what a new interpreter would be."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(out, 1)
    os.dup2(errors, 2)
    gc.freeze()  # garbage that has files must not close their numbers later, when others have them
    os.closerange(3, 4096)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]


def disinherit() -> None:
    """In a fork: what its parent would do at its end, such as removing a folder, is no business of the child."""
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]


def run(command: Sequence[str]) -> NoReturn:
    """Runs a command and ends as the interpreter would, but for giving back a heap that takes a second to walk."""
    code = 1
    try:
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM)
        )  # which a launcher's fork has blocked
        _run(command)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code == 1 and end.code != 1:
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        try:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        except SystemExit as end:  # of a run that was stopped: it must not unwind what the fork has of its parent
            code = end.code if isinstance(end.code, int) else 1
        else:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code & 0xFF)


def _run(command: Sequence[str]) -> None:
    del sys.path[0]  # the folder of the program that forks
    sys.orig_argv = list(command)
    if command[1] == "-m":
        sys.argv = list(command[2:])
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(command[2], None)
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command[1:])
        sys.path.insert(0, str(Path(command[1]).resolve().parent))
        runpy.run_path(command[1], run_name="__main__")


def preload() -> None:
    """Imports what tasks import."""
    import importlib
    import pkgutil

    import torchquorum

    sys.path.append(str(Path(__file__).resolve().parents[2]))  # for `tests.process.forking_launcher`
    importlib.import_module("torch._dynamo")  # which torch's optimizers import when the first one is made
    importlib.import_module("torch.utils.tensorboard")
    for module in pkgutil.walk_packages(torchquorum.__path__, "torchquorum."):
        importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # the forks' collections leave the pages shared


def main() -> None:
    """The zygote, and in its forks the program that was asked for."""
    asks = socket.socket(fileno=int(sys.argv[1]))
    preload()
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, "a fork would lack threads"
    asked = serve(asks)
    if asked is not None:
        asks.detach()
        run(asked["command"])


if __name__ == "__main__":
    main()
