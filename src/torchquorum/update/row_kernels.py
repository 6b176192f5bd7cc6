"""The optimizers of rows: each makes one update of rows that were gathered, in place, with all of their state.

Called by a table with the rows that an update touches, each once, their mean gradient and their state; nothing here knows keys,
positions or tables. What always holds: `SparseAdam` and `Adagrad` have the bits of torch.optim on sparse gradients; nothing is done
row by row in Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchquorum.errors import ConfigError

Options = Mapping[str, Any]
States = Mapping[str, torch.Tensor]
Step = Callable[[Options, int, torch.Tensor, torch.Tensor, States], None]
WHOLE, ONE = "whole", "one"  # a state is as wide as the row, or one number


@dataclass(frozen=True)
class RowKernel:
    """An optimizer of rows.

    Attributes:
        step: Updates rows in place: options, which update of the table it is (from 1), rows, gradients, states by name.
        states: The state that a row has, by name: `whole` as wide as the row, `one` a single number.
        initial: Returns what a state begins with.
        defaults: The options and what they are if not given.
        refused: Options of torch.optim that cannot be used with rows, unless they have this value, and why.
    """

    step: Step
    states: Mapping[str, str] = field(default_factory=dict)
    initial: Callable[[Options, str], float] = lambda _options, _name: 0.0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    def options(self, given: Options) -> dict[str, Any]:
        """Returns all options, those that were not given as they are by default."""
        return {**self.defaults, **given}

    def check(self, name: str, options: Options, where: str) -> None:
        """Raises ConfigError if an option cannot be used with rows."""
        for option, (allowed, why) in self.refused.items():
            if options.get(option, allowed) != allowed:
                raise ConfigError(
                    f"{where}: {name}({option}={options[option]}) cannot be used with rows: {why}; use {option}={allowed}, or sparse=False"
                )


def _sgd(options: Options, _count: int, rows: torch.Tensor, grad: torch.Tensor, _states: States) -> None:
    """W = w - lr g. torch adds a row's duplicates one by one; here they come added up."""
    rows.add_(grad, alpha=_sign(options) * -options["lr"])


def _adagrad(options: Options, count: int, rows: torch.Tensor, grad: torch.Tensor, states: States) -> None:
    """Duchi et al. 2011, as torch.optim.Adagrad does with a sparse gradient."""
    rate = options["lr"] / (1 + (count - 1) * options["lr_decay"])
    states["sum"].add_(grad.pow(2))
    std = states["sum"].sqrt().add_(options["eps"])
    rows.add_(torch.div(grad, std, out=std), alpha=_sign(options) * -rate)


def _rowwise_adagrad(options: Options, _count: int, rows: torch.Tensor, grad: torch.Tensor, states: States) -> None:
    """Adagrad with one number of state a row, the sum of the mean squares of its gradients (Ginart et al. 2019, section 2)."""
    total = states["sum"].add_(grad.square().mean(1))
    scale = total.sqrt().add_(options["eps"]).reciprocal_().mul_(-_sign(options) * options["lr"])
    rows.addcmul_(grad, scale.unsqueeze(1))


def _sparse_adam(options: Options, count: int, rows: torch.Tensor, grad: torch.Tensor, states: States) -> None:
    """Lazy Adam: moments change only where there is a gradient, in the operations and the order of torch.optim.SparseAdam."""
    beta1, beta2 = options["betas"]
    grad = -grad if options.get("maximize") else grad
    mean, square = states["exp_avg"], states["exp_avg_sq"]
    numer = torch.sub(grad, mean).mul_(1 - beta1).add_(mean)
    mean.copy_(numer)
    denom = grad.pow(2).sub_(square).mul_(1 - beta2).add_(square)
    square.copy_(denom)
    denom.sqrt_().add_(options["eps"])
    size = options["lr"] * math.sqrt(1 - beta2**count) / (1 - beta1**count)
    rows.add_(numer.div_(denom).mul_(-size))


def _ftrl(options: Options, _count: int, rows: torch.Tensor, grad: torch.Tensor, states: States) -> None:
    """FTRL-Proximal (McMahan et al. 2013, algorithm 1), with the options of tf.train.FtrlOptimizer."""
    rate, power = options["lr"], -options["learning_rate_power"]
    square, linear = states["square"], states["linear"]
    before = square.pow(power)
    square.addcmul_(grad, grad)
    after = square.pow(power)
    linear.add_(grad).addcmul_((after - before).div_(rate), rows, value=-1.0)
    l1, l2 = options["l1"], options["l2"]
    shrunk = torch.sign(linear).mul_(l1).sub_(linear)
    rows.copy_(torch.where(linear.abs() > l1, shrunk.div_(after.div_(rate).add_(2 * l2)), 0.0))


def _sign(options: Options) -> float:
    return -1.0 if options.get("maximize") else 1.0


_NO_DECAY = (0, "it would change rows that a batch does not touch")
KERNELS: dict[str, RowKernel] = {
    "SGD": RowKernel(
        _sgd,
        refused={
            "momentum": (0, "the momentum of rows that a batch does not touch would go on moving them"),
            "weight_decay": _NO_DECAY,
        },
    ),
    "Adagrad": RowKernel(
        _adagrad,
        {"sum": WHOLE},
        lambda options, _name: float(options["initial_accumulator_value"]),
        {"lr": 0.01, "lr_decay": 0.0, "eps": 1e-10, "initial_accumulator_value": 0.0},
        {"weight_decay": _NO_DECAY},
    ),
    "RowwiseAdagrad": RowKernel(
        _rowwise_adagrad,
        {"sum": ONE},
        lambda options, _name: float(options["initial_accumulator_value"]),
        {"lr": 0.01, "eps": 1e-8, "initial_accumulator_value": 0.0},
    ),
    "SparseAdam": RowKernel(
        _sparse_adam,
        {"exp_avg": WHOLE, "exp_avg_sq": WHOLE},
        defaults={"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8},
    ),
    "FTRL": RowKernel(
        _ftrl,
        {"square": WHOLE, "linear": WHOLE},
        lambda options, name: float(options["initial_accumulator_value"]) if name == "square" else 0.0,
        {"lr": 0.05, "l1": 0.0, "l2": 0.0, "learning_rate_power": -0.5, "initial_accumulator_value": 0.1},
    ),
}


def kernel_of(name: str, where: str) -> RowKernel:
    """Returns the row kernel of an optimizer.

    Raises:
        ConfigError: It has none.
    """
    kernel = KERNELS.get(name)
    if kernel is None:
        raise ConfigError(
            f"{where}: {name} has no update of single rows, and would change rows that a batch does not touch; use "
            "torch.optim.SparseAdam, Adagrad or SGD, or sparse=False"
        )
    return kernel
