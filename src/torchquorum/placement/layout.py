"""Which variable is on which shard, and at which bytes of the shard's flat memory.

The chief, the other workers and the ps tasks all compute it from the same list of variables, so only that list is sent. What
always holds: every element of every variable is in exactly one piece; a shard's memory is one contiguous section per dtype;
within a section the pieces are in order of parameter group, then of creation. Every piece begins on a cache line, here and in
the worker's buffers, because a matrix product may round differently at another alignment; the padding is always zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from torchquorum.errors import ConfigError, RefusedError

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
TRAINABLE_DTYPES = ("float64", "float32", "bfloat16", "float16")
STRATEGIES = ("round_robin", "greedy")
CONSTANT = -1
ALIGN_BYTES = 64


def padded(numel: int, dtype: str) -> int:
    """Returns `numel` rounded up, in elements, so that the next piece is aligned."""
    per_line = ALIGN_BYTES // ITEM_BYTES[dtype]
    return -(-numel // per_line) * per_line


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A named tensor on the ps tasks.

    Attributes:
        name: The parameter's qualified name in the worker's module.
        shape: Its shape.
        dtype: Its dtype as torch names it, without the prefix: float32.
        group: The index of its parameter group; CONSTANT if the optimizer does not have it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Returns the number of bytes."""
        return self.numel * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype}" + (" (constant)" if self.group == CONSTANT else "")


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements [start, stop) of one variable, at element `offset` of its section."""

    variable: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Section:
    """All pieces of one dtype on one shard, padded, from byte `start_byte` of the shard's memory."""

    dtype: str
    start_byte: int
    numel: int
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """Returns the number of bytes."""
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Region:
    """The flat memory of one shard: its sections, widest dtype first, each aligned."""

    sections: tuple[Section, ...]
    size_bytes: int


@dataclass(frozen=True)
class Layout:
    """The placement of all variables on all shards: trained variables and constants have separate regions."""

    variables: tuple[Variable, ...]
    num_shards: int
    parts: tuple[tuple[tuple[int, int, int], ...], ...] = field(repr=False)

    @cached_property
    def trained(self) -> tuple[Region, ...]:
        """Returns a region per shard with the variables that the optimizer updates."""
        return tuple(self._region(parts, constant=False) for parts in self.parts)

    @cached_property
    def constants(self) -> tuple[Region, ...]:
        """Returns a region per shard with the parameters that the optimizer does not have."""
        return tuple(self._region(parts, constant=True) for parts in self.parts)

    def shard_of(self, name: str) -> list[int]:
        """Returns the shards that hold (a slice of) the variable."""
        return [k for k, parts in enumerate(self.parts) if any(self.variables[v].name == name for v, _, _ in parts)]

    def _region(self, parts: Sequence[tuple[int, int, int]], *, constant: bool) -> Region:
        chosen = [p for p in parts if (self.variables[p[0]].group == CONSTANT) == constant]
        dtypes = sorted({self.variables[v].dtype for v, _, _ in chosen}, key=lambda d: (-ITEM_BYTES[d], d))
        sections, start_byte = [], 0
        for dtype in dtypes:
            of_dtype = [p for p in chosen if self.variables[p[0]].dtype == dtype]
            of_dtype.sort(key=lambda p: (self.variables[p[0]].group, p[0], p[1]))
            pieces, offset = [], 0
            for variable, start, stop in of_dtype:
                pieces.append(Piece(variable, start, stop, offset))
                offset += padded(stop - start, dtype)
            section = Section(dtype, start_byte, offset, tuple(pieces))
            sections.append(section)
            start_byte += section.size_bytes
        return Region(tuple(sections), start_byte)


def place(
    variables: Sequence[Variable],
    num_shards: int,
    *,
    strategy: str = "round_robin",
    slice_bytes: int | None = None,
) -> Layout:
    """Places variables on shards.

    Args:
        variables: In creation order, the same on every task.
        num_shards: The number of ps tasks.
        strategy: `round_robin` in creation order, as TensorFlow's replica_device_setter; or `greedy`: each variable to
            the shard with the fewest bytes so far, the lowest index on ties.
        slice_bytes: A larger variable is split into one equal slice per shard; None splits none.

    Returns:
        The layout, the same for the same arguments.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"placement strategy {strategy!r}: allowed are {', '.join(STRATEGIES)}")
    if slice_bytes is not None and slice_bytes < 1:
        raise ConfigError(f"slice_bytes={slice_bytes}: must be 1 or more; leave it out to split none")
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(num_shards)]
    load = [0] * num_shards
    turn = 0
    for index, variable in enumerate(variables):
        if variable.dtype not in (TRAINABLE_DTYPES if variable.group != CONSTANT else ITEM_BYTES):
            raise ConfigError(
                f"variable {variable.name}: dtype {variable.dtype}; allowed are {', '.join(TRAINABLE_DTYPES)}"
            )
        if slice_bytes is not None and num_shards > 1 and variable.size_bytes > slice_bytes:
            cuts = [variable.numel * k // num_shards for k in range(num_shards + 1)]
            for k in range(num_shards):
                if cuts[k] < cuts[k + 1]:
                    parts[k].append((index, cuts[k], cuts[k + 1]))
                    load[k] += (cuts[k + 1] - cuts[k]) * ITEM_BYTES[variable.dtype]
            continue
        shard = turn % num_shards if strategy == "round_robin" else load.index(min(load))
        turn += 1
        load[shard] += variable.size_bytes
        parts[shard].append((index, 0, variable.numel))
    return Layout(tuple(variables), num_shards, tuple(tuple(p) for p in parts))


def check_same_variables(ours: Sequence[Variable], theirs: Sequence[Variable], who: str) -> None:
    """Raises RefusedError, with the first differences, unless `who` has the variables that the ps tasks hold."""
    if tuple(ours) == tuple(theirs):
        return
    here, there = [str(v) for v in ours], [str(v) for v in theirs]
    missing = [v for v in here if v not in there]
    extra = [v for v in there if v not in here]
    lines = [f"- the ps tasks hold {v}" for v in missing[:5]] + [f"+ {who} has {v}" for v in extra[:5]]
    if len(missing) > 5 or len(extra) > 5:
        lines.append(f"  in total, {len(missing)} variables only on the ps tasks, {len(extra)} only in {who}")
    if not lines:
        lines = [f"  the order or the parameter groups differ: {here[:5]} against {there[:5]}"]
    raise RefusedError(
        f"{who} has another model than the one that the chief created:\n"
        + "\n".join(lines)
        + "\nStart every task with the same program and the same arguments."
    )
