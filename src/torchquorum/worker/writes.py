"""Notices that the program has written to the parameters inside a run, where that changes one worker's copy only.

Owned by the worker's part in the run (`torchquorum.worker.run_member`): `note` when the parameters hold a version, `look` and
`confirm` at the next step. In-place operations count in torch's version counters; writes through `.data` do not, so some elements of
every parameter are compared at every step, and all of them at the first steps and then now and then. What always holds: a full look
takes less than a hundredth of the time, and so does, on a GPU, a sample; a write that it finds is found before the step's
gradient is sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch

from torchquorum.clock import SYSTEM, Clock
from torchquorum.placement.layout import CONSTANT
from torchquorum.worker.flat import FlatParameters

SAMPLES = 4  # elements of each parameter at one step, fewer where that would be more than MOST_SAMPLES
MOST_SAMPLES = 256  # a model that has no more elements is compared whole
TABLES = 32  # choices of elements, used in turn
FULL_AT_FIRST = 3  # steps at which everything is compared, however long that takes
SHARE = 400  # what is not done at every step waits until this many times its own duration has passed
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_VERSION, _ADDRESS = attrgetter("_version"), torch.Tensor.data_ptr
Member = tuple[int, int, int]  # a variable, where it begins, how many elements it has


class SuspectedWriteError(Exception):
    """Parameters may have been written to; never leaves the worker's part in the run."""

    def __init__(self, variables: Iterable[int]) -> None:
        super().__init__()
        self.variables = sorted(set(variables))


class Watch(Protocol):
    """Is told what comes into the parameters; a worker's part in the run has one."""

    def note(self) -> None:
        """The parameters hold a version."""
        ...

    def look(self) -> None:
        """A step begins."""
        ...

    def confirm(self) -> None:
        """A GPU, if there is one, has been waited for since `look`."""
        ...

    def before_pull(self) -> None:
        """Another version is about to come, which no step has asked for."""
        ...

    def before_take(self) -> None:
        """The answer to a request is about to come into the parameters."""
        ...


class _Area(Protocol):
    """Memory in which some parameters lie one after the other."""

    def note(self, table: int) -> None: ...
    def look(self, table: int) -> list[int]: ...
    def confirm(self) -> list[int]: ...
    def sums(self) -> list[Any]: ...
    def owners(self) -> list[int]: ...


class _HostArea:
    """Memory of the host: compared at once, in microseconds."""

    def __init__(
        self, flat: torch.Tensor, members: Sequence[Member], tables: list[np.ndarray], owners: list[int]
    ) -> None:
        self._elements: Any = flat.view(_INTEGERS[flat.element_size()]).numpy()
        self._members, self._tables, self._owners = members, tables, owners
        self._kept: Any = None

    def note(self, table: int) -> None:
        self._kept = self._elements.take(self._tables[table])

    def look(self, table: int) -> list[int]:
        now = self._elements.take(self._tables[table])
        if now.tobytes() == self._kept.tobytes():
            return []
        return [self._owners[k] for k in np.flatnonzero(now != self._kept).tolist()]

    def confirm(self) -> list[int]:
        return []

    def sums(self) -> list[Any]:
        return [zlib.crc32(self._elements[start : start + count]) for _, start, count in self._members]

    def owners(self) -> list[int]:
        return [variable for variable, _, _ in self._members]


class _CudaArea:
    """Memory of a GPU: a look only begins, so that nobody waits for the GPU; its result is read once the GPU was waited for."""

    def __init__(
        self, flat: torch.Tensor, members: Sequence[Member], tables: list[np.ndarray], owners: list[int]
    ) -> None:
        self._elements = flat.view(_INTEGERS[flat.element_size()])
        self._members, self._owners = members, owners
        self._tables = [torch.from_numpy(table).to(flat.device) for table in tables]
        self._kept = torch.empty(len(owners), dtype=self._elements.dtype, device=flat.device)
        self._differs = torch.zeros(len(owners), dtype=torch.bool, device=flat.device)
        self._host = torch.zeros(len(owners), dtype=torch.bool, pin_memory=True)
        self._result: Any = self._host.numpy()

    def note(self, table: int) -> None:
        torch.index_select(self._elements, 0, self._tables[table], out=self._kept)

    def look(self, table: int) -> list[int]:
        torch.ne(torch.index_select(self._elements, 0, self._tables[table]), self._kept, out=self._differs)
        self._host.copy_(self._differs, non_blocking=True)
        return []

    def confirm(self) -> list[int]:
        return [self._owners[k] for k in np.flatnonzero(self._result).tolist()] if self._result.any() else []

    def sums(self) -> list[Any]:
        parts = [self._elements[start : start + count].sum() for _, start, count in self._members]
        return torch.stack(parts).tolist()

    def owners(self) -> list[int]:
        return [variable for variable, _, _ in self._members]


class WriteWatch:
    """What the parameters of one worker were when they last were given a version.

    Args:
        flat: The worker's parameters.
        clock: Tells how long a look takes.
    """

    def __init__(self, flat: FlatParameters, clock: Clock = SYSTEM) -> None:
        self._flat, self._clock = flat, clock
        variables = flat.layout.variables
        self._trained = [(i, p) for i, p in enumerate(flat.parameters) if variables[i].group != CONSTANT]
        self._parameters = [p for _, p in self._trained]
        self._placed, self._addresses = flat.addresses()
        self._areas = [_area(memory, members) for memory, members in flat.memory()]
        self._on_gpu = any(isinstance(area, _CudaArea) for area in self._areas)
        self._counters: list[int] = []
        self._counted = False  # by a look, since which the program has not run
        self._table, self._sampled, self._pending = 0, False, False
        self._sums: list[list[Any]] | None = None
        self._steps, self._full_at, self._sample_at = 0, 0.0, 0.0
        self._sample_s = 1.0  # the shortest duration seen, as a machine that is busy makes some longer

    def note(self) -> None:
        """The parameters hold a version: what is written from now on is the program's."""
        if not self._counted:
            self._counters = list(map(_VERSION, self._parameters))
        self._counted = False
        self._table = (self._table + 1) % TABLES
        self._pending = False
        now = self._clock.now()
        self._sampled = not self._on_gpu or now >= self._sample_at or self._steps < FULL_AT_FIRST
        if self._sampled:
            for area in self._areas:
                area.note(self._table)
            if self._on_gpu:
                self._sample_s = min(self._sample_s, self._clock.now() - now)
                self._sample_at = now + 3 * SHARE * self._sample_s  # three times as much begins with a look
        self._sums = None
        if self._steps < FULL_AT_FIRST or now >= self._full_at:
            started = self._clock.now()
            self._sums = [area.sums() for area in self._areas]
            self._full_at = self._clock.now() + 2 * SHARE * (self._clock.now() - started)

    def look(self) -> None:
        """A step begins: compares what was noted. Of a GPU the result comes with `confirm`.

        Raises:
            SuspectedWriteError: A parameter has been written to, or may have been.
            ConfigError: A parameter has been moved to another device, dtype or shape.
        """
        self._steps += 1
        # This is done at every step, so no line of Python is run for each parameter unless something has changed.
        found = self._flat.replaced() if list(map(_ADDRESS, self._placed)) != self._addresses else []
        counters = list(map(_VERSION, self._parameters))
        if counters != self._counters:
            pairs = zip(self._trained, counters, self._counters, strict=True)
            found += [i for (i, _), now, noted in pairs if now != noted]
        if not found and self._sampled:
            for area in self._areas:
                found += area.look(self._table)
            self._pending = self._on_gpu
        if not found and self._sums is not None:
            for area, noted in zip(self._areas, self._sums, strict=True):
                pairs = zip(area.owners(), area.sums(), noted, strict=True)
                found += [owner for owner, now, before in pairs if now != before]
        if found:
            raise SuspectedWriteError(found)
        self._counted = True

    def before_pull(self) -> None:
        """Another version is about to come: what the program has written was looked for at the last step."""

    def before_take(self) -> None:
        """The answer to a request is about to come: nothing of the program's is in the parameters then."""

    def confirm(self) -> None:
        """The GPU has been waited for since `look`.

        Raises:
            SuspectedWriteError: A parameter has been written to.
        """
        if self._pending:
            self._pending = False
            found = [variable for area in self._areas for variable in area.confirm()]
            if found:
                raise SuspectedWriteError(found)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits, NaN included."""
    integers = _INTEGERS[left.element_size()]
    return torch.equal(left.contiguous().view(integers), right.contiguous().view(integers))


def _area(memory: torch.Tensor, members: Sequence[Member]) -> _Area:
    if sum(count for _, _, count in members) <= MOST_SAMPLES:
        everything = np.concatenate([np.arange(start, start + count) for _, start, count in members])
        owners = [variable for variable, _, count in members for _ in range(count)]
        return (_CudaArea if memory.is_cuda else _HostArea)(memory, members, [everything] * TABLES, owners)
    generator = np.random.default_rng(len(members))
    samples = max(1, min(SAMPLES, MOST_SAMPLES // len(members)))
    starts = np.repeat(np.array([start for _, start, _ in members], np.int64), samples)
    counts = np.repeat(np.array([count for _, _, count in members], np.int64), samples)
    tables = [starts + (generator.random(len(starts)) * counts).astype(np.int64) for _ in range(TABLES)]
    owners = [variable for variable, _, _ in members for _ in range(samples)]
    return (_CudaArea if memory.is_cuda else _HostArea)(memory, members, tables, owners)
