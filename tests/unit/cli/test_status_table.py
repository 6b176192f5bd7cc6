"""The live table and the bar, at any size of the terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from torchquorum.cli.live_view import View, plain
from torchquorum.cli.speeds import RecentSpeeds, of_whole_run
from torchquorum.cli.status_table import (
    OptimizerTable,
    RunBar,
    RunProgress,
    StatusTable,
    clock,
    headline,
    rows_of,
    wait_words,
)


def status(workers: int = 3, **changes: Any) -> dict[str, Any]:
    one = {
        "state": "computing", "batches": 120, "batches_per_s": 30.0, "loss": 0.25, "staleness_mean": 1.5, "refused": 2,
        "waited_s": 5.0, "seconds": 10.0, "waits_for": None,
    }  # fmt: skip
    body = {
        "ready": True, "rule": "Sync()", "global_step": 40, "last_step": 100, "workers": workers, "live": list(range(workers)),
        "batches_per_s": 90.0, "updates": 40, "seconds": 4.0, "staleness_mean": 1.5, "refused": 6, "loss": 0.25, "stopped": False,
        "per_worker": {str(i): dict(one) for i in range(workers)},
    }  # fmt: skip
    return {**body, **changes}


def drawn(what: Any, width: int = 100, height: int = 24, *, terminal: bool = True) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, force_terminal=terminal, no_color=True, color_system=None)
    console.print(what)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [20, 36, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_every_worker_has_its_row(width: int) -> None:
    lines = drawn(StatusTable(rows_of(status())), width)
    assert len(lines) == 4 and all(len(line) <= width for line in lines)
    assert all(f"worker {i}" in lines[i + 1] for i in range(3))


def test_the_least_important_columns_go_first() -> None:
    body = status()
    waits = {"what": "the quorum", "have": 2, "need": 3, "missing": [1], "count": 1}
    body["per_worker"]["0"] |= {"state": "waiting", "waits_for": waits}
    wide, narrow = (drawn(StatusTable(rows_of(body)), width)[0] for width in (120, 40))
    assert wide.split() == [
        "worker",
        "state",
        "local",
        "step",
        "batches/s",
        "loss",
        "staleness",
        "refused",
        "waits",
        "for",
    ]
    assert narrow.split() == ["worker", "local", "step", "batches/s", "loss"]
    assert "worker 1 (2 of 3 have arrived)" in drawn(StatusTable(rows_of(body)), 120)[1]


def test_more_workers_than_lines_are_summed_up_and_the_dead_and_the_slow_stay() -> None:
    body = status(200)
    body["per_worker"]["150"]["batches"] = 6
    body["per_worker"]["77"]["state"] = "dead"
    lines = drawn(StatusTable(rows_of(body)), 100, 16)
    assert len(lines) <= 16 - 4
    text = "\n".join(lines)
    assert "worker 150" in text and "worker 77" in text and "dead" in text
    assert "and 191 faster workers: 191 computing" in lines[-1]


def test_all_workers_are_listed_where_there_is_no_terminal() -> None:
    assert len(drawn(StatusTable(rows_of(status(200))), terminal=False)) == 201


def test_the_bar_shows_what_is_done_and_what_is_left_as_far_as_there_is_room() -> None:
    bar = RunBar(RunProgress("global step", 1240, 3000, 75.0))
    (wide,), (narrow,), (tiny,) = (drawn(bar, width) for width in (100, 40, 12))
    assert wide.startswith("global step 1,240 of 3,000  41 %  1:15 left")
    assert narrow.startswith("global step 1,240 of 3,000") and "left" not in narrow
    assert len(tiny) <= 12
    assert drawn(RunBar(RunProgress("global step", 7, None, None)))[0].strip() == "global step 7"


@pytest.mark.parametrize(("seconds", "said"), [(0, "0:00"), (59.6, "1:00"), (125, "2:05"), (3723, "1:02:03")])
def test_times_are_written_as_on_a_clock(seconds: float, said: str) -> None:
    assert clock(seconds) == said


def test_for_whom_a_worker_waits_is_said_in_a_few_words() -> None:
    many = {"what": "the quorum", "have": 1, "need": 9, "missing": [0, 1, 2, 3, 4], "count": 8}
    assert wait_words(many) == "workers 0, 1, 2 and 5 more (1 of 9 have arrived)"
    behind = {"what": "the slowest worker", "have": 4, "need": 3, "missing": [2], "count": 1}
    assert wait_words(behind) == "worker 2 (4 steps behind)"
    assert wait_words(None) == ""


def test_a_view_without_a_terminal_prints_plain_lines_and_a_quiet_one_nothing() -> None:
    for quiet in (False, True):
        file = io.StringIO()
        console = Console(file=file, width=200, force_terminal=False)
        with View(console, quiet=quiet, plain_every_s=0.0) as view:
            view.line("a task's line")
            view.show({"ready": False})
            view.show(status())
        shown = file.getvalue()
        assert shown == "" if quiet else "global step 40/100, loss 0.25" in shown and "a task's line" in shown
        assert "\x1b" not in shown


def test_a_view_in_a_terminal_draws_bar_headline_and_table_and_clears_them_at_the_end() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, height=24, force_terminal=True, color_system=None)
    with View(console) as view:
        view.show(status())
        console.width = 50  # the window became narrower
        view.show(status(global_step=41))
    shown = file.getvalue()
    assert "global step 41 of 100" in shown and headline(status()) in shown and "worker 2" in shown
    assert shown.endswith("\x1b[2K") or "\x1b[1A\x1b[2K" in shown


def several() -> dict[str, Any]:
    of = {
        "rule": "Sync()",
        "version": 40,
        "batches": 80,
        "loss": 0.5,
        "refused": 0,
        "staleness_mean": 0.0,
        "round": [1, 2],
    }
    body = status(optimizers={"G": of, "D": {**of, "rule": "Async()", "version": 1200, "loss": None, "round": None}})
    body["per_worker"]["0"]["state"] = "waiting"
    body["per_worker"]["0"]["waits_for"] = {
        "what": "the quorum", "have": 1, "need": 2, "missing": [1], "count": 1, "optimizer": "G",
    }  # fmt: skip
    return {**body, "seconds": 10.0}


def test_each_of_several_optimizers_has_a_row_and_a_wait_names_whose_round_it_is() -> None:
    lines = drawn(OptimizerTable(several()))
    assert [line.split() for line in lines[1:]] == [
        ["G", "40", "4.0", "0.5000", "Sync()", "0.00", "0", "1", "of", "2"],
        ["D", "1,200", "120", "Async()", "0.00", "0"],
    ]
    for width in (10, 30, 60):
        assert all(len(line) <= width for line in drawn(OptimizerTable(several()), width))
    assert "worker 1 (G: 1 of 2 have arrived)" in drawn(StatusTable(rows_of(several())), 120)[1]
    assert headline(several()).startswith("2 optimizers, 3 of 3 workers live")
    assert drawn(OptimizerTable(status())) == [] and OptimizerTable(status()).lines == 0


def test_the_live_view_of_several_optimizers_fits_its_screen_and_its_plain_line_has_them_all() -> None:
    view = View(Console(file=io.StringIO(), width=100, height=24, force_terminal=True))
    view._note(several())
    text = "\n".join(drawn(view.render(several())))
    assert text.index("optimizer") < text.index("worker 0") and "1,200" in text
    assert "G 40 (loss 0.5), D 1200, " in plain(several(), of_whole_run(several()))


def seen(*moments: tuple[float, int, int]) -> RecentSpeeds:
    """Two workers, of which the first waits for the second; at each moment so many batches of either."""
    recent = RecentSpeeds()
    for now, first, second in moments:
        body = status(2, global_step=second, updates=second)
        body["per_worker"]["0"] |= {"batches": first, "waited_s": 0.8 * now}
        body["per_worker"]["1"] |= {"batches": second, "waited_s": 0.0}
        if now == 4.0:
            body["per_worker"]["0"]["waits_for"] = {
                "what": "the quorum",
                "have": 1,
                "need": 2,
                "missing": [1],
                "count": 1,
            }
        recent.note(body, now)
    return recent


def test_all_speeds_on_a_screen_are_of_the_same_seconds_and_add_up() -> None:
    speeds = seen((0.0, 0, 0), (10.0, 100, 90), (12.0, 140, 110), (15.0, 200, 140)).speeds()
    assert speeds is not None
    assert str(speeds) == "last 5 s: 10 updates/s, 30 batches/s"
    assert [w.batches_per_s for w in speeds.workers.values()] == [20.0, 10.0]
    assert seen((0.0, 0, 0)).speeds() is None
    assert str(of_whole_run(status())) == "whole run: 10 updates/s, 90 batches/s"


def test_state_and_waiting_agree() -> None:
    recent = seen((0.0, 0, 0), (4.0, 40, 40), (5.0, 50, 50))  # it computes at the last moment, and has waited before
    first, second = rows_of(status(2), recent.speeds())
    assert (first.state, first.waits, first.waits_for) == ("waiting", 0.8, "worker 1 (1 of 2 have arrived)")
    assert (second.state, second.waits, second.waits_for) == ("computing", 0.0, "")
