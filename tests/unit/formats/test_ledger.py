"""The ledger on disk, also after a run that was killed."""

from pathlib import Path

import pytest

from torchquorum.formats.ledger import NAME, DamagedLineError, Entry, Event, last_known, read_ledger, read_records
from torchquorum.formats.ledger_write import LedgerWriter


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
    with pytest.raises(DamagedLineError):
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


def test_the_version_that_a_ledger_knows_is_that_of_its_last_line_that_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, entry(4), entry(5), entry(5, accepted=False))
    data = (tmp_path / NAME).read_bytes()
    assert last_known(data) == 5
    assert last_known(b"".join(data.splitlines(keepends=True)[:2])) == 6  # the accepted one may have made update 6
    assert last_known(data + b'{"worker": \n{"torn') == 5
    assert last_known(b"") is None and last_known(b"torn") is None


def test_of_several_optimizers_the_gradients_of_the_first_say_which_global_step_a_ledger_knows(tmp_path: Path) -> None:
    others = [entry(2, optimizer="D", track=1), entry(70, optimizer="D", track=1)]
    write(tmp_path, entry(4, optimizer="G"), *others)
    assert last_known((tmp_path / NAME).read_bytes()) == 5
    writer = LedgerWriter(tmp_path)  # the run goes on at step 5: nothing is missing, and nothing is known beyond it
    for record in (Event("began", 1.0, 5), entry(3, optimizer="D", track=1), Event("began", 2.0, 8)):
        writer.write(record)
    writer.close()
    assert [r.event for r in read_records(tmp_path) if isinstance(r, Event)] == ["began", "began"]
    writer = LedgerWriter(tmp_path)
    writer.write(Event("began", 3.0, 9))
    writer.close()
    gap = next(r for r in read_records(tmp_path) if isinstance(r, Event) and r.event == "gap")
    assert (gap.values["first"], gap.values["last"]) == (9, 9)
