"""What is read from a run's folder, complete or damaged."""

from pathlib import Path

import numpy as np
import pytest

from tests.unit.report.runs import START, write_sync
from torchquorum.errors import ConfigError
from torchquorum.formats.ledger import NAME
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
