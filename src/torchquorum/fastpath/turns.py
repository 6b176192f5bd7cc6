"""Steps without rounds (Async): a worker waits for its turn, writes the next version from the current one, and publishes it.

Owned by the worker's thread, through `torchquorum.fastpath.steps`. What always holds: one worker at a time has the turn; a version
is published in the opening in which its turn began, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from torchquorum.clock import SYSTEM, Clock
from torchquorum.fastpath.admission import Admission
from torchquorum.fastpath.page import NOBODY
from torchquorum.fastpath.participant import MadeVersion, Participant, UpdateSlots
from torchquorum.fastpath.records import GradientId
from torchquorum.fastpath.stages import Sleep, Stage, Stages
from torchquorum.fastpath.update_journal import Giver, JournaledMean, RegionBytes, UpdateJournal, as_bytes
from torchquorum.memory.slots import Slots
from torchquorum.placement.layout import Layout
from torchquorum.update.gradient_norm import norm_of
from torchquorum.update.kernels import Kernel, Moment

TURN_SPIN_S = 0.0002


class TurnWriter(Protocol):
    """Makes the next version in a worker's turn: `CpuTurn`, or `torchquorum.worker.device_update.DeviceTurn` on a GPU.

    Attributes:
        direct: It takes the gradients from the parameters, which need not be copied to shared memory before.
        loads: The parameters hold the version that it has made.
        norm: The norm of the gradients that it took from the parameters; None if they were looked at when they were copied.
        mean: The gradient that it took, as the journal has it; None where there is no journal.
    """

    norm: float | None
    mean: JournaledMean | None

    @property
    def direct(self) -> bool: ...  # noqa: D102
    @property
    def loads(self) -> bool: ...  # noqa: D102

    def ready(self) -> bool:
        """Whether the gradients are there and finite; asked before the turn, so that no other worker waits for that."""
        ...

    def write(self, slots: UpdateSlots, moments: Sequence[Moment], *, held: bool) -> bool:
        """Writes the next version; False if the gradients are not finite.

        Args:
            slots: Where the version to start from is, and where the next one goes.
            moments: Of each parameter group, which update this is.
            held: Whether the parameters hold the version to start from.
        """
        ...


class _Turn(NamedTuple):
    version: int
    slots: UpdateSlots
    opening_id: int
    rates: list[float]


class TurnSteps:
    """The turns of one worker.

    Args:
        user: This worker.
        writer: Makes versions.
        admission: This worker's seat.
        clock: Tells the time.
        journal: Where updates are written before they are published, in a durable run.
    """

    def __init__(
        self,
        user: Participant,
        writer: TurnWriter,
        admission: Admission,
        clock: Clock = SYSTEM,
        journal: UpdateJournal | None = None,
    ) -> None:
        self._user, self._writer, self._admission, self._clock = user, writer, admission, clock
        self._journal = journal

    @property
    def direct(self) -> bool:
        """Whether the gradients need not be copied to shared memory before a step."""
        return self._writer.direct

    def arrive(self) -> None:
        """The worker has a gradient."""
        self._admission.arrive()

    def opened(self) -> Stages[bool]:
        """Waits a moment for a page that is closed; its result is whether it is open then."""
        return self._admission.opened_stages()

    def done(self) -> None:
        """The worker has copied the version."""
        self._user.done()
        self._admission.leave()

    def step(
        self, gradient: GradientId, loss: Callable[[], float | None], rates: Sequence[float] | None = None
    ) -> Stages[MadeVersion | None]:
        """Makes an update with this worker's gradient; its result is None if nothing has happened."""
        if not self._writer.ready():
            return None
        turn = (yield from self._take_turn(rates)) if (yield from self._admission.come_stages()) else None
        made = (yield from self._make(turn, gradient, loss)) if turn is not None else None
        if made is None:
            self._admission.give_up()
        return made

    def _take_turn(self, own: Sequence[float] | None) -> Stages[_Turn | None]:
        """Waits for the turn; its result is None if it does not come in time, or the page is closed."""
        user, page, words, now = self._user, self._user.page, self._user.page.words, self._clock.now
        spin_s = TURN_SPIN_S if user.spins or self._admission.straight_back else 0.0
        started, slept = now(), False
        while True:
            spins_until = now() + spin_s
            while words.writer != NOBODY and now() < spins_until:
                yield Stage.SPIN  # the writer has a core, too, so its turn is over soon
            yield Stage.LOCK
            with page.locked() as held:
                if not held:
                    return None
                if slept:
                    page.news.end_wait()
                if not user.may_step():
                    return None
                if words.writer == NOBODY:
                    # Lock held, the turn is free: take it, with a slot that no other worker uses.
                    version, slot = page.version, page.slot
                    page.workers.leases[user.worker] = -1  # what it was given by message it copied long ago
                    slots = UpdateSlots(slot, user.free_slot(slot), page.state_slot, user.free_state(page.state_slot))
                    page.workers.uses[user.worker], page.workers.state_uses[user.worker] = (
                        slots.target,
                        slots.state_target,
                    )
                    yield Stage.LOCKED
                    words.writer = user.worker
                    rates = list(user.own_rates(own) or page.rates.of(version))
                    return _Turn(version, slots, words.opening_id, rates)
                if now() - started > user.wait_s:
                    return None
                seen, slept = page.news.begin_wait(), True
            # Lock free, counted among those that wait for news.
            yield Sleep(page.news, seen, user.wait_s)

    def _make(self, turn: _Turn, gradient: GradientId, loss: Callable[[], float | None]) -> Stages[MadeVersion | None]:
        """Writes and publishes; the turn is ours, so no other worker changes the current version meanwhile."""
        written, user = False, self._user
        try:
            user.versions.mark(turn.slots.target, -1)
            held = gradient.computed_at == turn.version
            yield Stage.WRITE
            written = self._writer.write(turn.slots, user.moments(turn.version, turn.rates), held=held)
            yield Stage.WRITTEN
            seen = gradient if self._writer.norm is None else gradient._replace(norm=self._writer.norm)
            value = loss()
            if written and self._journal is not None and self._writer.mean is not None:
                giver = Giver(user.worker, seen, value)
                written = self._journal.append(
                    turn.opening_id, turn.version + 1, [giver], turn.rates, self._writer.mean
                )
                yield Stage.WRITTEN
        except BaseException:
            written = False
            raise
        finally:
            if not written:
                self._give_turn_back(turn)
        if not written:
            return None
        made = yield from self._publish(turn, seen, value)
        if made is not None and self._journal is not None and not self._journal.survives(made.version):
            self.done()  # the ps that is restored says what became of the gradient
            return None
        return made

    def _publish(self, turn: _Turn, gradient: GradientId, loss: float | None) -> Stages[MadeVersion | None]:
        user, page, made = self._user, self._user.page, None
        yield Stage.LOCK
        with page.locked() as held:
            if held and user.still_in(turn.opening_id) and page.words.writer == user.worker:
                # Lock held, the turn still ours: mark, record, then the one word that makes it the current version.
                version, target = turn.version + 1, turn.slots.target
                user.versions.mark(target, version)
                page.rates.use(turn.version, turn.rates)
                if self._journal is not None:
                    self._journal.count()
                page.records.add(user.worker, gradient, loss, version, target)
                yield Stage.LOCKED
                page.publish(version, target, turn.slots.state_target)
                rates = page.rates.of(version)
                made = MadeVersion(turn.version, version, target, rates, turn.rates, loaded=self._writer.loads)
                page.words.writer = NOBODY
                page.news.announce()
                self._admission.turn_ends()
        if made is None:
            self.done()  # the ps took the turn away: it has the current version, and this one counts for nothing
        yield Stage.FREE
        page.news.wake(1)
        self._admission.wake()
        return made

    def _give_turn_back(self, turn: _Turn) -> None:
        """Lets others have the turn; without stages, as an exception may be on its way."""
        user, page = self._user, self._user.page
        if self._journal is not None:
            self._journal.undo()
        with page.locked() as held:
            if held and page.words.opening_id == turn.opening_id and page.words.writer == user.worker:
                page.words.writer = NOBODY
                page.news.announce()
        self.done()
        page.news.wake(1)


class CpuTurn:
    """Makes versions on the host's cores, variable by variable.

    Args:
        layout: Where the variables lie, all of them on the one ps.
        parameters: The worker's parameters, in the order of the variables.
        versions: The ps's slots.
        own: The worker's gradient memory, for gradients that do not lie on the CPU.
        kernels: Make the updates, one for each parameter group.
        states: The ps's slots of optimizer state, by name.
        journaled: Whether the journal gets the gradient.
    """

    loads = False

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        versions: Slots,
        own: Slots,
        kernels: Sequence[Kernel],
        states: Mapping[str, Slots],
        *,
        journaled: bool = False,
    ) -> None:
        self.norm: float | None = None
        self.mean: JournaledMean | None = None
        self._region, self._versions, self._own = layout.trained[0], versions, own
        self._kernels, self._states = kernels, states
        pieces = [piece for section in self._region.sections for piece in section.pieces]
        self._variables = [piece.variable for piece in pieces]
        self._entries = [(parameters[p.variable], layout.variables[p.variable].group) for p in pieces]
        self.direct = all(p.device.type == "cpu" for p, _ in self._entries)
        self._views: dict[tuple[str, int], list[torch.Tensor]] = {}
        self._bytes = RegionBytes.of_pieces(self._region) if journaled else None

    def ready(self) -> bool:
        """Whether the gradients hold neither NaN nor infinity; those that were copied have been checked then.

        Where the optimizer has a state, every variable must have a gradient: without one its state counts fewer updates.
        """
        if self._states and any(p.grad is None for p, _ in self._entries):
            return False
        if not self.direct:
            if self._bytes is not None:
                self.mean = JournaledMean.of([as_bytes(self._own.bytes[0])])
            return True
        self.norm = norm_of([p.grad for p, _ in self._entries if p.grad is not None])
        if not math.isfinite(self.norm):
            return False
        if self._bytes is not None:  # before the turn, so that no other worker waits for the checksum
            self.mean = self._mean(self._bytes)
        return True

    def _mean(self, region: RegionBytes) -> JournaledMean:
        """Returns the gradients as the journal has them."""
        gradients = [p.grad for p, _ in self._entries]
        dense = [g if g is None or g.layout == torch.strided else g.to_dense() for g in gradients]
        absent = sorted({piece for piece, g in zip(self._variables, gradients, strict=True) if g is None})
        return JournaledMean.of(region.pieces(dense), absent)

    def write(self, slots: UpdateSlots, moments: Sequence[Moment], *, held: bool) -> bool:
        """Writes the next version from the current one; variables without a gradient stay as they are."""
        old, new = self._views_of("", slots.current), self._views_of("", slots.target)
        before = {name: self._views_of(name, slots.state) for name in self._states}
        after = {name: self._views_of(name, slots.state_target) for name in self._states}
        own = None if self.direct else self._views_of("", -1)
        for k, (parameter, group) in enumerate(self._entries):
            gradient, kernel = parameter.grad, self._kernels[group]
            if gradient is None:
                new[k].copy_(old[k])
                kernel.without_gradient(new[k])
                continue
            if own is not None:
                gradient = own[k]
            elif gradient.layout != torch.strided:
                gradient = gradient.to_dense()
            mine, made = [before[name][k] for name in kernel.state], [after[name][k] for name in kernel.state]
            kernel.write(moments[group], old[k], gradient, new[k], mine, made)
        return True

    def _views_of(self, state: str, slot: int) -> list[torch.Tensor]:
        """Returns a slot's memory variable by variable, of the version or of a state; slot -1 is this worker's own gradient."""
        found = self._views.get((state, slot))
        if found is None:
            slots = self._states[state] if state else self._versions
            sections = self._own.sections[0] if slot < 0 else slots.sections[slot]
            shapes = iter(parameter.shape for parameter, _ in self._entries)
            found = self._views[state, slot] = [
                values[piece.offset : piece.offset + piece.numel].view(next(shapes))
                for section, values in zip(self._region.sections, sections, strict=True)
                for piece in section.pieces
            ]
        return found
