"""The ps's side of the board: when workers may make updates by themselves, and how what they made is taken up.

Owned by the service of the one ps task of a run; has no clock and no sockets. The board is open only while there is nothing
to decide: the rule is Async or Sync of all, every worker that lives shares memory with this ps, nobody waits, nothing is being
saved, and an update is old - rate * mean. What the workers did is then told to the same quorum, gradient by gradient, which
must say what they assumed. Whatever else happens closes the board first.
"""

from __future__ import annotations

import torchquorum.transport.messages as m
from torchquorum.rules.quorum import Key
from torchquorum.server.board_rule import mode_of
from torchquorum.server.checkpoints import Checkpoints
from torchquorum.server.leader import Arrival, Leader
from torchquorum.server.shard import Shard
from torchquorum.transport.board import CLOSED, GONE, OPEN, Board, Record

NO_LIMIT = 1 << 46
RATES_AT_ONCE, RATES_AHEAD = 512, 4096
# These change nothing of what the board stands on, so they are answered while it is open.
HARMLESS = (
    m.Beat,
    m.Here,
    m.Probe,
    m.StatusRequest,
    m.Hello,
    m.FateOf,
    m.Position,
    m.Buffers,
    m.TakeBuffers,
    m.TakeBatches,
    m.UseBatches,
    m.Scale,
    m.Settle,
    m.Fault,
)


def may_change(message: m.AnyMessage, shard: Shard | None) -> bool:
    """Whether a message may change what the board stands on; those of a worker that is none of ours are refused."""
    if shard is not None and isinstance(message, m.Push | m.Pull | m.Leave | m.Save | m.Stop):
        return shard.knows(message.worker, message.incarnation)
    if shard is not None and isinstance(message, m.Join):
        return 0 <= message.worker < shard.plan.num_workers
    return not isinstance(message, HARMLESS)


class BoardHost:
    """Opens, closes and reads the board of one shard."""

    def __init__(self, shard: Shard, leader: Leader, checkpoints: Checkpoints) -> None:
        self._shard, self._leader, self._checkpoints = shard, leader, checkpoints
        self._rounds = mode_of(shard.plan) == "rounds"
        assert shard.board is not None
        self._board: Board = shard.board

    @property
    def is_open(self) -> bool:
        """Whether workers may be making updates now."""
        return self._board.state == OPEN

    def may_open(self) -> bool:
        """Whether there is nothing to decide."""
        quorum, shard = self._leader.quorum, self._shard
        if self._board.state != CLOSED or quorum.stopped or shard.ended is not None or not quorum.live:
            return False
        if quorum.round or quorum.held or shard.undecided_gradients or shard.mean.wanted:
            return False
        if self._checkpoints.busy or quorum.version >= self._limit or not shard.update.stateless:
            return False
        if self._rounds and quorum.live < self._leader.plan.num_workers:
            return False
        for worker in quorum.alive:
            known = quorum.workers[worker]
            if not shard.on_board(worker, known.incarnation) or known.fenced:
                return False  # what a fenced one pushes is refused, and on the board nobody is
            if self._leader.data and self._leader.data.is_void(worker, known.incarnation, known.local_step):
                return False
        return True

    @property
    def _limit(self) -> int:
        last = self._leader.plan.last_step
        return NO_LIMIT if last is None else last - 1  # the last update is the ps's, with all that ends a run

    def open(self) -> None:
        """Lets the workers that are alive make updates."""
        board, shard, quorum = self._board, self._shard, self._leader.quorum
        with board.locked() as held:
            if not held:
                return
            # First: who waits for a version without the lock is not to take this opening's for that of the one before.
            board.era += 1
            board.publish(shard.version, shard.versions.current)
            board.limit, board.writer = self._limit, -1
            board.begin_rounds()
            board.nobody_stands()
            for worker in range(board.num_workers):
                known = quorum.workers.get(worker)
                if known is not None and known.alive:
                    board.admit(worker, known.incarnation, shard.gradients_of(worker))
                else:
                    board.admit(worker, 0, None)
                leased = shard.versions.leased(worker)
                board.lease(worker, -1 if leased is None else leased)
            self._look_ahead()
            board.ps_looks()
            board.state = OPEN
            board.announce()
            board.call()
        board.wake()
        board.wake_queue()

    def look(self) -> list[Record]:
        """Says that the ps is alive, and returns what was made since."""
        self._board.ps_looks()
        if not self._board.undrained:
            return []
        with self._board.locked() as held:
            recorded = self._board.recorded if held else None
        found = [] if recorded is None else self._board.drain(recorded)  # workers write behind it meanwhile
        self._look_ahead()
        return found

    def close(self) -> tuple[list[Record], list[Record]]:
        """Closes the board; nothing is made on it any more.

        Returns:
            What was made since, and the gradients of a round that was full and that the ps must now finish itself.
        """
        board = self._board
        if board.state != OPEN:
            return [], []
        with board.locked() as held:
            board.state = CLOSED if held else GONE  # somebody is frozen while he holds the lock: never again
            found = board.drain()
            full = self._rounds and board.full == board.version + 1
            unfinished = board.round() if full else []
            board.writer = -1
            board.announce()
        board.wake()
        return found, unfinished

    def take_up(self, records: list[Record], *, made: bool) -> None:
        """Tells the leader of gradients, as they came; what was not made by the workers is kept for the ps to make."""
        for r in sorted(records, key=lambda r: (r.version, r.now)):  # so that who waited, waited
            key = Key(r.worker, r.incarnation, r.local_step)
            if made:
                self._shard.made[r.version] = r.slot
            elif not self._shard.decided(key):  # unless who was to publish it died when it had been recorded
                self._shard.store_given(key, r.request)
            self._leader.arrived(0, key, r.request, r.now, r.wall, push=Arrival(r.computed_at, r.loss))

    def _look_ahead(self) -> None:
        """Says the learning rates of the updates to come, some at a time; workers read none before it is counted."""
        board, version = self._board, self._shard.version
        if board.rated < version:
            board.begin_rates(version)
        most = min(max(board.rated, board.version) + RATES_AT_ONCE, board.version + RATES_AHEAD)
        for update in range(board.rated, most):
            rates = self._shard.update.rates_ahead(update - version)
            if rates is None:
                break
            board.rate(update, rates)
