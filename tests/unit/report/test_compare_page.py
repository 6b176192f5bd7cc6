"""The page of a comparison, and its figures for programs."""

from pathlib import Path

from tests.unit.report.runs import write_async, write_sync
from torchquorum.report.compare_page import as_json, compare_page
from torchquorum.report.comparison import compare_runs
from torchquorum.report.history import read_history


def test_the_page_of_a_comparison_has_all_charts_and_its_json_all_figures(tmp_path: Path) -> None:
    write_sync(tmp_path / "sync", rounds=60)
    write_async(tmp_path / "async", gradients=120)
    runs = compare_runs([(n, read_history(tmp_path / n)) for n in ("sync", "async")])
    text = compare_page(runs, "sync and async", "below")
    assert (
        "Validation accuracy by the clock" in text and "What became of the batches" in text and text.count("<svg") == 9
    )
    figures = as_json(runs)
    assert figures[0]["updates"] == 60 and figures[1]["wasted"] == 0 and figures[0]["waiting_share"] > 0.3
