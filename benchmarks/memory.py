"""What a ps holds in memory against the formula of docs/speed.md.

    python benchmarks/memory.py [--output DIR]

Starts real clusters, reads in /proc what the ps has for itself (anonymous and file pages, and the pages of the shared memory
that it made), and compares that with variables, optimizer state, averages, published versions and what is on its way.
"""

import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
from results import Floor, Result

HERE = Path(__file__).resolve().parent
BESIDES_MB = 350
STATES = {"SGD": 0, "Adam": 2, "Adagrad": 1}  # vectors of the model's size that the optimizer keeps
MB = 1e6


@dataclass(frozen=True)
class Case:
    """One run whose ps is looked at."""

    numel: int
    optimizer: str = "SGD"
    rule: str = "async"
    transport: str = "shm"
    workers: int = 2
    average: bool = False

    def vectors(self) -> dict[str, int]:
        """Returns how many vectors of the model's size a ps may hold, by what for."""
        return {
            "published versions": self.workers + 3,
            "gradients on their way": 2 * self.workers if self.transport == "tcp" else 0,
            "the mean": 1,
            "optimizer state": STATES[self.optimizer],
            "moving averages": int(self.average),
        }

    def formula_mb(self) -> float:
        """Returns the megabytes that the formula allows, besides the 350."""
        return sum(self.vectors().values()) * 4 * self.numel / MB


CASES = (
    Case(250_000),
    Case(25_000_000),
    Case(25_000_000, rule="sync"),
    Case(25_000_000, optimizer="Adam"),
    Case(25_000_000, optimizer="Adam", rule="sync", average=True),
    Case(25_000_000, transport="tcp"),
    Case(25_000_000, optimizer="Adam", transport="tcp"),
    Case(10_000_000, workers=4),
)


def held_mb(pid: int) -> dict[str, float]:
    """Returns what a process holds for itself: pages of its own, pages of files, and shared memory that it made."""
    status = Path(f"/proc/{pid}/status").read_text()
    own, files = (int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) * 1024 / MB for name in ("RssAnon", "RssFile"))
    made: dict[int, int] = {}  # by inode: a mapping has a descriptor of its own
    for place in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if re.search("memfd:torchquorum-(versions|fastpath)", str(place.readlink())):  # gradients are the workers'
                made[place.stat().st_ino] = place.stat().st_blocks * 512
        except OSError:
            continue  # closed meanwhile
    return {"own": own, "files": files, "shared": sum(made.values()) / MB}


def run(case: Case) -> dict[str, Any]:
    """Starts a cluster, waits until its workers work, and looks at its ps."""
    command = [sys.executable, "-m", "torchquorum.cli.main", "run", "--workers", str(case.workers)]
    command += ["--transport", case.transport, "memory_loop.py", str(case.numel), case.optimizer, case.rule]
    command += ["average"] if case.average else []
    task = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert task.stdout is not None
    pid, at_work, lines = 0, 0, []
    try:
        for line in task.stdout:
            lines.append(line)
            found = re.search(r"/job:ps/task:0: serving on .* \(process (\d+)\)", line)
            pid = int(found[1]) if found else pid
            at_work += "at work" in line
            if at_work == case.workers:
                break
        else:
            raise SystemExit(f"{' '.join(command)} ended early:\n{''.join(lines[-10:])}")
        held = held_mb(pid)
    finally:
        task.send_signal(signal.SIGKILL)  # the tasks die with their launcher
        task.communicate()
    total = sum(held.values())
    return {
        "mb": round(4 * case.numel / MB, 1),
        "optimizer": case.optimizer + (" and averages" if case.average else ""),
        "rule": case.rule,
        "transport": case.transport,
        "workers": case.workers,
        **{f"{name}_mb": round(value, 1) for name, value in held.items()},
        "total_mb": round(total, 1),
        "formula_mb": round(case.formula_mb(), 1),
        "besides_mb": round(total - case.formula_mb(), 1),
    }


def measure(cases: tuple[Case, ...] = CASES) -> Result:
    """Looks at every case."""
    rows = []
    for case in cases:
        rows.append(run(case))
        print(f"  {_name(rows[-1]):44} {rows[-1]['total_mb']:8,.0f} MB", flush=True)
    worst = max(rows, key=lambda row: row["besides_mb"])
    floors = [Floor(f"besides the formula ({_name(worst)})", worst["besides_mb"], BESIDES_MB, " MB", at_most=True)]
    return Result("memory", __doc__.splitlines()[0], rows, floors)


def _name(row: dict[str, Any]) -> str:
    return f"{row['mb']:.0f} MB, {row['optimizer']}, {row['rule']}, {row['transport']}, {row['workers']} workers"


def show(result: Result) -> None:
    """Prints the table."""
    head = ["a ps, in MB", "own", "files", "shared", "total", "formula", "besides"]
    keys = ("own_mb", "files_mb", "shared_mb", "total_mb", "formula_mb", "besides_mb")
    print(results.table(head, [[_name(row), *(f"{row[k]:,.0f}" for k in keys)] for row in result.rows]))
    results.say(result)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = results.parser(__doc__)
    args = parser.parse_args()
    results.report(lambda: measure(), show, args.output)


if __name__ == "__main__":
    main()
