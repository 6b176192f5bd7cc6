"""How `train` and `run` end: where the run stands, and the root cause."""

import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.cli.test_status_table import status
from torchquorum.cli.run_end import RunReport, show_end, typed_command, where_it_stopped


class Ended:
    """The tasks of a launcher that have ended."""

    def __init__(self, root_cause: str = "") -> None:
        self.root_cause = root_cause


def report(**changes: Any) -> dict[str, Any]:
    figures = {
        "updates": 663,
        "batches": 1326,
        "seconds": 4.0,
        "accuracy": 0.9,
        "staleness_max": 2,
        "logdir": "/runs/a",
    }
    return status(**{**figures, "global_step": 663, "last_step": 3000, "saved_step": 663, **changes})


def shown(code: int, body: dict[str, Any] | None, cause: str = "", width: int = 60, **more: Any) -> list[str]:
    file = io.StringIO()
    show_end(Console(file=file, width=width, highlight=False), code, body, Ended(cause), **more)  # pyright: ignore[reportArgumentType]
    return file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "stopped at step 663 of 3,000, saved; the same command goes on"),
        ({"saved_step": 0, "logdir": None}, "stopped at step 663 of 3,000, not saved: the run has no folder; give it a logdir"),
        (
            {"saved_step": 600, "not_saved": "No space left on device"},
            "stopped at step 663 of 3,000, not saved: No space left on device; the last checkpoint is of step 600",
        ),
        ({"last_step": None}, "stopped at step 663, saved; the same command goes on"),
    ],
)  # fmt: skip
def test_the_last_line_after_ctrl_c_says_where_the_run_is_and_whether_that_is_saved(
    changes: dict[str, Any], expected: str
) -> None:
    assert shown(130, report(**changes))[-1] == f"torchquorum: {expected}"


def test_a_run_that_has_not_begun_has_lost_nothing() -> None:
    assert "before the run began" in where_it_stopped(None, "")
    assert shown(130, None) == ["torchquorum: stopped before the run began: nothing was trained, and nothing is lost"]


def test_a_failed_run_ends_with_its_root_cause_and_does_not_advise_to_do_the_same_again() -> None:
    *_, cause, where = shown(
        1, report(), "/job:worker/task:2: train.py, line 7, in compute: ValueError: the shapes do not fit"
    )
    assert cause.endswith(
        "the run failed: /job:worker/task:2: train.py, line 7, in compute: ValueError: the shapes do not fit"
    )
    assert where == "torchquorum: stopped at step 663 of 3,000, saved"


def test_a_run_that_ended_well_has_its_figures_and_a_row_per_worker_whose_speeds_add_up() -> None:
    lines = shown(0, report(batches_per_s=90.0), width=100)
    assert lines[0] == "test accuracy 90.00 %"
    assert lines[1].startswith("663 updates from 1,326 batches in 4.0 s (90 batches/s), 6 gradients refused")
    assert lines[2].split() == ["worker", "local", "step", "batches/s", "staleness", "refused", "waits"]
    speeds = [float(line.split()[3]) for line in lines[3:6]]
    assert sum(speeds) == pytest.approx(90.0)
    assert not any("torchquorum: " in line for line in lines)


def test_the_command_is_noted_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/torchquorum", "run", "my script.py"])
    assert typed_command() == "torchquorum run 'my script.py'"


def test_a_report_of_an_earlier_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text('{"global_step": 1}')
    found = RunReport(path)
    assert found.read() is None
    new = tmp_path / "new"
    new.write_text('{"global_step": 2}')
    os.replace(new, path)
    assert found.read() == {"global_step": 2}
