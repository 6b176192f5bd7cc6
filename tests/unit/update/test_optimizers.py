"""Optimizer classes that a ps can run: torch's, and those of the program."""

from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.equivalence.test_one_worker import Net, backward, plain, same
from tests.harness import train
from torchquorum.errors import ConfigError
from torchquorum.update import optimizers


class SignMomentum(torch.optim.Optimizer):
    """An optimizer of one's own: with an argument that must be given, an option that only it knows, state, and no closure."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["seen"] = state.get("seen", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["beta"])
                p.add_(mean.sign() * mean.norm(), alpha=-group["lr"] * group.get("scale", 1.0))


def own(model: nn.Module) -> torch.optim.Optimizer:
    weights, biases = ([p for p in model.parameters() if (p.dim() > 1) is many] for many in (True, False))
    return SignMomentum([{"params": weights, "scale": 0.5}, {"params": biases, "beta": 0.5}], lr=0.01)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_registered", {})
    assert tq.register_optimizer(SignMomentum) is SignMomentum


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("ps", [1, 2])
def test_a_registered_optimizer_equals_itself_in_plain_pytorch(ps: int) -> None:
    ours, _ = train(Net, own, backward, steps=8, ps=ps)
    assert same(ours, plain(own, steps=8))


@pytest.mark.usefixtures("registered")
def test_a_name_means_one_class() -> None:
    class SignMomentum(torch.optim.SGD):
        pass

    with pytest.raises(ConfigError, match="SignMomentum; rename the class"):
        tq.register_optimizer(SignMomentum)
    tq.register_optimizer(torch.optim.Adam)
    with pytest.raises(ConfigError, match="give it a subclass of torch.optim.Optimizer, not an object"):
        tq.register_optimizer(torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]))  # type: ignore[type-var]


@pytest.mark.usefixtures("registered")
def test_a_class_that_is_called_like_one_of_torch_is_the_programs_own() -> None:
    class Muon(SignMomentum):  # as programs that are older than torch.optim.Muon have it
        pass

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Muon(model.parameters(), lr=0.01)

    with pytest.raises(ConfigError, match=r"write tq\.register_optimizer\(Muon\) before"):
        tq.Optimizer(make(Net()))
    tq.register_optimizer(Muon)
    ours, _ = train(Net, make, backward, steps=3)
    assert same(ours, plain(make, steps=3))
    assert (
        type(optimizers.build("Muon", [{"params": [nn.Parameter(torch.zeros(2, 2))], "lr": 0.1}])) is torch.optim.Muon
    )


def test_a_ps_that_does_not_know_a_class_says_what_to_write() -> None:
    with pytest.raises(
        ConfigError, match=r"tq.register_optimizer\(Missing\) before tq.join\(\), in the program that every"
    ):
        optimizers.build("Missing", [{"params": []}])
    with pytest.raises(ConfigError, match=r"did you mean Adam\?"):
        optimizers.build("Adamm", [{"params": []}])
    with pytest.raises(ConfigError, match="LBFGS cannot run on a ps"):
        optimizers.build("LBFGS", [{"params": []}])
