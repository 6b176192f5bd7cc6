from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.data.parts import write_parts
from torchquorum.data.shares import FileShare, ShareReader, check_share, find_files
from torchquorum.errors import ConfigError, DataError


def read(paths: tuple[Path, ...], share: FileShare, most: int = 5) -> list[bytes]:
    reader, records = ShareReader(paths, share, "auto"), []
    while block := reader.read(most):
        assert len(block) <= most
        records += [record for record, _ in block]
    return records


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=6), workers=st.integers(1, 5), loaders=st.data())
def test_every_record_comes_exactly_once_over_workers_and_their_processes(
    counts: list[int], workers: int, loaders: Any, tmp_path: Path
) -> None:
    paths = write_parts(tmp_path, counts)
    whole = FileShare(tuple(range(len(paths))))
    found, sizes = [], []
    for worker in range(workers):
        mine = whole.divide(worker, workers)
        processes = loaders.draw(st.integers(1, 4))  # each worker may have another number of them
        parts = [read(paths, mine.divide(process, processes)) for process in range(processes)]
        sizes.append(sum(map(len, parts)))
        found += [record for part in parts for record in part]
    assert sorted(found) == sorted(read(paths, whole)) and len(found) == sum(counts)
    if len(paths) < workers:
        assert max(sizes) - min(sizes) <= 1  # by record, the shares are even


def test_whole_files_are_shared_out_where_there_are_enough() -> None:
    whole = FileShare(tuple(range(5)))
    assert [whole.divide(w, 2).files for w in range(2)] == [(0, 2, 4), (1, 3)]
    assert whole.divide(5, 6) == FileShare((0, 1, 2, 3, 4), 6, 5)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=5), stride=st.integers(1, 4), data=st.data())
def test_skipping_and_reading_may_alternate(counts: list[int], stride: int, data: Any, tmp_path: Path) -> None:
    paths = write_parts(tmp_path, counts)
    share = FileShare(tuple(range(len(paths))), stride, data.draw(st.integers(0, stride - 1)))
    expected, at = read(paths, share), 0
    reader = ShareReader(paths, share, None)
    for skip, most in data.draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=8)):
        skipped = reader.skip(skip)
        assert skipped == min(skip, len(expected) - at)
        block = [record for record, _ in reader.read(most)]
        assert block == expected[at + skipped : at + skipped + len(block)]
        at += skipped + len(block)
    reader.close()
    assert reader.read(1) == []


def test_files_are_found_by_name_by_pattern_and_in_lists(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, [1, 1, 1])
    assert find_files(str(tmp_path / "part-*")) == tuple(paths)
    assert find_files([paths[2], str(tmp_path / "part-[01]")]) == (paths[2], paths[0], paths[1])
    odd = tmp_path / "odd[1]"
    odd.write_bytes(b"")
    assert find_files(odd) == (odd,)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("train-*", "train-.*: no file matches; .* holds part-0"),
        ("nowhere", "nowhere: no such file; .* holds part-0"),
        ("missing/file", "there is no folder .*missing"),
        (".", "is a folder; give its files"),
    ],
)
def test_files_that_are_not_there_are_named(files: str, message: str, tmp_path: Path) -> None:
    write_parts(tmp_path, [1])
    with pytest.raises(DataError, match=message):
        find_files(tmp_path / files)


@pytest.mark.parametrize("files", [5, [5], None, [None]])
def test_what_is_no_file_is_refused(files: Any) -> None:
    with pytest.raises(ConfigError, match="must be a path, a pattern"):
        find_files(files)
    with pytest.raises(DataError, match="no file to read"):
        find_files([])


@pytest.mark.parametrize("share", [(2, 2), (-1, 2), (0, 0), (1,), "01", (0.0, 1), (True, 2), 3])
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match="share="):
        check_share(share)
