"""Exceptions and exits of each worker's program, at each moment: exit codes, who saves, and what the ledger says.

`python -m tests.chaos` runs them after the matrix. docs/faults.md has the same table in prose. Those of ps tasks are a failing update
and signals (`tests/process/test_endings.py`), and the deaths of the matrix: a user's program does not run there.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.disks import check_ledger
from tests.ports import free_ports
from tests.process.zygote import Forked, fork_task
from torchquorum.formats.checkpoint import list_checkpoints

PROGRAM = Path(__file__).parent / "exit_program.py"
STEPS = 40
DEADLINE_S = 120.0
TASKS = ("chief", "worker")
MOMENTS = ("before the first step", "in the middle", "at the end")
RULES = ("async", "sync")
# How the program ends: its own exit code, and that of the ps task. The other worker's is 0, always.
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
    def stops(self) -> bool:
        """Whether the run ends before its last step: a signal to the chief stops it."""
        return self.task == "chief" and self.way == "SIGTERM" and self.moment != "at the end"


CELLS = [
    ExitCell(*of)
    for of in itertools.product(TASKS, WAYS, RULES, MOMENTS)
    if not (of[1] in IN_THE_LOOP and of[3] == "at the end")
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
    try:
        tasks = _start(cell, folder)
        while any(task.poll() is None for task in tasks.values()):
            assert time.monotonic() - began < DEADLINE_S, f"waited in vain for the end of {_codes(tasks)}"
            time.sleep(0.01)
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
    ports = [f"127.0.0.1:{port}" for port in free_ports(3)]
    flags = [
        f"--ps_hosts={ports[0]}",
        f"--worker_hosts={ports[1]},{ports[2]}",
        f"--rule={cell.rule}",
        f"--steps={STEPS}",
    ]
    flags += [
        f"--victim={TASKS.index(cell.task)}",
        f"--way={cell.way}",
        f"--moment={cell.moment}",
        f"--logdir={folder / 'run'}",
    ]
    made = {}
    for name, job, index in (("ps", "ps", 0), ("chief", "worker", 0), ("worker", "worker", 1)):
        argv = [str(PROGRAM), f"--job_name={job}", f"--task_index={index}", *flags]
        made[name] = fork_task(argv, folder / f"{name}.txt")
    return made


def _codes(tasks: dict[str, Forked]) -> dict[str, int | None]:
    return {name: task.poll() for name, task in tasks.items()}


def _text(folder: Path, name: str) -> str:
    return (folder / f"{name}.txt").read_text(errors="replace")


def _check(cell: ExitCell, folder: Path, codes: dict[str, int | None]) -> None:
    own, ps = WAYS[cell.way]
    other = next(name for name in TASKS if name != cell.task)
    assert codes == {"ps": ps, cell.task: own, other: 0}, codes
    newest = list_checkpoints(folder / "run")[-1].step
    if cell.stops:
        assert newest < STEPS, newest
    else:
        assert newest == STEPS, f"the newest checkpoint is of step {newest}"
    check_ledger(folder / "run", newest)
    assert "Traceback" not in _text(folder, other) + _text(folder, "ps")
    if cell.task == "chief" and cell.way in ("an exception", "os._exit(3)") and cell.moment != "at the end":
        assert "ps task 0 saves in its place" in _text(folder, "ps")
