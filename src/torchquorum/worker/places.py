"""Places at the board: where a host has more workers than cores, only as many workers as cores take turns; the others sleep.

Owned by a worker's steps on the board (`torchquorum.worker.board_steps`), without rounds. Updates are made one after another, so
of many workers that want to push at the same moment all but a few can only wait, and every change from one process
to another costs more than a small update. So whoever comes straight back after its turn keeps its place for a while, with its
gradients and parameters in the cache, then calls the one that has slept longest, and goes on until that one has come. What always
holds: nobody sleeps for ever, because whoever sleeps looks up by itself from time to time, and comes if nobody makes use of the turn.
"""

from __future__ import annotations

import os
import time

from torchquorum.transport.board import CLOSED, OPEN, Board

STRAIGHT_S = 0.0001  # nobody computes a gradient in this time: whoever is back within it has ready-made ones
STAY_S = 0.1  # a change of worker costs some milliseconds: the system wakes the next, whose caches are cold
COME_S = 0.003  # so long the next one takes to come
LOOK_S = 0.01  # of all who sleep, one looks up in this time
REOPENED_S = 0.01  # a message that changes something closes the board for a moment


def usable_cores() -> int:
    """Returns on how many cores this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Places:
    """One worker's place at the board.

    Args:
        board: The ps's board.
        worker: Which worker this is.
        wait_s: How long to wait for a place at most.
    """

    def __init__(self, board: Board, worker: int, wait_s: float) -> None:
        self._board, self._worker, self._wait_s = board, worker, wait_s
        self._most = usable_cores()
        self.needed = board.num_workers > self._most
        self._came_at = self._left_at = self._goes_at = 0.0
        self.straight = self._called = False  # straight: it has ready-made gradients, and is back at once
        self._shut_in = 0  # before the first opening nobody waits

    def arrive(self) -> None:
        """The worker has a gradient. How long it was away says whether it will be straight back next time."""
        self.straight = time.perf_counter() - self._left_at < STRAIGHT_S

    def opened(self) -> bool:
        """Waits a moment for a board that is closed, once in every era; whether it is open then."""
        board = self._board
        if board.era == self._shut_in:
            return board.state == OPEN
        end = time.perf_counter() + REOPENED_S
        while board.state == CLOSED and (left_s := end - time.perf_counter()) > 0:
            with board.locked() as held:
                if not held:
                    return False
                seen, sleeps = board.begin_wait(), board.state == CLOSED
            if sleeps:
                board.wait(seen, left_s)
            with board.locked() as held:
                if not held:
                    return False
                board.end_wait()
        if (state := self._board.state) != OPEN:
            self._shut_in = board.era
        return state == OPEN

    def come(self) -> bool:
        """Waits for a place; False if there is none in time, or the board is closed."""
        if not self.needed:
            return True
        board, me, queued = self._board, self._worker, False
        now = started = open_at = time.perf_counter()
        if board.stands(me) and (now - self._came_at < STAY_S or not board.queue):
            return True
        if now < self._goes_at:  # its place is the next one's, who has not come yet
            return True
        while True:
            with board.locked() as held:
                if not held:
                    return False
                if queued:
                    board.end_queue()
                is_open = board.state == OPEN
                open_at = now if is_open else open_at
                if now - open_at > REOPENED_S or now - started > self._wait_s:
                    return False
                if board.stands(me):  # for long, and others sleep
                    self._go()
                    self._goes_at = now + COME_S
                    break
                if queued and is_open and board.writer < 0 and board.idle_s > LOOK_S:
                    board.nobody_stands()  # whoever did does not come back, or not soon
                if is_open and board.standing() < self._most:
                    self._stand(now)
                    break
                heard, queued = board.begin_queue(), True
                look_s = LOOK_S * min(board.queue, board.num_workers) if is_open else REOPENED_S
            self.wake()
            board.wait_in_queue(heard, look_s)
            now = time.perf_counter()
        self.wake()
        return True

    def _stand(self, now: float) -> None:
        self._came_at = now
        self._board.stand(self._worker, there=True)
        if self._board.standing() < self._most:  # as after an opening, when nobody stands
            self._board.call()
            self._called = True

    def turned(self) -> None:
        """The turn is over; under the lock. Whoever comes straight back stays, so that nobody is called for nothing."""
        if self.needed and not self.straight:
            self._go()

    def leave(self) -> None:
        """The worker has what it came for; what it does now until it comes again is its own."""
        self._left_at = time.perf_counter()

    def give_up(self) -> None:
        """There will be no turn: the gradient goes by message."""
        if self.needed and self._board.stands(self._worker):
            with self._board.locked() as held:
                if held:
                    self._go()
            self.wake()

    def wake(self) -> None:
        """Wakes whoever was called; not under the lock."""
        if self._called:
            self._called = False
            self._board.wake_queue()

    def _go(self) -> None:
        self._board.stand(self._worker, there=False)
        self._board.call()
        self._called = True
