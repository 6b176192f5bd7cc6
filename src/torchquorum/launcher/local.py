"""A cluster that a launcher starts and looks after: one process per task, their output, their deaths and their end.

`LaunchedCluster` watches the tasks, wherever they run; `LocalCluster` runs them on this machine, `on_ray` on Ray's machines,
`functions` as forks. Called by `torchquorum train`, `torchquorum run` and `tq.launch`. What always holds: the ports of the ps
tasks are held from the moment they are chosen until the job ends; a task that a signal ended is started again, a few times;
when `wait` returns, by whatever way, no process of the cluster is left.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from torchquorum import env
from torchquorum.cluster import ClusterSpec, TaskId, WorkerRange, launcher_task
from torchquorum.cluster.secret import Access, read_access
from torchquorum.errors import ConfigError
from torchquorum.launcher.interrupts import Interrupts
from torchquorum.launcher.scale import Wanted

PS_GRACE_S = 20.0
WORKER_GRACE_S = 5.0
CHIEF_GRACE_S = 5.0
INTERRUPT_GRACE_S = 60.0
AFTER_WORKERS_GRACE_S = 2.0
STOP_GRACE_S = 5.0
POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


@dataclass(kw_only=True)
class Options:
    """What to start.

    Attributes:
        command: The program and its arguments, as one task runs it.
        ps: How many ps tasks.
        workers: How many workers: 4, or from the least to the most, (2, 8) or "2:8", where they may come and go.
        transport: auto, shm or tcp.
        threads: Threads of an operation in each task; None divides the cores among the workers.
        report: Where ps task 0 writes the report.
        logdir: The run's folder, for programs that name none.
        max_restarts: How often each task may be started again after a signal ended it.
        secret_file: The file with the secret for the tasks, which are given its path by their environment.
        durable: How updates are journalled: write or fsync; None leaves that to the program.
        range: `workers` as it was read: so many must be there to begin, and so many places there are.
    """

    command: Sequence[str]
    ps: int = 1
    workers: int | str | tuple[int, int] | WorkerRange = 2
    transport: str = "auto"
    threads: int | None = None
    report: str | None = None
    logdir: str | None = None
    max_restarts: int = 3
    secret_file: str | None = None
    durable: str | None = None
    range: WorkerRange = field(init=False)

    def __post_init__(self) -> None:
        if self.ps < 1:
            raise ConfigError(f"--ps {self.ps}: must be 1 or more")
        self.range = WorkerRange.read(self.workers)
        read_access(self.secret_file)  # what is wrong with the secret is said here, and not by every task


class Process(Protocol):
    """A process of a task, as subprocess.Popen has it."""

    @property
    def pid(self) -> int:
        """Returns its number."""
        ...

    @property
    def stdout(self) -> IO[bytes] | None:
        """Returns where its output comes out."""
        ...

    def poll(self) -> int | None:
        """Returns its exit code, negative for a signal, or None while it runs."""
        ...

    def send_signal(self, sig: int) -> None:
        """Sends it a signal, unless it has ended."""
        ...

    def kill(self) -> None:
        """Ends it at once."""
        ...


@dataclass
class Running:
    """A started task."""

    task: TaskId
    process: Process
    reader: threading.Thread = field(init=False)
    restarts: int = 0
    life: int = field(default_factory=itertools.count().__next__)  # another for every start of any task

    @property
    def code(self) -> int | None:
        """Returns the exit code, negative for a signal, or None while it runs."""
        return self.process.poll()


class LaunchedCluster:
    """The tasks of a cluster that a launcher has started, watched until they end.

    Args:
        options: What to start.
        output: Takes every line that a task prints, with the task.
        note: Takes every line of the launcher's own; they are kept in `messages` too.

    Attributes:
        cluster: The tasks and their addresses.
        tasks: Those that were started, each as it runs now.
        end_grace_s: How long a task may take to end, or its end to be heard of, after the ps tasks have ended.
        fails_together: Whether one worker that fails ends them all, without waiting for the chief.
    """

    cluster: ClusterSpec
    end_grace_s = WORKER_GRACE_S
    fails_together = False

    def __init__(
        self,
        options: Options,
        output: Callable[[TaskId, str], None],
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.options, self._output, self._note = options, output, note
        self._told: set[int] = set()
        self._ended_at: dict[str, float] = {}
        self.started_at = time.time()
        self.tasks: list[Running] = []
        self._wanted_now: Wanted | None = None
        self.messages: list[str] = []
        self._interrupts = Interrupts()

    def start(self) -> None:
        """Starts every ps task and as many workers as must be there.

        From here on interrupts are noted, so that whoever is started is known; `wait` sees them, and ends that.

        Raises:
            KeyboardInterrupt: One came before all were started.
        """
        with ExitStack() as failing:
            failing.enter_context(self._interrupts)
            for task in [*self.cluster.tasks("ps"), *self.cluster.tasks("worker")[: self.options.range.least]]:
                if self._interrupts.came:
                    raise KeyboardInterrupt
                self.tasks.append(self._start(task))
            self._hear_wishes()
            failing.pop_all()

    def _hear_wishes(self) -> None:
        """Begins to listen how many workers are wanted, where they may come and go."""
        if self.options.range.elastic:
            self._wanted_now = Wanted(self.leader, lambda: self.access)
            least, most = self.options.range.least, self.options.range.most
            self._say(
                f"{least} {'worker' if least == 1 else 'workers'} to begin with, of at most {most}; `torchquorum scale "
                f"{self.leader() or 'ADDRESS'} N` changes how many there are"
            )

    def _follow_wishes(self) -> None:
        """Starts workers that somebody has asked for; those that are too many leave by themselves."""
        wanted = self._wanted_now.news() if self._wanted_now is not None else None
        if wanted is None or not self._goes_on():
            return
        workers = {t.task.index: place for place, t in enumerate(self.tasks) if t.task.job == "worker"}
        running = [i for i, place in workers.items() if self.tasks[place].code is None]
        free = [i for i in range(self.options.range.most) if i not in running]
        for index in free[: max(0, wanted - len(running))]:
            task = TaskId("worker", index)
            self._say(f"starting {task}: {wanted} workers are wanted")
            started = self._start(task)
            if index in workers:
                self.tasks[workers[index]] = started
            else:
                self.tasks.append(started)
            self._ended_at.clear()

    def _goes_on(self) -> bool:
        """Whether there is a run to come to: no program has failed, and the chief has not ended it."""
        chief = next((t for t in self.tasks if t.task.is_chief), None)
        return not any((t.code or 0) > 0 for t in self.tasks) and (chief is None or chief.code != 0)

    def _start(self, task: TaskId) -> Running:
        """Starts a task, or starts it again."""
        raise NotImplementedError

    @property
    def access(self) -> Access:
        """Who may talk to the tasks."""
        return read_access(self.options.secret_file)

    def leader(self) -> str | None:
        """Returns where ps task 0 listens, or None while that is not known."""
        return self.cluster.address(TaskId("ps", 0))

    @property
    def failed(self) -> list[TaskId]:
        """Returns the workers whose program has failed, as opposed to those that were ended for it."""
        return [t.task for t in self.tasks if t.task.job == "worker" and 0 < (t.code or 0) < 128]

    def close(self) -> None:
        """Gives up what outlives the tasks; may be called twice."""

    # -- the end ------------------------------------------------------------------------------------------------------

    def wait(self, each: Callable[[], None] | None = None) -> int:
        """Waits until every task has ended; restarts those that a signal ended, ends those that have no reason to go on.

        Args:
            each: Called every now and then while waiting.

        Returns:
            The exit code of the run: 0 if it reached its end.
        """
        with self._interrupts as interrupts:
            try:
                while any(t.code is None for t in self.tasks):
                    if interrupts.came:
                        self._interrupted(interrupts)
                        return 130
                    self._look_after()
                    self._follow_wishes()
                    if self._hopeless():
                        break
                    if each is not None:
                        each()
                    time.sleep(POLL_S)
                self._look_after(restart=False)
            finally:
                self.stop(signal.SIGTERM)
        self._look_after(restart=False)
        return self._code()

    def _look_after(self, *, restart: bool = True) -> None:
        """Says who has died, and starts again whom a signal ended."""
        for place, t in enumerate(self.tasks):
            if t.code in (None, 0) or t.life in self._told:
                continue
            self._told.add(t.life)
            again = restart and (t.code or 0) < 0 and t.restarts < self.options.max_restarts and self._wanted(t)
            how = f"{t.task} {self._describe(t)}"
            self._say(f"{how}; starting it again ({t.restarts + 1} of {self.options.max_restarts})" if again else how)
            if again:
                self.tasks[place] = self._start(t.task)
                self.tasks[place].restarts = t.restarts + 1
                self._ended_at.clear()

    def _describe(self, ended: Running) -> str:
        """Returns how a task has ended, in words."""
        return describe_code(ended.code or 0)

    def _wanted(self, dead: Running) -> bool:
        """A task is started again only while there is a run to come back to."""
        workers = [t for t in self.tasks if t.task.job == "worker"]
        if self.options.range.elastic:
            return self._goes_on()
        if any((t.code or 0) > 0 for t in self.tasks):
            return False
        return dead.task.job == "ps" or not any(t.code == 0 for t in workers)

    def _hopeless(self) -> bool:
        """Whether those that still run have nothing to wait for, and have had their time to find out."""
        if self.fails_together and self.failed:
            return True
        running = [t for t in self.tasks if t.code is None]
        workers = [t for t in self.tasks if t.task.job == "worker"]
        now = time.monotonic()
        if running and all(t.task.job == "ps" for t in running):
            gone_at = self._ended_at.setdefault("worker", now)
            if all(t.code for t in workers) or now - gone_at > PS_GRACE_S:
                self._say("the workers are gone before the run was over: ending the ps tasks")
                return True
        if running and all(t.code == 0 for t in self.tasks if t.task.job == "ps"):
            gone_at = self._ended_at.setdefault("run", now)
            if now - gone_at > self.end_grace_s:
                late = ", ".join(str(t.task) for t in running)
                self._say(f"the run is over: ending {late}, which came back too late for it")
                return True
        chief = next((t for t in workers if t.task.index == 0), None)
        if running and chief is not None and (chief.code or 0) > 0:
            gone_at = self._ended_at.setdefault("chief", now)
            if now - gone_at > CHIEF_GRACE_S:
                self._say("the chief has failed: ending the other tasks")
                return True
        if any(t.task.job == "ps" and t.code for t in self.tasks):
            gone_at = self._ended_at.setdefault("ps", now)
            if now - gone_at > WORKER_GRACE_S:
                self._say("a ps task is gone: ending the other tasks")
                return True
        return False

    def _interrupted(self, interrupts: Interrupts) -> None:
        """Ctrl-C: the workers save and end, the ps tasks follow them; a second one ends all at once."""
        self._say("interrupted: saving and ending every task; once more ends them at once")
        for t in self.tasks:
            if t.task.job == "worker" and t.code is None:
                t.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + INTERRUPT_GRACE_S
        while any(t.code is None for t in self.tasks) and time.monotonic() < deadline:
            if len(interrupts.came) > 1:
                for t in self.tasks:
                    if t.code is None:
                        t.process.kill()
                return
            if all(t.code is not None for t in self.tasks if t.task.job == "worker"):
                # A chief that was interrupted before its run began has told no ps to end: `stop` tells them.
                deadline = min(deadline, time.monotonic() + AFTER_WORKERS_GRACE_S)
            time.sleep(POLL_S)

    def _say(self, line: str) -> None:
        self.messages.append(line)
        self._note(line)

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
        if self._wanted_now is not None:
            self._wanted_now.close()
            self._wanted_now = None
        for t in self.tasks:
            t.reader.join(timeout=STOP_GRACE_S)


class LocalCluster(LaunchedCluster):
    """The processes of a cluster on this machine."""

    def __init__(
        self,
        options: Options,
        output: Callable[[TaskId, str], None],
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(options, output, note)
        self._sockets = [_listening_socket() for _ in range(options.ps)]
        ports = [s.getsockname()[1] for s in self._sockets]
        names = _unused_ports(options.range.most, set(ports))
        self.cluster = ClusterSpec(
            {"ps": [f"127.0.0.1:{p}" for p in ports], "worker": [f"127.0.0.1:{p}" for p in names]},
            min_workers=options.range.least,
        )

    def _start(self, task: TaskId) -> Running:
        held = self._sockets[task.index] if task.job == "ps" else None
        fds = [held.fileno()] if held is not None else []
        threads = self.options.threads or max(1, (os.cpu_count() or 1) // self.options.range.most)
        extra: dict[str, str | None] = {
            env.TASK: launcher_task(self.cluster, task, self.options.transport, fds[0] if fds else None),
            env.STARTED_AT: repr(self.started_at),
            env.REPORT: self.options.report,
            env.LOGDIR: self.options.logdir,
            **({env.DURABLE: self.options.durable} if self.options.durable else {}),
            env.TF_CONFIG: None,
            "PYTHONUNBUFFERED": "1",
        }
        if self.options.secret_file is not None:
            extra[env.SECRET_FILE], extra[env.SECRET] = os.path.abspath(self.options.secret_file), None
        if not env.has_omp_num_threads():
            extra[env.OMP_NUM_THREADS] = str(threads)
        process = self._spawn(task, extra, fds)
        running = Running(task, process)
        assert process.stdout is not None
        running.reader = threading.Thread(
            target=self._read, args=(task, process.stdout), name=f"torchquorum-output-{task}", daemon=True
        )
        running.reader.start()
        return running

    def _spawn(self, task: TaskId, extra: dict[str, str | None], fds: list[int]) -> Process:
        """Starts the process of a task; `extra` changes its environment, `fds` are open files that it shall have."""
        return subprocess.Popen(
            list(self.options.command),
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

    def stop(self, first: signal.Signals) -> None:
        """Ends whatever still runs, and gives the ports up."""
        super().stop(first)
        for held in self._sockets:
            held.close()


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


def describe_code(code: int) -> str:
    """Returns how a process with this exit code has ended, in words."""
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def die_with_parent() -> None:
    """In the child: ends it when the launcher dies, so that kill -9 of the launcher leaves nothing behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    prctl = getattr(libc, "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
