"""The quorum: one pure state machine that decides when gradients become an update.

Owned by the thread of ps task 0 (and by tests and simulators). It takes events (a worker joined, a gradient arrived, time
passed) and returns decisions as data: accepted, refused with a reason, applied, released. It holds no tensors, opens no
sockets and reads no clock: `now` is an argument, in seconds of any monotonic clock.

What always holds:
- the version never decreases, and grows by one per `Applied`;
- every gradient is accepted or refused exactly once, and an accepted one is in exactly one `Applied` or, when the run
  ends before its round closed, in `Discarded`;
- a waiting worker is released as soon as its condition holds: at least one live worker is always computing, unless the
  run is over;
- the cost of an event depends on what follows from it, not on the number of workers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from torchquorum.rules.backup import BackupChooser
from torchquorum.rules.presets import Rule

LIVENESS_S = 5.0
QUORUM, SLOWEST = "the quorum", "the slowest worker"  # what workers wait for


def remembered_lives(num_workers: int) -> int:
    """Returns how many earlier incarnations are remembered, over all workers: memory must stay bounded in a run of weeks."""
    return max(1024, 4 * num_workers)


class Reason(StrEnum):
    """Why a gradient was accepted or refused; the ledger records these words."""

    FRESH = "fresh"  # computed at the current version
    WITHIN_BOUND = "within bound"  # stale, and the rule allows that much
    STALE = "stale"  # older than max_staleness
    ALREADY_IN_ROUND = "already in round"  # this worker counts once per round, and was counted
    PAST_LAST_STEP = "past last step"  # the run has made its last update
    OLD_INCARNATION = "old incarnation"  # sent by a process that has been replaced
    EXPIRED = "expired"  # its worker was declared dead while it computed
    NOT_FINITE = "not finite"  # it contains NaN or infinity


class Key(NamedTuple):
    """Identifies one gradient: the worker that computed it, its incarnation and its local step."""

    worker: int
    incarnation: int
    local_step: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The gradient joined the round that was open at version `met`."""

    key: Key
    version: int
    met: int
    reason: Reason
    now: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The gradient is not used; its worker is told."""

    key: Key
    version: int
    met: int
    reason: Reason
    now: float


@dataclass(frozen=True, slots=True)
class Repeated:
    """The gradient was decided on before: the same answer is sent again."""

    key: Key


@dataclass(frozen=True, slots=True)
class Applied:
    """The mean of these gradients is the update that makes `version`; keys are in order of worker and local step."""

    keys: tuple[Key, ...]
    version: int


@dataclass(frozen=True, slots=True)
class Discarded:
    """Accepted gradients whose round never closed because the run ended."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """The worker may continue, from `version`; `stop` means that the run is over."""

    worker: int
    incarnation: int
    local_step: int
    version: int
    stop: bool


@dataclass(frozen=True, slots=True)
class Died:
    """The worker no longer counts as alive."""

    worker: int
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class Chose:
    """From here on an update takes `aggregate` gradients, of `live` workers, and a round is expected to take `round_s`."""

    aggregate: int
    live: int
    round_s: float
    now: float


Action = Accepted | Refused | Repeated | Applied | Discarded | Released | Died | Chose


@dataclass(frozen=True, slots=True)
class Wait:
    """What a held worker waits for, for status messages."""

    what: str
    have: int
    need: int
    missing: tuple[int, ...]

    def to_dict(self) -> dict[str, object]:
        """Returns it for a status: at most eight missing workers, and their number."""
        few = list(self.missing[:8])
        return {"what": self.what, "have": self.have, "need": self.need, "missing": few, "count": len(self.missing)}


@dataclass(slots=True)
class Worker:
    """The state of one worker.

    `clock` measures its lead: it counts its gradients, but starts level with the slowest live worker when it joins or
    comes back, so that no worker waits for it to catch up. `gave_at` is the version whose round has its gradient.
    `paused`: it is alive and has nothing to compute, so it is not counted and no worker waits for it. `left`: this
    incarnation has said goodbye; `failed`: because its program failed, so that its part is not done.
    """

    incarnation: int
    last_seen: float
    clock: int
    gave_at: int
    local_step: int = 0
    alive: bool = False
    held: bool = False
    fenced: bool = False
    left: bool = False
    failed: bool = False
    paused: bool = False

    @property
    def counted(self) -> bool:
        """Whether a round may wait for it."""
        return self.alive and not self.paused

    @property
    def gone(self) -> bool:
        """Whether it died or failed: its part is not done, and a new incarnation may do it."""
        return not self.alive and (self.failed or not self.left)


@dataclass(slots=True)
class Quorum:
    """The state machine. The module's docstring lists what always holds.

    Attributes:
        rule: When gradients become an update.
        num_workers: The number of workers in the cluster; `Sync()` waits for that many gradients.
        version: The number of applied updates.
        last_step: The version at which the run is over; None runs until it is stopped.
        liveness_s: A worker that is silent for longer is declared dead.
        stopped: Whether the run is over.
        workers: Every worker that ever joined, by index.
        round: The gradients of the open round, in order of arrival.
        held: The workers that have pushed and are not released.
        live: How many workers are alive and not paused.
        idle: How many of these are held; the others compute.
        replaced: Earlier incarnations, as (worker, incarnation), and the last local step of each that was decided on.
        chooser: Chooses `needed`, where the rule says "auto".
        needed: How many gradients make one update.
    """

    rule: Rule
    num_workers: int
    version: int = 0
    last_step: int | None = None
    liveness_s: float = LIVENESS_S
    stopped: bool = False
    workers: dict[int, Worker] = field(default_factory=dict)
    round: list[Key] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    live: int = 0
    idle: int = 0
    replaced: dict[tuple[int, int], int] = field(default_factory=dict)
    chooser: BackupChooser | None = field(init=False, default=None)
    needed: int = field(init=False)
    _now: float = 0.0  # of the last event that had a time
    _round_began: float = 0.0
    _clocks: Counter[int] = field(default_factory=Counter)  # how many live workers are at each clock
    _low: int = 0  # the slowest clock when it was last asked for
    _slowest: int = 0  # the slowest clock when waiting workers were last checked
    _came_back: bool = False  # a worker came back, and `_settle` has not run since

    def __post_init__(self) -> None:
        self.stopped = self.stopped or self._finished()
        self.needed = self.rule.needed(self.num_workers)
        self.chooser = BackupChooser(self.rule.noise) if self.rule.auto else None

    # -- events -------------------------------------------------------------------------------------------------------

    def join(self, worker: int, incarnation: int, now: float) -> list[Action]:
        """A worker is ready to compute; a new incarnation replaces the old one permanently.

        Joining again repeats the release; an incarnation that was replaced, or that has left, is not accepted again.
        """
        known = self.workers.get(worker)
        if (worker, incarnation) in self.replaced:
            return []
        if known is not None and known.incarnation == incarnation:
            if known.left:
                return []
            self.seen(worker, incarnation, now)
            known.fenced = False
            return self._settle(worker) if known.held else [self._release(worker), *self._settle()]
        if known is not None:
            self._mark(worker, alive=False, held=False)
            self.replaced[worker, known.incarnation] = known.local_step
            while len(self.replaced) > remembered_lives(self.num_workers):
                del self.replaced[next(iter(self.replaced))]
        self.workers[worker] = Worker(
            incarnation=incarnation, last_seen=now, clock=self._level(), gave_at=known.gave_at if known else -1
        )
        self._mark(worker, alive=True, held=False)
        self._now = now
        if self.chooser is not None:
            self.chooser.times.joins(worker)
        return [self._release(worker), *self._settle()]

    def seen(self, worker: int, incarnation: int, now: float) -> None:
        """A sign of life. A worker that was declared dead is alive again, but the gradient it was computing is fenced.

        The effect on waiting workers comes with the next event, at the latest with the next `expire`.
        """
        known = self.workers.get(worker)
        if known is None or known.incarnation != incarnation or known.left:
            return
        known.last_seen, self._now = max(known.last_seen, now), now
        if not known.alive:
            known.clock = max(known.clock, self._level())
            self._mark(worker, alive=True, held=known.held)
            self._came_back = True

    def leave(self, worker: int, incarnation: int, *, failed: str = "") -> list[Action]:
        """An incarnation of a worker leaves for good; its accepted gradients still count.

        With `failed`, which says why, its program failed: the worker counts as dead until a new incarnation joins.
        """
        known = self.workers.get(worker)
        if known is None or known.incarnation != incarnation or known.left:
            return []
        self._mark(worker, alive=False, held=False)
        known.left, known.failed = True, bool(failed)
        died: list[Action] = [Died(worker, incarnation, failed)] if failed else []
        return [*died, *self._settle()]

    def pause(self, worker: int, incarnation: int, now: float) -> list[Action]:
        """A live worker has nothing to compute: it is not counted, as if dead, until it pushes or `resume`."""
        self.seen(worker, incarnation, now)
        known = self.workers.get(worker)
        if known is None or known.incarnation != incarnation or not known.counted or known.held:
            return []
        self._mark(worker, alive=True, held=False, paused=True)
        if self.chooser is not None:
            self.chooser.times.pauses(worker)
        return self._settle()

    def resume(self, worker: int, incarnation: int, now: float) -> list[Action]:
        """A paused worker computes again; its clock starts level with the slowest, as after coming back."""
        self.seen(worker, incarnation, now)
        known = self.workers.get(worker)
        if known is None or known.incarnation != incarnation or not known.paused:
            return []
        known.clock = max(known.clock, self._level())
        self._mark(worker, alive=known.alive, held=known.held)
        if self.chooser is not None:
            self.chooser.times.begins(worker, now)
        return self._settle()

    def fence(self, worker: int, incarnation: int) -> None:
        """The next gradient of this worker is out of date: it will be refused as expired."""
        known = self.workers.get(worker)
        if known is not None and known.incarnation == incarnation:
            known.fenced = True

    def lost(self, worker: int, incarnation: int, why: str) -> list[Action]:
        """A worker is known to be dead: its process is gone, or it was silent for too long."""
        known = self.workers.get(worker)
        if known is None or known.incarnation != incarnation or not known.alive:
            return []
        return [self._bury(worker, why), *self._settle(worker)]

    def somebody_silent(self, now: float) -> bool:
        """Whether `expire` would declare a worker dead, or a worker came back and `_settle` has not run since."""
        return self._came_back or any(w.alive and now - w.last_seen > self.liveness_s for w in self.workers.values())

    def expire(self, now: float) -> list[Action]:
        """Time has passed: workers that were silent for `liveness_s` are declared dead, and a late round is looked at.

        Who was seen later than now was seen by the clock of another task, which has not missed what this one has: it counts as now.
        """
        self._now = now
        for worker in self.workers.values():
            worker.last_seen = min(worker.last_seen, now)
        silent_s = {i: now - w.last_seen for i, w in self.workers.items() if w.alive}
        died = [
            self._bury(i, f"not heard of for {s:.1f} s") for i, s in sorted(silent_s.items()) if s > self.liveness_s
        ]
        late = self._choose() if self.chooser is not None and self.chooser.is_late(self._round_began, now) else []
        changed = died or late or self._came_back
        return [*died, *late, *self._settle(*(d.worker for d in died))] if changed else []

    def push(self, key: Key, version: int, now: float, *, finite: bool = True) -> list[Action]:
        """A gradient, computed at `version`, has arrived completely."""
        worker = self.workers.get(key.worker)
        if worker is None or worker.incarnation != key.incarnation:
            return [self._turn_away(key, version, now)]
        self.seen(key.worker, key.incarnation, now)
        if key.local_step <= worker.local_step:
            return [Repeated(key)]
        worker.local_step = key.local_step
        if worker.left:
            return [Refused(key, version, self.version, Reason.OLD_INCARNATION, now)]
        if worker.paused:
            worker.clock = max(worker.clock, self._level())
            self._mark(key.worker, alive=True, held=worker.held)
        if self.chooser is not None:
            self.chooser.times.ends(key.worker, now)
        self._tick(worker)
        reason = self._verdict(worker, version, finite)
        worker.fenced = False
        self._mark(key.worker, alive=True, held=True)
        if reason in (Reason.FRESH, Reason.WITHIN_BOUND):
            self.round.append(key)
            worker.gave_at = self.version
            return [Accepted(key, version, self.version, reason, now), *self._settle(key.worker)]
        return [Refused(key, version, self.version, reason, now), *self._settle(key.worker)]

    def assign(self) -> list[Action]:
        """The variables are given other values: the next version is no update's. The open round goes on after it."""
        for worker in self.workers.values():
            if worker.gave_at == self.version:
                worker.gave_at += 1
        self.version += 1
        self.stopped = self.stopped or self._finished()
        return self._settle()

    def stop(self) -> list[Action]:
        """The run is over: every waiting worker is released with `stop`."""
        self.stopped = True
        return self._settle()

    def close(self) -> list[Action]:
        """The server ends, and this is its last call: the gradients of the open round are discarded."""
        keys, self.round = tuple(self.round), []
        return [Discarded(keys)] if keys else []

    # -- queries ------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> list[int]:
        """Returns the live workers, in order, including paused ones."""
        return sorted(i for i, w in self.workers.items() if w.alive)

    def waits_for(self, worker: int) -> Wait | None:
        """Returns what a held worker waits for, or None if it does not wait."""
        known = self.workers.get(worker)
        if known is not None and known.paused:
            return Wait("a batch: others have those that are left", 0, 1, ())
        if known is None or not known.held:
            return None
        if self.cause_of_wait(worker) == QUORUM:
            given = {key.worker for key in self.round}
            short = self.live < self.needed  # then workers that gave were asked again
            counted = [i for i in self.alive if self.workers[i].counted]
            missing = tuple(i for i in counted if (not self.workers[i].held if short else i not in given))
            return Wait(QUORUM, len(self.round), self.needed, missing)
        slowest = self._slowest_clock()
        missing = tuple(i for i in self.alive if self.workers[i].counted and self.workers[i].clock == slowest)
        return Wait(SLOWEST, known.clock - slowest, self.rule.max_lead or 0, missing)

    def cause_of_wait(self, worker: int) -> str:
        """Returns what a held worker waits for, in words; `waits_for` says more, and takes longer."""
        return QUORUM if self._counted_in_round(self.workers[worker]) else SLOWEST

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _turn_away(self, key: Key, version: int, now: float) -> Action:
        """Refuses a gradient whose sender was replaced, or never joined."""
        past = key.worker, key.incarnation
        if key.local_step <= self.replaced.get(past, key.local_step - 1):
            return Repeated(key)
        if past in self.replaced:
            self.replaced[past] = key.local_step
        return Refused(key, version, self.version, Reason.OLD_INCARNATION, now)

    def _verdict(self, worker: Worker, version: int, finite: bool) -> Reason:
        staleness = self.version - version
        bound = self.rule.max_staleness
        if self.stopped:
            return Reason.PAST_LAST_STEP
        if worker.fenced:
            return Reason.EXPIRED
        if not finite:
            return Reason.NOT_FINITE
        if bound is not None and staleness > bound:
            return Reason.STALE
        if self._counted_in_round(worker) and self.live >= self.needed:
            return Reason.ALREADY_IN_ROUND
        return Reason.FRESH if staleness <= 0 else Reason.WITHIN_BOUND

    def _settle(self, *changed: int) -> list[Action]:
        """Closes the round if it is full, then releases every worker whose wait is over.

        Only the workers that `changed` are checked, unless the event changed what others wait for: so the cost of a round is
        linear in its gradients, not quadratic.
        """
        actions, before = list[Action](), self.version
        if self.chooser is not None and self.chooser.round_s is not None and self.needed > self.live:
            actions += self._choose()
        if len(self.round) >= self.needed and not self.stopped:
            keys, self.round = tuple(sorted(self.round)), []
            self.version += 1
            self._round_began = self._now
            actions.append(Applied(keys, self.version))
            self.stopped = self._finished()
            if self.chooser is not None and self.chooser.is_due(self.version, self._counted()):
                actions += self._choose()
        slowest = self._slowest_clock() if self.rule.max_lead is not None else 0
        closed = self.version != before and self.rule.once_per_round
        for_all = closed or self.stopped or slowest != self._slowest
        looked_at = sorted(self.held if for_all else self.held.intersection(changed))
        self._slowest, self._came_back = slowest, False
        actions += [self._release(i) for i in looked_at if not self._must_wait(self.workers[i], slowest)]
        return actions + self._ask_for_more()

    def _counted(self) -> list[int]:
        return [i for i, worker in self.workers.items() if worker.counted]

    def _choose(self) -> list[Action]:
        """Chooses how many gradients make an update, if the rule leaves that open; says so if the number changes."""
        assert self.chooser is not None
        live, before = self._counted(), self.needed
        if not live or self.stopped:
            return []
        floor = self.rule.least(self.num_workers)
        self.needed = self.chooser.choose(live, floor, before, self.version, self._now)
        if self.needed == before or self.chooser.round_s is None:
            return []
        return [Chose(self.needed, len(live), self.chooser.round_s, self._now)]

    def _must_wait(self, worker: Worker, slowest: int) -> bool:
        lead = worker.clock - slowest
        too_far_ahead = self.rule.max_lead is not None and worker.alive and lead > self.rule.max_lead
        return not self.stopped and (too_far_ahead or self._counted_in_round(worker))

    def _counted_in_round(self, worker: Worker) -> bool:
        """Whether this worker has given its one gradient to the open round."""
        return self.rule.once_per_round and worker.gave_at == self.version

    def _ask_for_more(self) -> list[Action]:
        """Releases as many workers as the round needs, those that gave least first, if it cannot fill otherwise.

        That happens when fewer workers live than the quorum needs, and when all workers wait: some because they were
        counted, the others because those are too far behind.
        """
        computing = self.live - self.idle
        if self.stopped or not self.rule.once_per_round or (self.live >= self.needed and computing):
            return []
        wanted = self.needed - len(self.round) - computing
        if wanted <= 0:
            return []
        idle = sorted(i for i in self.held if self.workers[i].alive)
        if len(idle) > wanted:
            given = Counter(key.worker for key in self.round)
            idle.sort(key=lambda i: (given[i], self.workers[i].clock))
        return [self._release(i) for i in idle[:wanted]]

    def _slowest_clock(self) -> int:
        """Returns the clock of the slowest live worker, which only grows: nobody joins or comes back below it."""
        if self._low not in self._clocks:
            self._low = self._low + 1 if self._low + 1 in self._clocks else min(self._clocks, default=self._low)
        return self._low

    def _level(self) -> int:
        """Returns the clock of a worker that joins now: that of the slowest live worker, or the highest if none lives."""
        return self._slowest_clock() if self.live else max((w.clock for w in self.workers.values()), default=0)

    def _bury(self, index: int, why: str) -> Died:
        worker = self.workers[index]
        worker.fenced = not worker.held  # a waiting worker was not computing a gradient that could be out of date
        self._mark(index, alive=False, held=worker.held)
        return Died(index, worker.incarnation, why)

    def _release(self, index: int) -> Released:
        worker = self.workers[index]
        self._mark(index, alive=worker.alive, held=False)
        if self.chooser is not None:
            self.chooser.times.begins(index, self._now)
        return Released(index, worker.incarnation, worker.local_step, self.version, self.stopped)

    def _tick(self, worker: Worker) -> None:
        self._count_clock(worker.clock, -1)
        worker.clock += 1
        self._count_clock(worker.clock, 1)

    def _mark(self, index: int, *, alive: bool, held: bool, paused: bool = False) -> None:
        """The only place that changes a worker's state, so that the counts stay right."""
        worker = self.workers[index]
        was, counted = worker.alive and not worker.paused, alive and not paused
        if counted != was:
            self._count_clock(worker.clock, 1 if counted else -1)
        self.live += counted - was
        self.idle += (counted and held) - (was and worker.held)
        worker.alive, worker.held, worker.paused = alive, held, paused
        (self.held.add if held else self.held.discard)(index)

    def _count_clock(self, clock: int, change: int) -> None:
        self._clocks[clock] += change
        if not self._clocks[clock]:
            del self._clocks[clock]

    def _finished(self) -> bool:
        return self.last_step is not None and self.version >= self.last_step
