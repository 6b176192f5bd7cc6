"""What users see of the worker: an optimizer whose step pushes gradients and pulls variables.

Wraps a torch.optim optimizer, which says what the ps tasks run and is never run here. Attached by `tq.Session`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from torchquorum.errors import ConfigError, LostPlaceError, TaskLostError
from torchquorum.rules import Rule, Sync
from torchquorum.update.constraints import read_after_update
from torchquorum.wire.messages import AverageSpec, OptimizerSpec, ScheduleSpec
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.link import Link
from torchquorum.worker.nonfinite import Nonfinite
from torchquorum.worker.run_member import LaterLoss
from torchquorum.worker.step import Step

Schedule = ScheduleSpec


class StepObserver(Protocol):
    """Who is told of every step: the session."""

    def before_run(self) -> None:
        """A step is about to be pushed."""
        ...

    def after_run(self, step: Step, loss: float | None, seconds: float) -> None:
        """A step has been made."""
        ...

    def recover(self, error: Exception) -> Step:
        """A ps task was lost in the middle of a step: finds it again, or raises."""
        ...


def schedule(name: str | type[Any], **arguments: Any) -> Schedule:
    """Names a learning-rate schedule that the ps tasks evaluate by global step.

    Args:
        name: A class of torch.optim.lr_scheduler, or its name.
        **arguments: The class's arguments, without the optimizer.

    Returns:
        What `tq.Optimizer(..., schedule=)` takes.
    """
    called = name if isinstance(name, str) else name.__name__
    for key, value in arguments.items():
        if callable(value) and not isinstance(value, ScheduleSpec):
            raise ConfigError(f"{called}({key}=...): a function cannot travel to a ps; use a schedule without one")
    return ScheduleSpec(called, {k: _travels(v) for k, v in arguments.items()})


def ExponentialDecay(*, decay_steps: float, decay_rate: float, staircase: bool = False) -> Schedule:
    """As tf.train.exponential_decay: lr * decay_rate ** (global_step / decay_steps), the exponent floored if staircase."""
    if decay_steps <= 0:
        raise ConfigError(f"ExponentialDecay(decay_steps={decay_steps}): must be more than 0")
    return ScheduleSpec(
        "ExponentialDecay", {"decay_steps": decay_steps, "decay_rate": decay_rate, "staircase": staircase}
    )


def ExponentialMovingAverage(decay: float, *, num_updates: bool = True) -> AverageSpec:
    """Names moving averages of the variables, kept on the ps tasks, as tf.train.ExponentialMovingAverage.

    Args:
        decay: How much of the old average stays at each update, such as 0.99.
        num_updates: Decay less at the start: min(decay, (1 + step) / (10 + step)).
    """
    if not 0.0 <= decay <= 1.0:
        raise ConfigError(f"ExponentialMovingAverage({decay}): must be between 0 and 1, such as 0.99")
    return AverageSpec(float(decay), num_updates)


def _travels(value: Any) -> Any:
    if isinstance(value, ScheduleSpec):
        return {"name": value.name, "arguments": value.arguments}
    if isinstance(value, torch.Tensor):
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return [_travels(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"{value!r} cannot travel to a ps: only numbers, words and lists of them can")


def _as_schedule(given: Any) -> Schedule | None:
    if given is None or isinstance(given, ScheduleSpec):
        return given
    if isinstance(given, functools.partial) and not given.args:
        return schedule(given.func, **given.keywords)  # pyright: ignore[reportArgumentType]
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        return schedule(given[0], **given[1])
    raise ConfigError(
        f"schedule={given!r}: give tq.schedule('StepLR', step_size=30), tq.ExponentialDecay(...), or "
        "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=30); a scheduler object belongs to one process"
    )


class Optimizer:
    """A torch.optim optimizer that runs on the ps tasks.

    Args:
        optimizer: Any optimizer of torch.optim over the model's parameters; its class and arguments are what counts.
        rule: When gradients become an update: `tq.Sync()` (the default), `tq.Async()`, `tq.Bounded(s)`, `tq.Buffered(k)`.
        schedule: A learning-rate schedule by global step, see `tq.schedule` and `tq.ExponentialDecay`.
        placement: How variables are placed on ps tasks: `round_robin` or `greedy`.
        slice_bytes: A variable of more bytes is sliced over all ps tasks.
        average: Moving averages of the variables, see `tq.ExponentialMovingAverage`; evaluate with `session.averaged()`.
        after_update: What is done to the variables after every update, where that is made: `tq.Clamp`, `tq.MaxNorm`, `tq.UnitNorm`.
        allow_nonfinite: Apply gradients with NaN or infinity, as plain PyTorch does; by default they are refused.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule | None = None,
        *,
        schedule: Any = None,
        placement: str = "round_robin",
        slice_bytes: int | None = None,
        average: AverageSpec | None = None,
        after_update: Any = None,
        allow_nonfinite: bool = False,
    ) -> None:
        if isinstance(optimizer, Optimizer):
            raise ConfigError("tq.Optimizer of a tq.Optimizer: wrap the torch.optim optimizer once")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"tq.Optimizer({type(optimizer).__name__}): give it a torch.optim optimizer")
        if rule is not None and not isinstance(rule, Rule):
            raise ConfigError(
                f"rule={rule!r}: give tq.Sync(), tq.Async(), tq.Bounded(s) or tq.Buffered(k), with parentheses"
            )
        self.inner = optimizer
        self.rule = rule if rule is not None else Sync()
        self.schedule = _as_schedule(schedule)
        self.placement, self.slice_bytes, self.average = placement, slice_bytes, average
        self.after_update = read_after_update(after_update)
        self.allow_nonfinite = allow_nonfinite
        self._nonfinite = Nonfinite()
        self.last: Step | None = None
        self._link: Link | None = None
        self._observer: StepObserver | None = None
        self._rates = self._given_rates()
        self._last_lr = list(self._rates)

    def _given_rates(self) -> list[float]:
        return [float(group.get("lr", 0.0)) for group in self.inner.param_groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Returns the parameter groups as they were given; the ps tasks have copies."""
        return self.inner.param_groups

    @property
    def lr(self) -> list[float]:
        """Returns the learning rate of each parameter group for the next update, as the ps tasks have it."""
        return self._link.lr if self._link is not None else self._last_lr

    def spec(self) -> OptimizerSpec:
        """Returns the optimizer as it travels to the ps tasks."""
        kind = type(self.inner)
        if getattr(torch.optim, kind.__name__, None) is not kind:
            raise ConfigError(f"{kind.__module__}.{kind.__qualname__}: only the classes of torch.optim can run on a ps")
        groups = []
        for group in self.inner.param_groups:
            kept = {k: v for k, v in group.items() if k not in ("params", "param_names", "initial_lr")}
            groups.append({k: _travels(v) for k, v in kept.items()})
        return OptimizerSpec(kind.__name__, groups)

    def attach(self, link: Link | None, observer: StepObserver | None = None) -> None:
        """Connects the optimizer to the ps tasks, or cuts it off; the session calls this and watches every step."""
        if link is None and self._link is not None:
            self._last_lr = self._link.lr
        self._link, self._observer = link, observer
        if link is not None:
            link.allow_nonfinite = self.allow_nonfinite

    @property
    def link(self) -> Link | None:
        """Returns the link to the ps tasks while a session runs."""
        return self._link

    @property
    def flat(self) -> FlatParameters | None:
        """Returns the parameters as they lie in memory while a session runs."""
        joined = self._link.joined if self._link is not None else None
        return joined.flat if joined is not None else None

    def say(self, line: str) -> None:
        """Prints a line for people, with the worker's name."""
        if self._link is not None:
            self._link.say(line)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None) -> Step:
        """Pushes the gradients and pulls the variables.

        Args:
            closure: Computes loss and gradients, as in torch.optim; not needed in an ordinary loop.
            loss: The loss, if it should appear in progress, ledger and report.

        Returns:
            What became of the gradients.
        """
        self.check()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()
        return self.push(float(loss) if loss is not None else None)

    def check(self) -> None:
        """Raises ConfigError if there is no session, or the learning rates were changed here."""
        if self._link is None:
            raise ConfigError(
                "optimizer.step() outside of `with tq.Session(task, model, optimizer)`: there is no ps to push to"
            )
        if self._given_rates() != self._rates:
            raise ConfigError(
                "the learning rate was changed on the worker, where it has no effect; give tq.Optimizer a schedule="
            )

    def push(self, loss: float | LaterLoss | None) -> Step:
        """Pushes the gradients and pulls the variables, as `step` does.

        Args:
            loss: The loss; or a function that returns it, called when the gradients have been computed.
        """
        assert self._link is not None
        if self._observer is None:
            self.last = self._link.push(loss)
            self._nonfinite.follow(self.last, self._link)
            return self.last
        self._observer.before_run()
        started = time.perf_counter()
        try:
            self.last = self._link.push(loss)
            self._nonfinite.follow(self.last, self._link)
        except (LostPlaceError, TaskLostError) as error:
            self.last = self._observer.recover(error)
        self._observer.after_run(self.last, loss() if callable(loss) else loss, time.perf_counter() - started)
        return self.last

    def state_dict(self) -> dict[str, Any]:
        """Is not here: the state lives on the ps tasks."""
        raise ConfigError("the optimizer's state lives on the ps tasks; it is saved with the run, not from a worker")
