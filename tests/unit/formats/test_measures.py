"""What a run measured, on disk."""

import shutil
from pathlib import Path

import pytest

from torchquorum.formats.measures import NAME, Measure, append_measures, read_measures


def test_measures_of_every_life_of_a_run_come_back_in_order(tmp_path: Path) -> None:
    first, second = Measure("accuracy", 0.5, 10, 1.0), Measure("loss", None, 20, 2.0)
    append_measures(tmp_path / "run", [first])
    append_measures(tmp_path / "run", [second, first])
    assert read_measures(tmp_path / "run") == [first, second, first]


def test_a_run_that_measured_nothing_has_no_measures(tmp_path: Path) -> None:
    assert read_measures(tmp_path) == read_measures(tmp_path / "nowhere") == []


@pytest.mark.parametrize("damage", [b"{", b"\xff\xfe", b'{"name": 1}', b"[" * 100_000, b""])
def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path, damage: bytes) -> None:
    measure = Measure("accuracy", 0.5, 10, 1.0)
    append_measures(tmp_path, [measure])
    with (tmp_path / NAME).open("ab") as file:
        file.write(damage + b"\n")
    append_measures(tmp_path, [measure])
    assert read_measures(tmp_path) == [measure, measure]


def test_measures_are_appended_and_torn_ones_left_out(tmp_path: Path) -> None:
    first, second = Measure("accuracy", 0.5, 1, 2.0), Measure("accuracy", 0.6, 2, 3.0)
    append_measures(tmp_path / "run", [first])
    append_measures(tmp_path / "run", [second])
    assert read_measures(tmp_path / "run") == [first, second]
    path = tmp_path / "run" / NAME
    path.write_bytes(path.read_bytes()[:-5])
    assert read_measures(tmp_path / "run") == [first]
    shutil.rmtree(tmp_path / "run")
    assert read_measures(tmp_path / "run") == []
