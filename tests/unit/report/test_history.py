"""What is read from a run's folder, complete or damaged."""

from pathlib import Path

import numpy as np
import pytest

from tests.unit.formats.checkpoints import save
from tests.unit.report.runs import START, write_sync
from torchquorum.errors import ConfigError
from torchquorum.formats.ledger import NAME, Entry, Event
from torchquorum.formats.ledger_write import LedgerWriter, gap_event
from torchquorum.report.figures import figure
from torchquorum.report.history import read_history


def test_a_sync_run_is_read_whole(tmp_path: Path) -> None:
    write_sync(tmp_path, rounds=40)
    history = read_history(tmp_path)
    figures = figure(history)
    assert (history.rule, history.last_version, history.accuracy) == ("Sync()", 40, 0.95)
    assert (figures.updates, figures.batches, figures.used, figures.wasted) == (40, 120, 120, 0)
    assert history.seconds == pytest.approx(40 * 0.03, abs=0.01)
    assert len(history.update_times()) == 40 and np.all(np.diff(history.update_times()) > 0)
    assert not history.is_running and history.missing == []


def test_a_resumed_run_has_no_gap_on_its_clock_and_rolled_back_gradients_are_not_kept(tmp_path: Path) -> None:
    write_sync(tmp_path, rounds=40, ended=False)
    write_sync(tmp_path, rounds=20, version=30, begin=START + 5000)
    history = read_history(tmp_path)
    assert history.restarts == 1 and history.last_version == 50
    assert history.seconds == pytest.approx(60 * 0.03, abs=0.02)
    assert np.all(np.diff(history.clock) >= -1e-9)
    assert int((~history.kept).sum()) == 9 * 3  # those that met 31 to 39; what met 30 may be of either life
    assert figure(history).updates == 50


def test_an_old_ledger_without_events_is_read_and_what_it_lacks_is_said(tmp_path: Path) -> None:
    write_sync(tmp_path, rounds=20, events=False)
    history = read_history(tmp_path)
    assert figure(history).batches == 60 and figure(history).straggler is None
    assert any("older version" in line for line in history.missing)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda p: p.write_bytes(b""), "has no gradients yet"),
        (lambda p: p.unlink(), "There is no ledger.jsonl"),
        (lambda p: p.write_bytes(p.read_bytes()[:-30]), "has no end"),
        (lambda p: p.write_bytes(b"\xff\xfe not json\n" + p.read_bytes()), "is damaged: line 1 cannot"),
        (lambda p: p.write_bytes(p.read_bytes().replace(b'"met"', b'"mett"')), "is damaged: 120 lines"),
    ],
)
def test_what_is_missing_or_damaged_is_said_and_the_rest_is_read(tmp_path: Path, damage: object, said: str) -> None:
    write_sync(tmp_path)
    damage(tmp_path / NAME)  # type: ignore[operator]
    history = read_history(tmp_path)
    figure(history)
    assert any(said in line for line in history.missing), history.missing


def test_an_empty_folder_is_an_error_that_names_the_runs_inside(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this folder holds no run"):
        read_history(tmp_path)
    (tmp_path / NAME).write_bytes(b"{ torn")
    with pytest.raises(ConfigError, match="ledger.jsonl has no gradients yet"):
        read_history(tmp_path)
    (tmp_path / NAME).unlink()
    write_sync(tmp_path / "inner")
    with pytest.raises(ConfigError, match="there are runs in it: inner"):
        read_history(tmp_path)


def test_a_run_that_is_still_running_is_recognised(tmp_path: Path) -> None:
    import time

    write_sync(tmp_path, rounds=10, begin=time.time() - 1, ended=False)
    assert read_history(tmp_path).is_running


def test_a_gap_a_hole_and_an_end_before_the_checkpoints_are_told(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path)
    writer.write(Event("began", 1.0, 10))
    writer.write(Event("assigned", 2.0, 11, 0))
    for met in (11, 15):
        writer.write(Entry(0, "0a", met, met, met, 0, True, "fresh", 2.0, 1.0, 0.1))
    writer.write(gap_event(3.0, 20, (17, 20), "No space left on device", gradients=9))
    writer.write(gap_event(3.0, 20, (0, 0), "No space left on device", refused=2))
    writer.write(Entry(0, "0a", 20, 20, 20, 0, True, "fresh", 2.0, 1.0, 0.1))
    writer.close()
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'{"worker": 0, "incar')
    said = " ".join(read_history(tmp_path).missing)
    assert f"{NAME} has a gap: updates 1 to 10 are only counted in it" in said  # before the run began
    assert "updates 17 to 20, 9 gradients, are only counted in it (No space left on device)" in said
    assert "lines that made no update are missing" in said
    assert "3 updates are in no line of ledger.jsonl; the first is update 13." in said
    assert "The last line of ledger.jsonl is torn" in said and "before model.ckpt" not in said
    save(tmp_path, 25)
    history = read_history(tmp_path)
    assert f"{NAME} ends at update 21, before model.ckpt-25: 4 updates are not in it." in history.missing


def test_numbers_of_a_gap_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path)
    writer.write(Event("began", 1.0, 0))
    writer.write(Event("gap", 1.0, 3, values={"first": "x", "last": [], "torn_bytes": 1e300, "gradients": -1}))
    writer.close()
    assert "3 updates are in no line" in " ".join(read_history(tmp_path).missing)
