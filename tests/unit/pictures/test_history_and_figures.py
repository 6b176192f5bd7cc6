"""What is read from a run's folder, whole or damaged, and what is figured out from it."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.unit.pictures.runs import START, write_async, write_sync
from torchquorum.errors import ConfigError
from torchquorum.formats.ledger import NAME, Entry, Event, LedgerWriter, read_ledger, read_records
from torchquorum.formats.measures import NAME as MEASURES
from torchquorum.formats.measures import Measure, append_measures, read_measures
from torchquorum.pictures.figures import figure, smooth
from torchquorum.pictures.history import read_history


def test_a_sync_run_is_read_whole(tmp_path: Path) -> None:
    write_sync(tmp_path, rounds=40)
    history = read_history(tmp_path)
    figures = figure(history)
    assert (history.rule, history.last_version, history.accuracy) == ("Sync()", 40, 0.95)
    assert (figures.updates, figures.batches, figures.used, figures.wasted) == (40, 120, 120, 0)
    assert history.seconds == pytest.approx(40 * 0.03, abs=0.01)
    assert len(history.update_times()) == 40 and np.all(np.diff(history.update_times()) > 0)
    assert not history.going_on and history.missing == []


def test_the_straggler_of_a_sync_run_is_found_and_its_cost_is_the_time_rounds_stood_open(tmp_path: Path) -> None:
    write_sync(tmp_path, rounds=100, times=(0.01, 0.03, 0.01))
    straggler = figure(read_history(tmp_path)).straggler
    assert straggler is not None and straggler.index == 1
    assert straggler.times == pytest.approx(3.0, rel=0.01)
    assert straggler.updates_per_s == pytest.approx(33.3, rel=0.02)
    assert straggler.without == pytest.approx(100.0, rel=0.05)
    assert straggler.others_wait == pytest.approx(2 / 3, abs=0.02)


def test_in_an_async_run_a_straggler_costs_what_it_does_not_contribute(tmp_path: Path) -> None:
    write_async(tmp_path, gradients=700, times=(0.01, 0.03, 0.01))
    figures = figure(read_history(tmp_path))
    assert figures.updates == figures.used == 700
    assert figures.straggler is not None and figures.straggler.index == 1
    assert figures.straggler.without == pytest.approx(300.0, rel=0.05)
    assert figures.waiting_share == pytest.approx(0.0, abs=0.01)
    assert figures.staleness_mean > 1.0 and figures.staleness.sum() == 700


def test_equal_workers_have_no_straggler(tmp_path: Path) -> None:
    write_sync(tmp_path, times=(0.01, 0.011, 0.0105))
    assert figure(read_history(tmp_path)).straggler is None


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
    with pytest.raises(ConfigError, match="nothing of a run is in there"):
        read_history(tmp_path)
    (tmp_path / NAME).write_bytes(b"{ torn")
    with pytest.raises(ConfigError, match="ledger.jsonl has no gradients yet"):
        read_history(tmp_path)
    (tmp_path / NAME).unlink()
    write_sync(tmp_path / "inner")
    with pytest.raises(ConfigError, match="there are runs in it: inner"):
        read_history(tmp_path)


def test_a_run_that_goes_on_is_known_as_one(tmp_path: Path) -> None:
    import time

    write_sync(tmp_path, rounds=10, begin=time.time() - 1, ended=False)
    assert read_history(tmp_path).going_on


def test_losses_that_are_not_numbers_do_not_spoil_a_curve() -> None:
    curve = smooth(np.arange(100.0), np.where(np.arange(100) % 2 == 0, np.nan, 1.0))
    assert set(curve.y) == {1.0} and len(curve.x) > 5
    assert smooth(np.array([]), np.array([])).x == []


def test_gradients_and_events_are_told_apart_and_only_gradients_are_entries(tmp_path: Path) -> None:
    entry = Entry(0, "0a", 1, 0, 0, 0, True, "fresh", 5.0, None, 0.25)
    event = Event("died", 6.0, 3, 1, "its process ended")
    writer = LedgerWriter(tmp_path)
    writer.write(event)
    writer.write(entry)
    writer.close()
    assert list(read_records(tmp_path)) == [event, entry] and list(read_ledger(tmp_path)) == [entry]


def test_measures_are_appended_and_torn_ones_left_out(tmp_path: Path) -> None:
    first, second = Measure("accuracy", 0.5, 1, 2.0), Measure("accuracy", 0.6, 2, 3.0)
    append_measures(tmp_path / "run", [first])
    append_measures(tmp_path / "run", [second])
    assert read_measures(tmp_path / "run") == [first, second]
    path = tmp_path / "run" / MEASURES
    path.write_bytes(path.read_bytes()[:-5])
    assert read_measures(tmp_path / "run") == [first]
    shutil.rmtree(tmp_path / "run")
    assert read_measures(tmp_path / "run") == []
