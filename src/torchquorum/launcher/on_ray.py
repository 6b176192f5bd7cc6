"""A cluster on Ray: Ray finds the machines and replaces lost ones; the tasks are watched as on this machine.

Called by `torchquorum run --on ray` and `tq.launch(on="ray")`. Every task has an actor (`ray_host`), which runs the unchanged
program as its child; a thread here follows it. Tensors never go through Ray. What always holds: the ps tasks and the first
workers have reservations before anything starts, other workers start when they have theirs; a lost worker is restarted alone;
when a ps returns with another address, every task is restarted with the new addresses and continues from the last checkpoint;
when `close` returns, no actor, child or placement group is left.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchquorum import env
from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.cluster.secret import Access, Secret, make_secret, read_access
from torchquorum.errors import DeadlineError
from torchquorum.launcher.fork import decode_result
from torchquorum.launcher.launched import LaunchedCluster, LaunchOptions, Note, Running, TaskOutput, ignore
from torchquorum.launcher.ray_cluster import (
    ActorLostError,
    Ray,
    RayConnection,
    Reservation,
    Reservations,
    describe_reservations,
)
from torchquorum.launcher.ray_host import ChildSpec, ChildStatus, HostEndpoint
from torchquorum.launcher.scaling import RequestedWorkers

FOLLOW_S = 10.0  # lines and the end are reported at once; this is how often an empty status comes
CANCEL_POLL_S = 0.5
RETRY_S = 0.2
SAY_WAITING_S = 5.0
THREAD_S = 10.0
ACTOR_S = 60.0


class CancelledError(Exception):
    """The launcher no longer waits for this task."""


class RemoteTask:
    """A task on another machine, as a `Process`.

    A separate thread waits for the reservation and for the program, starts it and follows it to its end.

    Args:
        reservation: What the cluster reserves for the task.
        ray: The module.
        output: Receives its lines, on that thread.
        clock: Used for all waits.

    Attributes:
        endpoint: Where it runs, once its actor does.
        started: Whether it was told what to run.
        lost: Whether its actor is gone, usually with its machine.
        last: Its report and result, once it has ended.
    """

    stdout = None

    def __init__(
        self, reservation: Reservation, ray: Any, output: Callable[[str], None], clock: Clock = SYSTEM
    ) -> None:
        self._reservation, self._ray, self._output, self._clock = reservation, ray, output, clock
        self._specs: queue.Queue[ChildSpec] = queue.Queue()
        self._cancelled = threading.Event()
        self._code: int | None = None
        self.pid = 0
        self.endpoint: HostEndpoint | None = None
        self.started = False
        self.lost = False
        self.last: ChildStatus | None = None
        self.asked_at = clock.now()
        self.thread = threading.Thread(target=self._follow, name=f"torchquorum-ray-{reservation.task}", daemon=True)
        self.thread.start()

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal, or None while it runs or waits."""
        return self._code

    def start(self, spec: ChildSpec) -> None:
        """Tells it what to run; a child that runs already is ended first."""
        again, self.started = self.started, True
        self._specs.put(spec)
        if again:
            self._reservation.host.signal.remote(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        """Sends a signal to the child; without a child, cancels the task."""
        if self._code is None and self.pid:
            self._reservation.host.signal.remote(int(sig))
        elif self._code is None:
            self._cancelled.set()

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)

    def cancel(self) -> None:
        """Stops following it."""
        self._cancelled.set()

    # -- on the thread --------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            found = self._wait_for_actor()
            self._reservation.address, self._reservation.machine = found.address, found.machine
            self.endpoint = found
            code = self._run(self._next_spec())
            while not self._specs.empty():  # the child was ended for a new start
                code = self._run(self._specs.get())
            self._code = code
        except CancelledError:
            self._code = -signal.SIGTERM
        except ActorLostError:
            self.lost = True
            self._code = -signal.SIGKILL
        except FileNotFoundError as error:
            self._output(
                f"torchquorum: error: {error} on {self._reservation.machine}. Every machine of the Ray cluster needs the "
                "program: put it on a shared disk, or send it along: ray job submit --working-dir . -- torchquorum run --on ray ..."
            )
            self._code = 2
        except Exception as error:  # the launcher waits for an exit code, so every error must set one
            self._output(f"torchquorum: error: {type(error).__name__}: {' '.join(str(error).split())[:600]}")
            self._code = 1

    def _wait_for_actor(self) -> HostEndpoint:
        since = self._clock.now()
        while True:
            try:
                return self._get(self._reservation.host.endpoint.remote(self._reservation.address))
            except ActorLostError as error:  # Ray is still restarting it
                if not self._reservation.is_reserved:
                    since = self._clock.now()  # no room yet: this wait has no deadline
                if self._clock.now() - since > ACTOR_S:
                    raise DeadlineError(
                        f"Ray has room for {self._reservation.task}, but its actor has not started within "
                        f"{ACTOR_S:.0f} s: {error}; `ray logs` on that machine may show more"
                    ) from None
                if self._clock.wait(self._cancelled, RETRY_S):
                    raise CancelledError from None

    def _next_spec(self) -> ChildSpec:
        while not self._cancelled.is_set():
            try:
                return self._specs.get(timeout=CANCEL_POLL_S)
            except queue.Empty:
                continue
        raise CancelledError

    def _run(self, spec: ChildSpec) -> int:
        self.pid = self._get(self._reservation.host.start.remote(spec))
        if not self._specs.empty():  # a newer spec has arrived meanwhile
            self.kill()
        while True:
            news: ChildStatus = self._get(self._reservation.host.follow.remote(FOLLOW_S))
            for line in news.lines:
                self._output(line)
            if news.code is not None:
                self.last = news
                return news.code

    def _get(self, ref: Any) -> Any:
        """Waits for the actor's answer.

        Raises:
            CancelledError: The launcher no longer waits for this task.
            ActorLostError: The actor is gone.
        """
        errors = self._ray.exceptions
        while not self._ray.wait([ref], timeout=CANCEL_POLL_S)[0]:
            if self._cancelled.is_set():
                raise CancelledError
        try:
            return self._ray.get(ref)
        except errors.RayActorError as error:
            if "creation task" in str(error):  # it failed in its constructor: Ray will not retry
                raise
            raise ActorLostError(" ".join(str(error).split())[-300:]) from None
        except errors.RayTaskError as error:
            raise error.cause if isinstance(error.cause, FileNotFoundError) else error from None


class RayCluster(LaunchedCluster):
    """The tasks of a cluster on Ray.

    Args:
        options: What to start; the first word of `command` is Python, which every machine replaces by its own.
        where: Which Ray, and what a worker reserves.
        output: Receives every line that a task prints, with the task.
        note: Receives every line of the launcher itself.
        call: A function that every worker runs, instead of a program.
        clock: Used for all waits.
    """

    end_grace_s = 15.0  # each end is reported by another machine

    def __init__(
        self,
        options: LaunchOptions,
        where: Ray,
        output: TaskOutput,
        note: Note = ignore,
        call: Callable[[], Any] | None = None,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        super().__init__(options, output, note, clock=clock)
        self._where, self._call = where, call
        self._folder = (
            os.getcwd()
        )  # read it now: raylets that share a disk may unpack the job's folder again below the driver
        self._connection = RayConnection(where, options.ps, options.range.most, self.say)
        self._reservations = Reservations(self._connection, where, self.say, clock)
        self._reserved: dict[TaskId, Reservation] = {}
        self._spec: ClusterSpec | None = None
        self._waiting: set[TaskId] = set()
        self._looked_at = 0.0
        self._secret_fd: int | None = None
        self._made_secret = False
        self._secret, self._access = self._choose_secret()

    # -- the start -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Reserves room for all tasks, waits for the ps tasks and the first workers, and starts the tasks that have room."""
        ps = [TaskId("ps", i) for i in range(self.options.ps)]
        workers = [TaskId("worker", i) for i in range(self.options.range.most)]
        # With a range the minimum must be there; otherwise the chief, which trains alone until others have room.
        needed = self.options.range.least if self.options.range.elastic else 1
        for together in (ps, *([task] for task in workers[:needed])):
            made = self._reservations.reserve(together)
            self._reservations.wait(made)
            self._reserved |= {reservation.task: reservation for reservation in made}
        self._reserved |= {task: self._reservations.reserve([task])[0] for task in workers[needed:]}
        for task in [*ps, *workers]:
            self.tasks.append(self._start(task))
        self._watch_scaling()

    def _watch_scaling(self) -> None:
        """Starts to watch how many workers are wanted; `_announce` shows the command once the address is known."""
        if self.options.range.elastic:
            self._scaling = RequestedWorkers(self.leader, lambda: self.access)
            least, most = self.options.range.least, self.options.range.most
            self.say(f"{least} to {most} workers, as many as there is room for on the cluster")

    def _start(self, task: TaskId) -> Running:
        if task not in self._reserved:  # it had left, and its reservation was given back
            self._reserved[task] = self._reservations.reserve([task])[0]
        ray = self._connection.ray
        remote = RemoteTask(self._reserved[task], ray, lambda line: self._output(task, line), self._clock)
        running = Running(task, remote)
        running.reader = remote.thread
        return running

    def _choose_secret(self) -> tuple[str | None, Access]:
        """Tasks on several machines need a secret; makes one for the run if there is none."""
        access = read_access(self.options.secret_file)
        if access.secret is None and not access.insecure and not self._connection.is_own:
            text, self._made_secret = make_secret(), True
            return text, Access(secret=Secret(text))
        return read_secret_text(self.options.secret_file) if access.secret is not None else None, access

    @property
    def access(self) -> Access:
        """The cluster's secret, for those who talk to its tasks."""
        return self._access

    def leader(self) -> str | None:
        """Returns the address of ps task 0, or None while it is not known."""
        return self._spec.address(TaskId("ps", 0)) if self._spec is not None else None

    # -- tasks with room start -----------------------------------------------------------------------------------------

    def _handle_exits(self, *, restart: bool = True) -> None:
        super()._handle_exits(restart=restart)
        if restart:
            self._release_left()
            self._advance()

    def _release_left(self) -> None:
        """Gives back the reservations of workers that have left a run which continues without them."""
        if self.options.range.elastic and self._run_continues():
            for t in self.tasks:
                if t.task.job == "worker" and t.code == 0 and t.task in self._reserved:
                    self._reservations.give_back(self._reserved.pop(t.task))

    def _advance(self) -> None:
        """Starts the tasks whose actors run, once the addresses of all ps tasks are known."""
        remotes = {t.task: t.process for t in self.tasks if isinstance(t.process, RemoteTask)}
        self._report_waiting(remotes)
        ps = [remotes[task] for task in remotes if task.job == "ps"]
        addresses = [remote.endpoint.address for remote in ps if remote.endpoint is not None]
        if len(addresses) < len(ps) or any(remote.poll() is not None for remote in ps):
            return
        if self._spec is None or addresses != self._spec.as_dict()["ps"]:
            self._set_addresses(addresses, remotes)
        for task, remote in remotes.items():
            if remote.endpoint is not None and not remote.started and remote.poll() is None:
                if task in self._waiting:
                    self._waiting.discard(task)
                    self.say(f"{task} has a place on {remote.endpoint.machine}")
                remote.start(self._child_spec(task))

    def _set_addresses(self, addresses: list[str], remotes: dict[TaskId, RemoteTask]) -> None:
        """Sets the addresses of the ps tasks; if some have moved, restarts all tasks with the new ones."""
        before = self._spec
        # A worker's address is only a name: nothing listens there.
        names = [f"ray-worker-{i}:{20000 + i}" for i in range(self.options.range.most)]
        self._spec = self.cluster = ClusterSpec(
            {"ps": addresses, "worker": names}, min_workers=self.options.range.least
        )
        self._announce()
        if before is None:
            return
        moved = [task for task in before.tasks("ps") if before.address(task) != self._spec.address(task)]
        what = ", ".join(f"{task} is at {self._spec.address(task)} now" for task in moved)
        self.say(f"{what}: every task starts again, from the last checkpoint if the run has one")
        for task, remote in remotes.items():
            if remote.started and remote.poll() is None:
                remote.start(self._child_spec(task))

    def _announce(self) -> None:
        """Prints the commands for status and scaling; a secret made for the run is readable under a path of /proc."""
        if self._connection.is_own and not self.options.range.elastic:
            return  # ps task 0 prints its address itself
        known = self.options.secret_file
        if self._made_secret and self._secret is not None:
            if self._secret_fd is None:
                self._secret_fd = os.memfd_create("secret")
                os.fchmod(self._secret_fd, 0o600)
                os.write(self._secret_fd, self._secret.encode())
            known = f"/proc/{os.getpid()}/fd/{self._secret_fd}"
        shown = f" --secret-file {known}" if known else ""
        self.say(f"for the status of the run: torchquorum status {self.leader()}{shown}")
        if self.options.range.elastic:
            self.say(f"to change the number of workers: torchquorum scale {self.leader()} N{shown}")

    def _report_waiting(self, remotes: dict[TaskId, RemoteTask]) -> None:
        """Reports tasks that wait for room. A ps or the chief gets the room of another worker.

        Raises:
            DeadlineError: A ps has waited for too long.
        """
        now = self._clock.now()
        if now - self._looked_at < SAY_WAITING_S:
            return
        self._looked_at = now
        for task, remote in remotes.items():
            if remote.endpoint is not None or remote.poll() is not None:
                continue
            reservation, waited_s = self._reserved[task], now - remote.asked_at
            if waited_s < SAY_WAITING_S or reservation.is_reserved:
                continue
            if task.job == "ps" and waited_s > self._where.placement_timeout_s:
                raise DeadlineError(self._reservations.explain([reservation], waited_s))
            if task not in self._waiting:
                self._waiting.add(task)
                self.say(f"{task} waits for room on the cluster: {describe_reservations([reservation])}")
            if task.job == "ps" or task.is_chief:
                self._take_room(task)

    def _take_room(self, needed: TaskId) -> None:
        """Takes the room of the last worker for a task without which the run stands still; that worker waits in line."""
        for at in reversed(range(len(self.tasks))):
            remote = self.tasks[at].process
            task = self.tasks[at].task
            if task.job == "ps" or task.is_chief or not isinstance(remote, RemoteTask):
                continue
            if remote.endpoint is not None and remote.poll() is None:
                self.say(f"{task} gives up its place on {remote.endpoint.machine} for {needed}")
                remote.cancel()
                self._reservations.give_back(self._reserved[task])
                self._reserved[task] = self._reservations.reserve([task])[0]
                restarts, self.tasks[at] = self.tasks[at].restarts, self._start(task)
                self.tasks[at].restarts = restarts
                return

    def _child_spec(self, task: TaskId) -> ChildSpec:
        assert self._spec is not None
        threads = self.options.threads or max(1, int(self._connection.cpus_per_worker))
        variables: dict[str, str | None] = {
            **env.variables(prefix="TORCHQUORUM_"),
            env.STARTED_AT: repr(self.started_at),
            env.SECRET: self._secret,
            env.SECRET_FILE: None,
            env.LOGDIR: self.options.logdir or env.logdir(),
            env.TF_CONFIG: None,
            env.OMP_NUM_THREADS: env.omp_num_threads() or str(threads),
            "PYTHONUNBUFFERED": "1",
            **self.options.for_sessions(),
        }
        return ChildSpec(
            command=tuple(self.options.command[1:]),
            folder=self._folder,
            cluster={job: list(addresses) for job, addresses in self._spec.as_dict().items()},
            min_workers=self._spec.min_workers,
            transport=self.options.transport,
            variables=variables,
            report=self.options.report is not None and task == TaskId("ps", 0),
            call=self._call,
        )

    # -- the end -------------------------------------------------------------------------------------------------------

    def _describe(self, ended: Running) -> str:
        remote = ended.process
        if isinstance(remote, RemoteTask) and remote.lost:
            return f"was lost with its place on {self._reserved[ended.task].machine}"
        return super()._describe(ended)

    def _must_give_up(self) -> bool:
        # The run is over: tasks that still wait for room are cancelled, each reported once.
        if self._spec is not None and all(t.code == 0 for t in self.tasks if t.task.job == "ps"):
            for t in self.tasks:
                waits = t.code is None and isinstance(t.process, RemoteTask) and t.process.endpoint is None
                if waits and t.life not in self._reported:
                    t.process.kill()
                    self._reported[t.life] = t.task
                    self.say(f"the run is over: {t.task} still waits for room, and is no longer needed")
        return super()._must_give_up()

    def results(self) -> list[Any]:
        """Returns what each worker's function returned."""
        news = [t.process.last for t in self.tasks if t.task.job == "worker" and isinstance(t.process, RemoteTask)]
        if self.options.range.elastic:
            news = [came for came in news if came is not None]  # of a range, some workers may never have started
        return [decode_result(came.result) if came is not None else None for came in news]

    def stop(self, first: signal.Signals) -> None:
        """Ends every task that still runs, and writes the report."""
        super().stop(first)
        for t in self.tasks:
            if isinstance(t.process, RemoteTask):
                t.process.cancel()
                t.process.thread.join(THREAD_S)
                if t.process.last is not None and t.process.last.report is not None and self.options.report:
                    Path(self.options.report).write_bytes(t.process.last.report)

    def close(self) -> None:
        """Gives all reservations back, and disconnects."""
        self._reservations.close()
        self._connection.close()
        if self._secret_fd is not None:
            os.close(self._secret_fd)
            self._secret_fd = None


def read_secret_text(secret_file: str | None) -> str:
    """Returns the text of the secret, which Ray transfers to the tasks."""
    path = secret_file or (None if env.secret() is not None else env.secret_file())
    return Path(path).expanduser().read_text().strip() if path is not None else (env.secret() or "")
