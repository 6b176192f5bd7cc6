"""What users write for a table's optimizer and its first rows: `tq.rows.Adagrad(lr=0.02)`, `tq.rows.Uniform(-0.01, 0.01)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchquorum.errors import ConfigError
from torchquorum.update.row_inits import check_init
from torchquorum.update.row_kernels import kernel_of
from torchquorum.wire.plan import InitSpec


@dataclass(frozen=True)
class RowOptimizer:
    """An optimizer of rows: its name among the kernels, and its options."""

    name: str
    options: dict[str, Any]


def _made(name: str, **options: Any) -> RowOptimizer:
    rate = options["lr"]
    if not (isinstance(rate, int | float) and rate >= 0):
        raise ConfigError(f"tq.rows.{name}(lr={rate!r}): must be a number, 0 or more")
    return RowOptimizer(name, kernel_of(name, "tq.Table").options(options))


def SGD(lr: float) -> RowOptimizer:
    """Gradient descent; a row has no state."""
    return _made("SGD", lr=lr)


def Adagrad(
    lr: float = 0.01, *, lr_decay: float = 0.0, eps: float = 1e-10, initial_accumulator_value: float = 0.0
) -> RowOptimizer:
    """As torch.optim.Adagrad; the state is as large as the row."""
    return _made("Adagrad", lr=lr, lr_decay=lr_decay, eps=eps, initial_accumulator_value=initial_accumulator_value)


def RowwiseAdagrad(lr: float = 0.01, *, eps: float = 1e-8, initial_accumulator_value: float = 0.0) -> RowOptimizer:
    """Adagrad with one number of state a row, the sum of the mean squares of its gradients."""
    return _made("RowwiseAdagrad", lr=lr, eps=eps, initial_accumulator_value=initial_accumulator_value)


def LazyAdam(lr: float = 0.001, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> RowOptimizer:
    """As torch.optim.SparseAdam: the moments of a row change only when it has a gradient."""
    return _made("SparseAdam", lr=lr, betas=list(betas), eps=eps)


def FTRL(
    lr: float = 0.05,
    *,
    l1: float = 0.0,
    l2: float = 0.0,
    learning_rate_power: float = -0.5,
    initial_accumulator_value: float = 0.1,
) -> RowOptimizer:
    """FTRL-Proximal, as tf.train.FtrlOptimizer."""
    return _made(
        "FTRL",
        lr=lr,
        l1=l1,
        l2=l2,
        learning_rate_power=learning_rate_power,
        initial_accumulator_value=initial_accumulator_value,
    )


def Uniform(low: float = -0.05, high: float = 0.05) -> InitSpec:
    """Rows begin with numbers between two."""
    return InitSpec("uniform", check_init("uniform", {"low": low, "high": high}))


def Normal(mean: float = 0.0, std: float = 1.0) -> InitSpec:
    """Rows begin with normal numbers."""
    return InitSpec("normal", check_init("normal", {"mean": mean, "std": std}))


def Constant(value: float) -> InitSpec:
    """Rows begin with one number."""
    return InitSpec("constant", check_init("constant", {"value": value}))


def Zeros() -> InitSpec:
    """Rows begin with zeros."""
    return InitSpec("zeros", {})
