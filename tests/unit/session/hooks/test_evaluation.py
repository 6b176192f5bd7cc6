from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.unit.session.runs import Line, train
from torchquorum.errors import ConfigError


def weight_of(model: nn.Module) -> float:
    return float(next(model.parameters()).detach().sum())


def test_evaluation_prints_the_tutorials_line_with_the_averages_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    during: list[float] = []
    before: list[float] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert not model.training and not torch.is_grad_enabled()
        during.append(weight_of(model))
        return {"accuracy": 0.9825, "loss": 0.5}

    hook = tq.EvaluateHook(5, evaluate)
    train(
        lambda _: [hook],
        last_step=12,
        average=tq.ExponentialMovingAverage(0.99),
        in_loop=lambda session: before.append(weight_of(session.model)),
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"After {step} training step(s),validation {name} using average model is {value}."
        for step in (5, 10)
        for name, value in (("accuracy", 0.9825), ("loss", 0.5))
    ]
    assert hook.step == 10 and hook.results == {"accuracy": 0.9825, "loss": 0.5}
    assert during[0] not in before and during[1] not in before


def test_after_an_evaluation_the_model_is_as_it_was() -> None:
    seen: list[tuple[float, bool]] = []

    def run(*hooks: Any) -> list[tuple[float, bool]]:
        seen.clear()

        def model() -> nn.Module:
            torch.manual_seed(3)
            return Line()

        train(
            lambda _: hooks,
            last_step=8,
            average=tq.ExponentialMovingAverage(0.9),
            model=model,
            in_loop=lambda session: seen.append((weight_of(session.model), session.model.training)),
        )
        return list(seen)

    assert run(tq.EvaluateHook(3, lambda _: 0.5)) == run()


def test_without_averages_the_variables_are_evaluated_and_the_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    train(lambda _: [tq.EvaluateHook(4, lambda _: {"accuracy": 1.0})], last_step=4)
    assert capsys.readouterr().out == "After 4 training step(s),validation accuracy is 1.\n"


def test_only_the_chief_evaluates_and_a_step_passed_over_is_made_up_for(capsys: pytest.CaptureFixture[str]) -> None:
    train(lambda _: [tq.EvaluateHook(10, lambda _: 0.5)], workers=2, rule=tq.Async(), last_step=60)
    steps = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert steps == sorted(set(steps)) and len({s // 10 for s in steps}) == len(steps) > 0


def test_every_worker_prints_and_records_its_final_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    recorded: dict[int, dict[str, float]] = {}

    class After(tq.Hook):
        def end(self, session: tq.hooks.HookSession) -> None:
            recorded[session.task.index] = session.results

    train(
        lambda task: [tq.hooks.FinalAccuracyHook(lambda _: {"accuracy": 0.5 + task.index, "loss": 2.0}), After()],
        workers=2,
        last_step=5,
    )
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "worker=0, final accuracy = 0.5",
        "worker=1, final accuracy = 1.5",
    ]
    assert recorded == {i: {"accuracy": 0.5 + i, "loss": 2.0} for i in (0, 1)}


def test_a_final_evaluation_without_accuracy_is_refused() -> None:
    with pytest.raises(ConfigError, match="returned loss; it must return an accuracy"):
        train(lambda _: [tq.hooks.FinalAccuracyHook(lambda _: {"loss": 1.0})], last_step=2)
