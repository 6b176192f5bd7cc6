"""Makes one cell of the fault matrix with real processes, and checks what came of it.

What always holds: a cell ends within its deadline, by itself or by being ended, and leaves no process and no namespace.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.cells import LONG_PAUSE, NAMESPACES, RULES, Cell
from tests.chaos.network import Hosts, Proxy
from tests.ports import free_ports
from tests.process.zygote import Forked, fork_task
from torchquorum.cluster.secret import make_secret
from torchquorum.formats.checkpoint import CheckpointReader, list_checkpoints
from torchquorum.formats.ledger import Entry, read_records
from torchquorum.rules import parse_rule

PROGRAM = Path(__file__).parent / "program.py"
DEADLINE_S = 120.0  # of a cell; it takes a few seconds, on a busy machine more
LAST_STEP, SAVE_STEPS, GATE_AT, FAULT_AT = 36, 4, 12, 5
POLL_S = 0.01
SECRET = make_secret()


class Failed(AssertionError):
    """The cell did not come to its outcome."""


@dataclass
class Running:
    """A task of the cell: its processes, one after another, write to one file."""

    job: str
    index: int
    name: str
    address: str
    output: Path
    host: int | None
    argv: list[str]
    lives: list[Forked] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Returns all that it has printed."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


class Run:
    """One cell at work."""

    def __init__(self, cell: Cell, number: int, folder: Path) -> None:
        self.cell = cell
        self.folder, self.gates, self.logdir = folder, folder / "gates", folder / "run"
        self.gates.mkdir()
        self.began = time.monotonic()
        self.deadline = self.began + DEADLINE_S
        self.events: list[str] = []
        self.hosts: Hosts | None = None
        self.proxy: Proxy | None = None
        self._heard = 0
        count = cell.num_ps + cell.num_workers
        if cell.fault in NAMESPACES:
            self.hosts = Hosts(f"q{os.getpid() % 10000}x{number}", count)
            addresses = [f"{address}:2222" for address in self.hosts.addresses]
        else:
            addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        names = [("ps", k) for k in range(cell.num_ps)] + [("worker", k) for k in range(cell.num_workers)]
        self.tasks = [self._task(i, *names[i], addresses) for i in range(count)]

    def _task(self, number: int, job: str, index: int, addresses: list[str]) -> Running:
        cell = self.cell
        seen = list(addresses)
        if cell.fault == "stall":
            self._stand_between(number, job, index, seen)
        start_s = 8 if not cell.outcome.ends else 40
        argv = [
            str(PROGRAM),
            f"--job_name={job}",
            f"--task_id={index}",
            f"--ps_hosts={','.join(seen[: cell.num_ps])}",
            f"--worker_hosts={','.join(seen[cell.num_ps :])}",
            f"--transport={'tcp' if cell.fault == 'stall' else 'auto'}",
            f"--gates={self.gates}",
            f"--logdir={self.logdir}",
            f"--rule={RULES[cell.rule]}",
            f"--steps={LAST_STEP}",
            f"--save-steps={SAVE_STEPS}",
            f"--gate-at={GATE_AT}",
            f"--start={start_s}",
            # Between hosts frames are large, so that lanes have threads of their own; on a slow link that would take minutes.
            *(("--size=50000",) if cell.fault in ("network cut", "half-open") else ()),
            # What is only slow must not be taken for dead, however busy the machine; nor must workers be by a ps that is cut
            # off for a moment before it is killed.
            *(("--liveness=20", "--silence=20") if cell.fault == "network slow" else ()),
            *(("--liveness=20",) if (cell.task, cell.fault) == ("ps", "half-open") else ()),
            # After a pause of all, nobody is late who is up within two seconds.
            *(("--liveness=3", "--silence=3") if cell.task == "all" else ()),
            *(("--user-deadlines",) if cell.fault == LONG_PAUSE else ()),
        ]
        host = number if self.hosts is not None else None
        output = self.folder / f"{job}-{index}.txt"
        return Running(job, index, f"/job:{job}/task:{index}", seen[number], output, host, argv)

    def _stand_between(self, number: int, job: str, index: int, seen: list[str]) -> None:
        """Whoever talks to the victim, or the victim if it is a worker, sees the proxy's port in place of the ps's."""
        at = self.cell.victim[1] if self.cell.task == "ps" else 0
        if self.proxy is None:
            host, _, port = seen[at].rpartition(":")
            self.proxy = Proxy((host, int(port)))
        behind = (job, index) != self.cell.victim if self.cell.task == "ps" else (job, index) == self.cell.victim
        if behind:
            seen[at] = f"127.0.0.1:{self.proxy.port}"

    @property
    def victim(self) -> Running:
        """Returns the task that meets the fault."""
        return next(t for t in self.tasks if (t.job, t.index) == self.cell.victim)

    @property
    def workers(self) -> list[Running]:
        """Returns the workers."""
        return [t for t in self.tasks if t.job == "worker"]

    @property
    def first_ps(self) -> Running:
        """Returns the ps task that decides."""
        return self.tasks[0]

    def start(self, task: Running) -> None:
        """Starts a task, or starts it again."""
        netns = self.hosts.names[task.host] if self.hosts is not None and task.host is not None else None
        # Between hosts without a secret that has to be said. With one there is no lane beside the port, so that all goes
        # through the proxy of a stall.
        env = {"TORCHQUORUM_INSECURE": "1"} if self.proxy is None else {"TORCHQUORUM_SECRET": SECRET}
        task.lives.append(fork_task(task.argv, task.output, netns=netns, env=env))
        self.note(f"{task.name} started as process {task.lives[-1].pid}")

    def note(self, what: str) -> None:
        """Keeps when something happened, for the report of a cell that fails."""
        self.events.append(f"{time.monotonic() - self.began:6.1f} s  {what}")

    def start_all(self) -> None:
        """Starts every task, the ps tasks first."""
        for task in self.tasks:
            self.start(task)
            if task.job == "ps":
                self.wait_for_line(task, "serving on")

    def code(self, task: Running) -> int | None:
        """Returns how a task's last process ended."""
        return task.lives[-1].poll()

    def open(self, *gates: str) -> None:
        """Opens gates."""
        for gate in gates:
            (self.gates / gate).touch()

    def wait(self, what: str, happened: Callable[[], object]) -> None:
        """Waits for an event, to the cell's deadline."""
        while not happened():
            if time.monotonic() > self.deadline:
                raise Failed(f"waited in vain for {what}")
            time.sleep(POLL_S)
        self.note(what)

    def wait_for_line(self, task: Running, pattern: str, after: int = 0) -> None:
        """Waits until a task has printed something."""
        self.wait(f"{task.name} to say {pattern!r}", lambda: re.search(pattern, task.text[after:]))

    def close(self) -> None:
        """Ends whatever is left."""
        for task in self.tasks:
            for life in task.lives:
                life.kill()
        for task in self.tasks:
            for life in task.lives:
                life.wait(60)
        if self.proxy is not None:
            self.proxy.close()
        if self.hosts is not None:
            self.hosts.close()

    # -- the fault ----------------------------------------------------------------------------------------------------

    def await_moment(self) -> None:
        """Lets the run come to the moment, and not beyond."""
        moment = self.cell.moment
        for worker in self.workers:
            self.wait_for_line(worker, "ready at")
        if moment == "before the first step":
            return
        if moment != "during a checkpoint":
            self.open("checkpoint")
        self.open("begin")
        if moment == "in the middle":
            self.wait_for_line(self.first_ps, "saved ")
            pattern = rf"local {FAULT_AT} "
            self.wait("a worker's steps", lambda: any(re.search(pattern, w.text) for w in self.workers))
            for worker in self.workers:  # a slow one may have its gradients refused by a quorum that needs it not
                self.wait_for_line(worker, r"local \d+ ")
        elif moment == "during a checkpoint":
            for ps in self.tasks[: self.cell.num_ps]:
                self.wait_for_line(ps, "checkpoint begun")
        else:
            self.wait_for_line(self.first_ps, "saved ")
            self.open("middle", "late")
            for worker in self.workers:
                self.wait_for_line(worker, "over at")

    def strike(self) -> None:
        """The fault, and its end where it has one; the others stop short of the end until a victim that can be is back."""
        victim, fault = self.victim, self.cell.fault
        self.note(f"{fault} of {victim.name}")
        match fault:
            case "kill -9":
                victim.lives[-1].send_signal(signal.SIGKILL)
                self.open_all()
            case "restart":
                self._restart(victim)
                self.open_all()
            case "SIGSTOP":
                victim.lives[-1].send_signal(signal.SIGSTOP)
                self.open_all()
                self.wait_until_noticed()
                victim.lives[-1].send_signal(signal.SIGCONT)
            case "network cut" | "half-open":
                assert self.hosts is not None and victim.host is not None
                self.hosts.cut(victim.host)
                if fault == "network cut":
                    self.open_all()
                    self.wait_until_noticed()
                    self.hosts.mend(victim.host)
                else:
                    self._restart(victim, lambda host=victim.host: self.hosts.mend(host))  # pyright: ignore[reportOptionalMemberAccess]
                    self.open_all()
            case "stall":
                assert self.proxy is not None
                self.proxy.stall()
                self.open_all()
                self.wait_until_noticed()
                self.proxy.resume()
            case _ if self.cell.pause_s is not None:
                self._pause(self.cell.pause_s)
            case _:
                assert self.hosts is not None and victim.host is not None
                self.hosts.slow(victim.host)
                self.open_all()

    def _pause(self, pause_s: float) -> None:
        """Freezes tasks for a time; what comes after it nothing holds up."""
        paused = [task.lives[-1] for task in self.tasks if self.cell.is_paused(task.job, task.index)]
        for life in paused:
            life.send_signal(signal.SIGSTOP)
        self.open_all()
        until = time.monotonic() + pause_s
        self.wait("the end of the pause", lambda: time.monotonic() > until)
        for life in paused:
            life.send_signal(signal.SIGCONT)

    def let_end(self) -> None:
        """Waits until a worker that was away is at work again, if it can be; then the run may come to its end."""
        away = self.victim.job == "worker" and self.cell.fault not in ("kill -9", "network slow")
        if away and self.cell.moment != "at the end":
            self.wait_for_line(self.victim, r"ready at|local \d+ global|over at", self._heard)
        self.open("late")

    def _restart(self, victim: Running, mend: Callable[[], None] = lambda: None) -> None:
        victim.lives[-1].send_signal(signal.SIGKILL)
        self.wait(f"the end of {victim.name}", lambda: self.code(victim) is not None)
        before = self._heard = len(victim.text)
        self.start(victim)
        mend()
        if victim.job == "worker" and self.cell.moment == "at the end":
            self.wait_for_line(victim, "over at", before)  # it joins while there is somebody to join

    def open_all(self) -> None:
        """From now on nothing but the fault holds anybody up."""
        self.open("checkpoint", "last checkpoint", "begin", "middle", "end")

    def wait_until_noticed(self) -> None:
        """Waits until the others take the victim for lost."""
        victim = self.victim
        if victim.job == "worker":
            self.wait_for_line(self.first_ps, f"{victim.name} counts as dead")
            self._heard = len(victim.text)
            return
        pattern = "trying to go on for"
        self.wait(f"a worker to notice {victim.name}", lambda: any(re.search(pattern, w.text) for w in self.workers))

    def await_end(self) -> None:
        """Waits until every process has ended."""
        for task in self.tasks:
            self.wait(f"the end of {task.name}", lambda task=task: self.code(task) is not None)

    # -- what came of it ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compares with the outcome."""
        outcome, victim = self.cell.outcome, self.victim
        for task in self.tasks:
            allowed = (outcome.victim,) if task is victim else (outcome.ps,) if task.job == "ps" else outcome.workers
            if (code := self.code(task)) not in allowed:
                raise Failed(f"{task.name} ended with {code}, expected {' or '.join(map(str, allowed))}")
        spoken = "\n".join(w.text for w in self.workers if w is not victim)
        where = f"127.0.0.1:{self.proxy.port}" if self.proxy is not None else victim.address
        says = outcome.says.format(name=re.escape(victim.name), address=re.escape(where))
        if says and not re.search(says, spoken):
            raise Failed(f"no worker said {says!r}")
        for task in self.tasks:
            if "Traceback" in task.text:
                raise Failed(f"{task.name} shows a traceback")
        if (self.cell.fault == "network slow" or self.cell.task == "all") and "counts as dead" in self.first_ps.text:
            raise Failed("a task was taken for dead that was only slow, or paused like all")
        if self.cell.task == "all" and "has not answered" in "".join(task.text for task in self.tasks):
            raise Failed("a task was taken for lost that was paused like all")
        check_books(self.logdir, self.cell, outcome.ends)


def check_books(logdir: Path, cell: Cell, ends: bool) -> None:
    """The ledger, the versions and the checkpoints tell one story: no update is lost, none is in twice."""
    needed = parse_rule(RULES[cell.rule]).needed(cell.num_workers)
    version, accepted, keys = 0, 0, set[tuple[int, str, int]]()
    for record in read_records(logdir):
        if isinstance(record, Entry):
            key = record.worker, record.incarnation, record.local_step
            if key in keys:
                raise Failed(f"the ledger has the gradient {key} twice")
            keys.add(key)
            accepted += record.accepted
        elif record.event == "began":
            if record.version > version + accepted // needed:
                raise Failed(
                    f"the ledger knows of {version + accepted // needed} updates, yet {record.version} were restored"
                )
            version, accepted, keys = record.version, 0, set()
    made = version + accepted // needed
    infos = list_checkpoints(logdir)
    for info in infos:
        if info.problem is not None:
            raise Failed(f"{info.path.name} is damaged: {info.problem}")
        with CheckpointReader(info.path) as reader:
            for name, values in reader.state_dict().items():
                if not bool((values == info.step).all()):
                    raise Failed(f"{info.path.name}: {name} holds {values.min()} to {values.max()}")
        if info.step > max(made, version):
            raise Failed(f"{info.path.name} is of a step that the ledger does not know: {made}")
    if ends and (made != LAST_STEP or not infos or infos[-1].step != LAST_STEP):
        raise Failed(f"the ledger ends at {made}, checkpoints at {[i.step for i in infos]}, expected {LAST_STEP}")
    if ends and (left := [p.name for p in logdir.iterdir() if p.name.startswith(".")]):
        raise Failed(f"left behind: {left}")


@dataclass
class Result:
    """How a cell went."""

    cell: object
    seconds: float
    problem: str = ""


def run_cell(cell: Cell, number: int, keep: Path | None = None) -> Result:
    """Runs a cell; a failure is in the result, with the last lines of every task."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=keep))
    problem, run = "", None
    try:
        run = Run(cell, number, folder)
        run.start_all()
        run.await_moment()
        run.strike()
        run.let_end()
        run.await_end()
        run.check()
    except (Failed, OSError) as error:
        tails = [f"--- {t.name}\n" + "\n".join(t.text.splitlines()[-12:]) for t in run.tasks] if run else []
        problem = "\n".join([str(error), *(run.events if run else []), *tails])
    finally:
        if run is not None:
            run.close()
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return Result(cell, time.monotonic() - began, problem)
