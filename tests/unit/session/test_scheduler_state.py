"""Schedulers among what a session saves."""

import json
import math
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import torchquorum as tq
from torchquorum.session.scheduler_state import is_late, is_scheduler, pack, unpack


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 7]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 7)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_from_its_state_as_json(name: str) -> None:
    ours, theirs = sgd(), sgd()
    first, second = SCHEDULERS[name](ours), SCHEDULERS[name](theirs)
    for _ in range(5):
        ours.step()
        first.step()
    second.load_state_dict(unpack(json.loads(json.dumps(pack(first.state_dict())))))
    theirs.param_groups[0] |= {k: v for k, v in ours.param_groups[0].items() if k != "params"}
    for _ in range(5):
        for optimizer, scheduler in ((ours, first), (theirs, second)):
            optimizer.step()
            scheduler.step()
        assert [ours.param_groups[0][k] == theirs.param_groups[0][k] for k in ("lr", "momentum")] == [True, True]


def test_any_state_of_plain_values_comes_back_as_it_was() -> None:
    state = {"a": (1, [2.5, None]), 3: {"b": True}, "inf": math.inf, "set": {1, 2}, "t": torch.tensor([1, 2])}
    back = unpack(pack({**state, "function": print}))
    assert torch.equal(back.pop("t"), state.pop("t")) and back == state  # type: ignore[arg-type]


def test_schedulers_and_scalers_are_late_and_data_is_not() -> None:
    optimizer = sgd()
    for source in (lr_scheduler.StepLR(optimizer, 2), lr_scheduler.ReduceLROnPlateau(optimizer)):
        assert is_late(source) and is_scheduler(source)
    scaler = torch.amp.GradScaler("cpu")
    assert is_late(scaler) and not is_scheduler(scaler)
    assert not is_late(tq.Batches((torch.zeros(4, 2), torch.zeros(4)), 2))
    assert not is_late(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4))))
