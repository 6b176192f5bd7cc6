"""The classes of optimizers that a ps can run: those of torch.optim, and those that the program has registered.

Asked by the worker before an optimizer travels, and by the ps that gets its name. The ps tasks run the same program up to `tq.join()`, so a
class that is registered before is there, too; nothing travels but its name. What always holds: a name means one class.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from torchquorum.errors import ConfigError
from torchquorum.update.delayed_nesterov import DelayedNesterov
from torchquorum.wire.settings import decode

_Kind = TypeVar("_Kind", bound=type[torch.optim.Optimizer])
# These need a closure, which a ps does not have.
IMPOSSIBLE = {"LBFGS": "it evaluates the loss again during a step"}
OWN = "own."  # before the name of a class of the program that is called like one of torch.optim
# Not for users to name: what others become under some rules.
_OURS: dict[str, type[torch.optim.Optimizer]] = {"DelayedNesterov": DelayedNesterov}
_registered: dict[str, type[torch.optim.Optimizer]] = {}


def register_optimizer(kind: _Kind) -> _Kind:
    """Lets ps tasks run an optimizer class of your own; call it before `tq.join()`, in the program that all tasks run.

    The class gets whole variables, as it would in plain PyTorch, and keeps its state on the ps tasks. May be used as a decorator.

    Args:
        kind: A subclass of torch.optim.Optimizer.

    Returns:
        The class.

    Raises:
        ConfigError: It is no such class, or its name means another one.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(
            f"tq.register_optimizer({kind!r}): give it a subclass of torch.optim.Optimizer, not an object"
        )
    name = _name(kind)
    known = _registered.get(name)
    if (
        known is not None
        and known is not kind
        and known.__qualname__ + known.__module__ != kind.__qualname__ + kind.__module__
    ):
        raise ConfigError(
            f"tq.register_optimizer({kind.__name__}): that name means {known.__module__}.{known.__qualname__}; rename the class"
        )
    _registered[name] = kind
    return kind


def _name(kind: type[torch.optim.Optimizer]) -> str:
    """Returns its own name; for a class of the program that is called like another one of torch.optim, one that tells them apart."""
    name = kind.__name__
    return name if _of_torch(name) in (None, kind) else f"{OWN}{name}"


def name_of(kind: type[torch.optim.Optimizer]) -> str:
    """Returns the name by which a class travels.

    Raises:
        ConfigError: A ps cannot run it, or would not know it.
    """
    name = _name(kind)
    if _of_torch(name) is kind and name in IMPOSSIBLE:
        raise ConfigError(f"torch.optim.{name} cannot run on a ps: {IMPOSSIBLE[name]}; use SGD, Adam or another")
    if _of_torch(name) is not kind and _registered.get(name) is not kind:
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} is no class of torch.optim: write tq.register_optimizer({kind.__name__}) before "
            "tq.join(), so that the ps tasks, which run the same program, have it too"
        )
    return name


def is_own(name: str) -> bool:
    """Whether a name means a class that was registered."""
    return name in _registered


def build(name: str, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Makes an optimizer from its class's name and its parameter groups, whose options may be as they travel.

    Raises:
        ConfigError: The name means nothing here.
    """
    if name in IMPOSSIBLE:
        raise ConfigError(f"torch.optim.{name} cannot run on a ps: {IMPOSSIBLE[name]}; use SGD, Adam or another")
    kind = _registered.get(name) or _of_torch(name) or _OURS.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, [*_registered, *dir(torch.optim)], 1)
        more = f"; did you mean {near[0]}?" if near else "."
        raise ConfigError(
            f"optimizer {name!r}: not a class of torch.optim, and this task has registered none of that name{more} A class of your "
            f"own needs tq.register_optimizer({name.removeprefix(OWN)}) before tq.join(), in the program that every task runs"
        )
    given = [{k: v if k == "params" else decode(v) for k, v in group.items()} | as_on_a_ps(group) for group in groups]
    needed = inspect.signature(kind).parameters if name in _registered else {}
    return kind(given, **{k: v for k, v in given[0].items() if k in needed and k != "params"})  # type: ignore[call-arg]


def as_on_a_ps(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are others on a ps, which has no GPU: those that say how an update is made there, not which."""
    return {"capturable": False} if options.get("capturable") else {}


def check_groups(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError if a parameter group has an option that has no effect on a ps."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            "differentiable=True: the update is made on the ps tasks, and no gradient flows through it; leave that out, or make such "
            "steps in the program with torch.func, and the outer ones with the tq.Optimizer"
        )


def step_without_hooks(optimizer: torch.optim.Optimizer, *args: Any) -> Any:
    """Makes a step that the program has not called: its hooks see the step of the `tq.Optimizer`, and not this one."""
    step = type(optimizer).step
    found = (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer, *args)  # pyright: ignore[reportFunctionMemberAccess]
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # for scheduler objects
    return found


@contextmanager
def of_the_program() -> Iterator[None]:
    """Inside this block an optimizer or a schedule runs, whose assertions are its own: they are errors, not faults of this package."""
    try:
        yield
    except AssertionError as error:
        raise RuntimeError(f"AssertionError: {error}") from error


def _of_torch(name: str) -> type[torch.optim.Optimizer] | None:
    found = getattr(torch.optim, name, None)
    known = isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and name != "Optimizer"
    return found if known else None
