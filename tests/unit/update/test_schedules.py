"""Schedules by name, on the ps."""

import pytest
import torch

from torchquorum.errors import ConfigError
from torchquorum.update.schedules import build, schedule_class
from torchquorum.wire.messages import ScheduleSpec


def rates(spec: ScheduleSpec, steps: int, lr: float = 1.0) -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=lr)
    schedule = build(spec, optimizer)
    seen = []
    for _ in range(steps):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return seen


def test_exponential_decay_is_smooth_or_a_staircase() -> None:
    smooth = ScheduleSpec("ExponentialDecay", {"decay_steps": 2, "decay_rate": 0.25})
    assert rates(smooth, 5) == pytest.approx([1.0, 0.5, 0.25, 0.125, 0.0625])
    stairs = ScheduleSpec("ExponentialDecay", {"decay_steps": 2, "decay_rate": 0.25, "staircase": True})
    assert rates(stairs, 5) == pytest.approx([1.0, 1.0, 0.25, 0.25, 0.0625])


def test_schedules_nest() -> None:
    inner = [
        {"name": "ConstantLR", "arguments": {"factor": 0.5, "total_iters": 2}},
        {"name": "ExponentialLR", "arguments": {"gamma": 0.1}},
    ]
    assert rates(ScheduleSpec("ChainedScheduler", {"schedulers": inner}), 3) == pytest.approx([0.5, 0.05, 0.01])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("LambdaLR", "LambdaLR cannot run on a ps: a function cannot travel"),
        ("MultiplicativeLR", "a function cannot travel"),
        ("ReduceLROnPlateau", "ReduceLROnPlateau cannot run on a ps: it follows a metric, not the global step"),
        ("LRScheduler", "allowed are ExponentialDecay and the classes"),
        ("Optimizer", "allowed are"),
        ("os", "allowed are"),
        ("StepLr", "schedule 'StepLr'"),
    ],
)
def test_what_is_no_schedule_for_a_ps_is_refused_with_the_reason(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        schedule_class(name)


@pytest.mark.parametrize(
    "spec",
    [
        ScheduleSpec("StepLR", {}),
        ScheduleSpec("StepLR", {"step_size": 1, "color": 2}),
        ScheduleSpec("ExponentialDecay", {"decay_steps": 0, "decay_rate": 1.0}),
        ScheduleSpec("ChainedScheduler", {}),
        ScheduleSpec("OneCycleLR", {"max_lr": 1.0}),
        ScheduleSpec("SequentialLR", {"schedulers": [{"name": "LambdaLR", "arguments": {}}], "milestones": []}),
    ],
    ids=lambda spec: spec.name,
)
def test_arguments_that_do_not_fit_are_an_error_that_names_the_schedule(spec: ScheduleSpec) -> None:
    with pytest.raises(ConfigError, match=f"{spec.name}|LambdaLR"):
        rates(spec, 1)
