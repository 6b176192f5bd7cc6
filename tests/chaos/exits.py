"""Exceptions and exits of each task's program, at each moment: exit codes, who saves, and what the ledger says.

`python -m tests.chaos` runs them after the matrix. docs/faults.md has the same table in prose. A ps's program is inside `tq.join()`: it
ends before that by an exception, inside by a signal, by an update that fails, or by a thread of the user's.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.disks import check_ledger
from tests.ports import free_ports
from tests.process.zygote import Forked, fork_task
from torchquorum.formats.checkpoint import list_checkpoints

PROGRAM = Path(__file__).parent / "exit_program.py"
STEPS = 40
START_S = 6.0  # for how long workers wait for a ps that does not come back
DEADLINE_S = 120.0
TASKS = {"chief": "worker/0", "worker": "worker/1"}
PS_TASKS = {"ps": "ps/0", "second ps": "ps/1"}
MOMENTS = ("before the first step", "in the middle", "at the end")
RULES = ("async", "sync")
# How a worker's program ends: its own exit code, and that of the ps task. The other worker's is 0, always.
WAYS: dict[str, tuple[int, int]] = {
    "an exception": (1, 1),
    "a hook": (1, 1),
    "a DataLoader": (1, 1),
    "a KeyboardInterrupt of its own": (-2, 1),
    "sys.exit(3)": (3, 1),
    "sys.exit()": (0, 0),
    "os._exit(3)": (3, 0),  # nothing tells it from a kill
    "SIGTERM": (130, 0),
}
IN_THE_LOOP = ("a hook", "a DataLoader")
# How a ps's program ends, and its own exit code.
PS_WAYS = {
    "an exception": 1,
    "an update that fails": 1,
    "os._exit(3)": 3,
    "SIGTERM": 130,
    "Ctrl-C": 130,
    "Ctrl-C twice": 130,
}
# What a run does that a ps has left: it is stopped and saved, or ended without it by all, in good order.
STOPS_THE_RUN = ("SIGTERM", "Ctrl-C")


@dataclass(frozen=True)
class ExitCell:
    """One case."""

    task: str
    way: str
    rule: str
    moment: str

    def __str__(self) -> str:
        return f"exit, {self.task}, {self.way}, {self.rule}, {self.moment}"

    @property
    def of_ps(self) -> bool:
        """Whether a ps meets it."""
        return self.task in PS_TASKS

    @property
    def num_ps(self) -> int:
        """Returns how many ps tasks there are: two where one of them meets it."""
        return 2 if self.of_ps else 1

    @property
    def stops(self) -> bool:
        """Whether the run ends before its last step: a signal to the chief, or to ps task 0, stops it."""
        who = (self.task == "chief" and self.way == "SIGTERM") or (self.task == "ps" and self.way in STOPS_THE_RUN)
        return who and self.moment != "at the end"

    @property
    def codes(self) -> dict[str, tuple[int, ...]]:
        """Returns which exit codes each task may have."""
        if not self.of_ps:
            own, ps = WAYS[self.way]
            other = next(name for name in TASKS if name != self.task)
            return {"ps": (ps,), self.task: (own,), other: (0,)}
        other = next(name for name in PS_TASKS if name != self.task)
        own = (PS_WAYS[self.way],)
        if self.task == "ps" and self.way in STOPS_THE_RUN:
            return {self.task: own, other: (0,), "chief": (0,), "worker": (0,)}
        at_the_end = self.moment == "at the end" and self.way != "an update that fails"
        return {self.task: own, other: (1,), "chief": (1,), "worker": (0, 1) if at_the_end else (1,)}

    @property
    def saves(self) -> bool:
        """Whether what was made is saved."""
        return not self.of_ps or (self.task == "ps" and self.way in STOPS_THE_RUN)


CELLS = [
    ExitCell(*of)
    for of in itertools.product(TASKS, WAYS, RULES, MOMENTS)
    if not (of[1] in IN_THE_LOOP and of[3] == "at the end")
]
CELLS += [
    ExitCell(task, way, RULES[(w + m) % 2], moment)
    for (task, (w, way), (m, moment)) in itertools.product(PS_TASKS, enumerate(PS_WAYS), enumerate(MOMENTS))
    if not (way == "an exception" and m > 0) and not (way == "an update that fails" and task != "ps")
]


@dataclass
class ExitResult:
    """How a cell went."""

    cell: ExitCell
    seconds: float
    problem: str = ""


def run_exit_cell(cell: ExitCell, keep: Path | None = None) -> ExitResult:
    """Runs a cell; a failure is in the result."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=keep))
    problem, tasks = "", dict[str, Forked]()

    def wait(what: str, happened: Callable[[], bool]) -> None:
        while not happened():
            assert time.monotonic() - began < DEADLINE_S, f"waited in vain for {what}: {_codes(tasks)}"
            time.sleep(0.01)

    try:
        tasks = _start(cell, folder)
        if cell.of_ps and cell.way not in ("an exception", "an update that fails"):
            wait("the moment", lambda: all("at the gate" in _text(folder, name) for name in TASKS))
            (folder / "strike").touch()
            victim = tasks[cell.task]
            if cell.way not in STOPS_THE_RUN:
                wait("its end", lambda: victim.poll() is not None)
        (folder / "go").touch()
        wait("the end", lambda: all(task.poll() is not None for task in tasks.values()))
        _check(cell, folder, _codes(tasks))
    except (AssertionError, OSError) as error:
        texts = [f"--- {name}\n{_text(folder, name)[-1500:]}" for name in tasks]
        problem = "\n".join([f"{type(error).__name__}: {error}", *texts])
    finally:
        for task in tasks.values():
            task.kill()
            task.wait(60)
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return ExitResult(cell, time.monotonic() - began, problem)


def _start(cell: ExitCell, folder: Path) -> dict[str, Forked]:
    ports = [f"127.0.0.1:{port}" for port in free_ports(cell.num_ps + 2)]
    victims = {**TASKS, **PS_TASKS}
    flags = [
        f"--ps_hosts={','.join(ports[:-2])}",
        f"--worker_hosts={','.join(ports[-2:])}",
        f"--rule={cell.rule}",
        f"--steps={STEPS}",
        f"--victim={victims[cell.task]}",
        f"--way={cell.way}",
        f"--moment={cell.moment}",
        f"--logdir={folder / 'run'}",
        f"--gates={folder}",
    ]
    flags += [f"--start={START_S}"] if cell.of_ps and not cell.saves else []
    made = {}
    for name in [*list(PS_TASKS)[: cell.num_ps], *TASKS]:
        job, index = victims[name].split("/")
        argv = [str(PROGRAM), f"--job_name={job}", f"--task_index={index}", *flags]
        made[name] = fork_task(argv, folder / f"{name}.txt")
    return made


def _codes(tasks: dict[str, Forked]) -> dict[str, int | None]:
    return {name: task.poll() for name, task in tasks.items()}


def _text(folder: Path, name: str) -> str:
    path = folder / f"{name}.txt"
    return path.read_text(errors="replace") if path.exists() else ""


def _check(cell: ExitCell, folder: Path, codes: dict[str, int | None]) -> None:
    wrong = {name: code for name, code in codes.items() if code not in cell.codes[name]}
    assert not wrong, f"{codes}, expected {cell.codes}"
    others = "".join(_text(folder, name) for name in codes if name != cell.task)
    assert cell.way == "an update that fails" or "Traceback" not in others, "another task shows a traceback"
    newest = max((info.step for info in list_checkpoints(folder / "run")), default=0)
    if cell.stops:
        assert newest < STEPS, newest
    elif cell.saves:
        assert newest == STEPS, f"the newest checkpoint is of step {newest}"
    if cell.saves:
        check_ledger(folder / "run", newest)
    if cell.task == "chief" and cell.way in ("an exception", "os._exit(3)") and cell.moment != "at the end":
        assert "ps task 0 saves in its place" in _text(folder, "ps")
