"""Recorded runs are made again, bit for bit: every rule, several ps tasks, deaths and restarts."""

from pathlib import Path

import pytest

from tests.process.replays import record, replay


@pytest.mark.parametrize("rule", ["async", "sync", "bounded:2", "buffered:2", "async:pipeline"])
def test_a_recorded_run_is_made_again_bit_for_bit(rule: str, tmp_path: Path) -> None:
    record(tmp_path, f"--rule={rule}", "--load=6" if rule == "async" else "--load=-1")
    replay(tmp_path)
