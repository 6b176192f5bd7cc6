"""The ledger while its disk is full, its file is removed or cut, and its store is away: it goes on, and counts what it missed."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.manual_clock import ManualClock
from tests.unit.formats.test_ledger import entry
from torchquorum.formats import ledger_segments
from torchquorum.formats.in_use import user_of
from torchquorum.formats.ledger import NAME, Entry, Event, read_ledger, read_records
from torchquorum.formats.ledger_segments import fetch_run
from torchquorum.formats.ledger_write import KEPT_BYTES, LOOK_EVERY_S, LedgerWriter, remove_torn_line, sync_ledger
from torchquorum.formats.storage import RemotePath, locate


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond a size: the kernel writes a part of what is too much, as a disk does that fills."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def updates(folder: Path) -> list[int]:
    """The updates that a ledger knows, singly or in a gap, in order."""
    found: list[int] = []
    for record in read_records(folder):
        if isinstance(record, Entry) and record.accepted:
            found.append(record.met + 1)
        elif isinstance(record, Event) and record.event == "gap" and record.values["updates"]:
            found += range(int(record.values["first"]), int(record.values["last"]) + 1)
    return found


def wait_until(happened: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        meanwhile()
        time.sleep(0.001)


def gaps(folder: Path) -> list[Event]:
    return [r for r in read_records(folder) if isinstance(r, Event) and r.event == "gap"]


def began(version: int = 0) -> Event:
    return Event("began", 1.0, version, values={"rule": "Sync()"})


@pytest.mark.parametrize("lines", [20, 2000])
def test_a_ledger_goes_on_when_there_is_space_again_and_knows_every_update(tmp_path: Path, lines: int) -> None:
    said: list[str] = []
    clock = ManualClock()
    writer = LedgerWriter(tmp_path, said.append, clock)
    writer.write(began())
    for step in range(20):
        writer.write(entry(step))
    writer.flush()
    with full_disk((tmp_path / NAME).stat().st_size + 300):
        for step in range(20, 20 + lines):
            writer.write(entry(step))
            writer.write(entry(step, accepted=False, reason="stale"))
            clock.advance(0.1)
            writer.flush()
        assert (tmp_path / NAME).read_bytes().endswith(b"\n")  # no part of a line stays
    clock.advance(2.0)
    writer.write(entry(20 + lines))
    writer.flush()
    writer.write(entry(21 + lines))
    writer.close()
    assert updates(tmp_path) == list(range(1, 23 + lines))
    if lines == 20:
        assert gaps(tmp_path) == []  # they were kept
    else:
        (gap,) = gaps(tmp_path)
        single = len(list(read_ledger(tmp_path)))
        assert gap.values["gradients"] == 20 + 2 * lines + 2 - single > 0
        assert gap.values["last"] == gap.version == 21 + lines and "File too large" in gap.text
    # Once, then every minute, then that it is over.
    troubles = [line for line in said if "cannot be written (File too large); training goes on" in line]
    assert len(troubles) == 1 + int(lines * 0.1 // 60)
    assert "can be written again" in said[-1]


def test_a_ledger_that_stays_unwritable_says_at_the_end_what_is_missing(tmp_path: Path) -> None:
    said: list[str] = []
    writer = LedgerWriter(tmp_path, said.append, ManualClock())
    with full_disk(10):
        writer.write(entry(1))
        assert said == []
        writer.sync()
        writer.close()
    assert len(said) == 2 and "cannot be written (File too large)" in said[0] and "without its last 1 lines" in said[1]
    writer.write(entry(2))
    for ending in (writer.sync, writer.flush, writer.check, writer.close):
        ending()  # nothing more is written or said
    assert len(said) == 2 and list(read_ledger(tmp_path)) == []


def test_a_folder_that_cannot_be_made_at_the_start_has_its_ledger_later(tmp_path: Path) -> None:
    said: list[str] = []
    clock = ManualClock()
    (tmp_path / "run").write_text("a file stands where the folder shall be")
    writer = LedgerWriter(tmp_path / "run", said.append, clock)
    writer.write(began())
    writer.write(entry(0))
    writer.flush()
    assert len(said) == 1 and "cannot be written (File exists)" in said[0]
    (tmp_path / "run").unlink()
    clock.advance(1.5)
    writer.flush()
    assert updates(tmp_path / "run") == [1] and "can be written again" in said[1]
    writer.close()


@pytest.mark.parametrize("how", ["folder removed", "folder made again", "file removed", "file replaced", "file cut"])
def test_a_ledger_that_is_removed_or_cut_is_begun_again_with_a_gap(tmp_path: Path, how: str) -> None:
    said: list[str] = []
    clock = ManualClock()
    folder = tmp_path / "run"
    writer = LedgerWriter(folder, said.append, clock)
    writer.write(began())
    for step in range(10):
        writer.write(entry(step))
    writer.flush()
    match how:
        case "folder removed" | "folder made again":
            shutil.rmtree(folder)
            if how == "folder made again":
                folder.mkdir()
        case "file removed":
            (folder / NAME).unlink()
        case "file replaced":
            (folder / "other").write_bytes(b"")
            (folder / "other").replace(folder / NAME)
        case _:
            os.truncate(folder / NAME, (folder / NAME).stat().st_size // 2)
    writer.write(entry(10))
    clock.advance(LOOK_EVERY_S)
    writer.flush()
    assert len(said) == 1 and str(folder / NAME) in said[0] and "while the run goes on" in said[0]
    writer.write(entry(11))
    writer.close()
    first, *_ = read_records(folder)
    assert isinstance(first, Event) and first.event == "began" and first.values == {"rule": "Sync()"}
    (gap,) = [g for g in gaps(folder) if g.values["updates"]]
    assert gap.values["last"] == 10 and updates(folder) == list(range(1, 13))


def test_the_check_before_a_checkpoint_does_not_wait_for_the_next_look(tmp_path: Path) -> None:
    said: list[str] = []
    writer = LedgerWriter(tmp_path, said.append, ManualClock())
    writer.write(began())
    writer.write(entry(0))
    writer.flush()
    (tmp_path / NAME).unlink()
    writer.write(entry(1))
    writer.flush()
    assert not (tmp_path / NAME).exists()
    writer.check()
    assert updates(tmp_path) == [1, 2] and "was removed" in said[0]
    writer.close()


@pytest.mark.parametrize("known", [None, 0, 3])
def test_a_run_that_goes_on_beyond_its_ledger_says_how_far(tmp_path: Path, known: int | None) -> None:
    if known is not None:
        writer = LedgerWriter(tmp_path, pytest.fail)
        writer.write(began())
        for step in range(known):
            writer.write(entry(step))
        writer.close()
    writer = LedgerWriter(tmp_path, pytest.fail)
    writer.write(began(7))
    writer.close()
    (gap,) = gaps(tmp_path)
    assert (gap.values["first"], gap.values["last"], gap.version) == ((known or 0) + 1, 7, 7)
    writer = LedgerWriter(tmp_path, pytest.fail)
    writer.write(began(5))  # rolled back: the ledger knows more
    writer.close()
    assert gaps(tmp_path) == [gap]


@pytest.mark.parametrize("torn", [b"{", b"y" * 200_000])
def test_a_torn_line_is_removed_and_its_size_noted(tmp_path: Path, torn: bytes) -> None:
    writer = LedgerWriter(tmp_path, pytest.fail)
    writer.write(entry(0))
    writer.close()
    with (tmp_path / NAME).open("ab") as file:
        file.write(torn)
    numbers: list[int] = []
    assert len(list(read_records(tmp_path, torn=numbers.append))) == 1 and numbers == [2]
    writer = LedgerWriter(tmp_path, pytest.fail)
    writer.write(entry(1))
    writer.close()
    assert len(list(read_ledger(tmp_path))) == 2
    (gap,) = gaps(tmp_path)
    assert gap.values["torn_bytes"] == len(torn) and gap.values["updates"] == 0
    assert remove_torn_line(tmp_path / NAME) == remove_torn_line(tmp_path / "nothing") == 0


def test_what_was_synced_is_on_disk_before_the_ledger_is_closed(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path, pytest.fail)
    writer.write(entry(1))
    writer.sync()
    assert list(read_ledger(tmp_path)) == [entry(1)]
    writer.close()
    sync_ledger(tmp_path)
    sync_ledger(tmp_path / "nowhere")  # a run without a ledger goes on


def test_a_disk_that_cannot_be_waited_for_is_said(tmp_path: Path) -> None:
    (tmp_path / NAME).symlink_to("/dev/null")  # which takes lines, and cannot be synced
    said: list[str] = []
    writer = LedgerWriter(tmp_path, said.append, ManualClock())
    writer.write(entry(1))
    writer.sync()
    assert len(said) == 1 and "cannot be written (Invalid argument)" in said[0]
    writer.close()


HOLDS = (
    "import sys; from pathlib import Path; from torchquorum.formats.ledger_write import LedgerWriter; "
    "held = LedgerWriter(Path(sys.argv[1])); print('held', flush=True); sys.stdin.readline()"
)


def test_the_folder_stays_in_use_when_it_is_removed_and_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        shutil.rmtree(folder)
        removed = user_of(folder)
        folder.mkdir()
        made_again = user_of(folder)
        other.kill()
    assert removed == made_again == f"process {other.pid}"
    assert user_of(folder) is None


class TestOnAnObjectStore:
    def test_a_store_that_comes_back_has_every_line(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.run(monkeypatch, tmp_path, lines=50)
        assert gaps(tmp_path) == []

    def test_what_does_not_fit_while_it_is_away_is_a_gap(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(ledger_segments, "MOST_BYTES", 4096)
        self.run(monkeypatch, tmp_path, lines=KEPT_BYTES // 50)
        (gap,) = gaps(tmp_path)
        assert gap.values["gradients"] > 0 and "away" in gap.text

    @staticmethod
    def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: int) -> None:
        folder = locate(f"memory://ledger-{tmp_path.name}-{lines}")
        assert isinstance(folder, RemotePath)
        puts: list[bool] = []
        put = RemotePath.write_bytes

        def away(self: RemotePath, data: bytes) -> int:
            puts.append(False)
            raise OSError(errno.EIO, "away")

        monkeypatch.setattr(ledger_segments, "PUT_EVERY_S", 0.002)
        said: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(RemotePath, "write_bytes", away)
            writer = LedgerWriter(folder, said.append)
            writer.write(began())
            writer.flush()
            wait_until(lambda: bool(puts))
            for step in range(lines):
                writer.write(entry(step))
                writer.check()
            assert "cannot be written (away); training goes on" in said[0]
        monkeypatch.setattr(RemotePath, "write_bytes", put)
        writer.write(entry(lines))
        wait_until(lambda: "can be written again" in said[-1], writer.check)
        writer.close()
        fetch_run(folder, tmp_path, (NAME,))
        assert updates(tmp_path) == list(range(1, lines + 2))
        again = LedgerWriter(folder, pytest.fail)
        again.write(began(lines + 1))  # no gap: what is there is known
        again.close()
