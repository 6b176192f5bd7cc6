"""A worker's update on the fast path, made by the GPU that holds the parameters and the gradient.

Used by `torchquorum.fastpath`: `DeviceTurn` writes the next version in the worker's turn, `DeviceRound` a part of it in a round. In a
turn the GPU takes the current version, if another worker has made it, updates it in place, and copies the result into the slot of
the next version: one version crosses the bus each way, and only one out where this worker made the last version itself. What
always holds: if the update is not published, the parameters hold values that no other task has; the push by message that
follows brings them a version again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchquorum.fastpath.participant import UpdateSlots
from torchquorum.fastpath.rounds import RoundPart, parts_of
from torchquorum.fastpath.update_journal import JournaledMean
from torchquorum.memory.slots import Sections, Slots
from torchquorum.placement.layout import CONSTANT, Region
from torchquorum.update.gradient_norm import norms_of
from torchquorum.update.kernels import Kernel, Moment, mean
from torchquorum.worker.exchange import Exchange
from torchquorum.worker.flat import BufferPlaces, FlatParameters


class DeviceTurn:
    """The turns of one worker whose parameters are all on one GPU.

    Args:
        flat: The worker's parameters.
        exchange: Copies them from and to the ps's slots.
        kernels: Make the updates, one for each parameter group.
        alone: Says whether no other worker uses the page, so that none waits while this one has the turn.
        confirm: Is called once the GPU has been waited for; raises if the program has written to the parameters.
    """

    direct = loads = True
    norm: float | None = None
    mean: JournaledMean | None = None  # a durable run makes updates where the ps would make them again

    def __init__(
        self,
        flat: FlatParameters,
        exchange: Exchange,
        kernels: Sequence[Kernel],
        alone: Callable[[], bool],
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        self._flat, self._exchange, self._kernels, self._alone = flat, exchange, kernels, alone
        self._confirm = confirm
        trained = zip(flat.layout.variables, flat.parameters, strict=True)
        self._entries = [(p, v.group) for v, p in trained if v.group != CONSTANT]
        self._floating = [p for p, _ in self._entries if p.is_floating_point()]
        self._changes = _changes(flat)

    def ready(self) -> bool:
        """Waits for the gradients, unless this worker is alone; returns whether they are finite, as far as that is known."""
        if self._alone():
            return True
        self._exchange.settle()
        gradients = self._flat.gradients
        return gradients is None or not gradients.in_use() or math.isfinite(gradients.norm())

    def write(self, slots: UpdateSlots, moments: Sequence[Moment], *, held: bool) -> bool:
        """Makes the next version in the parameters and in slot `target`; False if it is not finite."""
        changes = _changes(self._flat)
        if not held or changes != self._changes:  # or the program has changed the parameters itself
            self._exchange.pull(0, slots.current)
        self._changes = changes
        # The parameters hold the current version, or will when the GPU comes to what follows.
        known = self._update(moments)
        self._exchange.put(0, slots.target)
        norm = None if known else self._norm()
        self._exchange.settle()
        self._confirm()
        # The GPU is done: the slot holds the next version.
        if norm is not None:
            self.norm = float(norm)
        else:
            assert self._flat.gradients is not None
            self.norm = self._flat.gradients.norm()
        return math.isfinite(self.norm)

    def _norm(self) -> torch.Tensor:
        """Returns the norm of the gradients, which the GPU may not have computed yet."""
        given = [p.grad for p in self._floating if p.grad is not None]
        if not given:
            return torch.zeros(())
        return torch.stack(norms_of([g if g.layout == torch.strided else g.coalesce().values() for g in given])).norm()

    def _update(self, moments: Sequence[Moment]) -> bool:
        """Updates the parameters; True if the gradients come with their norm, which tells whether they are finite."""
        gradients = self._flat.gradients
        if gradients is not None and gradients.in_use():
            for mine, gradient, group in self._flat.trained_runs():
                self._kernels[group].write(moments[group], mine, gradient, mine, (), ())
            return gradients.norms is not None
        for parameter, group in self._entries:
            gradient = parameter.grad
            if gradient is not None:
                if gradient.layout != torch.strided:
                    gradient = gradient.to_dense()
                self._kernels[group].write(moments[group], parameter.data, gradient, parameter.data, (), ())
            else:
                self._kernels[group].without_gradient(parameter.data)
        return False


@dataclass(slots=True)
class _PartViews:
    """One part of a round: the other workers' gradients and room for them here, all gradients, their mean, and the version."""

    group: int
    others: list[tuple[torch.Tensor, torch.Tensor]]
    given: list[torch.Tensor]
    mean: torch.Tensor
    here: torch.Tensor
    out: torch.Tensor


class DeviceRound:
    """A worker's part of the rounds, where parameters and gradients each lie on one GPU in one piece per dtype.

    Of the other workers' gradients only this worker's part crosses the bus, and of the next version each part once out and
    once, for the other workers, back in.

    Args:
        flat: The worker's parameters.
        exchange: Reaches shared memory from the GPU.
        versions: The ps's slots.
        kernels: Make the updates, one for each parameter group.
        worker: Which worker this is.
        num_workers: How many there are.
    """

    loads = True

    def __init__(
        self,
        flat: FlatParameters,
        exchange: Exchange,
        versions: Slots,
        kernels: Sequence[Kernel],
        worker: int,
        num_workers: int,
    ) -> None:
        self._flat, self._exchange, self._versions, self._kernels = flat, exchange, versions, kernels
        self._worker, self._parts = worker, parts_of(flat.layout, worker, num_workers)
        self._region = flat.layout.trained[0]
        self._mine = _whole_sections(flat, self._region, versions, None)
        self._own: list[torch.Tensor] | None = None
        self._given: list[Sections] = []
        self._views: dict[int, list[_PartViews]] = {}
        self._rests: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._changes = _changes(flat)

    def ready(self) -> bool:
        """Whether the gradients lie together, as `tq.capture` leaves them, and the program has not changed the parameters."""
        gradients = self._flat.gradients
        before, self._changes = self._changes, _changes(self._flat)
        if self._mine is None or gradients is None or not gradients.in_use() or before != self._changes:
            return False
        if self._own is None:
            self._own = _whole_sections(self._flat, self._region, self._versions, gradients.place)
        return self._own is not None

    def reach(self, gradients: Slots) -> None:
        """Lets the GPU reach the gradient of another worker."""
        self._exchange.pin(gradients.bytes[0])

    def write(self, gradients: list[Sections], slots: UpdateSlots, moments: Sequence[Moment]) -> None:
        """Writes this worker's parts: the mean in order of worker, then the update, as the ps would.

        The parameters hold the current version, so its slot is not read.
        """
        if gradients is not self._given:
            self._given, self._views = gradients, {}
        target = slots.target
        views = self._views.get(target)
        if views is None:
            views = self._views[target] = [self._cut(part, target) for part in self._parts]
        for part in views:
            for room, theirs in part.others:
                room.copy_(theirs, non_blocking=True)
            kernel, step = self._kernels[part.group], mean(part.given, part.mean)
            kernel.write(moments[part.group], part.here, step, part.here, (), ())
            part.out.copy_(part.here, non_blocking=True)
        self._exchange.settle()

    def _cut(self, part: RoundPart, target: int) -> _PartViews:
        """Returns the views of everything that one part needs."""
        assert self._mine is not None and self._own is not None
        group, section, start, stop = part
        here, own = self._mine[section][start:stop], self._own[section][start:stop]
        workers = range(len(self._given))
        given = [own if w == self._worker else torch.empty_like(own) for w in workers]
        others = [(given[w], self._given[w][section][start:stop]) for w in workers if w != self._worker]
        out = self._versions.sections[target][section][start:stop]
        return _PartViews(group, others, given, torch.empty_like(own), here, out)

    def finish(self, target: int) -> None:
        """Takes the other workers' parts of a version that has been published; this only begins."""
        rest = self._rests.get(target)
        if rest is None:
            rest = self._rests[target] = self._rest(target)
        for mine, theirs in rest:
            mine.copy_(theirs, non_blocking=True)

    def _rest(self, target: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns what is not this worker's part, here and in slot `target`."""
        assert self._mine is not None
        found = []
        for section, mine in enumerate(self._mine):
            ranges = sorted((part.start, part.stop) for part in self._parts if part.section == section)
            at = 0
            for start, stop in [*ranges, (mine.numel(), mine.numel())]:
                if at < start:
                    found.append((mine[at:start], self._versions.sections[target][section][at:start]))
                at = stop
        return found


def _whole_sections(
    flat: FlatParameters, region: Region, versions: Slots, place: BufferPlaces | None
) -> list[torch.Tensor] | None:
    """Returns the parameters, or what lies at a place, section by section; None if a section is not one piece of them."""
    found = []
    for section, values in zip(region.sections, versions.sections[0], strict=True):
        alone = Region(sections=(section,), size_bytes=section.size_bytes)
        runs = flat.runs(alone, [values], place)
        if len(runs) != 1 or runs[0][1].numel() != values.numel():
            return None
        found.append(runs[0][0])
    return found


def _changes(flat: FlatParameters) -> int:
    """Returns how often the parameters were changed in place, but for changes through `.data`, as ours are."""
    return sum(p._version for p in flat.parameters)
