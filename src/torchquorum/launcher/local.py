"""A cluster of processes on this machine, one per task.

Used by `torchquorum train` and `torchquorum run`; `launched` watches the tasks. What always holds: the ports of the ps tasks
stay bound from the moment they are chosen until the job ends, so no other program can take them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from torchquorum import env
from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster import ClusterSpec, TaskId, launcher_task
from torchquorum.cluster.joined_tasks import JoinedTasks
from torchquorum.errors import ConfigError
from torchquorum.launcher.launched import LaunchedCluster, LaunchOptions, Note, Running, TaskOutput, ignore
from torchquorum.launcher.links import LinkedHosts, LinkRate
from torchquorum.launcher.outcome import FAILED
from torchquorum.launcher.process import Process, die_with_parent

LOOPBACK = "127.0.0.1"


class LocalCluster(LaunchedCluster):
    """The processes of a cluster on this machine.

    Attributes:
        no_task: Whether the program has turned out not to call `tq.join()`.
    """

    no_task = False

    def __init__(
        self, options: LaunchOptions, output: TaskOutput, note: Note = ignore, *, clock: Clock = SYSTEM
    ) -> None:
        super().__init__(options, output, note, clock=clock)
        self._joined = JoinedTasks()
        self._joined_before: dict[int, int] = {}  # by life: how many processes of its task had joined when it began
        self._hosts: LinkedHosts | None = None
        if options.link is not None:
            self._hosts = LinkedHosts(LinkRate.read(options.link), options.range.most)
        here = self._hosts.ps_host if self._hosts is not None else LOOPBACK
        self._sockets = [_listening_socket(here) for _ in range(options.ps)]
        ports = [s.getsockname()[1] for s in self._sockets]
        names = _unused_ports(options.range.most, set(ports))
        workers = [self._hosts.worker_host(i) if self._hosts is not None else LOOPBACK for i in range(len(names))]
        self.cluster = ClusterSpec(
            {
                "ps": [f"{here}:{port}" for port in ports],
                "worker": [f"{host}:{port}" for host, port in zip(workers, names, strict=True)],
            },
            min_workers=options.range.least,
        )

    def _start(self, task: TaskId) -> Running:
        held = self._sockets[task.index] if task.job == "ps" else None
        fds = [held.fileno(), self._joined.fd] if held is not None else [self._joined.fd]
        threads = self.options.threads or max(1, (os.cpu_count() or 1) // self.options.range.most)
        extra: dict[str, str | None] = {
            env.TASK: launcher_task(self.cluster, task, self.options.transport, fds[0] if held is not None else None),
            env.JOINED: str(self._joined.fd),
            env.STARTED_AT: repr(self.started_at),
            env.REPORT: self.options.report,
            env.LOGDIR: self.options.logdir,
            **self.options.for_sessions(),
            env.TF_CONFIG: None,
            "PYTHONUNBUFFERED": "1",
        }
        if self._hosts is not None:  # on this machine, whatever their addresses
            extra[env.INSECURE] = "1"
        if self.options.secret_file is not None:
            extra[env.SECRET_FILE], extra[env.SECRET] = os.path.abspath(self.options.secret_file), None
        if not env.has_omp_num_threads():
            extra[env.OMP_NUM_THREADS] = str(threads)
        joined = self._joined.count(task)
        process = self.spawn(task, extra, fds)
        running = Running(task, process)
        self._joined_before[running.life] = joined
        assert process.stdout is not None
        running.reader = threading.Thread(
            target=self._read, args=(task, process.stdout), name=f"torchquorum-output-{task}", daemon=True
        )
        running.reader.start()
        return running

    def spawn(self, task: TaskId, extra: dict[str, str | None], fds: list[int]) -> Process:
        """Starts the process of a task; `extra` changes its environment, `fds` are the file descriptors it inherits."""
        command = list(self.options.command)
        return subprocess.Popen(
            self._hosts.command(task.job, task.index, command) if self._hosts is not None else command,
            env=env.child_environment(**extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=fds,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def _read(self, task: TaskId, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._output(task, line.decode(errors="replace").rstrip("\r\n"))
        self._end_output(task)

    def _handles_signals(self, running: Running) -> bool:
        """Whether the process has called `tq.join()`."""
        return self._joined.count(running.task) > self._joined_before.get(running.life, 0)

    def _find_dead_end(self) -> str | None:
        return super()._find_dead_end() or self._find_no_task()

    def _find_no_task(self) -> str | None:
        """Returns what to change in a program that has ended on a ps without having called `tq.join()`."""
        strange = [t.task for t in self.tasks if t.task.job == "ps" and t.code == 0 and not self._joined.has(t.task)]
        if not strange:
            return None
        self.no_task = True
        program = next((word for word in self.options.command[1:] if word.endswith(".py")), "the program")
        return (
            f"{program} ended on {strange[0]} without calling tq.join(), so nothing was trained together: every task ran the whole "
            "program alone. Put `task = tq.join()` at its beginning, and a tq.Session around its loop"
        )

    def wait(self, each: Callable[[], None] | None = None) -> int:
        """As that of every launcher; a program that is no task is a failure."""
        code = super().wait(each)
        return FAILED if self.no_task and code == 0 else code

    def stop(self, first: signal.Signals) -> None:
        """Ends every task that still runs, and releases the ports."""
        super().stop(first)
        if not self.no_task and (why := self._find_no_task()) is not None:
            self.say(why)
        for held in self._sockets:
            held.close()
        self._joined.close()
        if self._hosts is not None:
            hosts, self._hosts = self._hosts, None
            for i, (up, down) in enumerate(hosts.bytes()):
                self.say(f"link of /job:worker/task:{i}: {up / 1e6:,.1f} MB up, {down / 1e6:,.1f} MB down")
            hosts.close()


def python_command(script: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command that runs a Python script in this interpreter."""
    if not Path(script).is_file():
        raise ConfigError(f"script {script!r}: no such file; give the path of a Python program")
    return [sys.executable, script, *arguments]


def _listening_socket(host: str) -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.bind((host, 0))
    held.listen(128)
    return held


def _unused_ports(count: int, taken: set[int]) -> list[int]:
    """Returns distinct port numbers for the addresses of workers, which never listen."""
    ports: list[int] = []
    candidate = 20000
    while len(ports) < count:
        if candidate not in taken:
            ports.append(candidate)
        candidate += 1
    return ports
