"""Who may take turns: where a host has more workers than cores, only as many workers as cores have a seat; the others sleep.

Owned by a worker's turns (`torchquorum.fastpath.turns`); rounds need none. Updates are made one after another, so of many workers
that want to push at the same moment all but a few can only wait, and each switch between processes costs more than a small
update. A worker that is back immediately after its turn keeps its seat for a while, with its gradients and parameters in the cache;
then it calls the worker that has slept longest, and continues until that one has come (ADR 0033). What always holds: no worker
sleeps forever, as each looks up from time to time and takes a seat if nobody uses the turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchquorum.clock import SYSTEM, Clock
from torchquorum.fastpath.page import CLOSED, NOBODY, OPEN
from torchquorum.fastpath.participant import Participant
from torchquorum.fastpath.stages import Sleep, Stage, Stages, run


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatTimes:
    """How long things take, in seconds.

    Attributes:
        back_s: A worker that is back within this time computed no gradient: it has ready-made ones.
        stay_s: How long such a worker keeps its seat. A switch costs milliseconds: a wake-up, and cold caches.
        come_s: How long the next worker takes to come.
        look_s: Of all workers that sleep, one looks up in this time.
        reopened_s: How long a message that changes something keeps the page closed.
    """

    back_s: float = 0.0001
    stay_s: float = 0.1
    come_s: float = 0.003
    look_s: float = 0.01
    reopened_s: float = 0.01


TIMES = SeatTimes()


class Admission:
    """One worker's seat.

    Args:
        user: The worker; there are as many seats as it counts cores.
        times: How long things take; by default `TIMES`.
        clock: Tells the time.

    Attributes:
        needed: Whether there are fewer seats than workers.
        straight_back: The worker came back immediately after its last turn.
    """

    def __init__(self, user: Participant, *, times: SeatTimes | None = None, clock: Clock = SYSTEM) -> None:
        self._page, self._worker, self._wait_s, self._seats = user.page, user.worker, user.wait_s, user.cores
        self._times, self._clock = times or TIMES, clock
        self.needed = self._page.num_workers > self._seats
        self.straight_back = False
        self._seated_at = self._left_at = self._stays_until = 0.0
        self._must_wake = False
        self._closed_in = 0  # the opening after which it has waited in vain; before the first it does not wait

    @property
    def _has_seat(self) -> bool:
        return self._page.workers.seats[self._worker] != 0

    def arrive(self) -> None:
        """The worker has a gradient. How long it was away tells whether it will be straight back next time."""
        self.straight_back = self._clock.now() - self._left_at < self._times.back_s

    def opened(self) -> bool:
        """Waits a moment for a page that is closed, once after every opening; returns whether it is open then."""
        return run(self.opened_stages())

    def opened_stages(self) -> Stages[bool]:
        """The stages of `opened`."""
        page, words = self._page, self._page.words
        if words.opening_id == self._closed_in:
            return words.state == OPEN
        end = self._clock.now() + self._times.reopened_s
        while words.state == CLOSED and (left_s := end - self._clock.now()) > 0:
            if not (yield from page.wait_stages(lambda: words.state != CLOSED, left_s)):
                return False
        if (state := words.state) != OPEN:
            self._closed_in = words.opening_id
        return state == OPEN

    def come(self) -> bool:
        """Waits for a seat; False if there is none in time, or the page stays closed."""
        return run(self.come_stages())

    def come_stages(self) -> Stages[bool]:
        """The stages of `come`."""
        now = self._clock.now()
        if not self.needed or now < self._stays_until:  # the one that it has called has not come yet
            return True
        if self._has_seat and (now - self._seated_at < self._times.stay_s or not self._page.queue.waiters):
            return True
        admitted = yield from self._wait_for_seat(now)
        self.wake()
        return admitted

    def _wait_for_seat(self, now: float) -> Stages[bool]:
        page, words, times, queued = self._page, self._page.words, self._times, False
        started = open_at = now
        while True:
            yield Stage.LOCK
            with page.locked() as held:
                if not held:
                    return False
                if queued:
                    page.queue.end_wait()
                # Lock held, not in the queue: give up, take a seat, or queue.
                is_open = words.state == OPEN
                open_at = now if is_open else open_at
                if now - open_at > times.reopened_s or now - started > self._wait_s:
                    return False
                if (
                    self._has_seat
                ):  # for long, while others sleep: the next one is called, and this one goes on until it comes
                    self._leave_seat()
                    self._stays_until = now + times.come_s
                    return True
                if queued and is_open and words.writer == NOBODY and page.idle_s > times.look_s:
                    page.workers.clear_seats()  # those that have seats do not use them
                if is_open and page.workers.seated() < self._seats:
                    self._take_seat(now)
                    return True
                seen, queued = page.queue.begin_wait(), True
                waiting = min(page.queue.waiters, page.num_workers)
                look_s = times.look_s * waiting if is_open else times.reopened_s
            # Lock free, counted in the queue: a call since `seen` ends the wait at once.
            self.wake()
            yield Sleep(page.queue, seen, look_s)
            now = self._clock.now()

    def turn_ends(self) -> None:
        """The turn is over; under the lock. A worker that was straight back keeps its seat: it is likely to be so again."""
        if self.needed and not self.straight_back:
            self._leave_seat()

    def leave(self) -> None:
        """The worker has its new version and goes to compute."""
        self._left_at = self._clock.now()

    def give_up(self) -> None:
        """There will be no turn: the gradient goes by message."""
        if self.needed and self._has_seat:
            with self._page.locked() as held:
                if held:
                    self._leave_seat()
            self.wake()

    def wake(self) -> None:
        """Wakes the worker that was called, if one was; not under the lock."""
        if self._must_wake:
            self._must_wake = False
            self._page.queue.wake(1)

    def _take_seat(self, now: float) -> None:
        self._seated_at = now
        self._page.workers.seats[self._worker] = 1
        if self._page.workers.seated() < self._seats:  # as after an opening, when no worker has a seat
            self._call()

    def _leave_seat(self) -> None:
        self._page.workers.seats[self._worker] = 0
        self._call()

    def _call(self) -> None:
        self._page.queue.announce()
        self._must_wake = True
