"""Starts tasks by forking a process that has loaded torch already: a task is then up in milliseconds, not in seconds.

`python -m tests.chaos.zygote` reads orders from its standard input, one JSON object per line, and answers on its standard
output: `{"id": 3, "pid": 4711}` when a task was started, `{"exit": 4711, "code": 0}` when it has ended (negative for a
signal). Every task is a process of its own, in a network namespace of its own if asked for, and dies with the zygote.
`Zygote` is the other end. What always holds: the zygote has one thread and no socket, so that a fork of it is clean.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import runpy
import selectors
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
ROOT = Path(__file__).parents[2]


class Zygote:
    """The runner's end: starts tasks, and knows how they ended."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
            text=True,
        )
        self._changed = threading.Condition()
        self._started: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._orders = 0
        self._dead = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        with self._changed:
            if not self._changed.wait_for(lambda: 0 in self._started or self._dead, 300) or self._dead:
                raise AssertionError("the zygote did not start")

    def start(
        self,
        argv: list[str],
        output: Path,
        netns: str | None = None,
        limits: dict[str, int] | None = None,
        env: dict[str, str] | None = None,
    ) -> int:
        """Starts a task, with limits such as {"NOFILE": 64} and an environment of its own; returns its process number."""
        assert self._process.stdin is not None
        with self._changed:
            self._orders += 1
            number = self._orders
            order = {
                "id": number,
                "argv": argv,
                "output": str(output),
                "netns": netns,
                "limits": limits or {},
                "env": env or {},
            }
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            if not self._changed.wait_for(lambda: number in self._started or self._dead, 60) or self._dead:
                raise AssertionError("the zygote does not answer")
            return self._started[number]

    def code(self, pid: int) -> int | None:
        """Returns how a task ended, or None while it runs."""
        with self._changed:
            return self._codes.get(pid)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            with self._changed:
                if "exit" in said:
                    self._codes[said["exit"]] = said["code"]
                else:
                    self._started[said["id"]] = said["pid"]
                self._changed.notify_all()
        with self._changed:
            self._dead = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the zygote, and with it whatever it started."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._reader.join(5)
        self._process.stdout.close()


def serve() -> None:
    """The zygote itself."""
    # Loaded once, here. The program's own imports are among them, and so is what torch.optim loads at its first step.
    import tests.chaos.program  # noqa: F401
    from torchquorum.server.update import warm_up

    warm_up()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of a process with threads is not clean"
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    watched = selectors.DefaultSelector()
    watched.register(sys.stdin.fileno(), selectors.EVENT_READ)
    watched.register(wake_read, selectors.EVENT_READ)
    _say({"id": 0, "pid": os.getpid()})
    pending = b""
    while True:
        for key, _ in watched.select():
            if key.fd == wake_read:
                os.read(wake_read, 4096)
                _reap()
                continue
            read = os.read(sys.stdin.fileno(), 1 << 16)
            if not read:
                return
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _become(order)
                _say({"id": order["id"], "pid": pid})


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say({"exit": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(what: dict[str, Any]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _become(order: dict[str, Any]) -> None:
    """Runs in the fork: it becomes a task, and never returns."""
    code = 1
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if order["netns"]:
            namespace = os.open(f"/run/netns/{order['netns']}", os.O_RDONLY)
            if libc.setns(namespace, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            os.close(namespace)
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, output), (2, output)):
            os.dup2(source, target)
        os.closerange(3, 256)
        for name, value in order["limits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        sys.argv = order["argv"]
        os.environ.update(order["env"])
        runpy.run_path(order["argv"][0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
