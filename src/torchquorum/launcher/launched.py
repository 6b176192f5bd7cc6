"""Watches the tasks that a launcher has started, wherever they run: restarts, scaling, interrupts, the end.

`LaunchedCluster` is the base of `local.LocalCluster` (processes here), `launch.ForkedCluster` (forks) and `on_ray.RayCluster`.
Driven by `torchquorum train`, `torchquorum run` and `tq.launch`, on one thread. What always holds: a task that a signal ended
is restarted at most `max_restarts` times; when `wait` returns, for whatever reason, no process of the cluster is left.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from torchquorum import env
from torchquorum.clock import SYSTEM, Clock, SeenTime
from torchquorum.cluster import ClusterSpec, TaskId, WorkerRange
from torchquorum.cluster.secret import Access, read_access
from torchquorum.errors import ConfigError
from torchquorum.launcher.failures import Failures
from torchquorum.launcher.interrupts import Interrupts
from torchquorum.launcher.outcome import INTERRUPTED, Ends, How, exit_code, may_return, read_code
from torchquorum.launcher.process import Process, describe_exit
from torchquorum.launcher.scaling import RequestedWorkers
from torchquorum.launcher.watch import RunWatcher

PS_GRACE_S = 20.0
FAILED_GRACE_S = 1.0
PS_SAVE_S = 180.0
WORKER_GRACE_S = 5.0
INTERRUPT_GRACE_S = 60.0
AFTER_WORKERS_GRACE_S = 2.0
STOP_GRACE_S = 5.0
STATE_S = 5.0
STATE_EVERY_S = 0.5
POLL_S = 0.05
PAUSE_S = 1.0

TaskOutput = Callable[[TaskId, str], None]
Note = Callable[[str], None]


def ignore(_: str) -> None:
    """Takes the launcher's own lines and drops them."""


@dataclass(kw_only=True)
class LaunchOptions:
    """What to start.

    Attributes:
        command: The program and its arguments, as one task runs it.
        ps: Number of ps tasks.
        workers: Number of workers: 4, or a range, (2, 8) or "2:8", within which workers join and leave.
        transport: auto, shm or tcp.
        threads: Threads per operation in each task; None divides the cores among the workers.
        report: Where ps task 0 writes the report.
        logdir: The run's folder, for programs that set none.
        max_restarts: How many times each task is restarted after a signal ended it.
        secret_file: The file with the cluster's secret; tasks get its path in their environment.
        durable: How updates are journalled: write or fsync; None leaves it to the program.
        start_afresh: Whether a run that cannot be restored begins again at step 0.
        accept_loss: Whether a durable run goes on without updates that are lost.
        typed: How the launcher was called, which is noted in the run's folder.
        link: The rate of each worker's line, such as 20mbit: then every worker is on a host of its own on this machine.
        record: Whether the run is recorded, so that it can be replayed.
        events: Whether sessions that have a folder, and no SummaryHook, write TensorBoard's event files.
        range: `workers`, parsed.
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
    start_afresh: bool = False
    accept_loss: bool = False
    record: bool = False
    events: bool = False
    typed: str | None = None
    link: str | None = None
    range: WorkerRange = field(init=False)

    def __post_init__(self) -> None:
        if self.ps < 1:
            raise ConfigError(f"--ps {self.ps}: must be 1 or more")
        self.range = WorkerRange.read(self.workers)
        read_access(self.secret_file)  # a bad secret is reported once here, not by every task

    def for_sessions(self) -> dict[str, str]:
        """Returns the variables of the environment by which sessions get what the launcher was asked for."""
        chosen = {env.START_AFRESH: self.start_afresh, env.ACCEPT_LOSS: self.accept_loss, env.RECORD: self.record}
        chosen[env.EVENTS] = self.events
        return {
            **({env.DURABLE: self.durable} if self.durable else {}),
            **({env.COMMAND: self.typed} if self.typed else {}),
            **(env.to_repeat() if self.record else {}),
            **{name: "1" for name, asked in chosen.items() if asked},
        }


@dataclass
class Running:
    """A started task."""

    task: TaskId
    process: Process
    reader: threading.Thread = field(init=False)
    restarts: int = 0
    life: int = field(default_factory=itertools.count().__next__)  # unique for every start of any task
    ended_by_us: bool = False  # told to end, because the run could not go on: no failure of its own

    @property
    def code(self) -> int | None:
        """Returns the exit code, negative for a signal, or None while it runs."""
        return self.process.poll()


class LaunchedCluster:
    """The tasks of a cluster that a launcher has started, watched until they end.

    Args:
        options: What to start.
        output: Receives every line that a task prints, with the task.
        note: Receives every line of the launcher itself; `messages` keeps them too.
        clock: Used for all waits.

    Attributes:
        cluster: The tasks and their addresses.
        tasks: The started tasks, each as it runs now.
        failures: What their output says of failures.
        end_grace_s: How long a task may take to end after the ps tasks have ended.
    """

    cluster: ClusterSpec
    end_grace_s = WORKER_GRACE_S

    def __init__(
        self, options: LaunchOptions, output: TaskOutput, note: Note = ignore, *, clock: Clock = SYSTEM
    ) -> None:
        self.options, self._show, self._note, self._clock = options, output, note, clock
        self.failures = Failures()
        self._seen = SeenTime(
            clock, PAUSE_S
        )  # a run that was suspended as a whole, by Ctrl-Z or with its container, is not late
        self._reported: dict[int, TaskId] = {}  # lives whose end was reported, in order
        self._ended_at: dict[str, float] = {}  # when each group of tasks was first seen to have ended
        self.started_at = clock.wall()
        self.tasks: list[Running] = []
        self._scaling: RequestedWorkers | None = None
        self._state: RunWatcher | None = None  # asked only when a program has failed
        self._begun = False
        self.messages: list[str] = []
        self._interrupts = Interrupts()

    def start(self) -> None:
        """Starts every ps task and the minimum number of workers.

        Interrupts are recorded from here on, so that every started process is known; `wait` handles them.

        Raises:
            KeyboardInterrupt: One arrived before all tasks were started.
        """
        with ExitStack() as failing:
            failing.enter_context(self._interrupts)
            for task in [*self.cluster.tasks("ps"), *self.cluster.tasks("worker")[: self.options.range.least]]:
                if self._interrupts.came:
                    raise KeyboardInterrupt
                self.tasks.append(self._start(task))
            self._watch_scaling()
            failing.pop_all()

    def _watch_scaling(self) -> None:
        """Starts to watch how many workers are wanted, if the number may change."""
        if self.options.range.elastic:
            self._scaling = RequestedWorkers(self.leader, lambda: self.access)
            least, most = self.options.range.least, self.options.range.most
            self.say(
                f"starting with {least} {'worker' if least == 1 else 'workers'} of at most {most}; `torchquorum scale "
                f"{self.leader() or 'ADDRESS'} N` changes the number"
            )

    def _scale_up(self) -> None:
        """Starts the workers that were asked for; surplus workers leave by themselves."""
        wanted = self._scaling.news() if self._scaling is not None else None
        if wanted is None or not self._run_continues():
            return
        workers = {t.task.index: at for at, t in enumerate(self.tasks) if t.task.job == "worker"}
        running = [i for i, at in workers.items() if self.tasks[at].code is None]
        free = [i for i in range(self.options.range.most) if i not in running]
        for index in free[: max(0, wanted - len(running))]:
            task = TaskId("worker", index)
            self.say(f"starting {task}: {wanted} workers are wanted")
            started = self._start(task)
            if index in workers:
                self.tasks[workers[index]] = started
            else:
                self.tasks.append(started)
            self._ended_at.clear()

    def _run_continues(self) -> bool:
        """Whether a new worker would find a run: the chief has not ended it."""
        return self._ends().get(TaskId("worker", 0), How.RUNNING) not in (How.DONE, How.INTERRUPTED)

    def _ends(self) -> Ends:
        return {t.task: read_code(t.code) for t in self.tasks}

    def _output(self, task: TaskId, line: str) -> None:
        """Takes a line of a task, on the thread that reads it."""
        for shown in self.failures.read(task, line):
            self._show(task, shown)

    def _end_output(self, task: TaskId) -> None:
        """Takes the end of a task's output."""
        for shown in self.failures.end(task):
            self._show(task, shown)

    def _handles_signals(self, running: Running) -> bool:
        """Whether a task has got so far that Ctrl-C ends it in good order; before, Python would show where it was."""
        return True

    def _start(self, task: TaskId) -> Running:
        """Starts a task, or restarts it."""
        raise NotImplementedError

    @property
    def access(self) -> Access:
        """The cluster's secret, for those who talk to its tasks."""
        return read_access(self.options.secret_file)

    def leader(self) -> str | None:
        """Returns the address of ps task 0, or None while it is not known."""
        return self.cluster.address(TaskId("ps", 0))

    @property
    def failed(self) -> list[TaskId]:
        """Returns the workers whose own program failed; not those that a signal ended."""
        return [task for task, how in self._ends().items() if task.job == "worker" and how is How.FAILED]

    @property
    def root_cause(self) -> str:
        """Returns which task failed first, where and with what; empty if none did."""
        seen = [t for t in self.tasks if t.life in self._reported and not t.ended_by_us]
        bad = [t for t in seen if read_code(t.code) in (How.FAILED, How.KILLED)]
        found = {t.task: self.failures.of(t.task) for t in bad}
        told = {task: failure for task, failure in found.items() if failure is not None}
        workers = {task: failure for task, failure in told.items() if task.job == "worker"}
        if workers or told:
            first, failure = min((workers or told).items(), key=lambda item: item[1].order)
            return f"{first}: {failure}"
        order = list(self._reported)
        silent = sorted(bad, key=lambda t: (t.task.job == "ps", order.index(t.life)))
        return f"{silent[0].task} {self._describe(silent[0])}" if silent else ""

    def close(self) -> None:
        """Releases what outlives the tasks; may be called twice."""

    # -- until the end ------------------------------------------------------------------------------------------------

    def wait(self, each: Callable[[], None] | None = None) -> int:
        """Waits until every task has ended; restarts tasks that a signal ended, ends tasks that have nothing left to do.

        Args:
            each: Called on every poll.

        Returns:
            The exit code of the run, see docs/faults.md: 0 if it reached its end and that is saved.
        """
        with self._interrupts as interrupts:
            try:
                while any(t.code is None for t in self.tasks):
                    if interrupts.came:
                        self._end_after_interrupt(interrupts)
                        return INTERRUPTED
                    self._handle_exits()
                    self._scale_up()
                    if self._must_give_up():
                        break
                    if each is not None:
                        each()
                    self._clock.sleep(POLL_S)
                self._handle_exits(restart=False)
            finally:
                self.stop(signal.SIGTERM)
        self._handle_exits(restart=False)
        return exit_code(self._ends())

    def _handle_exits(self, *, restart: bool = True) -> None:
        """Reports each task that has died, and restarts it if a signal ended it."""
        for at, t in enumerate(self.tasks):
            if t.code in (None, 0) or t.life in self._reported:
                continue
            self._reported[t.life] = t.task
            if t.ended_by_us:
                continue
            killed = restart and read_code(t.code) is How.KILLED and t.restarts < self.options.max_restarts
            again = killed and may_return(t.task, self._ends(), elastic=self.options.range.elastic)
            how = f"{t.task} {self._describe(t)}"
            self.say(f"{how}; restarting it ({t.restarts + 1} of {self.options.max_restarts})" if again else how)
            if again:
                self.tasks[at] = self._start(t.task)
                self.tasks[at].restarts = t.restarts + 1
                self._ended_at.clear()

    def _describe(self, ended: Running) -> str:
        """Returns how a task has ended, in words."""
        return describe_exit(ended.code or 0)

    def _must_give_up(self) -> bool:
        """Whether the tasks that still run have nothing to wait for; says why."""
        why = self._find_dead_end()
        if why is not None:
            self.say(why)
        return why is not None

    def _find_dead_end(self) -> str | None:
        """Returns why the run cannot go on, once its tasks have had their grace period to find out themselves."""
        running = [t for t in self.tasks if t.code is None]
        ps = [t for t in self.tasks if t.task.job == "ps"]
        if not running:
            return None
        if all(t.task.job == "ps" for t in running):
            return self._end_ps_tasks(running)
        if all(t.code == 0 for t in ps) and self._waited_s("run") > self.end_grace_s:
            late = ", ".join(str(t.task) for t in running)
            return f"the run is over: ending {late}, which came back too late for it"
        if any(t.code for t in ps) and self._waited_s("ps") > WORKER_GRACE_S:
            return "a ps task is gone: ending the other tasks"
        if self.failed and not self._has_begun():
            failed = ", ".join(map(str, self.failed))
            return f"{failed} failed before all workers had joined the run: ending the other tasks"
        return None

    def _end_ps_tasks(self, running: list[Running]) -> str | None:
        """The workers are gone: the ps tasks end by themselves if the run is over; otherwise ps task 0 is told to save and end."""
        told = self._ended_at.get("told")
        if told is not None:
            late = self._seen.turn() - told > PS_SAVE_S
            alone = all(t.task.index for t in running) and self._waited_s("ps") > WORKER_GRACE_S
            return "ending the ps tasks, which do not end by themselves" if late or alone else None
        unfinished = all(t.code for t in self.tasks if t.task.job == "worker")
        if self._waited_s("worker") > (FAILED_GRACE_S if unfinished else PS_GRACE_S):
            self._ended_at["told"] = self._seen.turn()
            self.say("the workers are gone before the run was over: telling the ps tasks to save and end")
            for t in running:
                t.ended_by_us = True
                if t.task.index == 0:  # the others follow it
                    t.process.send_signal(signal.SIGTERM)
        return None

    def _has_begun(self) -> bool:
        """Whether the run's workers were all there once: then those that are left go on without one that has failed."""
        if self._begun:
            return True
        if self._state is None:
            self._state = RunWatcher(self.leader, STATE_EVERY_S, lambda: self.access)
        self._state.poll()
        status = self._state.status
        if not status and self._waited_s("status") < STATE_S:
            return True  # not known yet
        self._begun = status.get("updates", 0) > 0 or len(status.get("per_worker", ())) >= self.options.range.least
        if self._begun:
            self.say("the other workers go on without it; the run will end with exit code 1")
        return self._begun

    def _waited_s(self, group: str) -> float:
        """Returns how long ago a group of tasks was first seen to have ended: 0 the first time it is asked."""
        now = self._seen.turn()
        return now - self._ended_at.setdefault(group, now)

    def _end_after_interrupt(self, interrupts: Interrupts) -> None:
        """Ctrl-C: the workers save and end, the ps tasks follow; a second Ctrl-C kills all tasks."""
        self.say("interrupted: saving and ending every task; Ctrl-C again kills them at once")
        running = [t for t in self.tasks if t.code is None]
        chief = any(t.task == TaskId("worker", 0) and self._handles_signals(t) for t in running)
        for t in running:
            t.ended_by_us = True
            if not self._handles_signals(t) or (t.task == TaskId("ps", 0) and not chief):
                t.process.send_signal(signal.SIGTERM)
            elif t.task.job == "worker":
                t.process.send_signal(signal.SIGINT)
        deadline = self._seen.turn() + INTERRUPT_GRACE_S
        while any(t.code is None for t in self.tasks) and self._seen.turn() < deadline:
            if len(interrupts.came) > 1:
                for t in self.tasks:
                    if t.code is None:
                        t.process.kill()
                return
            if all(t.code is not None for t in self.tasks if t.task.job == "worker"):
                # A chief that was interrupted before its run began has told no ps to end: `stop` does.
                deadline = min(deadline, self._seen.turn() + AFTER_WORKERS_GRACE_S)
            self._clock.sleep(POLL_S)

    def say(self, line: str) -> None:
        """Passes a line of the launcher itself to `note` and keeps it."""
        self.messages.append(line)
        self._note(line)

    def stop(self, first: signal.Signals) -> None:
        """Ends every task that still runs: with signal `first`, then SIGTERM, then SIGKILL."""
        for sign in (first, signal.SIGTERM, signal.SIGKILL):
            alive = [t for t in self.tasks if t.code is None]
            if not alive:
                break
            for t in alive:
                t.ended_by_us = True
                t.process.send_signal(sign)
            deadline = self._seen.turn() + STOP_GRACE_S
            while any(t.code is None for t in alive) and self._seen.turn() < deadline:
                self._clock.sleep(POLL_S)
        if self._scaling is not None:
            self._scaling.close()
            self._scaling = None
        if self._state is not None:
            self._state.close()
            self._state = None
        for t in self.tasks:
            t.reader.join(timeout=STOP_GRACE_S)
            self._end_output(t.task)
