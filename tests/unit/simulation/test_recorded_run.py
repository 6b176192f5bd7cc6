"""A run's ledger as the source of a simulation."""

from pathlib import Path

import pytest

from tests.unit.report.runs import START, write_async, write_sync
from torchquorum.errors import ConfigError
from torchquorum.formats.ledger import Entry, Event
from torchquorum.formats.ledger_write import LedgerWriter
from torchquorum.rules import Async, Sync
from torchquorum.simulation.recorded_run import read_run
from torchquorum.simulation.simulate import simulate


def test_the_run_simulated_as_it_was_has_its_speed(tmp_path: Path) -> None:
    write_sync(tmp_path, times=(0.01, 0.03, 0.01))
    run = read_run(tmp_path)
    assert run.rule == Sync() and run.workers == 3
    assert run.times.by_worker[1] == pytest.approx([0.03] * len(run.times.by_worker[1]))
    assert run.updates_per_s == pytest.approx(1 / 0.03, rel=0.06)  # of 38 rounds
    assert simulate(run.rule, 3, run.times).updates_per_s == pytest.approx(1 / 0.03, rel=0.01)
    # What if: without the slow one.
    assert simulate("sync:2of3", 3, run.times).updates_per_s == pytest.approx(1 / 0.01, rel=0.01)


def test_an_async_run_has_one_update_per_gradient(tmp_path: Path) -> None:
    write_async(tmp_path, gradients=300)
    run = read_run(tmp_path)
    assert run.rule == Async()
    assert run.updates_per_s == pytest.approx(2 / 0.01 + 1 / 0.03, rel=0.05)
    assert simulate(run.rule, 3, run.times).updates_per_s == pytest.approx(run.updates_per_s, rel=0.05)


def test_of_several_attempts_the_longest_counts(tmp_path: Path) -> None:
    end = write_sync(tmp_path, rounds=60, times=(0.01, 0.02))
    write_sync(tmp_path, rounds=20, times=(0.5, 0.5), begin=end + 100, version=60)
    assert set(read_run(tmp_path).times.by_worker[1]) == {0.02}


def test_the_time_before_all_are_there_does_not_count(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path)
    writer.write(Event("began", START, 0, values={"rule": "Async()"}))
    for step in range(1, 101):  # worker 1 comes at 50 s, and makes everything slower
        writer.write(Entry(0, "a", step, step, step, 0, True, "fresh", START + step, 0.0, 1.0 if step <= 50 else 2.0))
        if step > 50:
            writer.write(Entry(1, "b", step - 50, step, step, 0, True, "fresh", START + step, 0.0, 2.0))
    writer.close()
    run = read_run(tmp_path)
    assert set(run.times.by_worker[0]) == {2.0} and run.seconds == pytest.approx(48.0)


@pytest.mark.parametrize("rounds", [0, 3])
def test_too_short_a_run_is_an_error(tmp_path: Path, rounds: int) -> None:
    write_sync(tmp_path, rounds=rounds)
    with pytest.raises(ConfigError, match="at least 10 timed gradients of every worker"):
        read_run(tmp_path)


def test_a_folder_without_a_ledger_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ledger.jsonl cannot be read"):
        read_run(tmp_path / "none")
