"""The ledger on disk, also after a run that was killed."""

import resource
from pathlib import Path

import pytest

from torchquorum.formats.ledger import NAME, Entry, LedgerWriter, read_ledger


def entry(step: int, **changes: object) -> Entry:
    given: dict = {
        "worker": 0,
        "incarnation": "00ff",
        "local_step": step,
        "version": step - 1,
        "met": step,
        "staleness": 1,
        "accepted": True,
        "reason": "within bound",
        "arrived_at": 1234.5,
    }
    return Entry(**{**given, **changes})


def write(folder: Path, *entries: Entry) -> None:
    writer = LedgerWriter(folder)
    for one in entries:
        writer.write(one)
    writer.close()


def test_what_was_written_is_read_from_the_file_or_its_folder(tmp_path: Path) -> None:
    entries = [entry(1), entry(2, accepted=False, reason="stale", loss=0.5), entry(3, loss=1e-9)]
    write(tmp_path / "run", *entries)
    assert list(read_ledger(tmp_path / "run")) == list(read_ledger(tmp_path / "run" / NAME)) == entries


def test_flushed_entries_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path)
    writer.write(entry(1))
    assert list(read_ledger(tmp_path)) == []
    writer.flush()
    assert list(read_ledger(tmp_path)) == [entry(1)]
    writer.close()


def test_a_second_run_in_the_same_folder_is_appended(tmp_path: Path) -> None:
    write(tmp_path, entry(1))
    write(tmp_path, entry(2))
    assert list(read_ledger(tmp_path)) == [entry(1), entry(2)]


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_torn_last_line_is_skipped(tmp_path: Path, cut: int) -> None:
    write(tmp_path, entry(1), entry(2))
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-cut])
    assert list(read_ledger(tmp_path)) == [entry(1)]


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_torn_last_line_does_not_spoil_the_first_line_of_the_next_run(tmp_path: Path, cut: int) -> None:
    write(tmp_path, entry(1), entry(2))
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-cut])
    write(tmp_path, entry(3))
    assert list(read_ledger(tmp_path)) == [entry(1), entry(3)]


@pytest.mark.parametrize("torn", [b"", b"{", b"x" * 200_000])
def test_a_file_with_nothing_but_a_torn_line_begins_afresh(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / NAME).write_bytes(torn)
    write(tmp_path, entry(1))
    assert list(read_ledger(tmp_path)) == [entry(1)]


def test_a_long_torn_line_is_cut_where_the_last_whole_one_ends(tmp_path: Path) -> None:
    write(tmp_path, entry(1))
    with (tmp_path / NAME).open("ab") as file:
        file.write(b"y" * 200_000)
    write(tmp_path, entry(2))
    assert list(read_ledger(tmp_path)) == [entry(1), entry(2)]


def test_a_folder_without_a_ledger_is_an_error_of_the_file_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_ledger(tmp_path))


def test_a_disk_that_takes_no_more_ends_the_ledger_and_not_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    writer = LedgerWriter(tmp_path, said.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        for step in range(2000):
            writer.write(entry(step))
        writer.flush()
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said == [f"the ledger {tmp_path / NAME} ends here: it cannot be written (File too large); training goes on"]
    write(tmp_path, entry(7))
    assert list(read_ledger(tmp_path))[-1] == entry(7)
