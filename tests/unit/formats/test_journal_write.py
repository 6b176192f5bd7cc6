"""Writing the journal: in pieces, by others while the file is lent, and in another file where somebody may still write."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchquorum.formats.crc32c import crc32c, crc32c_pieces
from torchquorum.formats.journal import Head, JournalError, Record, find_lineage, read_file, replay_lineage
from torchquorum.formats.journal_write import MOST_PIECES, JournalWriter, encode_record, write_record

HEAD = Head(0, 1, 7, 0, 0, 1, {})


def lent(journal: JournalWriter, version: int, at: int, payload: bytes = b"by a worker") -> int:
    """Appends as a worker does, in two pieces; returns where the record ends."""
    fd = os.open(journal.path, os.O_WRONLY)
    try:
        pieces = [payload[:3], np.frombuffer(payload[3:], np.uint8)]
        return write_record(
            fd, at, encode_record(Record(version, [], [(0, 5, version)])), pieces, crc32c_pieces(pieces)
        )
    finally:
        os.close(fd)


def found(folder: Path, step: int = 0) -> list[tuple[int, bytes]]:
    line = find_lineage(folder, 0, 1, 7, step)
    return [(r.version, bytes(p)) for r, p in replay_lineage(line, step, line.version)]


def test_a_checksum_of_pieces_is_that_of_the_whole() -> None:
    assert crc32c_pieces([b"ab", np.frombuffer(b"cde", np.uint8), b""]) == crc32c(b"abcde")


def test_a_record_in_many_pieces_is_read_as_one(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, HEAD, "write")
    fd, at = journal.lend()
    pieces = [bytes([k % 251]) for k in range(2 * MOST_PIECES + 3)]
    end = write_record(fd, at, encode_record(Record(1, [], [])), pieces, crc32c_pieces(pieces))
    assert end == os.fstat(fd).st_size
    journal.close()
    assert [(r.version, bytes(p)) for r, p in read_file(journal.path)] == [(1, b"".join(pieces))]


def test_a_write_that_is_cut_short_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, pwritev = JournalWriter(tmp_path, HEAD, "write"), os.pwritev
    _, at = journal.lend()
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, at: pwritev(fd, [b"".join(map(bytes, pieces))[:5]], at))
    lent(journal, 1, at)
    journal.close()
    assert found(tmp_path) == [(1, b"by a worker")]


def test_workers_and_the_ps_append_in_turns(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, HEAD, "write")
    journal.append(Record(1, [], []), b"by the ps")
    _, end = journal.lend()
    with pytest.raises(AssertionError, match="workers write the journal"):
        journal.append(Record(2, [], []), b"")
    end = lent(journal, 3, lent(journal, 2, end))
    journal.take_back(end, 3, settled=True)
    journal.append(Record(4, [], []), b"by the ps")
    journal.close()
    assert [version for version, _ in found(tmp_path)] == [1, 2, 3, 4]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("late", [False, True])
def test_what_a_worker_writes_that_lost_its_turn_is_not_read(tmp_path: Path, late: bool) -> None:
    journal = JournalWriter(tmp_path, HEAD, "write")
    first = journal.path
    _, end = journal.lend()
    end = lent(journal, 1, end)
    frozen = os.open(first, os.O_WRONLY)
    if not late:
        lent(journal, 2, end, b"never published")
    journal.take_back(end, 1, settled=False)
    journal.append(Record(2, [], []), b"this counts")
    if late:
        pieces = [b"never published"]
        write_record(frozen, end, encode_record(Record(2, [], [])), pieces, crc32c_pieces(pieces))
    os.close(frozen)
    assert found(tmp_path) == [(1, b"by a worker"), (2, b"this counts")]
    journal.append(Record(3, [], []), b"and this")
    journal.close()
    assert journal.path != first and [v for v, _ in found(tmp_path)] == [1, 2, 3]
    assert find_lineage(tmp_path, 0, 1, 7, 0).damage == []


def test_a_file_without_an_update_that_counts_makes_room_for_another_of_its_name(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, HEAD, "write")
    frozen = os.open(journal.path, os.O_WRONLY)
    _, end = journal.lend()
    journal.take_back(end, 0, settled=False)
    assert os.fstat(frozen).st_nlink == 0, "its name is another file's now"
    os.pwrite(frozen, b"nonsense", end)
    os.close(frozen)
    journal.append(Record(1, [], []), b"one")
    journal.close()
    assert found(tmp_path) == [(1, b"one")]


def test_what_workers_have_appended_is_on_disk_before_others_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, waits = JournalWriter(tmp_path, HEAD, "fsync"), list[int]()
    monkeypatch.setattr(os, "fdatasync", waits.append)
    _, end = journal.lend()
    assert not journal.uncommitted
    journal.note_foreign()
    journal.commit()
    journal.take_back(lent(journal, 1, end), 1, settled=False)
    assert len(waits) == 3, "the commit, the file that is left, the head of the new one"
    journal.close()


def test_a_journal_that_cannot_be_begun_again_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = JournalWriter(tmp_path, HEAD, "write")
    _, end = journal.lend()
    end = lent(journal, 1, end)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(JournalError, match="the disk is full"):
        journal.take_back(end, 1, settled=False)
    monkeypatch.undo()
    assert found(tmp_path) == [(1, b"by a worker")]
