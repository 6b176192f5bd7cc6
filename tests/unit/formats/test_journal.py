"""The journal on disk: what was written comes back, what was torn is left out, and other generations' records stay out."""

import os
import resource
import stat
from pathlib import Path

import msgspec
import pytest

from tests.unit.formats.descriptors import descriptor_of
from torchquorum.formats import journal
from torchquorum.formats.journal import (
    SUFFIX,
    Head,
    JournalError,
    Record,
    clear,
    find_common,
    find_lineage,
    keep_damaged,
    read_file,
    read_head,
    replay_lineage,
)
from torchquorum.formats.journal_write import JournalWriter, frame_header

PLAN = {"optimizer": "SGD"}


def head(generation: int = 1, after: int = 0, start: int = 0, *, shard: int = 0, shards: int = 1, at: int = 0) -> Head:
    return Head(shard, shards, generation, after, start, at or generation, PLAN)


def write(folder: Path, of: Head, versions: range, mode: str = "write") -> Path:
    writer = JournalWriter(folder, of, mode)
    for version in versions:
        writer.append(Record(version, [2], [(0, 5, version)]), f"{of.generation}:{version}".encode())
    path = writer.path
    writer.close()
    return path


def replayed(folder: Path, generation: int, step: int, upto: int | None = None) -> list[str]:
    line = find_lineage(folder, 0, 1, generation, step)
    return [
        bytes(payload).decode() for _, payload in replay_lineage(line, step, line.version if upto is None else upto)
    ]


@pytest.mark.parametrize("mode", ["write", "fsync"])
def test_what_is_appended_comes_back_in_order(tmp_path: Path, mode: str) -> None:
    path = write(tmp_path, head(), range(1, 4), mode)
    records = list(read_file(path))
    assert [(r.version, r.absent, r.keys, bytes(p)) for r, p in records] == [
        (v, [2], [(0, 5, v)], f"1:{v}".encode()) for v in (1, 2, 3)
    ]
    assert read_head(path) == msgspec.structs.replace(head(), synced=mode == "fsync")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # it names the lives of workers


def test_a_file_cut_anywhere_gives_the_records_before_the_cut(tmp_path: Path) -> None:
    path = write(tmp_path, head(), range(1, 4))
    whole = path.read_bytes()
    found = set[int]()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        versions = [r.version for r, _ in read_file(path)]
        assert versions == list(range(1, len(versions) + 1))
        assert find_lineage(tmp_path, 0, 1, 1, 0).version == len(versions)
        found.add(len(versions))
    assert found == {0, 1, 2}


def test_a_byte_that_changed_ends_the_file_before_it(tmp_path: Path) -> None:
    path = write(tmp_path, head(), range(1, 4))
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        payloads = [bytes(p) for _, p in read_file(path)]
        assert payloads == [f"1:{v}".encode() for v in range(1, len(payloads) + 1)] and len(payloads) < 3


def test_records_before_the_checkpoint_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, head(), range(1, 6))
    assert replayed(tmp_path, 1, 3) == ["1:4", "1:5"]
    assert replayed(tmp_path, 1, 5) == []


def test_a_line_goes_on_over_the_files_of_a_generation(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, head(), "write")
    for version in range(1, 7):
        writer.append(Record(version, [], []), b"%d" % version)
        if version in (2, 4):
            writer.rotate(version)
    writer.close()
    assert replayed(tmp_path, 1, 0) == list("123456")
    assert replayed(tmp_path, 1, 3) == list("456")
    clear(tmp_path, 1, 4)
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1
    assert replayed(tmp_path, 1, 4) == list("56")


def test_a_generation_that_goes_on_from_another_supersedes_what_that_one_wrote_later(tmp_path: Path) -> None:
    write(tmp_path, head(1), range(1, 6))
    write(tmp_path, head(2, after=1, start=3), range(4, 6))
    assert replayed(tmp_path, 1, 0) == ["1:1", "1:2", "1:3", "2:4", "2:5"]
    assert find_lineage(tmp_path, 0, 1, 1, 0).kept() == [(1, 3), (2, 5)]
    write(tmp_path, head(3, after=2, start=2), range(3, 4))
    assert find_common(tmp_path, 1, 1, 0).kept() == [(1, 2), (2, 2), (3, 3)]


def test_a_generation_that_began_anew_has_nothing_to_do_with_the_records_of_before(tmp_path: Path) -> None:
    write(tmp_path, head(1), range(1, 60))
    write(tmp_path, head(2), range(1, 3))
    assert replayed(tmp_path, 2, 0) == ["2:1", "2:2"]
    assert replayed(tmp_path, 2, 50) == []
    assert len(replayed(tmp_path, 1, 0)) == 59
    clear(tmp_path, 2, 0)
    assert [read_head(p).generation for p in tmp_path.glob(f"*{SUFFIX}")] == [2]  # type: ignore[union-attr]


def test_shards_come_back_to_the_version_that_all_of_them_have(tmp_path: Path) -> None:
    write(tmp_path, head(shard=0, shards=2), range(1, 8))
    write(tmp_path, head(shard=1, shards=2), range(1, 6))
    assert find_common(tmp_path, 2, 1, 0).version == 5
    assert find_common(tmp_path, 2, 1, 6).version == 6  # a checkpoint that is newer than a journal stands by itself


def test_another_number_of_ps_tasks_is_an_error_only_if_something_would_be_lost(tmp_path: Path) -> None:
    path = write(tmp_path, head(shard=0, shards=2), range(1, 4))
    with pytest.raises(
        JournalError, match=rf"{path.name} holds updates after step 0 and was written by 2 ps tasks, not 1"
    ):
        find_common(tmp_path, 1, 1, 0)
    assert find_common(tmp_path, 1, 1, 3).version == 3


def test_a_folder_that_is_full_is_an_error_and_leaves_whole_records(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, head(), "write")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # Python ignores the signal, so writing fails as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    written = 0
    try:
        for version in range(1, 100):
            writer.append(Record(version, [], []), bytes(300))
            written = version
        pytest.fail("the disk was never full")
    except JournalError as error:
        failed = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be written (File too large)" in failed and "start the tasks again" in failed
    assert written > 5 and [r.version for r, _ in read_file(writer.path)] == list(range(1, written + 1))
    writer.close()


def test_a_file_that_is_no_journal_has_no_head_and_no_records(tmp_path: Path) -> None:
    path = write(tmp_path, head(), range(1, 3))
    whole = path.read_bytes()
    for content in (b"", b"other" * 30, whole[:8], whole[:20]):
        path.write_bytes(content)
        assert read_head(path) is None and list(read_file(path)) == []
    assert read_head(tmp_path / "nowhere") is None


def framed(packed: bytes) -> bytes:
    return frame_header(packed, b"") + packed


def test_whole_frames_that_hold_something_else_end_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, head(), range(1, 3))
    whole = path.read_bytes()
    path.write_bytes(whole + framed(b"\x01"))
    assert [r.version for r, _ in read_file(path)] == [1, 2]
    path.write_bytes(whole + framed(msgspec.msgpack.encode(Record(7, [], []))))  # a version that does not follow
    assert [r.version for r, _ in read_file(path)] == [1, 2]
    path.write_bytes(whole[: len(journal.MAGIC)] + framed(b"\x01"))
    assert read_head(path) is None


def test_a_line_that_does_not_lead_where_it_should_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, head(), range(1, 4))
    with pytest.raises(JournalError, match="reaches version 3, not 5"):
        replayed(tmp_path, 1, 0, 5)


def test_a_folder_in_which_nothing_can_be_begun_is_an_error_that_holds_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"cannot be written \(File exists\)"):
        JournalWriter(tmp_path / "file", head(), "write")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 20):  # not even the first bytes, or not all of the head
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(JournalError, match=r"cannot be written \(File too large\)"):
                JournalWriter(tmp_path, head(), "write")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_place_that_cannot_wait_for_its_disk_is_an_error_of_the_commit(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, head(), "fsync")
    writer.append(Record(1, [], []), b"one")
    reading, writing = os.pipe()
    os.dup2(writing, descriptor_of(writer.path))
    for _ in range(2):
        with pytest.raises(JournalError, match=r"cannot be written \(Invalid argument\); check that folder"):
            writer.commit()
    writer.close()
    writer.close()
    os.close(reading)
    os.close(writing)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def test_a_file_cut_anywhere_is_torn_and_one_with_a_changed_byte_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path, head(), range(1, 4))
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert find_common(tmp_path, 1, 1, 0).damage == []
    for at in range(len(whole)):
        path.write_bytes(whole)
        flip(path, at)
        line = find_common(tmp_path, 1, 1, 0)
        assert line.version < 3 and len(line.damage) == 1 and str(path) in line.damage[0][1], at


def test_what_follows_a_damaged_record_tells_how_far_the_journal_led(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, head(), "write")
    for version in range(1, 8):
        writer.append(Record(version, [], [], told=version - 1), bytes(100))
        if version == 5:
            writer.rotate(5)
    writer.close()
    first, second = sorted(tmp_path.glob(f"*{SUFFIX}"))
    flip(first, first.stat().st_size // 2)  # in the payload of the third record
    line = find_common(tmp_path, 1, 1, 0)
    assert (line.version, line.seen, line.told) == (2, 7, 6) and f"update 3 in {first}" in line.damage[0][1]
    second.unlink()
    line = find_common(tmp_path, 1, 1, 0)
    assert (line.version, line.seen, line.told) == (2, 5, 4)


def test_damage_behind_what_another_shard_has_is_none_of_an_update_that_was_told(tmp_path: Path) -> None:
    write(tmp_path, head(shard=0, shards=2), range(1, 4))
    other = write(tmp_path, head(shard=1, shards=2), range(1, 5))
    flip(other, other.stat().st_size - 1)  # its fourth update, which shard 0 never had
    line = find_common(tmp_path, 2, 1, 0)
    assert (line.version, line.damage) == (3, [])
    flip(other, other.stat().st_size // 2)
    line = find_common(tmp_path, 2, 1, 0)
    assert line.version < 3 and len(line.damage) == 1


def test_a_shard_that_begins_a_file_before_the_others_have_come_so_far_promises_nothing_of_that(tmp_path: Path) -> None:
    first = JournalWriter(tmp_path, head(shard=0, shards=2), "write")
    for version in range(1, 5):
        first.append(Record(version, [], [(0, 5, version)], told=version - 2), b"mean")
    first.rotate(4)  # a checkpoint of version 4 begins
    first.close()
    write(tmp_path, head(shard=1, shards=2), range(1, 4))  # killed before it had version 4
    line = find_common(tmp_path, 2, 1, 0)
    assert (line.version, line.told, line.damage) == (3, 2, [])


def test_a_file_that_begins_behind_what_is_missing_tells_that_it_is_missing(tmp_path: Path) -> None:
    write(tmp_path, head(start=4), range(5, 5))
    line = find_lineage(tmp_path, 0, 1, 1, 0)
    assert (line.version, line.told) == (0, 4)


def test_a_loss_of_power_may_damage_the_end_of_a_synced_file_and_not_its_middle(tmp_path: Path) -> None:
    path = write(tmp_path, head(), range(1, 4), "fsync")
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(500))
    assert find_common(tmp_path, 1, 1, 0).damage == [] and find_common(tmp_path, 1, 1, 0).version == 3
    path.write_bytes(whole)
    flip(path, len(whole) - 1)
    assert find_common(tmp_path, 1, 1, 0).damage == [] and find_common(tmp_path, 1, 1, 0).version == 2
    flip(path, len(whole) * 2 // 3)
    path.write_bytes(path.read_bytes()[:-1] + whole[-1:])
    assert len(find_common(tmp_path, 1, 1, 0).damage) == 1


def test_a_generation_that_went_on_makes_earlier_damage_beyond_its_start_harmless(tmp_path: Path) -> None:
    before = write(tmp_path, head(1), range(1, 6))
    flip(before, before.stat().st_size - 1)
    write(tmp_path, head(2, after=1, start=4), range(5, 7))
    line = find_common(tmp_path, 1, 1, 0)
    assert (line.version, line.damage, line.generations) == (6, [], [1, 2])
    flip(before, before.stat().st_size // 2)
    line = find_common(tmp_path, 1, 1, 0)  # what lies before its start is needed
    assert line.version < 4 and line.seen == 6 and len(line.damage) == 1 and line.generations == [1]


def test_a_file_without_a_beginning_counts_as_damage_if_it_may_matter(tmp_path: Path) -> None:
    write(tmp_path, head(), range(1, 3))
    later = write(tmp_path, head(start=2), range(3, 5))
    flip(later, 3)
    assert "the beginning of" in find_common(tmp_path, 1, 1, 0).damage[0][1]
    assert find_common(tmp_path, 1, 1, 4).damage == []  # a checkpoint has those updates
    (tmp_path / f"other{SUFFIX}").write_bytes(b"of no run")
    assert len(find_common(tmp_path, 1, 1, 0).damage) == 1


@pytest.mark.parametrize("at", range(20))
def test_records_are_found_again_behind_a_frame_that_is_damaged(tmp_path: Path, at: int) -> None:
    sizes: list[int] = []
    writer = JournalWriter(tmp_path, head(), "write")
    for version in range(1, 5):
        sizes.append(writer.path.stat().st_size)
        writer.append(
            Record(version, [], [], told=version - 1), bytes(range(256)) * 9000 if version == 2 else bytes(99)
        )
    writer.close()
    flip(writer.path, sizes[1] + at)
    line = find_common(tmp_path, 1, 1, 0)
    assert (line.version, line.seen, line.told) == (1, 4, 3) and "update 2 in" in line.damage[0][1]


def test_a_damaged_file_is_kept_when_the_journal_is_cleared(tmp_path: Path) -> None:
    path = write(tmp_path, head(), range(1, 3))
    kept = [keep_damaged(path), keep_damaged(path)]
    clear(tmp_path, 1, 2)
    assert not path.exists() and [k.name for k in kept] == [f"{path.name}.damaged", f"{path.name}.damaged-2"]
    assert [r.version for r, _ in read_file(kept[0])] == [1, 2]


def test_a_file_that_lost_its_name_is_noticed(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, head(), "write")
    assert not writer.removed
    writer.path.unlink()
    assert writer.removed
    writer.rotate(0)
    assert not writer.removed and writer.path.exists()
    writer.close()
    assert not writer.removed


def test_a_generation_begins_after_all_others_even_if_the_clock_went_back(tmp_path: Path) -> None:
    write(tmp_path, head(1, at=5_000_000_000), range(1, 4))
    write(tmp_path, head(2, after=1, start=3, at=journal.next_generation_at(tmp_path, 2.0)), range(4, 6))
    assert replayed(tmp_path, 1, 0) == ["1:1", "1:2", "1:3", "2:4", "2:5"]
    assert journal.next_generation_at(tmp_path, 7.0) == 7_000_000_000
