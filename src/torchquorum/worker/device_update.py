"""A worker's update on the board, made by the GPU that holds the parameters and the gradient.

Used by `torchquorum.worker.board_steps`: `DeviceUpdate` in the worker's turn, `DeviceRound` in a round of all. In a turn the
GPU takes the current version, if another worker has made it, subtracts rate * gradient in place, and copies the result
into the slot of the next version: what crosses the bus is one version each way, and only one out where this worker made
the last one itself. What always holds: if the update does not come to be published, the parameters hold something that
nobody has; the push by message that follows brings them a version again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchquorum.placement.layout import CONSTANT, Region
from torchquorum.transport.slots import Slots
from torchquorum.worker.exchange import Exchange
from torchquorum.worker.flat import FlatParameters, Place

Part = tuple[int, int, int, int]  # parameter group, section, and where it begins and ends there


class DeviceUpdate:
    """The updates of one worker whose parameters are all on one GPU."""

    def __init__(self, flat: FlatParameters, exchange: Exchange) -> None:
        self._flat, self._exchange = flat, exchange
        trained = zip(flat.layout.variables, flat.parameters, strict=True)
        self._entries = [(p, v.group) for v, p in trained if v.group != CONSTANT]
        self._floating = [p for p, _ in self._entries if p.is_floating_point()]
        self._seen = _changes(flat)

    def gradients_there(self) -> bool:
        """Waits for the gradients to be computed, so that nobody waits for them in this worker's turn.

        Returns:
            Whether they are finite, as far as that is known already.
        """
        self._exchange.settle()
        gradients = self._flat.gradients
        return gradients is None or not gradients.in_use() or gradients.finite()

    def write(self, current: int, target: int, rates: list[float], *, held: bool) -> bool:
        """Makes the next version in the parameters and in slot `target`; False if it would not be finite.

        Args:
            current: The slot of the version to start from.
            target: Where the next version goes.
            rates: The learning rate of each parameter group.
            held: Whether the parameters hold the version to start from.
        """
        counts = _changes(self._flat)
        if not held or counts != self._seen:  # or somebody has changed the parameters by hand
            self._exchange.pull(0, current)
        self._seen = counts
        known = self._subtract(rates)
        self._exchange.put(0, target)
        total = None if known else sum(p.detach().sum(dtype=torch.float32) for p in self._floating)
        self._exchange.settle()
        if total is None:
            return self._flat.gradients is not None and self._flat.gradients.finite()
        return math.isfinite(float(total))

    def _subtract(self, rates: list[float]) -> bool:
        """Subtracts the gradients; True if whoever computed them has summed them up, too."""
        gradients = self._flat.gradients
        if gradients is not None and gradients.in_use():
            for mine, gradient, group in self._flat.trained_runs():
                mine.add_(gradient, alpha=-rates[group])
            return gradients.totals is not None
        for parameter, group in self._entries:
            gradient = parameter.grad
            if gradient is not None:
                if gradient.layout != torch.strided:
                    gradient = gradient.to_dense()
                parameter.data.add_(gradient, alpha=-rates[group])
        return False


@dataclass(slots=True)
class _Move:
    """One part of a round: where the others' gradients come from and go to, all gradients, their mean, and the version."""

    group: int
    others: list[tuple[torch.Tensor, torch.Tensor]]
    given: list[torch.Tensor]
    mean: torch.Tensor
    here: torch.Tensor
    out: torch.Tensor


class DeviceRound:
    """A worker's part of the rounds, where parameters and gradients each lie on one GPU in one piece per dtype.

    Of the others' gradients only the part that is this worker's crosses the bus, and of the next version each part
    once out and once, for everybody else, back in.
    """

    def __init__(self, flat: FlatParameters, exchange: Exchange, ring: Slots) -> None:
        self._flat, self._exchange, self._ring = flat, exchange, ring
        self._region = flat.layout.trained[0]
        self._mine = _whole_sections(flat, self._region, ring, None)
        self._moves: tuple[list[Part], list[int], dict[int, list[_Move]]] | None = None
        self._rests: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._gradients: list[torch.Tensor] | None = None
        self._seen = _changes(flat)

    def ready(self) -> bool:
        """Whether the gradients lie together, as `tq.capture` leaves them, and nobody has changed the parameters."""
        gradients = self._flat.gradients
        seen, self._seen = self._seen, _changes(self._flat)
        if self._mine is None or gradients is None or not gradients.in_use() or seen != self._seen:
            return False
        if self._gradients is None:
            self._gradients = _whole_sections(self._flat, self._region, self._ring, gradients.place)
        return self._gradients is not None

    def write(
        self, parts: list[Part], others: Sequence[Sequence[torch.Tensor]], me: int, target: int, rates: list[float]
    ) -> None:
        """Writes this worker's parts of the next version: the mean in order of worker, then the update, as the ps would.

        Args:
            parts: Group, section, and where in it.
            others: Of every worker, the sections of its gradient in shared memory.
            me: Which of them is this one.
            target: The slot of the next version.
            rates: The learning rate of each parameter group.
        """
        if self._moves is None or self._moves[0] is not parts or self._moves[1] != [id(o) for o in others]:
            self._moves = parts, [id(o) for o in others], {}
        moves = self._moves[2].get(target)
        if moves is None:
            moves = self._moves[2][target] = [self._views(part, others, me, target) for part in parts]
        for part in moves:
            for room, theirs in part.others:
                room.copy_(theirs, non_blocking=True)
            torch.add(part.given[0], part.given[1], out=part.mean)
            for more in part.given[2:]:
                part.mean.add_(more)
            part.mean.div_(len(others))
            part.here.add_(part.mean, alpha=-rates[part.group])
            part.out.copy_(part.here, non_blocking=True)
        self._exchange.settle()

    def _views(self, part: Part, others: Sequence[Sequence[torch.Tensor]], me: int, target: int) -> _Move:
        """Cuts the pieces of everything that one part needs, once."""
        assert self._mine is not None and self._gradients is not None
        group, section, start, stop = part
        here, own = self._mine[section][start:stop], self._gradients[section][start:stop]
        given = [own if w == me else torch.empty_like(own) for w in range(len(others))]
        theirs = [(given[w], o[section][start:stop]) for w, o in enumerate(others) if w != me]
        out = self._ring.sections[target][section][start:stop]
        return _Move(group, theirs, given, torch.empty_like(own), here, out)

    def pull_rest(self, parts: list[Part], target: int) -> None:
        """Takes the others' parts of a version that has been published; this only begins."""
        rest = self._rests.get(target)
        if rest is None:
            rest = self._rests[target] = self._rest(parts, target)
        for mine, theirs in rest:
            mine.copy_(theirs, non_blocking=True)

    def _rest(self, parts: list[Part], target: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        assert self._mine is not None
        found = []
        for section, mine in enumerate(self._mine):
            ranges = sorted((start, stop) for _, s, start, stop in parts if s == section)
            at = 0
            for start, stop in [*ranges, (mine.numel(), mine.numel())]:
                if at < start:
                    found.append((mine[at:start], self._ring.sections[target][section][at:start]))
                at = stop
        return found

    def reach(self, slots: Slots) -> None:
        """Lets the GPU reach the gradient of another worker."""
        self._exchange.pin(slots.bytes[0])


def _whole_sections(
    flat: FlatParameters, region: Region, ring: Slots, place: Place | None
) -> list[torch.Tensor] | None:
    """Returns the parameters, or what lies at a place, section by section; None if a section is not one piece of them."""
    found = []
    for section, values in zip(region.sections, ring.sections[0], strict=True):
        alone = Region(sections=(section,), size_bytes=section.size_bytes)
        runs = flat.runs(alone, [values], place)
        if len(runs) != 1 or runs[0][1].numel() != values.numel():
            return None
        found.append(runs[0][0])
    return found


def _changes(flat: FlatParameters) -> int:
    """Returns how often somebody other than us has changed the parameters in place."""
    return sum(p._version for p in flat.parameters)
