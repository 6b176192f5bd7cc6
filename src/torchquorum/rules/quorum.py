"""The quorum: one pure state machine that decides when gradients become an update.

Owned by the thread of ps task 0 (and by tests and simulators). It takes events (a worker joined, a gradient arrived, time
passed) and returns decisions as data (`torchquorum.rules.decisions`): accepted, refused with a reason, applied, released. It holds no
tensors, opens no sockets and reads no clock: `now` is an argument, in seconds of any monotonic clock. A run has a track for each of its
optimizers (`torchquorum.rules.track`), with a rule, a round and a version of its own; who is in and who is alive is one for all.

What always holds:
- no version ever decreases, and each grows by one per `Applied` of its track;
- every gradient is accepted or refused exactly once, and an accepted one is in exactly one `Applied`, of its own track, or, when the
  run ends before its round closed, in `Discarded`;
- a waiting worker is released as soon as its condition holds: at least one live worker is always computing, unless the
  run is over, or all wait for each other in different tracks, which `Stuck` says;
- the cost of an event depends on what follows from it, not on the number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchquorum.rules.backup import BackupChooser
from torchquorum.rules.decisions import Accepted as Accepted
from torchquorum.rules.decisions import Action as Action
from torchquorum.rules.decisions import Applied as Applied
from torchquorum.rules.decisions import Chose as Chose
from torchquorum.rules.decisions import Died as Died
from torchquorum.rules.decisions import Discarded as Discarded
from torchquorum.rules.decisions import Key as Key
from torchquorum.rules.decisions import Reason as Reason
from torchquorum.rules.decisions import Refused as Refused
from torchquorum.rules.decisions import Released as Released
from torchquorum.rules.decisions import Repeated as Repeated
from torchquorum.rules.decisions import Stuck as Stuck
from torchquorum.rules.decisions import Wait as Wait
from torchquorum.rules.out_of_step import OutOfStep
from torchquorum.rules.presets import Rule
from torchquorum.rules.times import StepTimes
from torchquorum.rules.track import Standing, Track

LIVENESS_S = 5.0
QUORUM, SLOWEST = "the quorum", "the slowest worker"  # what workers wait for
LAST_GRADIENTS_S = 30.0  # how long after the last step the other tracks may complete what was begun


def remembered_lives(num_workers: int) -> int:
    """Returns how many earlier incarnations are remembered, over all workers: memory must stay bounded in a run of weeks."""
    return max(1024, 4 * num_workers)


@dataclass(slots=True)
class Worker:
    """The state of one worker.

    `places` has where it stands in each track. `waits_in` is the track in which it waits, -1 while it computes. `paused`: it is alive and
    has nothing to compute, so it is not counted and no worker waits for it; `done`: nor will it have anything until all others have come as
    far, so rounds do not need its gradients. `left`: this incarnation has said goodbye; `failed`: because its program failed, so that its
    part is not done. `out_of_step`: it may be at another place in its program than the others, as one is
    that came later or was refused; `seen_in` are the tracks in which a round has closed with it since.
    """

    incarnation: int
    last_seen: float
    places: list[Standing]
    local_step: int = 0
    alive: bool = False
    waits_in: int = -1
    fenced: bool = False
    left: bool = False
    failed: bool = False
    paused: bool = False
    done: bool = False
    out_of_step: bool = False
    seen_in: set[int] = field(default_factory=set)

    @property
    def held(self) -> bool:
        """Whether it waits."""
        return self.waits_in >= 0

    @property
    def clock(self) -> int:
        """Returns its clock in the first track."""
        return self.places[0].clock

    @property
    def counted(self) -> bool:
        """Whether a round may wait for it."""
        return self.alive and not self.paused

    @property
    def gone(self) -> bool:
        """Whether it died or failed: its part is not done, and a new incarnation may do it."""
        return not self.alive and (self.failed or not self.left)


class Quorum:
    """The state machine. The module's docstring lists what always holds.

    Args:
        rule: When gradients of the first optimizer become an update.
        num_workers: The number of workers in the cluster; `Sync()` waits for that many gradients.
        version: The number of applied updates of the first optimizer.
        last_step: That at which the run is over; None runs until it is stopped.
        liveness_s: A worker that is silent for longer is declared dead.
        more: The rules of the other optimizers, and their versions.

    Attributes:
        tracks: The state of each optimizer.
        workers: Every worker that ever joined, by index.
        stopped: Whether the run is over. After its last step the other optimizers may still complete what was begun.
        closed: Whether no gradient counts any more.
        held: The workers that have pushed and are not released.
        live: How many workers are alive and not paused.
        idle: How many of these are held; the others compute.
        done: How many workers are paused because they are done with their epoch.
        came_back: Whether a worker came back since it was last looked who may go on.
        replaced: Earlier incarnations, as (worker, incarnation), and the last local step of each that was decided on.
    """

    def __init__(
        self,
        rule: Rule,
        num_workers: int,
        *,
        version: int = 0,
        last_step: int | None = None,
        liveness_s: float = LIVENESS_S,
        more: Sequence[tuple[Rule, int]] = (),
    ) -> None:
        rules = [(rule, version), *more]
        self.num_workers, self.last_step, self.liveness_s = num_workers, last_step, liveness_s
        self.tracks = [Track(k, of, num_workers, at) for k, (of, at) in enumerate(rules)]
        self.workers: dict[int, Worker] = {}
        self.replaced: dict[tuple[int, int], int] = {}
        self.held: set[int] = set()
        self.live = self.idle = self.done = 0
        self.stopped = self._finished()
        self.closed = self.stopped
        self._now = 0.0  # of the last event that had a time
        self._stopped_at = 0.0
        self.came_back = False
        self._out_of_step = OutOfStep(self.tracks, begun=any(at for _, at in rules))

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
            self._out_of_step.lost(known)
            return self._settle(worker) if known.held else [self._release(worker), *self._settle()]
        if known is not None:
            self._mark(worker, alive=False)
            self.replaced[worker, known.incarnation] = known.local_step
            while len(self.replaced) > remembered_lives(self.num_workers):
                del self.replaced[next(iter(self.replaced))]
        places = [Standing(self._level(t), known.places[t.index].gave_at if known else -1) for t in self.tracks]
        self.workers[worker] = Worker(incarnation=incarnation, last_seen=now, places=places)
        self._mark(worker, alive=True)
        self._now = now
        self._out_of_step.joined(self.workers[worker])
        for times in self._times():
            times.joins(worker)
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
            self._catch_up(known)
            self._mark(worker, alive=True, waits_in=known.waits_in)
            self.came_back = True

    def leave(self, worker: int, incarnation: int, *, failed: str = "") -> list[Action]:
        """An incarnation of a worker leaves for good; its accepted gradients still count.

        With `failed`, which says why, its program failed: the worker counts as dead until a new incarnation joins.
        """
        known = self.workers.get(worker)
        if known is None or known.incarnation != incarnation or known.left:
            return []
        self._mark(worker, alive=False)
        known.left, known.failed = True, bool(failed)
        died: list[Action] = [Died(worker, incarnation, failed)] if failed else []
        return [*died, *self._settle()]

    def pause(self, worker: int, incarnation: int, now: float, *, done: bool = False) -> list[Action]:
        """A live worker has nothing to compute: it is not counted, as if dead, until it pushes or `resume`.

        With `done` it has come to the end of an epoch: until it is resumed, rounds need the gradients of the others only.
        """
        self.seen(worker, incarnation, now)
        known = self.workers.get(worker)
        if known is None or known.incarnation != incarnation or not known.alive or known.held:
            return []
        if known.paused and known.done >= done:
            return []
        self._mark(worker, alive=True, paused=True, done=done)
        for times in self._times():
            times.pauses(worker)
        return self._settle()

    def resume(self, worker: int, incarnation: int, now: float) -> list[Action]:
        """A paused worker computes again; its clock starts level with the slowest, as after coming back."""
        self.seen(worker, incarnation, now)
        known = self.workers.get(worker)
        if known is None or known.incarnation != incarnation or not known.paused:
            return []
        self._catch_up(known)
        self._mark(worker, alive=known.alive, waits_in=known.waits_in)
        for times in self._times():
            times.begins(worker, now)
        return self._settle()

    def flush(self) -> list[Action]:
        """The epoch is over: what was given to the open rounds is an update of each, however little it is."""
        return self._settle(full=True)

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
        return self.came_back or any(w.alive and now - w.last_seen > self.liveness_s for w in self.workers.values())

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
        late = [action for t in self.tracks if t.is_late(now) for action in self._choose(t)]
        ends = self.stopped and not self.closed and now - self._stopped_at > LAST_GRADIENTS_S
        self.closed = self.closed or ends
        graces = any(t.is_over_grace(now) for t in self.tracks)
        changed = died or late or ends or graces or self.came_back
        return [*died, *late, *self._settle(*(d.worker for d in died))] if changed else []

    def push(self, key: Key, version: int, now: float, *, finite: bool = True, track: int = 0) -> list[Action]:
        """A gradient, computed at this version of its track, has arrived completely."""
        worker, of = self.workers.get(key.worker), self.tracks[track]
        if worker is None or worker.incarnation != key.incarnation:
            return [self._turn_away(key, version, now, of)]
        place = worker.places[track]
        self.seen(key.worker, key.incarnation, now)
        if key.local_step <= place.local_step:
            return [Repeated(key)]
        place.local_step, worker.local_step = key.local_step, max(key.local_step, worker.local_step)
        if worker.left:
            return [Refused(key, version, of.version, Reason.OLD_INCARNATION, now)]
        if worker.paused:
            self._catch_up(worker)
            self._mark(key.worker, alive=True, waits_in=worker.waits_in)
        if of.times is not None:
            of.times.ends(key.worker, now)
        of.tick(place)
        reason = self._verdict(worker, of, version, finite)
        worker.fenced = False
        self._mark(key.worker, alive=True, waits_in=track)
        if reason in (Reason.FRESH, Reason.WITHIN_BOUND):
            of.round.append(key)
            place.gave_at = of.version
            self._out_of_step.begun = True
            return [Accepted(key, version, of.version, reason, now), *self._settle(key.worker, track=of)]
        self._out_of_step.lost(worker)
        return [Refused(key, version, of.version, reason, now), *self._settle(key.worker, track=of)]

    def assign(self, track: int = 0) -> list[Action]:
        """A track's variables are given other values: the next version is no update's. The open round goes on after it."""
        of = self.tracks[track]
        for worker in self.workers.values():
            if worker.places[track].gave_at == of.version:
                worker.places[track].gave_at += 1
        of.version += 1
        self._look_for_end()
        return self._settle()

    def stop(self) -> list[Action]:
        """The run is over: every waiting worker is released with `stop`."""
        self.stopped = self.closed = True
        return self._settle()

    def conclude(self) -> list[Action]:
        """Nobody completes anything any more: after the last step no gradient of any optimizer counts from now on."""
        if not self.stopped or self.closed:
            return []
        self.closed = True
        return self._settle()

    def close(self) -> list[Action]:
        """The server ends, and this is its last call: the gradients of the open rounds are discarded."""
        keys = tuple(key for t in self.tracks for key in t.round)
        for t in self.tracks:
            t.round = []
        return [Discarded(keys)] if keys else []

    # -- queries ------------------------------------------------------------------------------------------------------

    @property
    def rule(self) -> Rule:
        """Returns the rule of the first optimizer."""
        return self.tracks[0].rule

    @property
    def version(self) -> int:
        """Returns the number of applied updates of the first optimizer."""
        return self.tracks[0].version

    @property
    def place(self) -> int:
        """Returns how many updates were applied in all."""
        return sum(t.version for t in self.tracks)

    @property
    def needed(self) -> int:
        """Returns how many gradients make an update of the first optimizer."""
        return self.tracks[0].needed

    @property
    def chooser(self) -> BackupChooser | None:
        """Returns what chooses that number, where the first optimizer's rule says "auto"."""
        return self.tracks[0].chooser

    @property
    def round(self) -> list[Key]:
        """Returns the gradients of the first optimizer's open round."""
        return self.tracks[0].round

    @property
    def alive(self) -> list[int]:
        """Returns the live workers, in order, including paused ones."""
        return sorted(i for i, w in self.workers.items() if w.alive)

    def waits_for(self, worker: int) -> Wait | None:
        """Returns what a held worker waits for, or None if it does not wait."""
        known = self.workers.get(worker)
        if known is not None and known.paused:
            what = "the others to finish their epoch" if known.done else "a batch: others have those that are left"
            return Wait(what, 0, 1, ())
        if known is None or not known.held:
            return None
        of = self.tracks[known.waits_in]
        if self.cause_of_wait(worker) == QUORUM:
            given = {key.worker for key in of.round}
            needed = self._needed(of)
            short = self.live < needed  # then workers that gave were asked again
            counted = [i for i in self.alive if self.workers[i].counted]
            missing = tuple(i for i in counted if (not self.workers[i].held if short else i not in given))
            return Wait(QUORUM, len(of.round), needed, missing, of.index)
        slowest = of.slowest_clock()
        missing = tuple(
            i for i in self.alive if self.workers[i].counted and self.workers[i].places[of.index].clock == slowest
        )
        return Wait(SLOWEST, known.places[of.index].clock - slowest, of.rule.max_lead or 0, missing, of.index)

    def cause_of_wait(self, worker: int) -> str:
        """Returns what a held worker waits for, in words; `waits_for` says more, and takes longer."""
        known = self.workers[worker]
        of = self.tracks[known.waits_in]
        return QUORUM if of.has_given(known.places[of.index]) else SLOWEST

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _turn_away(self, key: Key, version: int, now: float, of: Track) -> Action:
        """Refuses a gradient whose sender was replaced, or never joined."""
        past = key.worker, key.incarnation
        if key.local_step <= self.replaced.get(past, key.local_step - 1):
            return Repeated(key)
        if past in self.replaced:
            self.replaced[past] = key.local_step
        return Refused(key, version, of.version, Reason.OLD_INCARNATION, now)

    def _verdict(self, worker: Worker, of: Track, version: int, finite: bool) -> Reason:
        staleness = of.version - version
        bound = of.rule.max_staleness
        if self._is_over(of):
            return Reason.PAST_LAST_STEP
        if worker.fenced:
            return Reason.EXPIRED
        if not finite:
            return Reason.NOT_FINITE
        if bound is not None and staleness > bound:
            return Reason.STALE
        if of.has_given(worker.places[of.index]) and self.live >= self._needed(of):
            return Reason.ALREADY_IN_ROUND
        return Reason.FRESH if staleness <= 0 else Reason.WITHIN_BOUND

    def _is_over(self, of: Track) -> bool:
        """Whether a track makes no update any more."""
        return self.closed or (self.stopped and of.index == 0)

    def _needed(self, of: Track) -> int:
        """Returns how many gradients make the open round's update: of workers that are done with their epoch it needs none."""
        if not self.done or not self.live or not of.rule.once_per_round:
            return of.needed
        return max(1, min(of.needed, self.num_workers - self.done))

    def _settle(self, *changed: int, track: Track | None = None, full: bool = False) -> list[Action]:
        """Closes rounds that are full, then releases every worker whose wait is over.

        Only the workers that `changed` are checked, unless the event changed what others wait for: so the cost of a round is
        linear in its gradients, not quadratic. A gradient touches its own track only.
        """
        actions, stopped = list[Action](), self.stopped
        those = self.tracks if track is None or self.came_back else [track]
        for of in those:
            actions += self._settle_track(of, changed, full=full)
        if self.stopped != stopped and len(those) < len(self.tracks):
            for of in self.tracks[1:]:
                actions += self._settle_track(of, changed)
        self.came_back = False
        for of in self.tracks:
            actions += self._ask_for_more(of)
        if len(self.tracks) > 1 and self.idle == self.live > 0:
            actions += self.conclude() if self.stopped else self._let_go()
        return actions

    def _settle_track(self, of: Track, changed: tuple[int, ...], *, full: bool = False) -> list[Action]:
        actions, before = list[Action](), of.version
        if of.chooser is not None and of.chooser.round_s is not None and of.needed > self.live:
            actions += self._choose(of)
        enough = len(of.round) >= self._needed(of) and not self._stays_open(of)
        if (enough or (full and of.round)) and not self._is_over(of):
            keys, of.round = tuple(sorted(of.round)), []
            of.version += 1
            of.round_began = self._now
            if of.grace is not None:
                of.grace.closed()
            actions.append(Applied(keys, of.version, of.index))
            if len(self.tracks) > 1:
                givers = {key.worker: self.workers[key.worker] for key in keys if key.worker in self.workers}
                self._out_of_step.applied(of, [w for w in givers.values() if w.counted], self.live)
            self._look_for_end()
            if of.chooser is not None and of.chooser.is_due(of.version, self._counted()):
                actions += self._choose(of)
        slowest = of.slowest_clock() if of.rule.max_lead is not None else 0
        closed = of.version != before and of.rule.once_per_round
        for_all = closed or self._is_over(of) or slowest != of.slowest
        looked_at = sorted(of.held if for_all else of.held.intersection(changed))
        of.slowest = slowest
        return actions + [self._release(i) for i in looked_at if not self.must_wait(self.workers[i], of, slowest)]

    def _counted(self) -> list[int]:
        return [i for i, worker in self.workers.items() if worker.counted]

    def _times(self) -> list[StepTimes]:
        return [t.times for t in self.tracks if t.times is not None]

    def _stays_open(self, of: Track) -> bool:
        """Whether a round that has enough gradients waits for those that are about to come."""
        if of.grace is None:
            return False
        given = {key.worker for key in of.round}
        return of.grace.holds(len(of.round), [i for i in self._counted() if i not in given], of.round_began, self._now)

    def _choose(self, of: Track) -> list[Action]:
        """Chooses how many gradients make an update, if the rule leaves that open; says so if the number changes."""
        assert of.chooser is not None
        live, before = self._counted(), of.needed
        if not live or self._is_over(of):
            return []
        floor = of.rule.least(self.num_workers)
        of.needed = of.chooser.choose(live, floor, before, of.version, self._now)
        if of.needed == before or of.chooser.round_s is None:
            return []
        return [Chose(of.needed, len(live), of.chooser.round_s, self._now, of.index)]

    def must_wait(self, worker: Worker, of: Track, slowest: int) -> bool:
        """Whether a worker may not go on in a track yet, where the slowest live one is that far."""
        place = worker.places[of.index]
        return not self._is_over(of) and ((worker.alive and of.is_ahead(place, slowest)) or of.has_given(place))

    def _ask_for_more(self, of: Track) -> list[Action]:
        """Releases as many workers as a round needs, those that gave least first, if it cannot fill otherwise.

        That happens when fewer workers live than the quorum needs, and when all workers wait here: some because they were
        counted, the others because those are too far behind.
        """
        if self._is_over(of) or not of.rule.once_per_round or not of.held:
            return []
        computing = self.live - self.idle
        if self.live >= self._needed(of) and (computing or (len(self.tracks) > 1 and not self._all_wait_in(of))):
            return []
        wanted = self._needed(of) - len(of.round) - computing
        if wanted <= 0:
            return []
        idle = sorted(i for i in of.held if self.workers[i].alive)
        if len(idle) > wanted:
            given = Counter(key.worker for key in of.round)
            idle.sort(key=lambda i: (given[i], self.workers[i].places[of.index].clock))
        for i in idle[:wanted]:
            self._out_of_step.lost(self.workers[i])
        return [self._release(i) for i in idle[:wanted]]

    def _all_wait_in(self, of: Track) -> bool:
        return all(w.waits_in == of.index for w in self.workers.values() if w.counted)

    def _let_go(self) -> list[Action]:
        """All live workers wait, and in different tracks: those that are out of step go on, and their gradients stay in their rounds.

        Where nobody is, the workers run different programs, and would wait for ever.
        """
        waiting = {of.index: tuple(sorted(i for i in of.held if self.workers[i].counted)) for of in self.tracks}
        goes = self._out_of_step.who_goes(
            {k: [(i, self.workers[i]) for i in those] for k, those in waiting.items() if those}
        )
        if not goes:
            return [Stuck(tuple((k, those) for k, those in waiting.items() if those))]
        return [self._release(i) for i in goes]

    def _level(self, of: Track) -> int:
        """Returns the clock of a worker that joins now: that of the slowest live worker, or the highest if none lives."""
        if self.live:
            return of.slowest_clock()
        return max((w.places[of.index].clock for w in self.workers.values()), default=0)

    def _catch_up(self, worker: Worker) -> None:
        """A worker counts again: level with the slowest, and perhaps at another place in its program than the others."""
        for of, place in zip(self.tracks, worker.places, strict=True):
            place.clock = max(place.clock, self._level(of))
        self._out_of_step.lost(worker)

    def _bury(self, index: int, why: str) -> Died:
        worker = self.workers[index]
        worker.fenced = not worker.held  # a waiting worker was not computing a gradient that could be out of date
        self._mark(index, alive=False, waits_in=worker.waits_in)
        return Died(index, worker.incarnation, why)

    def _release(self, index: int) -> Released:
        worker = self.workers[index]
        version = self.tracks[max(0, worker.waits_in)].version
        self._mark(index, alive=worker.alive)
        for times in self._times():
            times.begins(index, self._now)
        return Released(index, worker.incarnation, worker.local_step, version, self.stopped)

    def _mark(self, index: int, *, alive: bool, waits_in: int = -1, paused: bool = False, done: bool = False) -> None:
        """The only place that changes a worker's state, so that the counts stay right."""
        worker, held = self.workers[index], waits_in >= 0
        was, counted = worker.counted, alive and not paused
        if counted != was:
            for of, place in zip(self.tracks, worker.places, strict=True):
                of.count_clock(place.clock, 1 if counted else -1)
        self.live += counted - was
        self.idle += (counted and held) - (was and worker.held)
        if worker.held:
            self.tracks[worker.waits_in].held.discard(index)
        if held:
            self.tracks[waits_in].held.add(index)
        self.done += done - worker.done
        worker.alive, worker.waits_in, worker.paused, worker.done = alive, waits_in, paused, done
        (self.held.add if held else self.held.discard)(index)

    def _look_for_end(self) -> None:
        """After the last step of the first optimizer the others may complete what was begun; alone, it has been."""
        if not self.stopped and self._finished():
            self.stopped, self.closed, self._stopped_at = True, len(self.tracks) == 1, self._now

    def _finished(self) -> bool:
        return self.last_step is not None and self.version >= self.last_step
