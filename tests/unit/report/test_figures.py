"""What is computed from the history of a run."""

from pathlib import Path

import numpy as np
import pytest

from tests.unit.report.runs import write_async, write_sync
from torchquorum.report.figures import figure, smooth
from torchquorum.report.history import read_history


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


def test_losses_that_are_not_numbers_do_not_spoil_a_curve() -> None:
    curve = smooth(np.arange(100.0), np.where(np.arange(100) % 2 == 0, np.nan, 1.0))
    assert set(curve.y) == {1.0} and len(curve.x) > 5
    assert smooth(np.array([]), np.array([])).x == []
