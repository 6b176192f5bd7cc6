"""A cluster on Ray: Ray finds the machines and makes lost places anew; the tasks are watched as on this machine.

Called by `torchquorum run --on ray` and `tq.launch(on="ray")`. Every task has an actor (`ray_host`), which runs the unchanged
program as its child; a thread here follows it. Tensors never travel by Ray. What always holds: the ps tasks and the first
workers have places before anything starts, other workers start when they have theirs; a worker that is lost is started again
alone; when a ps comes back under another address, every task is started again with the new addresses and goes on from the
last checkpoint; when `close` returns, no actor, child or placement group is left.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchquorum import env
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.cluster.secret import Access, Secret, make_secret, read_access
from torchquorum.errors import DeadlineError
from torchquorum.launcher.functions import decode_result
from torchquorum.launcher.local import LaunchedCluster, Options, Running
from torchquorum.launcher.ray_cluster import Connection, GoneError, Hall, Ray, Seat, describe_seats
from torchquorum.launcher.ray_host import News, Order, Place
from torchquorum.launcher.scale import Wanted

FOLLOW_S = 10.0  # a line, and the end, come at once; this is how often nothing is said
CANCEL_POLL_S = 0.5
RETRY_S = 0.2
SAY_WAITING_S = 5.0
THREAD_S = 10.0
HOPELESS_S = 60.0


class CancelledError(Exception):
    """Nobody waits for this task any more."""


class RemoteTask:
    """The process of a task on another machine, with the methods of subprocess.Popen that a cluster needs.

    A thread of its own waits for the task's place, then for its order, starts it and follows it to its end.

    Args:
        seat: The task's place on the cluster.
        ray: The module.
        output: Takes its lines, on its thread.

    Attributes:
        place: Where it is, once Ray has found a place.
        ordered: Whether it was told what to run.
        lost: Whether its actor is gone, mostly with its machine.
        last: Its report and result, once it has ended.
    """

    stdout = None

    def __init__(self, seat: Seat, ray: Any, output: Callable[[str], None]) -> None:
        self._seat, self._ray, self._output = seat, ray, output
        self._orders: queue.Queue[Order] = queue.Queue()
        self._cancelled = threading.Event()
        self._code: int | None = None
        self.pid = 0
        self.place: Place | None = None
        self.ordered = False
        self.lost = False
        self.last: News | None = None
        self.asked_at = time.monotonic()
        self.thread = threading.Thread(target=self._live, name=f"torchquorum-ray-{seat.task}", daemon=True)
        self.thread.start()

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal, or None while it runs or waits."""
        return self._code

    def order(self, order: Order) -> None:
        """Tells it what to run; one that runs something else is ended for it."""
        again, self.ordered = self.ordered, True
        self._orders.put(order)
        if again:
            self._seat.host.signal.remote(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        """Sends a signal to the child; a task that has none yet is given up."""
        if self._code is None and self.pid:
            self._seat.host.signal.remote(int(sig))
        elif self._code is None:
            self._cancelled.set()

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)

    def cancel(self) -> None:
        """Stops following it."""
        self._cancelled.set()

    # -- on its thread -------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._seat.address, self._seat.machine = (found := self._find_place()).address, found.machine
            self.place = found
            code = self._run(self._next_order())
            while not self._orders.empty():  # it was ended so that it begins anew
                code = self._run(self._orders.get())
            self._code = code
        except CancelledError:
            self._code = -signal.SIGTERM
        except GoneError:
            self.lost = True
            self._code = -signal.SIGKILL
        except FileNotFoundError as error:
            self._output(
                f"torchquorum: error: {error} on {self._seat.machine}. Every machine of the Ray cluster needs the program: put "
                "it where all see it, or send it along: ray job submit --working-dir . -- torchquorum run --on ray ..."
            )
            self._code = 2
        except Exception as error:  # the thread must not end in silence: the launcher waits for a code
            self._output(f"torchquorum: error: {type(error).__name__}: {' '.join(str(error).split())[:600]}")
            self._code = 1

    def _find_place(self) -> Place:
        since = time.monotonic()
        while True:
            try:
                return self._get(self._seat.host.place.remote(self._seat.address))
            except GoneError as error:  # Ray is still making it anew
                if not self._seat.is_reserved:
                    since = time.monotonic()  # there is no room, which is waited for
                if time.monotonic() - since > HOPELESS_S:
                    raise DeadlineError(
                        f"Ray has room for {self._seat.task}, but its actor has not come to life within {HOPELESS_S:.0f} s: "
                        f"{error}; `ray logs` on that machine may say more"
                    ) from None
                if self._cancelled.wait(RETRY_S):
                    raise CancelledError from None

    def _next_order(self) -> Order:
        while not self._cancelled.is_set():
            try:
                return self._orders.get(timeout=CANCEL_POLL_S)
            except queue.Empty:
                continue
        raise CancelledError

    def _run(self, order: Order) -> int:
        self.pid = self._get(self._seat.host.start.remote(order))
        if not self._orders.empty():  # it was told something else meanwhile
            self.kill()
        while True:
            news: News = self._get(self._seat.host.follow.remote(FOLLOW_S))
            for line in news.lines:
                self._output(line)
            if news.code is not None:
                self.last = news
                return news.code

    def _get(self, ref: Any) -> Any:
        """Waits for what the actor answers.

        Raises:
            CancelledError: Nobody waits any more.
            GoneError: The actor is gone.
        """
        errors = self._ray.exceptions
        while not self._ray.wait([ref], timeout=CANCEL_POLL_S)[0]:
            if self._cancelled.is_set():
                raise CancelledError
        try:
            return self._ray.get(ref)
        except errors.RayActorError as error:
            if "creation task" in str(error):  # it cannot begin, and Ray will not try again
                raise
            raise GoneError(" ".join(str(error).split())[-300:]) from None
        except errors.RayTaskError as error:
            raise error.cause if isinstance(error.cause, FileNotFoundError) else error from None


class RayCluster(LaunchedCluster):
    """The tasks of a cluster on Ray.

    Args:
        options: What to start; the first word of `command` is Python, of which every machine takes its own.
        where: Which Ray, and what a worker reserves.
        output: Takes every line that a task prints, with the task.
        note: Takes every line of the launcher's own.
        call: A function that every worker runs, instead of a program.
    """

    end_grace_s = 15.0  # the news of it come from another machine each

    def __init__(
        self,
        options: Options,
        where: Ray,
        output: Callable[[TaskId, str], None],
        note: Callable[[str], None] = lambda _: None,
        call: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(options, output, note)
        self._where, self._call, self.fails_together = where, call, call is not None
        self._folder = os.getcwd()  # now: raylets that share a disk unpack a job's folder anew under its driver
        self._connection = Connection(where, options.ps, options.range.most, self._say)
        self._hall = Hall(self._connection, where, self._say)
        self._seats: dict[TaskId, Seat] = {}
        self._spec: ClusterSpec | None = None
        self._told_waiting: set[TaskId] = set()
        self._looked_at = 0.0
        self._secret_fd: int | None = None
        self._made_secret = False
        self._secret, self._access = self._choose_secret()

    # -- the beginning -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Finds places for the ps tasks and the first workers, and starts every task that has one."""
        ps = [TaskId("ps", i) for i in range(self.options.ps)]
        workers = [TaskId("worker", i) for i in range(self.options.range.most)]
        # Of a range the least must be there; of a number the chief, who trains alone until others have room.
        needed = self.options.range.least if self.options.range.elastic else 1
        for together in (ps, *([task] for task in workers[:needed])):
            seats = self._hall.reserve(together)
            self._hall.wait(seats)
            self._seats |= {seat.task: seat for seat in seats}
        self._seats |= {task: self._hall.reserve([task])[0] for task in workers[needed:]}
        for task in [*ps, *workers]:
            self.tasks.append(self._start(task))
        self._hear_wishes()

    def _hear_wishes(self) -> None:
        """Begins to listen how many workers are wanted; how to say it is said when the address is known."""
        if self.options.range.elastic:
            self._wanted_now = Wanted(self.leader, lambda: self.access)
            least, most = self.options.range.least, self.options.range.most
            self._say(f"{least} to {most} workers, as many as there is room for on the cluster")

    def _start(self, task: TaskId) -> Running:
        if task not in self._seats:  # it had left, and given its place back
            self._seats[task] = self._hall.reserve([task])[0]
        remote = RemoteTask(self._seats[task], self._connection.ray, lambda line: self._output(task, line))
        running = Running(task, remote)
        running.reader = remote.thread
        return running

    def _choose_secret(self) -> tuple[str | None, Access]:
        """Tasks on several machines need a secret; one is made for the run if there is none."""
        access = read_access(self.options.secret_file)
        if access.secret is None and not access.insecure and not self._connection.is_own:
            text, self._made_secret = make_secret(), True
            return text, Access(secret=Secret(text))
        return read_secret_text(self.options.secret_file) if access.secret is not None else None, access

    @property
    def access(self) -> Access:
        """Who may talk to the tasks."""
        return self._access

    def leader(self) -> str | None:
        """Returns where ps task 0 listens, or None while that is not known."""
        return self._spec.address(TaskId("ps", 0)) if self._spec is not None else None

    # -- who has a place starts ----------------------------------------------------------------------------------------

    def _look_after(self, *, restart: bool = True) -> None:
        super()._look_after(restart=restart)
        if restart:
            self._free_places()
            self._advance()

    def _free_places(self) -> None:
        """Gives back the places of workers that have left a run which goes on without them."""
        if self.options.range.elastic and self._goes_on():
            for t in self.tasks:
                if t.task.job == "worker" and t.code == 0 and t.task in self._seats:
                    self._hall.give_back(self._seats.pop(t.task))

    def _advance(self) -> None:
        """Starts the tasks that have a place, once the addresses of all ps tasks are known."""
        remotes = {t.task: t.process for t in self.tasks if isinstance(t.process, RemoteTask)}
        self._tell_waiting(remotes)
        ps = [remotes[task] for task in remotes if task.job == "ps"]
        addresses = [remote.place.address for remote in ps if remote.place is not None]
        if len(addresses) < len(ps) or any(remote.poll() is not None for remote in ps):
            return
        if self._spec is None or addresses != self._spec.as_dict()["ps"]:
            self._meet(addresses, remotes)
        for task, remote in remotes.items():
            if remote.place is not None and not remote.ordered and remote.poll() is None:
                if task in self._told_waiting:
                    self._told_waiting.discard(task)
                    self._say(f"{task} has a place on {remote.place.machine}")
                remote.order(self._order(task))

    def _meet(self, addresses: list[str], remotes: dict[TaskId, RemoteTask]) -> None:
        """Takes up the addresses of the ps tasks; if some have moved, all tasks start again with the new ones."""
        before = self._spec
        # A worker's address is only its name: nothing listens there.
        names = [f"ray-worker-{i}:{20000 + i}" for i in range(self.options.range.most)]
        self._spec = self.cluster = ClusterSpec(
            {"ps": addresses, "worker": names}, min_workers=self.options.range.least
        )
        self._announce()
        if before is None:
            return
        moved = [task for task in before.tasks("ps") if before.address(task) != self._spec.address(task)]
        what = ", ".join(f"{task} is at {self._spec.address(task)} now" for task in moved)
        self._say(f"{what}: every task starts again, from the last checkpoint if the run has one")
        for task, remote in remotes.items():
            if remote.ordered and remote.poll() is None:
                remote.order(self._order(task))

    def _announce(self) -> None:
        """Says how to ask after the run; a secret that was made for it lies in this process's memory, under a path of /proc."""
        if self._connection.is_own and not self.options.range.elastic:
            return  # ps task 0 says itself where it is
        known = self.options.secret_file
        if self._made_secret and self._secret is not None:
            if self._secret_fd is None:
                self._secret_fd = os.memfd_create("secret")
                os.fchmod(self._secret_fd, 0o600)
                os.write(self._secret_fd, self._secret.encode())
            known = f"/proc/{os.getpid()}/fd/{self._secret_fd}"
        shown = f" --secret-file {known}" if known else ""
        self._say(f"to ask after the run: torchquorum status {self.leader()}{shown}")
        if self.options.range.elastic:
            self._say(f"to change how many workers there are: torchquorum scale {self.leader()} N{shown}")

    def _tell_waiting(self, remotes: dict[TaskId, RemoteTask]) -> None:
        """Says who waits for room. A ps or the chief gets another worker's place, or ends the run in the end.

        Raises:
            DeadlineError: A ps has waited for too long.
        """
        now = time.monotonic()
        if now - self._looked_at < SAY_WAITING_S:
            return
        self._looked_at = now
        for task, remote in remotes.items():
            if remote.place is not None or remote.poll() is not None:
                continue
            seat, waited_s = self._seats[task], now - remote.asked_at
            if waited_s < SAY_WAITING_S or seat.is_reserved:
                continue
            if task.job == "ps" and waited_s > self._where.placement_timeout_s:
                raise DeadlineError(self._hall.explain([seat], waited_s))
            if task not in self._told_waiting:
                self._told_waiting.add(task)
                self._say(f"{task} waits for room on the cluster: {describe_seats([seat])}")
            if task.job == "ps" or task.is_chief:
                self._take_place(task)

    def _take_place(self, needed: TaskId) -> None:
        """Without every ps and the chief nobody gets on, so the last worker that has a place gives it up and waits in line."""
        for at in reversed(range(len(self.tasks))):
            remote = self.tasks[at].process
            task = self.tasks[at].task
            if task.job == "ps" or task.is_chief or not isinstance(remote, RemoteTask):
                continue
            if remote.place is not None and remote.poll() is None:
                self._say(f"{task} gives up its place on {remote.place.machine} for {needed}")
                remote.cancel()
                self._hall.give_back(self._seats[task])
                self._seats[task] = self._hall.reserve([task])[0]
                restarts, self.tasks[at] = self.tasks[at].restarts, self._start(task)
                self.tasks[at].restarts = restarts
                return

    def _order(self, task: TaskId) -> Order:
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
        }
        if self.options.durable:
            variables[env.DURABLE] = self.options.durable
        return Order(
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
            return f"was lost with its place on {self._seats[ended.task].machine}"
        return super()._describe(ended)

    def _hopeless(self) -> bool:
        if self._spec is not None and all(t.code == 0 for t in self.tasks if t.task.job == "ps"):
            for t in self.tasks:
                waits = t.code is None and isinstance(t.process, RemoteTask) and t.process.place is None
                if waits and t.life not in self._told:
                    t.process.kill()
                    self._told.add(t.life)
                    self._say(f"the run is over: {t.task} still waits for room, and is not needed any more")
        return super()._hopeless()

    def results(self) -> list[Any]:
        """Returns what each worker's function returned."""
        news = [t.process.last for t in self.tasks if t.task.job == "worker" and isinstance(t.process, RemoteTask)]
        if self.options.range.elastic:
            news = [came for came in news if came is not None]  # of a range, some may never have come
        return [decode_result(came.result) if came is not None else None for came in news]

    def stop(self, first: signal.Signals) -> None:
        """Ends whatever still runs, keeps the report, and gives every place back."""
        super().stop(first)
        for t in self.tasks:
            if isinstance(t.process, RemoteTask):
                t.process.cancel()
                t.process.thread.join(THREAD_S)
                if t.process.last is not None and t.process.last.report is not None and self.options.report:
                    Path(self.options.report).write_bytes(t.process.last.report)

    def close(self) -> None:
        """Gives every place on the cluster back, and leaves it."""
        self._hall.close()
        self._connection.close()
        if self._secret_fd is not None:
            os.close(self._secret_fd)
            self._secret_fd = None


def read_secret_text(secret_file: str | None) -> str:
    """Returns the secret itself, which travels to the tasks inside Ray."""
    path = secret_file or (None if env.secret() is not None else env.secret_file())
    return Path(path).expanduser().read_text().strip() if path is not None else (env.secret() or "")
