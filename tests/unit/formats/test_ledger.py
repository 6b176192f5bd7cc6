"""The ledger on disk, also after a run that was killed."""

import os
import resource
from pathlib import Path

import msgspec
import pytest

from torchquorum.formats import ledger
from torchquorum.formats.ledger import NAME, Entry, Event, LedgerWriter, read_ledger, read_records, sync_ledger


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
    assert said == [f"the ledger {tmp_path / NAME} stops here: it cannot be written (File too large); training goes on"]
    write(tmp_path, entry(7))
    assert list(read_ledger(tmp_path))[-1] == entry(7)


def test_what_was_synced_is_on_disk_before_the_ledger_is_closed(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path, pytest.fail)
    writer.write(entry(1))
    writer.sync()
    assert list(read_ledger(tmp_path)) == [entry(1)]
    writer.close()
    writer.sync()  # of a ledger that has ended there is nothing to wait for
    sync_ledger(tmp_path)
    sync_ledger(tmp_path / "nowhere")  # a run without a ledger goes on


@pytest.mark.parametrize("ending", ["flush", "sync", "close"])
def test_a_disk_that_is_full_only_when_the_buffer_is_emptied_ends_the_ledger_once(tmp_path: Path, ending: str) -> None:
    said: list[str] = []
    writer = LedgerWriter(tmp_path, said.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        writer.write(entry(1))
        assert said == []
        getattr(writer, ending)()
        assert len(said) == 1 and "it cannot be written (File too large); training goes on" in said[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.write(entry(2))
    writer.sync()
    writer.close()
    assert len(said) == 1 and list(read_ledger(tmp_path)) == []


def test_a_place_that_cannot_wait_for_its_disk_ends_the_ledger_where_that_was_asked_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    reading = os.open(tmp_path / NAME, os.O_RDONLY | os.O_NONBLOCK)
    said: list[str] = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ledger, "remove_torn_line", lambda path: None)  # which cannot cut a pipe
            writer = LedgerWriter(tmp_path, said.append)
        writer.sync()
    finally:
        os.close(reading)
    assert len(said) == 1 and "it cannot be written (Invalid argument)" in said[0]


def test_events_stand_between_the_gradients_and_a_damaged_line_is_told_by_its_number(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path)
    began = Event("began", 1.0, 0, text="anew", values={"rule": "Sync()"})
    for record in (began, entry(1), Event("died", 2.0, 1, worker=3)):
        writer.write(record)
    writer.close()
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / NAME).write_bytes(b"".join([lines[0], b'{"worker": []}\n', b"\xff\n", *lines[1:]]))
    damaged: list[int] = []
    assert list(read_records(tmp_path, damaged.append)) == [began, entry(1), Event("died", 2.0, 1, worker=3)]
    assert damaged == [2, 3]
    with pytest.raises(msgspec.DecodeError):
        list(read_ledger(tmp_path))
    (tmp_path / NAME).write_bytes(b"".join(lines))
    assert list(read_ledger(tmp_path)) == [entry(1)]


def test_gradients_and_events_are_told_apart_and_only_gradients_are_entries(tmp_path: Path) -> None:
    entry = Entry(0, "0a", 1, 0, 0, 0, True, "fresh", 5.0, None, 0.25)
    event = Event("died", 6.0, 3, 1, "its process ended")
    writer = LedgerWriter(tmp_path)
    writer.write(event)
    writer.write(entry)
    writer.close()
    assert list(read_records(tmp_path)) == [event, entry] and list(read_ledger(tmp_path)) == [entry]
