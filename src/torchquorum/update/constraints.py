"""What is done to the variables after every update: `tq.Optimizer(after_update=tq.Clamp(-0.01, 0.01))`.

Part of the update wherever that is made: the shard calls `Constraints` on a new version, the fast path runs `constrained` kernels. They
travel by name and numbers, in the plan. What always holds: on every path the result has the bits of the same torch operation on
the whole parameter after torch.optim's step; what cannot be had so is refused when the session begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from torchquorum.errors import ConfigError
from torchquorum.placement.layout import CONSTANT, Layout, Variable
from torchquorum.update.kernels import Kernel, Moment, Tensors
from torchquorum.wire.plan import AfterSpec

EPSILON = 1e-12  # the least norm that UnitNorm divides by, as torch.nn.functional.normalize


def Clamp(low: float, high: float, *, only: str | Sequence[str] = ()) -> AfterSpec:
    """After every update each element is at least `low` and at most `high`, as `p.clamp_(low, high)` would make it.

    Args:
        low: The least value.
        high: The greatest value.
        only: Names of the parameters that it applies to, with * and ? as in file names; all that are trained by default.
    """
    if not all(isinstance(v, float | int) and not isinstance(v, bool) and math.isfinite(v) for v in (low, high)):
        raise ConfigError(f"Clamp({low!r}, {high!r}): must be two finite numbers, such as -0.01 and 0.01")
    if low > high:
        raise ConfigError(f"Clamp({low}, {high}): the first must not be more than the second")
    return AfterSpec("Clamp", {"low": float(low), "high": float(high)}, _names("Clamp", only))


def MaxNorm(limit: float, *, dim: int | None = 0, only: str | Sequence[str] = ()) -> AfterSpec:
    """After every update no row has a 2-norm above `limit`; longer ones are shortened, as `torch.renorm(p, 2, dim, limit)` does.

    Args:
        limit: The greatest norm, more than 0.
        dim: The dimension that counts the rows: with 0, of a weight of shape (out, in, ...), each output's weights have their own
            norm. None takes the whole parameter as one row.
        only: Names of the parameters that it applies to, with * and ? as in file names. By default all that have two dimensions
            or more, so no biases; one of fewer dimensions that is named here counts as one row.
    """
    if isinstance(limit, bool) or not isinstance(limit, float | int) or not 0 < limit < math.inf:
        raise ConfigError(f"MaxNorm({limit!r}): must be a finite number above 0, such as 1.0")
    return AfterSpec("MaxNorm", {"limit": float(limit), "dim": _dim("MaxNorm", dim)}, _names("MaxNorm", only))


def UnitNorm(*, dim: int | None = 0, only: str | Sequence[str] = ()) -> AfterSpec:
    """After every update each row has the 2-norm 1, as `torch.nn.functional.normalize` makes it.

    Args:
        dim: As of `MaxNorm`.
        only: As of `MaxNorm`.
    """
    return AfterSpec("UnitNorm", {"dim": _dim("UnitNorm", dim)}, _names("UnitNorm", only))


def _dim(name: str, dim: Any) -> int | None:
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 0):
        raise ConfigError(f"{name}(dim={dim!r}): must be 0 or more, or None for the whole parameter")
    return dim


def _names(name: str, only: Any) -> list[str]:
    found = [only] if isinstance(only, str) else list(only)
    if not all(isinstance(each, str) for each in found):
        raise ConfigError(f"{name}(only={only!r}): must be names of parameters, such as 'fc1.weight' or 'critic.*'")
    return found


def read_after_update(given: Any) -> list[AfterSpec]:
    """Returns what `tq.Optimizer(after_update=)` was given as a list, in the order in which it is done.

    Raises:
        ConfigError: It is something else.
    """
    found = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    for each in found:
        if not isinstance(each, AfterSpec):
            raise ConfigError(
                f"after_update={each!r}: give tq.Clamp(low, high), tq.MaxNorm(limit), tq.UnitNorm(), or a list of these; a "
                "function cannot travel to a ps"
            )
    return found


# -- what each does to one parameter, in place ----------------------------------------------------------------------------


def _clamp(values: torch.Tensor, arguments: Mapping[str, Any]) -> None:
    values.clamp_(arguments["low"], arguments["high"])


def _rows(values: torch.Tensor, dim: int | None) -> tuple[torch.Tensor, int]:
    """Returns a parameter so that a dimension counts its rows."""
    return (values.view(1, -1), 0) if dim is None or values.dim() < 2 else (values, dim)


def _max_norm(values: torch.Tensor, arguments: Mapping[str, Any]) -> None:
    rows, dim = _rows(values, arguments["dim"])
    rows.renorm_(2, dim, arguments["limit"])


def _unit_norm(values: torch.Tensor, arguments: Mapping[str, Any]) -> None:
    rows, dim = _rows(values, arguments["dim"])
    others = [d for d in range(rows.dim()) if d != dim]
    rows.div_(torch.linalg.vector_norm(rows, 2, others, keepdim=True).clamp_min_(EPSILON))


_DO: dict[str, Callable[[torch.Tensor, Mapping[str, Any]], None]] = {
    "Clamp": _clamp,
    "MaxNorm": _max_norm,
    "UnitNorm": _unit_norm,
}


# -- on a ps --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a variable in a shard's memory, and what is done to it; its shape is the variable's where that is whole."""

    spec: AfterSpec
    section: int
    start: int
    stop: int
    shape: tuple[int, ...]


class Constraints:
    """What is done to the variables of one shard after every update.

    Args:
        specs: What is done, in order.
        layout: Where the variables lie.
        shard: Which shard it is.

    Raises:
        ConfigError: Something of it cannot be done to these variables.
    """

    def __init__(self, specs: Sequence[AfterSpec], layout: Layout, shard: int) -> None:
        check_after_update(specs, layout)
        self._parts: list[_Part] = []
        for spec in specs:
            for index, section in enumerate(layout.trained[shard].sections):
                for piece in section.pieces:
                    variable = layout.variables[piece.variable]
                    if _applies(spec, variable):
                        shape = variable.shape if piece.numel == variable.numel else (piece.numel,)
                        stop = piece.offset + piece.numel
                        self._parts.append(_Part(spec, index, piece.offset, stop, tuple(shape)))

    def apply(self, sections: Sequence[torch.Tensor]) -> None:
        """Changes a new version in place, before it is published."""
        for part in self._parts:
            values = sections[part.section][part.start : part.stop].view(part.shape)
            _DO[part.spec.name](values, part.spec.arguments)


def check_after_update(specs: Sequence[AfterSpec], layout: Layout) -> None:
    """Raises ConfigError if something cannot be done to these variables: none has that name, no such dimension, or one is sliced."""
    sliced = {v for parts in layout.parts for v, start, stop in parts if stop - start != layout.variables[v].numel}
    for spec in specs:
        if spec.name not in _DO:
            raise ConfigError(f"after_update {spec.name!r}: must be one of {', '.join(_DO)}")
        chosen = [(i, v) for i, v in enumerate(layout.variables) if _applies(spec, v)]
        if not chosen:
            wanted = f"only={spec.only}" if spec.only else "two dimensions or more"
            raise ConfigError(f"tq.{spec.name}: no parameter that is trained has {wanted}, so it would do nothing")
        for index, variable in chosen if spec.name != "Clamp" else ():
            dim = spec.arguments["dim"]
            if dim is not None and dim >= max(len(variable.shape), 1):
                raise ConfigError(
                    f"tq.{spec.name}(dim={dim}): parameter {variable.name} of shape {list(variable.shape)} has no such dimension; "
                    "give another dim, or name the parameters it is for with only="
                )
            if index in sliced:
                raise ConfigError(
                    f"tq.{spec.name}: parameter {variable.name} is sliced over the ps tasks, and none of them has whole rows of it; "
                    "leave slice_bytes out, or make it larger than this parameter"
                )


def _applies(spec: AfterSpec, variable: Variable) -> bool:
    if variable.group == CONSTANT:
        return False
    if spec.only:
        return any(fnmatchcase(variable.name, pattern) for pattern in spec.only)
    return spec.name == "Clamp" or len(variable.shape) >= 2


# -- on the fast path -----------------------------------------------------------------------------------------------------


class ClampedKernel:
    """A kernel and a clamp after it, element by element, so on any slice."""

    def __init__(self, kernel: Kernel, low: float, high: float) -> None:
        self._kernel, self._low, self._high = kernel, low, high
        self.state, self.initial = kernel.state, kernel.initial
        self.counted, self.eager, self.plain = kernel.counted, kernel.eager, kernel.plain

    def write(
        self, at: Moment, old: torch.Tensor, gradient: torch.Tensor, new: torch.Tensor, before: Tensors, after: Tensors
    ) -> None:
        """Writes the next values and the next state."""
        self._kernel.write(at, old, gradient, new, before, after)
        new.clamp_(self._low, self._high)

    def without_gradient(self, values: torch.Tensor) -> None:
        """Clamps."""
        self._kernel.without_gradient(values)
        values.clamp_(self._low, self._high)


def constrained(kernels: list[Kernel] | None, specs: Sequence[AfterSpec]) -> list[Kernel] | None:
    """Returns kernels that also do what follows an update; None if only the ps can do that.

    Workers make updates of slices that end anywhere and hold the padding between variables too, which stays zero.
    """
    for spec in specs:
        anywhere = spec.name == "Clamp" and not spec.only and spec.arguments["low"] <= 0.0 <= spec.arguments["high"]
        if kernels is None or not anywhere:
            return None
        kernels = [ClampedKernel(kernel, spec.arguments["low"], spec.arguments["high"]) for kernel in kernels]
    return kernels
