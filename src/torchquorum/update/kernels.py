"""The arithmetic of an update, written once: the mean of gradients, and one kernel for each optimizer that workers can run.

Called by the ps (`torchquorum.update.updater`) and by the fast path, on CPU (`torchquorum.fastpath.steps`) and on a GPU
(`torchquorum.worker.device_update`). `kernel_for` is the one place that says which optimizers and options the fast path takes,
`SLICED_IN` in which dtypes. To add an optimizer, write a kernel and add it to `KERNELS`. What always holds: a kernel gives the
bits of torch.optim on every slice of a vector in a dtype of `SLICED_IN`; in other dtypes only on whole variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from torchquorum.wire.plan import OptimizerSpec

# In narrower dtypes torch's kernels may round the tail of a vector differently from its body.
SLICED_IN = frozenset(["float32", "float64"])


def mean(gradients: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Returns the mean of gradients: their sum in order, then one division, in their own precision (ADR 0008).

    Args:
        gradients: The gradients, in order of worker and local step.
        out: Where the mean of several is written; a single gradient is returned as it is.
    """
    if len(gradients) == 1:
        return gradients[0]
    torch.add(gradients[0], gradients[1], out=out)
    for more in gradients[2:]:
        out.add_(more)
    return out.div_(len(gradients))


class Kernel(Protocol):
    """One optimizer's update of a slice of the variables."""

    state: ClassVar[tuple[str, ...]]
    """The tensors that the optimizer keeps for each element. Slots hold values only, so these must be none yet."""

    hides_infinity: bool
    """Whether finite values may come of an infinite gradient."""

    @staticmethod
    def takes(options: Mapping[str, Any]) -> bool:
        """Whether it can make the updates of a parameter group with these options of the torch.optim class."""
        ...

    def write(self, old: torch.Tensor, gradient: torch.Tensor, rate: float, new: torch.Tensor) -> None:
        """Writes the next values beside the old ones, as on a CPU, where each version has memory of its own."""
        ...

    def update(self, values: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        """Replaces the values by the next ones, as on a GPU, where only the parameters are."""
        ...

    def without_gradient(self, values: torch.Tensor) -> None:
        """Does to values of the next version what is done to a variable that has no gradient: mostly nothing."""
        ...


class PlainSgd:
    """SGD without state: new = old - rate * gradient, in the one operation that torch.optim uses."""

    state: ClassVar[tuple[str, ...]] = ()
    hides_infinity = False
    _not_plain = ("momentum", "weight_decay", "maximize", "fused", "foreach", "differentiable")

    @staticmethod
    def takes(options: Mapping[str, Any]) -> bool:
        """Whether no option asks for more than that; a learning rate that is a tensor is updated by torch.optim."""
        plain = not any(options.get(option) for option in PlainSgd._not_plain)
        return plain and isinstance(options.get("lr", 0.0), float | int)

    def write(self, old: torch.Tensor, gradient: torch.Tensor, rate: float, new: torch.Tensor) -> None:
        """Writes the next values beside the old ones."""
        torch.add(old, gradient, alpha=-rate, out=new)

    def update(self, values: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        """Replaces the values by the next ones."""
        values.add_(gradient, alpha=-rate)

    def without_gradient(self, values: torch.Tensor) -> None:
        """They stay as they are."""


KERNELS: dict[str, type[Kernel]] = {"SGD": PlainSgd}


def kernel_for(optimizer: OptimizerSpec) -> Kernel | None:
    """Returns the kernel with which workers can make an optimizer's updates; None if only the ps can, with torch.optim."""
    kind = KERNELS.get(optimizer.name)
    if kind is None or kind.state or not all(kind.takes(options) for options in optimizer.groups):
        return None
    return kind()
