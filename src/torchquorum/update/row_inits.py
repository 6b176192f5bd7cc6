"""What a row begins with: a function of the table's seed and the row's key alone.

So it does not depend on who came first, on the order of keys, or on how many ps tasks there are. The numbers are drawn by a
counter-based generator (the finalizer of splitmix64 over seed, key and column), for whole arrays of keys.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchquorum.errors import ConfigError
from torchquorum.memory.key_index import Keys, mix

# Name: its numbers, with what they are if not given.
INITS: dict[str, dict[str, float]] = {
    "zeros": {},
    "constant": {"value": 0.0},
    "uniform": {"low": -0.05, "high": 0.05},
    "normal": {"mean": 0.0, "std": 1.0},
}


def check_init(name: str, numbers: dict[str, float]) -> dict[str, float]:
    """Returns the numbers of an init, all of them.

    Raises:
        ConfigError: There is no such init, or it has no such number.
    """
    if name not in INITS:
        raise ConfigError(f"init {name!r}: allowed are {', '.join(INITS)}")
    unknown = sorted(set(numbers) - set(INITS[name]))
    if unknown:
        raise ConfigError(f"init {name}({unknown[0]}=): allowed are {', '.join(INITS[name]) or 'no arguments'}")
    whole = {**INITS[name], **{key: float(value) for key, value in numbers.items()}}
    if not all(map(math.isfinite, whole.values())):
        raise ConfigError(f"init {name}({whole}): the numbers must be finite")
    return whole


def initial_rows(
    name: str, numbers: dict[str, float], seed: int, keys: Keys, dim: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns what the rows of these keys begin with, [len(keys), dim]."""
    shape = (len(keys), dim)
    if name in ("zeros", "constant"):
        return torch.full(shape, numbers.get("value", 0.0), dtype=dtype)
    base = mix(keys, seed)
    if name == "uniform":
        drawn = _unit(_draw(base, dim))
        drawn *= numbers["high"] - numbers["low"]
        drawn += numbers["low"]
    else:
        drawn = _normal(base, dim)
        drawn *= numbers["std"]
        drawn += numbers["mean"]
    return torch.from_numpy(drawn).to(dtype)


def _draw(base: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.uint64]:
    """Returns `count` independent 64-bit numbers for each key."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    drawn = np.add.outer(base, steps)
    return mix(drawn.reshape(-1).view(np.int64)).reshape(drawn.shape)


def _unit(drawn: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Returns numbers in (0, 1), 53 bits of each."""
    return ((drawn >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _normal(base: npt.NDArray[np.uint64], dim: int) -> npt.NDArray[Any]:
    """Returns normal numbers, two from each pair of uniform ones (Box and Muller 1958)."""
    pairs = _unit(_draw(base, 2 * ((dim + 1) // 2))).reshape(len(base), -1, 2)
    radius, angle = np.sqrt(-2.0 * np.log(pairs[:, :, 0])), 2.0 * np.pi * pairs[:, :, 1]
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 2).reshape(len(base), -1)
    return np.ascontiguousarray(both[:, :dim])
