"""Steps in rounds (Sync of all workers): each gives its gradient; when all have given, each writes its part of the next version.

Owned by the worker's thread, through `torchquorum.fastpath.steps`. What always holds: a round that is full can be finished by the
ps with the same bits, as the gradients lie in shared memory and are summed in order of worker; a version is published by the worker
that finishes last, in the opening in which the round began, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from torchquorum.errors import SegmentError
from torchquorum.fastpath.participant import MadeVersion, Participant, UpdateSlots
from torchquorum.fastpath.records import GradientId
from torchquorum.fastpath.stages import Stage, Stages
from torchquorum.fastpath.update_journal import Giver, JournaledMean, RegionBytes, UpdateJournal
from torchquorum.memory.slots import DTYPES, Sections, Slots
from torchquorum.placement.layout import ITEM_BYTES, Layout, Region
from torchquorum.update.kernels import Kernel, Moment, mean

CHUNK = 1 << 16
_LINE = 64  # parts begin at multiples of this many elements


class RoundPart(NamedTuple):
    """A run of elements of one section and one parameter group."""

    group: int
    section: int
    start: int
    stop: int


def parts_of(layout: Layout, worker: int, num_workers: int, chunk: int | None = None) -> list[RoundPart]:
    """Returns the parts of the one shard's variables that a worker writes in a round, each of at most `chunk` elements."""
    found: list[RoundPart] = []
    for index, section in enumerate(layout.trained[0].sections):
        numel, pieces, runs = section.numel, section.pieces, []
        cuts = [min(numel, -(-(numel * w // num_workers) // _LINE) * _LINE) for w in range(num_workers)] + [numel]
        most = numel if chunk is None else chunk
        for piece, after in zip(pieces, [*pieces[1:], None], strict=True):
            group = layout.variables[piece.variable].group
            start = max(cuts[worker], piece.offset)
            # With the padding behind the piece, which is zero everywhere.
            stop = min(cuts[worker + 1], after.offset if after is not None else numel)
            while start < stop:
                last: RoundPart | None = runs[-1] if runs else None
                if last is not None and (last.group, last.stop) == (group, start) and start - last.start < most:
                    start = runs.pop().start
                end = min(stop, start + most)
                runs.append(RoundPart(group, index, start, end))
                start = end
        found += runs
    return found


class RoundWriter(Protocol):
    """Writes a worker's part of a round: `CpuRound`, or `torchquorum.worker.device_update.DeviceRound` on a GPU.

    Attributes:
        loads: The parameters hold the version once `finish` was called, though a GPU may still be copying.
    """

    @property
    def loads(self) -> bool: ...  # noqa: D102

    def ready(self) -> bool:
        """Whether it can write this round."""
        ...

    def reach(self, gradients: Slots, /) -> None:
        """Prepares to read the gradients of a worker that is new."""
        ...

    def write(self, gradients: list[Sections], slots: UpdateSlots, moments: Sequence[Moment]) -> None:
        """Writes this worker's parts of the next version.

        Args:
            gradients: Of every worker, the sections of its gradient; the same list as long as no worker changes.
            slots: Where the current version is, and where the next one goes.
            moments: Of each parameter group, which update this is.
        """
        ...

    def finish(self, target: int) -> None:
        """The version in slot `target` is published: takes the other workers' parts."""
        ...


class RoundGradients:
    """The gradient memory of all workers.

    Args:
        user: This worker.
        region: What a gradient is made of.
        own: This worker's gradient memory.

    Attributes:
        sections: Of every worker, the sections of its gradient; another list whenever a worker has changed.
        means: In a durable run, of every worker the sections in which it leaves its part of the mean gradient.
    """

    def __init__(self, user: Participant, region: Region, own: Slots) -> None:
        self._table, self._worker, self._region, self._own = user.page.workers, user.worker, region, own
        self._others: dict[int, tuple[int, Slots]] = {}
        self.sections: list[Sections] = []
        self.means: list[Sections] = []

    def follow(self, reach: Callable[[Slots], None]) -> bool:
        """Opens the memory of workers that are new; False if one has gone, and its memory with it."""
        tokens = self._table.tokens.tolist()
        for worker, token in enumerate(tokens):
            known = self._others.get(worker)
            if worker == self._worker or (known is not None and known[0] == token):
                continue
            try:
                opened = Slots.open(self._table.gradients(worker), self._region)
            except SegmentError:
                return False  # the ps has it open, and finishes the round
            reach(opened)
            self._others[worker] = token, opened
            self.sections = []
        if not self.sections:
            slots = [self._own if w == self._worker else self._others[w][1] for w in range(len(tokens))]
            self.sections = [s.sections[0] for s in slots]
            self.means = [s.sections[-1] for s in slots]
        return True


class RoundSteps:
    """The rounds of one worker.

    Args:
        user: This worker.
        gradients: The gradients of all workers.
        writers: What writes this worker's part: the first that is ready.
        journal: Where updates are written before they are published, in a durable run.
    """

    direct = False  # the gradient is copied to shared memory before a step, for the other workers to read

    def __init__(
        self,
        user: Participant,
        gradients: RoundGradients,
        writers: Sequence[RoundWriter],
        journal: RoundJournal | None = None,
    ) -> None:
        self._user, self._gradients, self._writers, self._journal = user, gradients, writers, journal

    def arrive(self) -> None:
        """The worker has a gradient."""

    def opened(self) -> Stages[bool]:
        """A page that is closed is not waited for: the others push by message, and so does this worker."""
        yield from ()
        return False

    def done(self) -> None:
        """The worker has copied the version."""
        self._user.done()

    def step(
        self, gradient: GradientId, loss: Callable[[], float | None], rates: Sequence[float] | None = None
    ) -> Stages[MadeVersion | None]:
        """Makes an update with the gradients of all workers; its result is None if this worker has to push by message."""
        user, page, words = self._user, self._user.page, self._user.page.words
        version, value = gradient.computed_at + 1, loss()
        # Lock held inside: our gradient counts; the last worker to give chooses the slot and makes the round full.
        begun = yield from self._give(gradient, value, version, rates)
        if begun is None:
            return None
        opening_id, current = begun
        if not (yield from user.until(lambda: words.full == version, opening_id)):
            return None
        # The round is full: every worker has `target` in use, and every gradient stays where it is until the round is over.
        if not self._gradients.follow(self._reach):
            return self._abandon()
        target, writer, used = words.target, next(w for w in self._writers if w.ready()), page.rates.of(version - 1)
        slots = UpdateSlots(current[0], target, current[1], words.state_target)
        yield Stage.WRITE
        writer.write(self._gradients.sections, slots, user.moments(version - 1, used))
        yield Stage.WRITTEN
        # Our part is written; lock held inside: the last worker to finish records the round and publishes the version.
        if not (yield from self._finish(version, target, opening_id)):
            return self._abandon()
        if not (yield from user.until(lambda: page.version >= version, opening_id)):
            return self._abandon()
        if self._journal is not None and not self._journal.survives(version):
            return self._abandon()  # the ps that is restored says what became of the gradient
        # The version is published, and `target` stays in use by us until it has been copied.
        writer.finish(target)
        after, loads = page.rates.of(version), writer.loads
        return MadeVersion(gradient.computed_at, version, target, after, used, loaded=loads, reading=loads)

    def _give(
        self, gradient: GradientId, loss: float | None, version: int, rates: Sequence[float] | None
    ) -> Stages[tuple[int, tuple[int, int]] | None]:
        """Gives our gradient to the round; its result is the opening and the current slots, or None if there can be no round."""
        user, page, words = self._user, self._user.page, self._user.page.words
        yield Stage.LOCK
        with page.locked() as held:
            if not held or not user.may_step() or page.version != gradient.computed_at:
                return None
            opening_id, current = words.opening_id, (page.slot, page.state_slot)
            page.workers.leases[user.worker] = -1
            page.records.give(user.worker, gradient, loss, version)
            if (own := user.own_rates(rates)) is not None:
                page.rates.change(version - 1, own)
            yield Stage.LOCKED
            page.workers.given[user.worker] = version
            full = page.workers.all_given(version)
            if full:
                words.target, words.state_target = user.free_slot(current[0]), user.free_state(current[1])
                for worker in range(page.num_workers):
                    page.workers.uses[worker], page.workers.state_uses[worker] = words.target, words.state_target
                user.versions.mark(words.target, -1)
                yield Stage.LOCKED
                words.full = version
                page.news.announce()
        if full:
            yield Stage.FREE
            page.news.wake()
        return opening_id, current

    def _finish(self, version: int, target: int, opening_id: int) -> Stages[bool]:
        """Our part is written; the last publishes the version. Its result is False if the page was closed: the ps finishes the round."""
        user, page = self._user, self._user.page
        yield Stage.LOCK
        with page.locked() as held:
            if not held or not user.still_in(opening_id):
                return False
            page.workers.written[user.worker] = version
            last = page.workers.all_written(version)
            if last and self._journal is None:
                yield from self._publish(version, target)
        if last and self._journal is not None:
            # Lock free: all have written, and wait for the version; nobody else writes to the journal.
            if not self._journal.append(opening_id, version, self._gradients.means):
                return False
            yield Stage.WRITTEN
            yield Stage.LOCK
            with page.locked() as held:
                if not held or not user.still_in(opening_id):
                    return False
                self._journal.count()
                yield from self._publish(version, target)
        if last:
            yield Stage.FREE
            page.news.wake()
        return True

    def _publish(self, version: int, target: int) -> Stages[None]:
        """Lock held, everything is written: mark, record, then the one word that makes it the current version."""
        user, page = self._user, self._user.page
        user.versions.mark(target, version)
        page.rates.use(version - 1)
        for worker in range(page.num_workers):
            page.records.add_given(worker, target)
            yield Stage.LOCKED
        page.publish(version, target, page.words.state_target)
        page.news.announce()

    def _abandon(self) -> None:
        """The round is not ours any more: the slot may be used by others."""
        self.done()

    def _reach(self, slots: Slots) -> None:
        for writer in self._writers:
            writer.reach(slots)


class RoundJournal:
    """What the last worker of a round writes to the journal: the parts of the mean gradient, where all workers have left theirs.

    Args:
        user: This worker.
        layout: Where the variables lie, all of them on the one ps.
        journal: The journal.
    """

    def __init__(self, user: Participant, layout: Layout, journal: UpdateJournal) -> None:
        self._user, self._journal, region = user, journal, layout.trained[0]
        self._parts = [
            (worker, part)
            for worker in range(user.page.num_workers)
            for part in parts_of(layout, worker, user.page.num_workers)
        ]
        places: list[tuple[int, int]] = []
        for _, part in self._parts:
            section = region.sections[part.section]
            size_bytes = ITEM_BYTES[section.dtype]
            places.append((section.start_byte + part.start * size_bytes, (part.stop - part.start) * size_bytes))
        self._bytes = RegionBytes(region, places)
        self.count, self.survives = journal.count, journal.survives

    def append(self, opening_id: int, version: int, means: Sequence[Sections]) -> bool:
        """Writes the record of the round that makes `version`; False if that is impossible, or not this worker's to do any more."""
        page = self._user.page
        parts = [means[worker][part.section][part.start : part.stop] for worker, part in self._parts]
        given = page.records.given()
        if any(record.version != version for record in given):
            return False  # the page was closed and opened again meanwhile
        givers = [
            Giver(r.worker, GradientId(r.incarnation, r.local_step, r.request, r.computed_at, r.norm, r.sample), r.loss)
            for r in given
        ]
        mean = JournaledMean.of(self._bytes.pieces(parts))
        return self._journal.append(opening_id, version, givers, page.rates.of(version - 1), mean)


class _RoundViews(NamedTuple):
    group: int
    room: torch.Tensor
    given: list[torch.Tensor]
    old: torch.Tensor
    new: torch.Tensor
    before: list[torch.Tensor]
    after: list[torch.Tensor]


class CpuRound:
    """Writes this worker's part on the host's cores, in chunks that stay in the cache.

    Args:
        parts: This worker's parts, from `parts_of`.
        region: What the parts are parts of.
        versions: The ps's slots.
        kernels: Make the updates, one for each parameter group.
        states: The ps's slots of optimizer state, by name.
        means: Where the parts of the mean gradient stay, in a durable run.
    """

    loads = False

    def __init__(
        self,
        parts: Sequence[RoundPart],
        region: Region,
        versions: Slots,
        kernels: Sequence[Kernel],
        states: Mapping[str, Slots],
        means: Sections | None = None,
    ) -> None:
        self._parts, self._versions, self._kernels, self._states = parts, versions, kernels, states
        self._means = means
        self._room = [torch.empty(CHUNK, dtype=DTYPES[section.dtype]) for section in region.sections]
        self._gradients: list[Sections] = []
        self._views: dict[UpdateSlots, list[_RoundViews]] = {}

    def ready(self) -> bool:
        """It can write every round."""
        return True

    def reach(self, gradients: Slots) -> None:
        """Shared memory is read as it is."""

    def write(self, gradients: list[Sections], slots: UpdateSlots, moments: Sequence[Moment]) -> None:
        """Writes this worker's parts: the mean in order of worker, then the update, as the ps would."""
        if gradients is not self._gradients:
            self._gradients, self._views = gradients, {}
        views = self._views.get(slots)
        if views is None:
            views = self._views[slots] = [self._cut(part, slots) for part in self._parts]
        for group, room, given, old, new, before, after in views:
            self._kernels[group].write(moments[group], old, mean(given, room), new, before, after)

    def _cut(self, part: RoundPart, slots: UpdateSlots) -> _RoundViews:
        """Returns room for a part's mean, and the part of every gradient, of the old and the new version and of their states."""
        there = slice(part.start, part.stop)

        def cut(sections: Sections) -> torch.Tensor:
            return sections[part.section][there]

        names = self._kernels[part.group].state
        return _RoundViews(
            part.group,
            cut(self._means) if self._means is not None else self._room[part.section][: part.stop - part.start],
            [cut(sections) for sections in self._gradients],
            cut(self._versions.sections[slots.current]),
            cut(self._versions.sections[slots.target]),
            [cut(self._states[name].sections[slots.state]) for name in names],
            [cut(self._states[name].sections[slots.state_target]) for name in names],
        )

    def finish(self, target: int) -> None:
        """The parameters take the whole version from the slot, later."""
