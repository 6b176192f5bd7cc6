import io
import math
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import torchquorum as tq
from tests.unit.session.runs import Line, train
from torchquorum.errors import ConfigError

LINE = re.compile(
    r"^After (\d+) training steps \((\d+) global steps\), loss on training batch is (\S+)\. \(\d+\.\d{3} sec/batch\)$"
)


@pytest.mark.parametrize("rule", [tq.Sync(), tq.Async()])
def test_stop_at_step_ends_the_loop_at_the_global_step(rule: Any) -> None:
    assert train(lambda _: [tq.StopAtStepHook(last_step=7)], last_step=None, rule=rule) == [(7, 7)]


def test_stop_at_step_ends_all_synchronous_workers_in_the_same_round() -> None:
    ends = train(lambda _: [tq.StopAtStepHook(last_step=6)], last_step=None, workers=2)
    assert [global_step for global_step, _ in ends] == [6, 6]


def test_stop_at_step_is_exact_with_asynchronous_workers() -> None:
    ends = train(lambda _: [tq.StopAtStepHook(last_step=9)], last_step=None, workers=3, rule=tq.Async())
    assert [global_step for global_step, _ in ends] == [9, 9, 9]


def test_the_last_step_of_the_session_wins_over_that_of_a_hook() -> None:
    assert train(lambda _: [tq.StopAtStepHook(last_step=9)], last_step=5) == [(5, 5)]


def test_num_steps_count_from_where_the_session_starts() -> None:
    hook = tq.StopAtStepHook(num_steps=3)
    session = Pretended(global_step=40)
    hook.after_create_session(session)  # type: ignore[arg-type]
    assert hook.last_step == 43
    session.global_step = 42
    hook.after_create_session(session)  # type: ignore[arg-type]
    assert hook.last_step == 43 and not session.stop_asked


def test_a_session_that_starts_beyond_the_last_step_makes_no_step() -> None:
    session = Pretended(global_step=10)
    tq.StopAtStepHook(last_step=10).after_create_session(session)  # type: ignore[arg-type]
    assert session.stop_asked


class Pretended:
    def __init__(self, global_step: int) -> None:
        self.global_step, self.stop_asked = global_step, False

    def request_stop(self) -> None:
        self.stop_asked = True


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "exactly one"),
        ({"last_step": 1, "num_steps": 1}, "exactly one"),
        ({"last_step": 0}, "1 or more"),
        ({"num_steps": 2.5}, "whole number"),
    ],
)
def test_stop_at_step_says_what_it_wants(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        tq.StopAtStepHook(**arguments)


def test_the_step_counter_measures_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    hook = tq.hooks.StepCounterHook(every=5)
    train(lambda _: [hook], last_step=12)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["worker 0: global step 5", "worker 0: global step 10"]
    assert all(re.search(r" [\d.]+ global steps/s, [\d.]+ local steps/s$", line) for line in lines)
    assert hook.global_steps_per_s is not None and hook.local_steps_per_s is not None
    assert 0 < hook.global_steps_per_s == pytest.approx(hook.local_steps_per_s)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_with_a_clear_error(bad: float) -> None:
    with pytest.raises(tq.NanLossError) as caught:
        train(lambda _: [tq.hooks.NanGuardHook()], losses=lambda step: bad if step == 4 else 1.0)
    text = str(caught.value)
    assert f"/job:worker/task:0: the loss is {bad} at local step 4, global step 4" in text
    assert "smaller learning rate (now 0.01)" in text and "clip" in text


def test_a_nan_guard_that_shall_not_fail_only_stops_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    guard = lambda _: [tq.hooks.NanGuardHook(fail=False)]  # noqa: E731
    assert train(guard, losses=lambda step: math.nan if step == 4 else 1.0) == [(4, 4)]
    assert "the loss is nan at local step 4" in capsys.readouterr().err


def test_a_nan_gradient_is_caught_before_it_reaches_the_variables() -> None:
    kept: list[nn.Module] = []

    class Spoilt(Line):
        def __init__(self) -> None:
            super().__init__()
            kept.append(self)
            self.fc.bias.register_hook(lambda g: g * math.nan)

    with pytest.raises(tq.NanLossError, match=r"the gradient of fc.bias is not finite .* It was not pushed"):
        train(lambda _: [tq.hooks.NanGuardHook(gradients=True)], model=Spoilt)
    assert all(bool(torch.isfinite(p).all()) for p in kept[0].parameters())


def test_the_log_line_is_the_tutorials_to_the_letter(capsys: pytest.CaptureFixture[str]) -> None:
    train(lambda _: [tq.LogHook(every=5)], last_step=12)
    found = [LINE.match(line) for line in capsys.readouterr().out.splitlines()]
    assert [m and m.groups() for m in found] == [("5", "5", "0.2"), ("10", "10", "0.1")]


def test_the_log_line_of_the_other_tutorials_has_a_singular(capsys: pytest.CaptureFixture[str]) -> None:
    train(lambda _: [tq.LogHook(every=5, singular=True)], last_step=5)
    assert "After 5 training steps (5 global step), loss on training batch is 0.2. (" in capsys.readouterr().out


def test_hooks_that_need_the_loss_say_once_that_it_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    train(lambda _: [tq.LogHook(every=1), tq.hooks.NanGuardHook()], last_step=3, losses=lambda _: None)
    shown = capsys.readouterr()
    assert shown.err.count("LogHook has no loss to look at; write optimizer.step(loss=loss)") == 1
    assert shown.err.count("NanGuardHook has no loss") == 1
    assert shown.out.count("loss on training batch is nan.") == 3


def test_progress_is_a_plain_line_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    train(lambda _: [tq.hooks.ProgressHook(every_s=1e-9)], last_step=3)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"worker 0: global step 2/3, loss 0\.5, [\d.]+ local steps/s", lines[1])


def test_progress_is_a_bar_in_a_terminal() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    train(lambda _: [tq.hooks.ProgressHook(console=console)], last_step=3)
    shown = screen.getvalue()
    assert "worker 0" in shown and "3/3" in shown and "\x1b[?25h" in shown  # the cursor is back


def test_hooks_refuse_periods_of_nothing() -> None:
    for make in (tq.LogHook, tq.hooks.StepCounterHook):
        with pytest.raises(ConfigError, match="must be more than 0"):
            make(every=0)
