"""Faults of what a run writes to: disks that fill and free, folders removed, files damaged in the middle, bits that flip.

`python -m tests.chaos` runs them after the matrix, `tests/chaos/test_disks.py` some of them. Each is a run of real processes (two
workers, one or two ps tasks) with the fault, and what has to be true after it. The disks are small file systems in memory, which
needs root.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.process.forked import Cluster
from torchquorum.formats.checkpoint import list_checkpoints, newest_good
from torchquorum.formats.journal import SUFFIX
from torchquorum.formats.ledger import Entry, Event, read_records
from torchquorum.report.history import read_history

PS, CHIEF = ("ps", 0), ("worker", 0)


@contextmanager
def disk(folder: Path, size: str = "4m") -> Iterator[Path]:
    """A file system of its own."""
    mount = folder / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount)], timeout=60, check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], timeout=60, check=True)


def can_mount() -> bool:
    """Whether this machine lets us make file systems."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with disk(Path(folder)):
                return True
        except (OSError, subprocess.SubprocessError):
            return False


@contextmanager
def cluster(folder: Path, ps: int, *options: str, logdir: Path | None = None) -> Iterator[Cluster]:
    """Tasks that are killed at the end, whatever has happened."""
    made = Cluster(folder, ps, *options, logdir=logdir)
    try:
        yield made
    finally:
        made.close()


def finish(run: Cluster, *codes: int) -> None:
    """Waits for the end of all tasks, and checks how they ended."""
    run.wait("the end", run.ended)
    texts = "\n".join(f"--- {task}\n{run.text(task)[-1500:]}" for task in run.lives)
    assert run.codes() == list(codes), f"{run.codes()}\n{texts}"
    assert "Traceback" not in texts, texts


def known_updates(logdir: Path) -> list[int]:
    """Every update that the ledger knows since its run last began, singly or in a gap, without repetition."""
    found = set[int]()
    for record in read_records(logdir):
        if isinstance(record, Entry):
            found |= {record.met + 1} if record.accepted else set()
        elif isinstance(record, Event) and record.event == "gap" and record.values["updates"]:
            found |= set(range(int(record.values["first"]), int(record.values["last"]) + 1))
        elif record.event == "began":
            found = {v for v in found if v <= record.version}
    return sorted(found)


def check_ledger(logdir: Path, last_step: int) -> None:
    """The ledger knows every update, and the report agrees."""
    assert known_updates(logdir) == list(range(1, last_step + 1)), known_updates(logdir)
    said = " ".join(read_history(logdir).missing)
    assert "in no line" not in said and "before model.ckpt" not in said, said


def fill(mount: Path) -> Path:
    """Takes all that is left of a disk."""
    ballast = mount / "ballast"
    with ballast.open("wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return ballast


def flip_byte(path: Path, at: int) -> None:
    """Damages one byte of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 0x10]))


def killed_run(folder: Path, ps: int, *options: str, at: int = 40) -> tuple[Cluster, int]:
    """A run whose tasks were all killed; returns it, and the version that its workers were told of."""
    with cluster(folder, ps, "--steps=4000", *options) as run:
        run.wait("progress", lambda: run.told() >= at)
        run.kill(*run.lives)
    return run, run.told()


# -- the cells --------------------------------------------------------------------------------------------------------


def a_disk_that_fills_and_frees(folder: Path) -> None:
    """The ledger and the checkpoints come back, and the ledger knows every update."""
    with (
        disk(folder) as mount,
        cluster(folder / "a", 1, "--steps=600", "--pause=0.002", "--save-steps=150", logdir=mount / "run") as run,
    ):
        run.wait("progress", lambda: run.told() > 40)
        ballast = fill(mount)
        run.wait(
            "a word about it", lambda: "the ledger" in run.text(PS) and "cannot be written (No space" in run.text(PS)
        )
        told = run.told()
        run.wait("training that goes on", lambda: run.told() > told + 250)
        ballast.unlink()
        run.wait("the ledger's return", lambda: "can be written again" in run.text(PS))
        finish(run, 0, 0, 0)
        assert run.text(PS).count("cannot be written (No space") == 1
        check_ledger(mount / "run", 600)
        assert list_checkpoints(mount / "run")[-1].step == 600


def a_durable_run_on_a_disk_that_fills(folder: Path) -> None:
    """It ends with an error, and goes on from what was told when there is room."""
    with disk(folder, "2m") as mount:
        options = ("--steps=300", "--save-steps=1000", "--durable=write", "--start=5")
        with cluster(folder / "a", 1, *options, logdir=mount / "run") as run:
            run.wait("progress", lambda: run.told() > 20)
            ballast = fill(mount)
            run.wait("the end", run.ended)
            assert run.codes()[0] == 1 and "the disk is full" in run.text(PS)
        ballast.unlink()
        with cluster(folder / "b", 1, *options, logdir=mount / "run") as again:
            subprocess.run(["mount", "-o", "remount,size=40m", str(mount)], timeout=60, check=True)
            finish(again, 0, 0, 0)
            started = re.search(r"started at (\d+) ", again.text(CHIEF))
            assert started and int(started[1]) >= run.told()


def a_folder_that_is_removed(folder: Path) -> None:
    """The run says so within a minute, makes it again, and its ledger counts what was in it."""
    with cluster(folder / "a", 1, "--steps=900", "--pause=0.01", "--save-steps=300") as run:
        run.wait("progress", lambda: run.told() > 50)
        at = time.monotonic()
        shutil.rmtree(run.logdir)
        run.wait("a word about it", lambda: "was removed while the run goes on" in run.text(PS))
        assert time.monotonic() - at < 60
        finish(run, 0, 0, 0)
        check_ledger(run.logdir, 900)
        assert list_checkpoints(run.logdir)[-1].step == 900


def a_durable_run_whose_folder_is_removed(folder: Path) -> None:
    """It says so, saves at once, and is durable again: a ps that is killed then costs nothing."""
    with cluster(folder / "a", 1, "--steps=900", "--pause=0.01", "--save-steps=5000", "--durable=write") as run:
        run.wait("progress", lambda: run.told() > 50)
        shutil.rmtree(run.logdir)
        run.wait("a new checkpoint", lambda: "was removed" in run.text(PS) and list_checkpoints(run.logdir))
        told = run.told()
        run.wait("progress", lambda: run.told() > told + 50)
        run.kill(PS)
        told = run.told()
        run.start(PS)
        run.wait("the run to go on", lambda: re.search(r"going on at global step (\d+)", run.text(CHIEF)))
        back = re.search(r"going on at global step (\d+)", run.text(CHIEF))
        assert back and int(back[1]) >= told
        finish(run, 0, 0, 0)


def a_folder_made_again_under_a_living_run(folder: Path) -> None:
    """No second run gets in, neither with other ps tasks in the same folder nor at the same addresses."""
    with cluster(folder / "a", 1, "--steps=1300", "--pause=0.01", "--save-steps=5000") as run:
        run.wait("progress", lambda: run.told() > 30)
        shutil.rmtree(run.logdir)
        run.logdir.mkdir()
        beside = [run.start_beside(task) for task in (PS, *run.workers)]
        with cluster(folder / "b", 1, "--steps=50", "--start=5", logdir=run.logdir) as second:
            second.wait("its chief's end", lambda: second.lives[CHIEF].poll() is not None)
            assert second.lives[CHIEF].poll() == 1 and "another run that is alive writes there" in second.text(CHIEF)
        run.wait("the end of the second tasks", lambda: all(life.poll() is not None for life, _ in beside))
        texts = [path.read_text() for _, path in beside]
        assert [life.poll() for life, _ in beside] == [1, 1, 1], texts
        assert "the port is in use" in texts[0], texts
        assert all("another process is at work as" in text for text in texts[1:]), texts
        finish(run, 0, 0, 0)


def a_journal_damaged_in_the_middle(folder: Path, ps: int = 1) -> None:
    """An error with the number of updates that are missing; `accept_loss` goes on without them, and keeps the file."""
    run, told = killed_run(folder / "a", ps, "--durable=write", "--save-steps=5000")
    path = next(run.logdir.glob(f"shard-{ps - 1:05d}*{SUFFIX}"))
    flip_byte(path, path.stat().st_size // 2)
    options = ("--durable=write", f"--steps={told + 20}", "--save-steps=5000", "--start=5")
    with cluster(folder / "b", ps, *options, logdir=run.logdir) as refused:
        refused.wait("the chief's end", lambda: refused.lives[CHIEF].poll() is not None)
        text = refused.text(CHIEF)
        found = re.search(
            r"told of global step (\d+), and the folder leads to (\d+): (\d+)( to \d+)? updates are missing", text
        )
        assert refused.lives[CHIEF].poll() == 1 and found and "accept_loss=True" in text, text
        assert told - 1 <= int(found[1]) <= told + 1 and int(found[1]) - int(found[2]) == int(found[3]) > 5
    with cluster(folder / "c", ps, *options, "--accept-loss", logdir=run.logdir) as accepted:
        finish(accepted, *[0] * (ps + 2))
        assert f"started at {found[2]} " in accepted.text(CHIEF)
    assert list(run.logdir.glob("*.damaged")) and list_checkpoints(run.logdir)[-1].step == told + 20


def a_journal_of_a_second_ps_damaged_in_the_middle(folder: Path) -> None:
    """The same, told by the journal of the first."""
    a_journal_damaged_in_the_middle(folder, ps=2)


def checkpoints_with_flipped_bits(folder: Path) -> None:
    """That all are damaged is an error; `start_afresh` begins again and keeps them."""
    with cluster(folder / "a", 1, "--steps=30", "--save-steps=10") as run:
        finish(run, 0, 0, 0)
    draw = random.Random(4)
    infos = list_checkpoints(run.logdir)
    for number, info in enumerate(infos):
        file = next(Path(str(info.path)).glob("part-*" if number % 2 else "manifest.json"))
        flip_byte(file, draw.randrange(file.stat().st_size // 2, file.stat().st_size))
    with cluster(folder / "b", 1, "--steps=20", "--start=5", logdir=run.logdir) as refused:
        refused.wait("the chief's end", lambda: refused.lives[CHIEF].poll() is not None)
        assert refused.lives[CHIEF].poll() == 1
        assert f"all {len(infos)} checkpoints are damaged" in refused.text(
            CHIEF
        ) and "start_afresh=True" in refused.text(CHIEF)
    assert [info.step for info in list_checkpoints(run.logdir)] == [info.step for info in infos]
    with cluster(folder / "c", 1, "--steps=20", "--afresh", logdir=run.logdir) as afresh:
        finish(afresh, 0, 0, 0)
    found, skipped = newest_good(run.logdir)
    assert found is not None and found[1].step == 20 and skipped == []
    assert len(list(run.logdir.glob("*.damaged"))) == len(infos)


def a_ledger_with_flipped_bits(folder: Path) -> None:
    """Training does not mind; the report says which line is damaged and which update is in no line."""
    run, _ = killed_run(folder / "a", 1, "--save-steps=1000")
    path = run.logdir / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if b'"met":20,' in line)
    for number in (at, at + 1):  # both gradients of the round
        flip_byte(path, sum(map(len, lines[:number])) + 2)
    said = " ".join(read_history(run.logdir).missing)
    assert f"2 lines, the first is line {at + 1}" in said and "1 updates are in no line of ledger.jsonl" in said, said


CELLS: dict[str, Callable[[Path], None]] = {
    made.__name__.replace("_", " "): made
    for made in (
        a_disk_that_fills_and_frees,
        a_durable_run_on_a_disk_that_fills,
        a_folder_that_is_removed,
        a_durable_run_whose_folder_is_removed,
        a_folder_made_again_under_a_living_run,
        a_journal_damaged_in_the_middle,
        a_journal_of_a_second_ps_damaged_in_the_middle,
        checkpoints_with_flipped_bits,
        a_ledger_with_flipped_bits,
    )
}
NEED_MOUNTS = ("a disk that fills and frees", "a durable run on a disk that fills")


@dataclass
class DiskResult:
    """How a cell went."""

    name: str
    seconds: float
    problem: str = ""


def run_disk_cell(name: str, keep: Path | None = None) -> DiskResult:
    """Runs a cell; a failure is in the result."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=keep))
    problem = ""
    try:
        CELLS[name](folder)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return DiskResult(name, time.monotonic() - began, problem)
