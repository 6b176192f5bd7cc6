"""Several runs side by side: colours and sentences."""

from pathlib import Path

from tests.unit.report.runs import write_async, write_sync
from torchquorum.report.comparison import compare_runs, describe_comparison
from torchquorum.report.history import read_history


def test_a_comparison_has_one_colour_per_run_and_describes_itself(tmp_path: Path) -> None:
    write_sync(tmp_path / "sync", rounds=60)
    write_async(tmp_path / "async", gradients=120)
    write_async(tmp_path / "again", gradients=60)
    runs = compare_runs([(n, read_history(tmp_path / n)) for n in ("sync", "async", "again")])
    assert len({r.colour for r in runs}) == 3 and [r.colour for r in runs][:2] == ["c0", "c1"]
    said = " ".join(describe_comparison(runs))
    assert "Worker 1 was the slow one: a batch took it 3.0 times as long" in said
    assert "sync was best, 95.00 %" in said and "async: its gradients were" in said
