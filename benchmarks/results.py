"""What every measurement leaves: the machine, the date and the versions beside the figures, and which floors were met.

Called by the programs of this folder; imports nothing but the standard library. A result is one JSON file,
`DATE-KIND-N-cores.json`; measuring again on the same day replaces it.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "results"
KINDS = ("speed", "bandwidth", "load", "scaling", "decisions", "startup", "memory")


@dataclass(frozen=True)
class Floor:
    """A figure that must not be undercut; `at_most` where it must not be exceeded."""

    what: str
    measured: float
    bound: float
    unit: str = ""
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether it holds."""
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound

    def line(self) -> str:
        """Returns it as a line for people."""
        word = "met   " if self.met else "MISSED"
        bound = f"{'at most' if self.at_most else 'at least'} {self.bound:,.6g}{self.unit}"
        return f"  {word}  {self.what}: {self.measured:,.4g}{self.unit}, {bound}"


@dataclass(frozen=True)
class Result:
    """What one program measured."""

    kind: str
    what: str
    rows: Sequence[dict[str, Any]]
    floors: Sequence[Floor] = ()
    notes: Sequence[str] = ()


def middle(values: Iterable[float], digits: int = 2) -> float:
    """Returns the median, rounded."""
    return round(statistics.median(values), digits)


def machine() -> dict[str, Any]:
    """Returns what the figures were measured on."""
    names = ("model name", "Model")
    cpu = [
        line.partition(":")[2].strip()
        for line in _read("/proc/cpuinfo").splitlines()
        if line.partition(":")[0].strip() in names
    ]
    memory = [line.split()[1] for line in _read("/proc/meminfo").splitlines() if line.startswith("MemTotal")]
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": cpu[0] if cpu else platform.processor(),
        "memory_gib": round(int(memory[0]) / 2**20) if memory else None,
        "system": f"{platform.system()} {platform.release()}",
        "load_before": [round(load, 1) for load in os.getloadavg()],
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def versions() -> dict[str, str]:
    """Returns what the figures were measured with."""
    found = {"python": platform.python_version()}
    for name in ("torchquorum", "torch", "cryptography", "msgspec"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def say(result: Result) -> None:
    """Prints what is to be said beside a table: notes, and the floors."""
    for note in result.notes:
        print(f"  {note}")
    for floor in result.floors:
        print(floor.line())
    print(flush=True)


def keep(result: Result, folder: Path, before: dict[str, Any]) -> Path:
    """Writes a result, whole or not at all; `before` is the machine as it was before the measurement."""
    now = datetime.datetime.now().astimezone()
    cores = before["cores"]
    body = {
        "kind": result.kind,
        "what": result.what,
        "date": now.isoformat(timespec="minutes"),
        "command": shlex.join(_without_folders(argument) for argument in sys.argv),
        "machine": before,
        "versions": versions(),
        "rows": list(result.rows),
        "floors": [{**asdict(floor), "met": floor.met} for floor in result.floors],
        "notes": list(result.notes),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{now:%Y-%m-%d}-{result.kind}-{cores}-cores.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(body, indent=1) + "\n")
    partial.replace(path)
    return path


def _without_folders(argument: str) -> str:
    """Returns an argument without the folders of this machine: /a/python is python, --output=/a/b is --output=b."""
    name, equals, value = argument.rpartition("=")
    return f"{name}{equals}{Path(value).name}" if Path(value).is_absolute() else argument


def parser(about: str | None) -> argparse.ArgumentParser:
    """Returns the parser that all programs begin with: their own text, and a folder for the result."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, help="a folder for the JSON")
    return made


def report(measure: Callable[[], Result], show: Callable[[Result], None], output: Path | None) -> None:
    """Measures, prints the table, and keeps the result where a folder was given, with the machine as it was before."""
    before = machine()
    result = measure()
    show(result)
    if output:
        print(keep(result, output, before))


def newest(kind: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """Returns the newest result of a kind, or None."""
    found = sorted(folder.glob(f"????-??-??-{kind}-*-cores.json"))
    return json.loads(found[-1].read_text()) if found else None


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
