"""Another parameter or layer in the model of a run is noticed, as its updates would reach nothing."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from torchquorum.errors import ConfigError
from torchquorum.worker.parameter_places import AT_FIRST, ParameterPlaces


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
        self.first, self.last = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(2, 2)


def new_parameter(model: Any) -> None:
    model.body[0].weight = nn.Parameter(torch.zeros(4, 3))


def new_layer(model: Any) -> None:
    model.body[2] = nn.Linear(4, 4)


def new_block(model: Any) -> None:
    model.body = nn.Sequential(nn.Linear(3, 4))


def untied(model: Any) -> None:
    model.last.weight = nn.Parameter(torch.zeros(5, 4))


def removed(model: Any) -> None:
    del model.body


def assigned(model: Any) -> None:
    model.load_state_dict(dict(model.state_dict()), assign=True)


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.body[0], "weight", amount=0.5)


def parametrized(model: Any) -> None:
    parametrizations.weight_norm(model.body[2])


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (new_parameter, "parameter body.0.weight"),
    (new_layer, "layer body.2"),
    (new_block, "layer body"),
    (untied, "parameter last.weight"),
    (removed, "layer body"),
    (assigned, "parameter "),
    (pruned, "parameter body.0.weight"),
    (parametrized, "parameter body.2.weight"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_another_parameter_or_layer_is_named(change: Callable[[Any], None], said: str) -> None:
    model = Tied()
    places = ParameterPlaces(model, [p for name, p in model.named_parameters() if "frozen" not in name])
    places.check()
    change(model)
    with pytest.raises(ConfigError, match=f"{said}.* of the model is another one than when the session began"):
        places.check()


def test_values_wrappers_and_what_the_optimizer_does_not_know_are_no_change() -> None:
    model = Tied()
    places = ParameterPlaces(model, [p for name, p in model.named_parameters() if "frozen" not in name])
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    model.frozen = nn.Linear(7, 7)
    nn.DataParallel(model)
    places.check()
    model.last.weight = nn.Parameter(torch.zeros(5, 4))
    with pytest.raises(ConfigError, match="last.weight"):
        places.check()


def test_a_large_model_is_looked_at_now_and_then_and_a_change_is_still_found() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(200)])
    places = ParameterPlaces(model, model.parameters())
    for _ in range(AT_FIRST + 1):
        places.check()
    started = time.perf_counter()
    for _ in range(100):
        places.check()
    assert time.perf_counter() - started < 0.02
    model[150] = nn.Linear(4, 4)
    looks = [places.check] * 20
    with pytest.raises(ConfigError, match="layer 150 of the model"):
        any(look() for look in looks)
