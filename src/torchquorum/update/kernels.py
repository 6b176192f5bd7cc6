"""The arithmetic of an update, written once: the mean of gradients, and one kernel for each optimizer that workers can run.

Called by the ps (`torchquorum.update.updater`) and by the fast path, on CPU (`torchquorum.fastpath.steps`) and on a GPU
(`torchquorum.worker.device_update`). `kernels_for` is the one place that says which optimizers and options the fast path takes,
`SLICED_IN` in which dtypes. To add an optimizer, write a kernel and add it to `KERNELS`. What always holds: a kernel gives the
bits of torch.optim on every slice of a vector in a dtype of `SLICED_IN`; in other dtypes only on whole variables. It reads the
old values and state and writes the new ones; the two may be the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from torchquorum.wire.plan import OptimizerSpec, ScheduleSpec

# In narrower dtypes torch's kernels may round the tail of a vector differently from its body.
SLICED_IN = frozenset(["float32", "float64"])
# These choose another implementation of torch.optim, with other bits, or tensors where there are numbers here.
_OTHER_WAYS = ("fused", "foreach", "differentiable", "capturable")

Tensors = Sequence[torch.Tensor]


def mean(gradients: Sequence[torch.Tensor], out: torch.Tensor, weights: Sequence[float] = ()) -> torch.Tensor:
    """Returns the mean of gradients: their sum in order, then one division, in their own precision (ADR 0008).

    With weights it is sum(w * g) / sum(w), in the same order.

    Args:
        gradients: The gradients, in order of worker and local step.
        out: Where the mean of several is written; a single gradient is returned as it is.
        weights: How much each counts; empty where all count alike.
    """
    if len(gradients) == 1:
        return gradients[0]
    if weights:
        torch.mul(gradients[0], weights[0], out=out)
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            out.add_(gradient, alpha=weight)
        return out.div_(sum(weights))
    torch.add(gradients[0], gradients[1], out=out)
    for more in gradients[2:]:
        out.add_(more)
    return out.div_(len(gradients))


class Moment(NamedTuple):
    """Which update is made: its learning rate, and how many the state has seen before it."""

    rate: float
    step: int


class Kernel(Protocol):
    """The updates of one parameter group by one optimizer.

    Attributes:
        state: The tensors that the optimizer keeps for each element, by torch.optim's names.
        initial: What a new state holds.
        counted: Whether torch.optim keeps the number of updates, as `step`, in the state of every parameter.
        eager: Whether torch.optim makes the state before the first update.
        plain: Whether an update is one operation, so that a GPU may make it beside copies of the version.
    """

    state: tuple[str, ...]
    initial: float
    counted: bool
    eager: bool
    plain: bool

    def write(
        self, at: Moment, old: torch.Tensor, gradient: torch.Tensor, new: torch.Tensor, before: Tensors, after: Tensors
    ) -> None:
        """Writes the next values and the next state; `gradient` is only read."""
        ...

    def without_gradient(self, values: torch.Tensor) -> None:
        """Does to values of the next version what is done to a variable that has no gradient: mostly nothing."""
        ...


class Scratch:
    """Memory for what an update computes on its way, kept from one slice to the next."""

    def __init__(self) -> None:
        self._room: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns room of a tensor's shape and dtype."""
        key = tensor.dtype, tensor.device
        room = self._room.get(key)
        if room is None or room.numel() < tensor.numel():
            room = self._room[key] = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        return room[: tensor.numel()].view(tensor.shape)


class _Elementwise:
    """What all kernels have in common."""

    initial = 0.0
    counted = eager = plain = False

    def without_gradient(self, values: torch.Tensor) -> None:
        """They stay as they are."""


class Sgd(_Elementwise):
    """g = gradient + weight_decay * old; buffer = momentum * buffer + (1 - dampening) * g; new = old - rate * buffer."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._momentum, self._dampening = options.get("momentum", 0), options.get("dampening", 0)
        self._decay, self._maximize = options.get("weight_decay", 0), options.get("maximize", False)
        self._nesterov = options.get("nesterov", False)
        self.state: tuple[str, ...] = ("momentum_buffer",) if self._momentum != 0 else ()
        self.plain = not (self._momentum or self._decay or self._maximize)
        self._scratch = Scratch()

    def write(
        self, at: Moment, old: torch.Tensor, gradient: torch.Tensor, new: torch.Tensor, before: Tensors, after: Tensors
    ) -> None:
        """Writes the next values and the next momentum."""
        step = _directed(gradient, old, new, self._scratch, self._decay, self._maximize)
        if self.state:
            buffer = after[0]
            if at.step == 0:
                buffer.copy_(step)
            else:
                torch.mul(before[0], self._momentum, out=buffer).add_(step, alpha=1 - self._dampening)
            ahead = self._scratch.like(new) if self._nesterov else buffer
            step = torch.add(step, buffer, alpha=self._momentum, out=ahead) if self._nesterov else buffer
        torch.add(old, step, alpha=-at.rate, out=new)


class Adam(_Elementwise):
    """Kingma & Ba 2015, with AMSGrad and, as AdamW (Loshchilov & Hutter 2019), weight decay apart from the gradient."""

    counted = True
    decoupled: ClassVar[bool] = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._beta1, self._beta2 = options.get("betas", (0.9, 0.999))
        self._eps, self._amsgrad = options.get("eps", 1e-8), options.get("amsgrad", False)
        self._decay, self._maximize = options.get("weight_decay", 0), options.get("maximize", False)
        self._decoupled = options.get("decoupled_weight_decay", self.decoupled)
        self.state: tuple[str, ...] = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self._amsgrad else []))
        self._scratch = Scratch()

    def write(
        self, at: Moment, old: torch.Tensor, gradient: torch.Tensor, new: torch.Tensor, before: Tensors, after: Tensors
    ) -> None:
        """Writes the next values and moments."""
        step = at.step + 1
        into_gradient = 0 if self._decoupled else self._decay
        gradient = _directed(gradient, old, new, self._scratch, into_gradient, self._maximize)
        first, second = after[:2]
        torch.lerp(before[0], gradient, 1 - self._beta1, out=first)
        torch.mul(before[1], self._beta2, out=second).addcmul_(gradient, gradient, value=1 - self._beta2)
        if self._amsgrad:
            second = torch.maximum(before[2], second, out=after[2])
        # The gradient is used up: its room serves for the denominator.
        denominator = torch.sqrt(second, out=self._scratch.like(new))
        denominator.div_((1 - self._beta2**step) ** 0.5).add_(self._eps)
        if self._decoupled and self._decay:
            old = torch.mul(old, 1 - at.rate * self._decay, out=new)
        torch.addcdiv(old, first, denominator, value=-(at.rate / (1 - self._beta1**step)), out=new)


class AdamW(Adam):
    """Adam with weight decay apart from the gradient."""

    decoupled = True


class Adagrad(_Elementwise):
    """Duchi et al. 2011: sum += gradient^2; new = old - rate / (1 + step * lr_decay) * gradient / (sqrt(sum) + eps)."""

    state: tuple[str, ...] = ("sum",)
    counted = eager = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.initial = float(options.get("initial_accumulator_value", 0.0))
        self._lr_decay, self._eps = options.get("lr_decay", 0), options.get("eps", 1e-10)
        self._decay, self._maximize = options.get("weight_decay", 0), options.get("maximize", False)
        self._scratch, self._room = Scratch(), Scratch()

    def write(
        self, at: Moment, old: torch.Tensor, gradient: torch.Tensor, new: torch.Tensor, before: Tensors, after: Tensors
    ) -> None:
        """Writes the next values and sums."""
        gradient = _directed(gradient, old, new, self._room, self._decay, self._maximize)
        torch.addcmul(before[0], gradient, gradient, value=1, out=after[0])
        denominator = torch.sqrt(after[0], out=self._scratch.like(new)).add_(self._eps)
        rate = at.rate / (1 + at.step * self._lr_decay)
        torch.addcdiv(old, gradient, denominator, value=-rate, out=new)


class RmsProp(_Elementwise):
    """Tieleman & Hinton 2012: the mean of squares; `centered` takes away that of the gradient, `momentum` adds a buffer."""

    counted = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._alpha, self._eps = options.get("alpha", 0.99), options.get("eps", 1e-8)
        self._momentum, self._centered = options.get("momentum", 0), options.get("centered", False)
        self._decay, self._maximize = options.get("weight_decay", 0), options.get("maximize", False)
        more = [name for name, used in (("momentum_buffer", self._momentum > 0), ("grad_avg", self._centered)) if used]
        self.state: tuple[str, ...] = ("square_avg", *more)
        self._scratch, self._room = Scratch(), Scratch()

    def write(
        self, at: Moment, old: torch.Tensor, gradient: torch.Tensor, new: torch.Tensor, before: Tensors, after: Tensors
    ) -> None:
        """Writes the next values and means."""
        gradient = _directed(gradient, old, new, self._room, self._decay, self._maximize)
        squares = torch.mul(before[0], self._alpha, out=after[0])
        squares.addcmul_(gradient, gradient, value=1 - self._alpha)
        denominator = self._scratch.like(new)
        if self._centered:
            average = torch.lerp(before[-1], gradient, 1 - self._alpha, out=after[-1])
            torch.addcmul(squares, average, average, value=-1, out=denominator).sqrt_()
        else:
            torch.sqrt(squares, out=denominator)
        denominator.add_(self._eps)
        if self._momentum > 0:
            buffer = torch.mul(before[1], self._momentum, out=after[1]).addcdiv_(gradient, denominator)
            torch.add(old, buffer, alpha=-at.rate, out=new)
        else:
            torch.addcdiv(old, gradient, denominator, value=-at.rate, out=new)


def _directed(
    gradient: torch.Tensor, old: torch.Tensor, new: torch.Tensor, room: Scratch, decay: float, maximize: bool
) -> torch.Tensor:
    """Returns the gradient with the sign in which the values go down, and with the weight decay in it."""
    if not decay and not maximize:
        return gradient
    out = room.like(new)
    if maximize:
        gradient = torch.neg(gradient, out=out)
    return torch.add(gradient, old, alpha=decay, out=out) if decay else gradient


KERNELS: dict[str, Callable[[Mapping[str, Any]], Kernel]] = {
    "SGD": Sgd,
    "Adam": Adam,
    "AdamW": AdamW,
    "Adagrad": Adagrad,
    "RMSprop": RmsProp,
}


def kernels_for(optimizer: OptimizerSpec, schedule: ScheduleSpec | None = None) -> list[Kernel] | None:
    """Returns the kernel of each parameter group; None if only the ps can make the updates, with torch.optim."""
    kind = KERNELS.get(optimizer.name)
    if kind is None or not all(_takes(options) for options in optimizer.groups) or _cycles_momentum(schedule):
        return None
    return [kind(options) for options in optimizer.groups]


def _takes(options: Mapping[str, Any]) -> bool:
    """Whether a group's options ask for numbers only, and for torch.optim's plain implementation."""
    numbers = all(not isinstance(value, dict) for value in options.values())  # a dict is a tensor that travels
    betas = options.get("betas", ())
    return (
        numbers and all(isinstance(b, float | int) for b in betas) and not any(options.get(way) for way in _OTHER_WAYS)
    )


def _cycles_momentum(schedule: Any) -> bool:
    """Whether a schedule, or one inside it, changes more than the rate, as OneCycleLR and CyclicLR do."""
    if isinstance(schedule, list):
        return any(_cycles_momentum(part) for part in schedule)
    if isinstance(schedule, dict):
        schedule = ScheduleSpec(schedule["name"], schedule["arguments"]) if "arguments" in schedule else None
    if not isinstance(schedule, ScheduleSpec):
        return False
    cycles = schedule.name in ("OneCycleLR", "CyclicLR") and schedule.arguments.get("cycle_momentum", True)
    return bool(cycles) or any(_cycles_momentum(value) for value in schedule.arguments.values())


def states_of(kernels: Sequence[Kernel]) -> tuple[str, ...]:
    """Returns the names of the states that any of the groups has, each once."""
    return tuple(dict.fromkeys(name for kernel in kernels for name in kernel.state))
