"""Writes to parameters inside a run are noticed at the next step, however they are made, and cost next to nothing."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.errors import ConfigError
from torchquorum.placement import place
from torchquorum.session.join import Task
from torchquorum.worker import writes
from torchquorum.worker.flat import FlatParameters, describe
from torchquorum.worker.writes import SuspectedWriteError, WriteWatch, same_bits


def watch(model: nn.Module) -> WriteWatch:
    variables, parameters = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return WriteWatch(FlatParameters(place(variables, 1), parameters))


def suspects(of: WriteWatch) -> list[int]:
    try:
        of.look()
    except SuspectedWriteError as found:
        return found.variables
    return []


# -- the watch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_one_element_written_through_data_is_found_by_a_full_look(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(30, 50, dtype=dtype), nn.Linear(50, 7, dtype=dtype))
    seen = watch(model)
    seen.note()
    assert suspects(seen) == []
    model.get_parameter("1.weight").data[3, 4] += 1
    assert suspects(seen) == [2]


def test_samples_alone_find_what_changes_every_element(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "FULL_AT_FIRST", 0)
    model = nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 7))
    seen = watch(model)
    monkeypatch.setattr(seen, "_full_at", float("inf"))
    for _ in range(40):
        seen.note()
        assert suspects(seen) == []
    model.get_parameter("0.bias").data.mul_(0.5)
    assert suspects(seen) == [1]


def test_of_a_small_model_every_element_is_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "FULL_AT_FIRST", 0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    seen = watch(model)
    monkeypatch.setattr(seen, "_full_at", float("inf"))
    for of, parameter in enumerate(model.parameters()):
        for element in range(parameter.numel()):
            seen.note()
            parameter.data.view(-1)[element] += 1
            assert suspects(seen) == [of]


def test_a_parameter_with_a_memory_format_of_its_own_is_watched_too() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    seen = watch(model)
    seen.note()
    model.weight.data[0, 1, 2, 2] = 7
    assert suspects(seen) == [0]


def test_nan_that_stays_is_no_write_and_constants_are_the_programs() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model.get_parameter("0.weight").data.fill_(float("nan"))
    variables, parameters = describe(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    seen = WriteWatch(FlatParameters(place(variables, 1), parameters))
    seen.note()
    model.get_parameter("1.weight").data.zero_()
    assert suspects(seen) == []


def test_bits_are_compared_and_not_values() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


def test_a_step_costs_microseconds() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(50)])
    seen = watch(model)
    for _ in range(10):
        seen.note()
        seen.look()
    best = 1.0
    for _ in range(50):
        started = time.perf_counter()
        seen.note()
        seen.look()
        best = min(best, time.perf_counter() - started)
    assert best < 0.0005, best


# -- in a run -------------------------------------------------------------------------------------------------------------


def in_place(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight[1, 1] = 3


def loaded(model: nn.Linear) -> None:
    model.load_state_dict({"weight": torch.ones(2, 3), "bias": model.bias.detach().clone()})


def through_data(model: nn.Linear) -> None:
    model.weight.data.clamp_(-0.001, 0.001)


def replaced(model: nn.Linear) -> None:
    model.weight.data = torch.zeros(2, 3)


def initialised(model: nn.Linear) -> None:
    nn.init.xavier_uniform_(model.weight)


def swapped_and_back(model: nn.Linear) -> None:
    kept = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
        model.weight.copy_(kept)


def replaced_and_back(model: nn.Linear) -> None:
    kept = model.weight.data.clone()
    model.weight.data = torch.zeros(2, 3)
    model.weight.data = kept


def train(
    write: Callable[[nn.Linear], None], at: int = 3, rule: Any = None, **options: Any
) -> tuple[int, torch.Tensor]:
    def work(task: Task) -> tuple[int, torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Linear(3, 2)
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule=rule or tq.Sync())
        with tq.Session(task, model, optimizer, last_step=6, patience=PATIENCE) as session:
            while not session.should_stop():
                optimizer.zero_grad()
                model(torch.ones(4, 3)).square().mean().backward()
                if session.global_step == at:
                    write(model)
                optimizer.step()
            return session.global_step, model.weight.detach().clone()

    return Cluster(**options).run(work)[0]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("write", [in_place, loaded, through_data, replaced, initialised])
def test_a_write_is_an_error_at_the_next_step_that_names_the_parameter_and_the_two_ways(
    write: Any, transport: str
) -> None:
    with pytest.raises(
        ConfigError, match=r"parameter.* weight.*: written to inside.*session\.assign\(\).*after_update="
    ):
        train(write, transport=transport)


def test_a_write_before_the_first_step_is_noticed_too() -> None:
    with pytest.raises(ConfigError, match="parameter weight: written to inside the run"):
        train(through_data, at=0)


@pytest.mark.parametrize("write", [swapped_and_back, replaced_and_back])
def test_values_that_are_put_back_before_the_step_are_no_write(write: Any) -> None:
    step, weight = train(write)
    assert step == 6
    assert torch.equal(weight, train(lambda model: None)[1])


def test_with_a_gradient_on_its_way_a_write_is_noticed_too() -> None:
    with pytest.raises(ConfigError, match="parameter weight: written to inside the run"):
        train(in_place, rule=tq.Async(pipeline=True))


def test_inside_averaged_and_after_it_nothing_counts_as_a_write() -> None:
    def work(task: Task) -> None:
        model = nn.Linear(3, 2)
        average = tq.ExponentialMovingAverage(0.9)
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), average=average)
        with tq.Session(task, model, optimizer, last_step=4, patience=PATIENCE) as session:
            while not session.should_stop():
                optimizer.zero_grad()
                model(torch.ones(4, 3)).square().mean().backward()
                optimizer.step()
                with session.averaged():
                    model(torch.ones(4, 3))
            assert session.global_step == 4

    Cluster().run(work)


# -- the end of a session -------------------------------------------------------------------------------------------------


def by_hand(model: nn.Linear, rate: float) -> None:
    """As PyTorch's word_language_model does it."""
    model.zero_grad()
    model(torch.ones(4, 3)).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-rate)


def test_a_program_that_updates_by_hand_and_never_steps_is_told_what_to_write() -> None:
    def work(task: Task) -> None:
        model = nn.Linear(3, 2)
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with tq.Session(task, model, optimizer, patience=PATIENCE):
            for _ in range(3):
                by_hand(model, 0.1)

    with pytest.raises(ConfigError, match=r"weight, bias: .*optimizer.step\(\) was never called.*param_groups\[0\]"):
        Cluster().run(work)


def test_what_is_written_after_the_last_step_stays_and_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    def work(task: Task) -> list[torch.Tensor]:
        model = nn.Linear(3, 2)
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with tq.Session(task, model, optimizer, last_step=2, patience=PATIENCE) as session:
            while not session.should_stop():
                optimizer.zero_grad()
                model(torch.ones(4, 3)).square().mean().backward()
                optimizer.step()
            best = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
            model.load_state_dict(best)
        return [p.detach().clone() for p in model.parameters()]

    [found] = Cluster().run(work)
    assert all(torch.equal(p, torch.ones_like(p)) for p in found)
    assert "weight, bias: written to after this worker's last step" in capsys.readouterr().err
