"""A worker's step on the board: it makes the update itself, in shared memory, without asking the ps.

Owned by the worker's thread, through its client. Without rounds (Async) a worker waits for its turn, writes the next version
from the current one and its gradient, and publishes it. With rounds (Sync of all workers) each gives its gradient, and
when all have given, each writes its own part of the next version. What always holds: `step` returns None, and nothing has
happened, whenever the board is closed, a wait grows long, or the ps has not looked for a while; the gradient is then
pushed by message, under the same number, and cannot count twice.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from torchquorum.transport.board import OPEN, Board, Given
from torchquorum.transport.memory import SegmentError
from torchquorum.transport.slots import Slots
from torchquorum.worker.device_update import DeviceRound, DeviceUpdate, Part
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.places import Places, usable_cores

WAIT_S = 0.2  # with a core for each: whoever waits for longer asks the ps, which knows for whom, and says so
SPIN_S = 0.0005
TURN_SPIN_S = 0.0002
PS_SILENT_S = 0.5
CHUNK = 1 << 16
ROUNDS_IN = (torch.float32, torch.float64)  # in narrower ones the tail of a vector may round otherwise than its body


@dataclass(frozen=True, slots=True)
class Taken:
    """A version that was made on the board: the one it was made from, its slot, and the rates of the next update.

    `loaded` says that the parameters hold it already, `reading` that a GPU may still be reading its slot.
    """

    met: int
    version: int
    slot: int
    rates: list[float]
    loaded: bool = False
    reading: bool = False


@dataclass(frozen=True, slots=True)
class _Turn:
    version: int
    slot: int
    target: int
    era: int
    rates: list[float]


class BoardSteps:
    """The steps of one worker.

    Args:
        board: The ps's board.
        worker: Which worker this is.
        incarnation: Its life.
        flat: Its parameters, all of them on the one ps.
        ring: The ps's versions.
        own: This worker's gradient memory.
        rounds: Whether the rule is Sync.
        device: Makes updates where the parameters are, if that is one GPU and there are no rounds.
        device_round: The same for rounds.
    """

    def __init__(
        self,
        board: Board,
        worker: int,
        incarnation: int,
        flat: FlatParameters,
        ring: Slots,
        own: Slots,
        *,
        rounds: bool,
        device: DeviceUpdate | None = None,
        device_round: DeviceRound | None = None,
    ) -> None:
        self._device, self._device_round = device, device_round
        self._board, self._worker, self._incarnation = board, worker, incarnation
        self._ring, self._own, self.rounds = ring, own, rounds
        self._flat, self._region = flat, flat.layout.trained[0]
        self._entries: list[tuple[nn.Parameter, int]] = []
        for section in self._region.sections:
            for piece in section.pieces:
                self._entries.append((flat.parameters[piece.variable], flat.layout.variables[piece.variable].group))
        self._views: dict[int, list[torch.Tensor]] = {}
        on_cpu = all(p.device.type == "cpu" for p, _ in self._entries)
        self.direct = device is not None or (not rounds and on_cpu)  # the gradient need not be copied before
        self._others: dict[int, tuple[int, Slots]] = {worker: (incarnation, own)}
        self._parts: dict[tuple[int, int], list[tuple[int, list[torch.Tensor]]]] = {}
        self._scratch = {d: torch.empty(CHUNK, dtype=d) for d in ROUNDS_IN} if rounds else {}
        self._whole_share: list[Part] | None = None
        self.made = self.missed = 0
        cores = usable_cores()
        self._spins = board.num_workers <= cores
        self._wait_s = WAIT_S * max(1, -(-board.num_workers // cores))  # they share the cores, so turns come later
        self._places = Places(board, worker, self._wait_s)

    def step(self, given: Given, loss: Callable[[], float | None] = lambda: None) -> Taken | None:
        """Makes an update with this worker's gradient, or None: then it shall be pushed by message.

        Args:
            given: Which gradient it is.
            loss: Returns its loss, once the gradient has been computed.
        """
        board, taken = self._board, None
        self._places.arrive()
        if self._device is not None and not board.only(self._worker) and not self._device.gradients_there():
            return None
        if (board.state == OPEN or (not self.rounds and self._places.opened())) and board.ps_silent_s < PS_SILENT_S:
            with torch.no_grad():
                taken = self._in_round(given, loss) if self.rounds else self._in_turn(given, loss)
        self.made += taken is not None
        self.missed += taken is None
        return taken

    def done(self) -> None:
        """The version that was taken has been copied."""
        self._board.use(self._worker, -1)
        self._places.leave()

    def _may(self) -> bool:
        board = self._board
        version = board.version
        return (
            board.state == OPEN
            and board.token(self._worker) == self._incarnation
            and version < board.limit
            and version + 1 < board.rated
            and board.room() >= board.num_workers
        )

    def _free_slot(self, current: int) -> int:
        busy, slot = self._board.busy(), 0
        while slot == current or slot in busy:
            slot += 1
        assert slot < len(self._ring), "there is a slot more than workers can use"
        return slot

    def _until(self, reached: Callable[[], bool], era: int) -> bool:
        """Waits until something holds of this era; False if the board was closed meanwhile, or the wait grew long."""
        board = self._board
        started = time.perf_counter()
        while not reached():
            waited = time.perf_counter() - started
            if board.state != OPEN or board.era != era or waited > self._wait_s:
                break
            if self._spins and waited < SPIN_S:
                os.sched_yield()
                continue
            with board.locked() as held:
                if not held:
                    return False
                if reached():
                    break
                seen = board.begin_wait()
            board.wait(seen, self._wait_s)
            with board.locked() as held:
                if not held:
                    return False
                board.end_wait()
        # In another era the same version may lie elsewhere: the ps has finished what the workers had begun.
        return reached() and board.era == era

    # -- without rounds -----------------------------------------------------------------------------------------------

    def _in_turn(self, given: Given, loss: Callable[[], float | None]) -> Taken | None:
        if self._device is None and not self._finite():
            return None
        turn = self._take_turn() if self._places.come() else None
        taken = self._make(turn, given, loss) if turn is not None else None
        if taken is None:
            self._places.give_up()
        return taken

    def _make(self, turn: _Turn, given: Given, loss: Callable[[], float | None]) -> Taken | None:
        fine = False
        try:
            if self._device is None:
                self._write(turn)
                fine = True
            else:
                self._ring.mark(turn.target, -1)
                held = given.computed_at == turn.version
                fine = self._device.write(turn.slot, turn.target, turn.rates, held=held)
        finally:
            if not fine:
                self._give_turn_back(turn)
        return self._publish(turn, given, loss()) if fine else None

    def _take_turn(self) -> _Turn | None:
        board, me, slept = self._board, self._worker, False
        started = time.perf_counter()
        while True:
            spins_until = time.perf_counter() + (TURN_SPIN_S if self._spins or self._places.straight else 0.0)
            while board.writer >= 0 and time.perf_counter() < spins_until:
                os.sched_yield()  # whoever has the turn has a core too, so it is over soon
            with board.locked() as held:
                if not held:
                    return None
                if slept:
                    board.end_wait()
                if not self._may():
                    return None
                if board.writer < 0:
                    version, slot = board.version, board.slot
                    board.lease(me, -1)  # whatever it was given by message it has long copied
                    target = self._free_slot(slot)
                    board.use(me, target)
                    board.writer = me
                    return _Turn(version, slot, target, board.era, board.rates(version))
                if time.perf_counter() - started > self._wait_s:
                    return None
                seen, slept = board.begin_wait(), True
            board.wait(seen, self._wait_s)

    def _finite(self) -> bool:
        """Whether the gradients hold neither NaN nor infinity; looked at before the turn, so that nobody waits for it."""
        if not self.direct:
            return True  # the client has looked, when it copied them
        gradients = [p.grad for p, _ in self._entries if p.grad is not None]
        return all(math.isfinite(g.sum().item()) or bool(torch.isfinite(g.to_dense()).all()) for g in gradients)

    def _write(self, turn: _Turn) -> None:
        """Writes the next version."""
        self._ring.mark(turn.target, -1)
        old, new = self._views_of(turn.slot), self._views_of(turn.target)
        own = None if self.direct else self._views_of(-1)
        for k, (parameter, group) in enumerate(self._entries):
            gradient = parameter.grad
            if gradient is None:
                new[k].copy_(old[k])
                continue
            if own is not None:
                gradient = own[k]
            elif gradient.layout != torch.strided:
                gradient = gradient.to_dense()
            torch.add(old[k], gradient, alpha=-turn.rates[group], out=new[k])

    def _views_of(self, slot: int) -> list[torch.Tensor]:
        """Returns a slot's memory variable by variable; slot -1 is this worker's own gradient."""
        found = self._views.get(slot)
        if found is None:
            sections = self._own.sections[0] if slot < 0 else self._ring.sections[slot]
            found = self._views[slot] = [
                values[piece.offset : piece.offset + piece.numel].view(self._flat.parameters[piece.variable].shape)
                for section, values in zip(self._region.sections, sections, strict=True)
                for piece in section.pieces
            ]
        return found

    def _publish(self, turn: _Turn, given: Given, loss: float | None) -> Taken | None:
        board, me, taken = self._board, self._worker, None
        with board.locked() as held:
            if held and board.state == OPEN and board.era == turn.era and board.writer == me:
                version = turn.version + 1
                self._ring.mark(turn.target, version)
                board.record(me, given, loss, version, turn.target)
                board.publish(version, turn.target)
                taken = Taken(turn.version, version, turn.target, board.rates(version), self._device is not None)
                board.writer = -1
                board.announce()
                self._places.turned()
        if taken is None:
            self.done()
        board.wake(1)
        self._places.wake()
        return taken

    def _give_turn_back(self, turn: _Turn) -> None:
        board = self._board
        with board.locked() as held:
            if held and board.era == turn.era and board.writer == self._worker:
                board.writer = -1
                board.announce()
        self.done()
        board.wake(1)

    # -- with rounds --------------------------------------------------------------------------------------------------

    def _in_round(self, given: Given, loss: Callable[[], float | None]) -> Taken | None:
        board, me = self._board, self._worker
        version, value = given.computed_at + 1, loss()
        with board.locked() as held:
            if not held or not self._may() or board.version != given.computed_at:
                return None
            era, current = board.era, board.slot
            board.lease(me, -1)
            board.give(me, given, value, version)
            everybody = range(board.num_workers)
            if all(board.gave(w) == version for w in everybody):
                board.target = self._free_slot(current)
                for w in everybody:
                    board.use(w, board.target)
                self._ring.mark(board.target, -1)
                board.full = version
                board.announce()
        if board.full == version:
            board.wake()
        if not self._until(lambda: board.full == version, era):
            return None
        if not self._follow_others():
            self.done()
            return None
        target, on_gpu = board.target, self._device_round is not None and self._device_round.ready()
        self._write_part(current, target, board.rates(given.computed_at), on_gpu=on_gpu)
        with board.locked() as held:
            if not held or board.state != OPEN or board.era != era:
                self.done()
                return None
            board.finish(me, version)
            last = all(board.finished(w) == version for w in everybody)
            if last:
                self._ring.mark(target, version)
                board.record_round(version, target)
                board.publish(version, target)
                board.announce()
        if last:
            board.wake()
        if not self._until(lambda: board.version >= version, era):
            self.done()
            return None
        if on_gpu and self._device_round is not None:
            self._device_round.pull_rest(self._shares(), target)
        return Taken(given.computed_at, version, target, board.rates(version), on_gpu, on_gpu)

    def _write_part(self, current: int, target: int, rates: list[float], *, on_gpu: bool = False) -> None:
        """Writes this worker's share of the vector: the mean in order of worker, then the update, as the ps would."""
        count = self._board.num_workers
        if on_gpu and self._device_round is not None:
            gradients = [self._others[w][1].sections[0] for w in range(count)]
            self._device_round.write(self._shares(), gradients, self._worker, target, rates)
            return
        for group, (old, new, *gradients) in self._part(current, target):
            if count == 1:
                torch.add(old, gradients[0], alpha=-rates[group], out=new)
                continue
            mean = self._scratch[old.dtype][: old.numel()]
            torch.add(gradients[0], gradients[1], out=mean)
            for more in gradients[2:]:
                mean.add_(more)
            mean.div_(count)
            torch.add(old, mean, alpha=-rates[group], out=new)

    def _part(self, current: int, target: int) -> list[tuple[int, list[torch.Tensor]]]:
        """Returns the pieces of this worker's share, as views of the old and new version and of every gradient."""
        found = self._parts.get((current, target))
        if found is None:
            found = self._parts[current, target] = []
            gradients = [self._others[w][1].sections[0] for w in range(self._board.num_workers)]
            for index, section in enumerate(self._region.sections):
                whole = [self._ring.sections[current][index], self._ring.sections[target][index]]
                whole += [g[index] for g in gradients]
                for group, start, stop in self._share(index, section.numel):
                    found.append((group, [values[start:stop] for values in whole]))
        return found

    def _shares(self) -> list[Part]:
        """Returns all runs that are this worker's, with their sections, in no chunks."""
        if self._whole_share is None:
            sections = enumerate(self._region.sections)
            self._whole_share = [(g, k, a, b) for k, s in sections for g, a, b in self._share(k, s.numel, s.numel)]
        return self._whole_share

    def _share(self, index: int, numel: int, chunk: int = CHUNK) -> list[tuple[int, int, int]]:
        """Returns the runs of one section that are this worker's, each of one parameter group, in chunks."""
        count, line = self._board.num_workers, 64
        cuts = [min(numel, (numel * w // count + line - 1) // line * line) for w in range(count)] + [numel]
        first, last = cuts[self._worker], cuts[self._worker + 1]
        runs: list[tuple[int, int, int]] = []
        pieces = self._region.sections[index].pieces
        for piece, after in zip(pieces, [*pieces[1:], None], strict=True):
            group = self._flat.layout.variables[piece.variable].group
            start = max(first, piece.offset)
            stop = min(last, after.offset if after is not None else numel)  # with the padding, which is zero everywhere
            while start < stop:
                if runs and runs[-1][0] == group and runs[-1][2] == start and start - runs[-1][1] < chunk:
                    _, start, _ = runs.pop()
                end = min(stop, start + chunk)
                runs.append((group, start, end))
                start = end
        return runs

    def _follow_others(self) -> bool:
        """Opens the gradient memory of workers that are new; False if one has gone, and its memory with it."""
        for w in range(self._board.num_workers):
            token = self._board.token(w)
            if w not in self._others or self._others[w][0] != token:
                try:
                    opened = Slots.open(self._board.gradients(w), self._region)
                except SegmentError:
                    return False  # the ps has opened it, and finishes the round
                if self._device_round is not None:
                    self._device_round.reach(opened)
                self._others[w] = token, opened
                self._parts.clear()
        return True
