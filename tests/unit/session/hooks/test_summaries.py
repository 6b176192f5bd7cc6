import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import torchquorum as tq
from tests.unit.session.runs import Line, train
from torchquorum.errors import ConfigError
from torchquorum.session.hooks import summaries
from torchquorum.session.hooks.summary_writer import StatusRates


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    events.Reload()
    return events


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(e.step, e.value) for e in read(folder).Scalars(tag)]


def until_written(hook: tq.SummaryHook, session: tq.Session) -> None:
    """Waits until the writer has nothing left to do; its questions go over the link, which belongs to this thread."""
    deadline = time.monotonic() + 60
    while hook.behind:
        assert time.monotonic() < deadline and session.optimizer.link is not None
        session.optimizer.link.attend()
        time.sleep(0.01)


def test_a_run_leaves_scalars_histograms_graph_and_configuration(tmp_path: Path) -> None:
    summary = {index: tq.SummaryHook(every_steps=10, example=torch.ones(4, 3)) for index in range(2)}
    train(
        lambda task: [tq.EvaluateHook(10, lambda _: 0.75), summary[task.index]],
        last_step=30,
        workers=2,
        logdir=tmp_path,
        in_loop=lambda session: until_written(summary[session.task.index], session),
    )
    tags: Any = read(tmp_path).Tags()
    assert {
        "loss",
        "accuracy",
        "learning_rate",
        "global_steps_per_s",
        "examples_per_s",
        "staleness/mean",
        "staleness/max",
        "refused/total",
        "workers/live",
        *(f"{name}/worker_{i}" for name in ("quorum_wait", "batches_per_s") for i in (0, 1)),
    } <= set(tags["scalars"])
    names = ("fc.weight", "fc.bias")
    assert set(tags["histograms"]) == {f"{kind}/{n}" for kind in ("variables", "gradients") for n in names}
    assert tags["graph"]
    assert [step for step, _ in points(tmp_path, "loss")][:3] == [10, 20, 30]
    assert dict(points(tmp_path, "loss"))[20] == pytest.approx(1 / 20)
    assert points(tmp_path, "accuracy")[0] == (10, 0.75)
    config = read(tmp_path).Tensors("configuration/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| rule | Sync() |" in config and "| optimizer | SGD |" in config
    assert "| fc.weight | [2, 3] | float32 | 0 |" in config and "localhost:2001" in config


def test_the_first_moments_come_by_steps_and_the_graph_is_that_of_the_programs_own_input(tmp_path: Path) -> None:
    train(lambda _: [tq.SummaryHook(every_s=3600, logdir=tmp_path)], last_step=12)
    assert [step for step, _ in points(tmp_path, "loss")] == [1, 2, 5, 10, 12]
    assert read(tmp_path).Tags()["graph"]


def test_only_the_chief_writes(tmp_path: Path) -> None:
    train(lambda task: [tq.SummaryHook(logdir=tmp_path / str(task.index))], workers=2, last_step=3)
    assert [folder.name for folder in tmp_path.iterdir()] == ["0"]


def test_recorded_accuracy_and_a_hooks_own_numbers_are_written(tmp_path: Path) -> None:
    summary = tq.SummaryHook(logdir=tmp_path)

    class Mine(tq.Hook):
        def after_run(self, session: tq.hooks.HookSession, ran: tq.hooks.Ran) -> None:
            summary.scalar("mine/half", ran.step.version / 2, ran.step.version)

    counter = tq.hooks.StepCounterHook(every=2, quiet=True)
    train(lambda _: [Mine(), counter, summary], last_step=4, at_end=lambda s: s.record(accuracy=0.9, loss=0.3))
    assert points(tmp_path, "mine/half") == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]
    assert points(tmp_path, "final/accuracy") == [(4, pytest.approx(0.9))]
    assert points(tmp_path, "final/loss") == [(4, pytest.approx(0.3))]
    assert [step for step, _ in points(tmp_path, "step_counter/local_steps_per_s")] == [2, 4]


def test_a_folder_that_cannot_be_written_costs_a_line_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file, not a folder")
    assert train(lambda _: [tq.SummaryHook(logdir=taken / "run", every_steps=1)], last_step=5) == [(5, 5)]
    said = [line for line in capsys.readouterr().err.splitlines() if "summaries" in line]
    assert len(said) == 1
    assert f"no summaries: {taken / 'run'} cannot be written" in said[0] and "Training goes on" in said[0]


def test_a_missing_tensorboard_costs_a_line_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard.writer", None)
    train(lambda _: [tq.SummaryHook(logdir=tmp_path, every_steps=1)], last_step=5)
    assert "no summaries: " in (said := capsys.readouterr().err) and "pip install tensorboard" in said


def test_a_run_without_a_folder_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    train(lambda _: [tq.SummaryHook()], last_step=2)
    assert "no summaries: there is no folder for them; give tq.Session a logdir=" in capsys.readouterr().err


def test_a_model_that_cannot_be_traced_costs_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(lambda _: [tq.SummaryHook(logdir=tmp_path, example=torch.ones(4, 77))], last_step=3)
    shown = capsys.readouterr()
    assert shown.err.count("summaries: no graph of the model: ") == 1
    assert "loss" in read(tmp_path).Tags()["scalars"]


def test_a_run_that_fails_leaves_its_summaries_and_no_thread(tmp_path: Path) -> None:
    with pytest.raises(tq.NanLossError):
        train(
            lambda _: [tq.SummaryHook(logdir=tmp_path, every_steps=1), tq.hooks.NanGuardHook()],
            losses=lambda step: float("nan") if step == 5 else 1.0,
        )
    for thread in threading.enumerate():
        if thread.name == "torchquorum-summaries":
            thread.join(60)
            assert not thread.is_alive()
    assert [step for step, _ in points(tmp_path, "loss")][:4] == [1, 2, 3, 4]


def test_what_was_written_beyond_the_step_of_a_resumed_run_counts_no_more(tmp_path: Path) -> None:
    hook = tq.SummaryHook(logdir=tmp_path, every_steps=1)

    class Back(tq.Hook):
        """Stands for a recovery that restored step 3."""

        def after_run(self, session: tq.hooks.HookSession, ran: tq.hooks.Ran) -> None:
            if ran.step.version == 6:
                hook.noted = (session.task.clock.now(), 10)
                hook.after_create_session(session)

    train(lambda _: [hook, Back()], last_step=8, in_loop=lambda session: until_written(hook, session))
    assert [step for step, _ in points(tmp_path, "learning_rate")][:8] == [1, 2, 3, 4, 5, 7, 8, 8]
    seconds = {path.name.split(".")[3] for path in tmp_path.glob("events.out.tfevents.*")}
    assert len(seconds) == 2  # by which readers put them in order


def test_large_models_are_sampled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "SAMPLED", 100)
    monkeypatch.setattr(summaries, "LEAST_SAMPLED", 10)
    model = nn.Module()
    model.large = nn.Parameter(torch.arange(1000.0))
    model.small = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    taken = summaries.take_variables(model)
    assert set(taken) == {"variables/large", "variables/small"}
    assert taken["variables/large"].tolist() == list(range(0, 1000, 20))
    assert taken["variables/small"].tolist() == [1.0, 1.0, 1.0]
    model.large.data.zero_()
    assert taken["variables/large"].max() == 980  # a copy


def test_values_that_are_not_finite_do_not_end_the_histograms(tmp_path: Path) -> None:
    class Spoilt(Line):
        def __init__(self) -> None:
            super().__init__()
            self.fc.bias.register_hook(lambda g: g * float("nan"))

    train(lambda _: [tq.SummaryHook(logdir=tmp_path)], last_step=1, model=Spoilt, allow_nonfinite=True)
    assert "gradients/fc.weight" in (tags := read(tmp_path).Tags()["histograms"]) and "gradients/fc.bias" not in tags


def test_rates_come_from_two_statuses() -> None:
    def status(batches: int, waited_s: float) -> dict[str, Any]:
        worker = {"batches": batches, "waited_s": waited_s, "refused_reasons": {"too stale": batches // 10}}
        totals = {"batches": batches, "refused": batches // 10, "staleness_mean": 0.5, "staleness_max": 2, "live": [0]}
        return {**totals, "per_worker": {"0": worker}}

    rates = StatusRates(batch_size=32)
    first = rates.scalars(status(10, 1.0), 100.0)
    assert first == {
        "staleness/mean": 0.5,
        "staleness/max": 2,
        "refused/total": 1,
        "refused/too_stale": 1,
        "workers/live": 1,
    }
    second = rates.scalars(status(30, 1.5), 102.0)
    assert second["batches_per_s/worker_0"] == 10.0 and second["examples_per_s"] == 320.0
    assert second["quorum_wait/worker_0"] == 0.25 and second["refused/too_stale"] == 3
    assert rates.scalars({"ready": False}, 103.0) == {}


def test_the_loop_goes_on_while_the_writer_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, go_on = threading.Event(), threading.Event()
    freed: list[bool] = []
    freed_before_the_end: list[bool] = []

    def stick(*_: Any) -> None:
        stuck.set()
        freed.append(go_on.wait(60))

    def free(_: tq.Session) -> None:
        assert stuck.wait(60)
        freed_before_the_end.extend(freed)
        go_on.set()

    monkeypatch.setattr(summaries.SummaryThread, "_write_values", stick)
    hook = tq.SummaryHook(logdir=tmp_path, every_steps=1)
    assert train(lambda _: [hook], last_step=50, at_end=free) == [(50, 50)]
    assert freed_before_the_end == [] and freed and all(freed)


@pytest.mark.parametrize("arguments", [{"every_s": 1, "every_steps": 1}, {"every_s": 0}, {"every_steps": -1}])
def test_periods_must_make_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        tq.SummaryHook(**arguments)


def test_histogram_arrays_are_float32() -> None:
    assert all(a.dtype == np.float32 for a in summaries.take_variables(nn.Linear(2, 2).double()).values())
