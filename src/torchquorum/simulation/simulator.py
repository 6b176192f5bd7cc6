"""Drives the shipped quorum (`rules/quorum.py`) in virtual time.

Called by `simulate`. A heap of events takes the place of processes and sockets: a worker ends a step, a gradient arrives, a worker
fails. What always holds: every decision is the quorum's; an event costs O(log events), whatever the number of workers; the same
scenario gives the same figures.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchquorum.rules.quorum import Action, Key, Quorum, Released
from torchquorum.simulation.counts import Counts
from torchquorum.simulation.network import SharedLink
from torchquorum.simulation.scenario import Scenario
from torchquorum.simulation.step_times import random_of

TICK_S = 0.25  # how often a ps looks at its clock, at most


@dataclass(slots=True)
class SimulatedWorker:
    """One worker as it sees itself. `life` is its incarnation: an event of an earlier one is void."""

    draws: Iterator[float]
    life: int = 0
    alive: bool = False
    factor: float = 1.0
    version: int = 0
    local_step: int = 0
    # Pipelined, the next gradient is computed while the answer to the last one is on its way.
    sent_version: int = 0
    next_version: int = 0
    unanswered: bool = False
    computed: bool = False


class Simulator:
    """One simulation; `run` makes it.

    Attributes:
        quorum: The shipped one.
        counts: What has happened so far.
        now: The virtual time, in seconds.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = s = scenario
        # Processes that die are noticed by events of their own, so nobody is silent.
        self.quorum = Quorum(s.chosen_rule, s.workers, last_step=s.updates, liveness_s=math.inf)
        self.counts = Counts(s)
        self.now = 0.0
        times = s.step_times
        self._processes = [SimulatedWorker(times.draws(i, s.seed)) for i in range(s.workers)]
        self._random = random_of(s.seed, -1)
        self._up, self._down = SharedLink(s.network), SharedLink(s.network)
        self._pipeline, self._instant = self.quorum.rule.pipeline, s.network.instant
        self._pushed = self._count = 0
        self._looks_at = -1.0
        self._events: list[tuple[float, int, _Handler, int, int]] = []
        self._places = list(range(s.start or s.workers, s.workers))  # where workers that arrive later go; a heap

    def run(self) -> Counts:
        """Simulates until the scenario's end, or until nothing more can happen."""
        s = self.scenario
        for number, change in enumerate(s.slow_downs):
            self._at(change.at_s, Simulator._change_speed, number)
        for worker in range(s.start or s.workers):
            self._at(0.0, Simulator._start, worker, 1)
        if s.arrive_s is not None:
            self._expect_arrival()
        if self.quorum.chooser is not None:
            self._at(TICK_S, Simulator._tick)
        end, most = s.seconds or math.inf, s.gradients or math.inf
        events, pop, counts = self._events, heapq.heappop, self.counts
        while events and self._pushed < most and not self.quorum.stopped:
            at, _, handle, worker, life = pop(events)
            if at > end:
                break
            self.now = at
            handle(self, worker, life)
        self.now = end if events and self._pushed < most and not self.quorum.stopped else self.now
        counts.close(self.now)
        return counts

    # -- steps --------------------------------------------------------------------------------------------------------

    def _begin_step(self, worker: int, process: SimulatedWorker, at: float) -> None:
        """A worker begins to compute on the version that it has."""
        end = at + next(process.draws) * process.factor
        self.counts.computing(worker, at, end)
        direct = self._instant and not self._pipeline
        self._at(end, Simulator._arrive if direct else Simulator._end_step, worker, process.life)

    def _end_step(self, worker: int, life: int) -> None:
        """A worker has computed a gradient: it sends it, unless the answer to the one before is missing."""
        process = self._processes[worker]
        if process.life != life or not process.alive:
            return
        if process.unanswered:
            process.computed = True
            self.counts.holds(worker, self.now, "the answer to the push before")
            return
        arrives_at = self._up.transfer(self.now)
        self.counts.sending(arrives_at - self.now)
        self._at(arrives_at, Simulator._arrive, worker, life)
        if self._pipeline:  # it goes on at once, on the last version that it has got
            process.sent_version, process.version = process.version, process.next_version
            process.unanswered = True
            self._begin_step(worker, process, self.now)

    def _arrive(self, worker: int, life: int) -> None:
        """A gradient is at the ps tasks: the quorum decides."""
        process = self._processes[worker]
        if process.life != life or not process.alive:
            return
        process.local_step += 1
        self._pushed += 1
        version = process.sent_version if self._pipeline else process.version
        self._follow(self.quorum.push(Key(worker, life, process.local_step), version, self.now))
        self._look_later()
        if not self._pipeline and worker in self.quorum.held:
            self.counts.holds(worker, self.now, self.quorum.cause_of_wait(worker))

    def _released(self, action: Released) -> None:
        """A worker is answered: it gets the variables, and goes on."""
        worker = action.worker
        process = self._processes[worker]
        if process.life != action.incarnation or not process.alive or action.stop:
            return
        here_at = self.now if self._instant else self._down.transfer(self.now)
        self.counts.sending(here_at - self.now)
        if process.unanswered:
            process.next_version = action.version
            self._at(here_at, Simulator._answered, worker, process.life)
            return
        self.counts.releases(worker, self.now)
        process.version = process.next_version = action.version
        self._begin_step(worker, process, here_at)

    def _answered(self, worker: int, life: int) -> None:
        """Pipelined: the answer to a push is at its worker."""
        process = self._processes[worker]
        if process.life != life or not process.alive:
            return
        process.unanswered = False
        if process.computed:
            process.computed = False
            self.counts.releases(worker, self.now)
            self._end_step(worker, life)

    # -- workers come and go ------------------------------------------------------------------------------------------

    def _start(self, worker: int, life: int) -> None:
        """A process is ready to compute."""
        process = self._processes[worker]
        process.life, process.alive, process.local_step = life, True, 0
        process.unanswered = process.computed = False
        self.counts.starts(worker, self.now)
        if self.scenario.fail_s is not None:
            self._at(self.now + self._random.expovariate(1.0 / self.scenario.fail_s), Simulator._fail, worker, life)
        self._follow(self.quorum.join(worker, life, self.now))

    def _fail(self, worker: int, life: int) -> None:
        """A process dies, and what it was doing is lost."""
        s, process = self.scenario, self._processes[worker]
        process.alive = False
        self.counts.fails(worker, self.now)
        self._at(self.now + s.notice_s, Simulator._notice, worker, life)
        if s.restart_s is not None:
            self._at(self.now + s.restart_s, Simulator._start, worker, life + 1)
        else:
            heapq.heappush(self._places, worker)

    def _notice(self, worker: int, life: int) -> None:
        """The ps tasks know that a process died."""
        self._follow(self.quorum.lost(worker, life, "its process ended"))

    def _expect_arrival(self) -> None:
        assert self.scenario.arrive_s is not None
        self._at(self.now + self._random.expovariate(1.0 / self.scenario.arrive_s), Simulator._come)

    def _come(self, _worker: int, _life: int) -> None:
        """One more worker arrives; it takes the first free place, if there is one."""
        if self._places:
            worker = heapq.heappop(self._places)
            self._start(worker, self._processes[worker].life + 1)
        self._expect_arrival()

    def _change_speed(self, number: int, _life: int) -> None:
        """From now on some workers need more or less time for a step."""
        for worker, factor in self.scenario.slow_downs[number].factors.items():
            self._processes[worker].factor = factor

    def _tick(self, _worker: int, _life: int) -> None:
        """Time has passed, as the ps's own clock says: a round may be late."""
        chooser = self.quorum.chooser
        assert chooser is not None
        self._follow(self.quorum.expire(self.now))
        self._at(self.now + max(TICK_S, chooser.round_s or 0.0), Simulator._tick)

    def _look_later(self) -> None:
        """A round that is kept open closes when its grace is over."""
        grace = self.quorum.tracks[0].grace
        if grace is not None and grace.until is not None and grace.until > self._looks_at:
            self._looks_at = grace.until
            self._at(grace.until, Simulator._look)

    def _look(self, _worker: int, _life: int) -> None:
        self._follow(self.quorum.expire(self.now))

    # -- what follows -------------------------------------------------------------------------------------------------

    def _follow(self, actions: list[Action]) -> None:
        note = self.counts.note
        for action in actions:
            if type(action) is Released:
                self._released(action)
            else:
                note(action, self.now)

    def _at(self, at: float, handle: _Handler, worker: int = 0, life: int = 0) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, handle, worker, life))


_Handler = Callable[[Simulator, int, int], None]
