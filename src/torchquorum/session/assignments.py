"""Who computes which batch: the client's books, without sockets, threads or a clock.

Owned by the client's dispatcher. A batch waits, is given to a compute task, and comes back as a result. If its task is
lost, it stays in doubt until ps task 0 has said what became of its gradient; only one that cannot have been applied, and
cannot be any more, is given to another task. What always holds: a batch is in exactly one place.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torchquorum.transport import graph_messages as g
from torchquorum.transport.codec import Frame


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What became of one batch.

    Attributes:
        number: Which batch, in the order they were submitted, from 0.
        loss: Its loss, before the update; None if it was not computed, because the run was over.
        step: The global step after it, as its task saw it.
        local_step: Which of its task's gradients it was.
        placement: Where it was computed: /job:worker/task:1/device:CPU:0.
        accepted: Whether its gradient was used; None while that is not known.
        reason: Why.
        staleness: How many versions old the gradient was when it arrived.
        lr: The learning rate of the next update.
        attempts: How many tasks it was given to.
        seconds: How long its task took, the wait for the round included.
    """

    number: int
    loss: float | None
    step: int
    local_step: int
    placement: str
    accepted: bool | None
    reason: str
    staleness: int = 0
    lr: float = 0.0
    attempts: int = 1
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class GivenBatch:
    """A batch that was submitted, and everything needed to submit it again."""

    number: int
    seed: int
    specs: list[g.TensorSpec]
    frames: list[Frame]
    wish: int | None = None
    attempts: int = 0
    result: BatchResult | None = None
    error: str = ""

    @property
    def over(self) -> bool:
        """Whether its result is there."""
        return self.result is not None or bool(self.error)


@dataclass(slots=True)
class Doubt:
    """A batch whose task was lost: as which gradient, of which life, it may have been applied."""

    batch: GivenBatch
    worker: int
    incarnation: int
    local_step: int
    place: str


@dataclass(slots=True)
class Helper:
    """A compute task as the books see it; `given` counts its batches, level with the others' when it comes."""

    index: int
    incarnation: int
    local_step: int
    place: str
    given: int = 0
    queue: list[GivenBatch] = field(default_factory=list)
    held: dict[int, str] = field(default_factory=dict)
    loss: float | None = None
    version: int = 0

    def held_text(self, number: int) -> str:
        """Returns what a batch waits for at the ps tasks, for people."""
        what = self.held.get(number)
        return f" (waits for {what})" if what else ""


class Assignments:
    """The books.

    Args:
        depth: How many batches a task may have: one that it computes, and others on their way.
        in_turn: Give batches to the tasks strictly in turn, so that a sync run does the same every time.
    """

    def __init__(self, *, depth: int = 2, in_turn: bool = False) -> None:
        self.depth, self._in_turn = depth, in_turn
        self.waiting: deque[GivenBatch] = deque()
        self.helpers: dict[int, Helper] = {}
        self.doubts: list[Doubt] = []
        self.expecting = False  # whether the client is about to bring more batches by itself

    @property
    def unfinished(self) -> int:
        """Returns how many batches have no result yet."""
        return len(self.waiting) + len(self.doubts) + sum(len(h.queue) for h in self.helpers.values())

    @property
    def room(self) -> int:
        """Returns how many batches could be given away now, beyond those that wait already."""
        free = sum(self.depth - len(h.queue) for h in self.helpers.values())
        return free - len(self.waiting) - len(self.doubts)

    def ready(self, index: int, incarnation: int, local_step: int, place: str, *, busy_with: int = -1) -> None:
        """A task is ready to compute; it counts as if it had done what the others have.

        If it is one that was only thought to be lost, what it owed and nobody has settled is its again. It may also be busy
        with a batch that is not its any more; that makes one of its local steps.
        """
        level = min((h.given - len(h.queue) for h in self.helpers.values()), default=0)
        helper = self.helpers[index] = Helper(index, incarnation, local_step, place, given=level)
        its_own = [d for d in self.doubts if (d.worker, d.incarnation) == (index, incarnation)]
        self.doubts = [d for d in self.doubts if d not in its_own]
        helper.queue = [d.batch for d in its_own]
        if busy_with >= 0 and busy_with not in [b.number for b in helper.queue]:
            helper.local_step += 1

    def next(self) -> tuple[Helper, GivenBatch] | None:
        """Gives a batch to a task with room, the oldest that can be given, if there is one."""
        for batch in self.waiting:
            helper = self._choose(batch.wish)
            if helper is not None:
                self.waiting.remove(batch)
                helper.queue.append(batch)
                helper.given += 1
                batch.attempts += 1
                return helper, batch
        return None

    def _choose(self, wish: int | None) -> Helper | None:
        if not self.helpers:
            return None
        if wish in self.helpers:
            chosen = self.helpers[wish]
        elif self._in_turn:
            chosen = min(self.helpers.values(), key=lambda h: (h.given, h.index))
            if len(chosen.queue) >= self.depth and self._waits(chosen):  # perhaps for one who has nothing to do
                chosen = next((h for h in self.helpers.values() if not h.queue), chosen)
        else:
            chosen = min(self.helpers.values(), key=lambda h: (len(h.queue), h.given, h.index))
        return chosen if len(chosen.queue) < self.depth else None

    def _waits(self, helper: Helper) -> bool:
        """Whether a task waits at the ps tasks; not if only word of its results is late, so that it keeps its turn."""
        return any(not self._round_is_made(helper, number) for number in helper.held)

    def _round_is_made(self, helper: Helper, number: int) -> bool:
        """Whether the round that a batch was said to wait for has been made: what became of it is on its way."""
        newest = max(h.version for h in self.helpers.values())
        return helper.held.get(number, "").startswith("the quorum") and helper.version < newest

    def to_recall(self) -> tuple[Helper, GivenBatch] | None:
        """Returns a batch that lies behind one that waits for its round, while another task has nothing to do.

        Not while the client brings more: then that one has something to do soon, and a sync run stays the same every time. A
        task that was frozen may have taken its batches in another order than the books have.
        """
        if self.waiting or self.expecting or all(h.queue for h in self.helpers.values()):
            return None
        for helper in self.helpers.values():
            behind = [b for b in helper.queue if not helper.held.get(b.number)]
            if behind and len(behind) < len(helper.queue):
                return helper, behind[-1]
        return None

    def recalled(self, index: int, number: int) -> None:
        """A task has given a batch back without having begun it."""
        helper = self.helpers.get(index)
        batch = next((b for b in helper.queue if b.number == number), None) if helper else None
        if helper is not None and batch is not None:
            helper.queue.remove(batch)
            batch.wish = next((h.index for h in self.helpers.values() if not h.queue), None)  # not the same one again
            self.waiting.append(batch)

    def done(self, index: int, message: g.Done) -> None:
        """A task has computed a batch; that may not be its business any more, or is to be done again."""
        helper = self.helpers.get(index)
        batch = next((b for b in helper.queue if b.number == message.number), None) if helper else None
        if helper is None or batch is None:
            return
        helper.queue.remove(batch)
        helper.local_step, helper.version = message.local_step, message.version
        if message.reason == "expired":  # its task had been taken for dead; the gradient was not used
            self.waiting.appendleft(batch)
            return
        batch.result = BatchResult(
            number=message.number,
            loss=message.loss,
            step=message.version,
            local_step=message.local_step,
            placement=helper.place,
            accepted=message.accepted,
            reason=message.reason,
            staleness=message.staleness,
            lr=message.lr,
            attempts=batch.attempts,
            seconds=message.seconds,
        )
        batch.frames = []

    def failed(self, index: int, number: int, text: str) -> None:
        """A task could not compute a batch, and no other could."""
        helper = self.helpers.get(index)
        batch = next((b for b in helper.queue if b.number == number), None) if helper else None
        if helper is None or batch is None:
            return
        helper.queue.remove(batch)
        batch.error, batch.frames = text, []

    def lost(self, index: int) -> list[GivenBatch]:
        """A task is gone: its batches are in doubt."""
        helper = self.helpers.pop(index, None)
        if helper is None:
            return []
        for behind, batch in enumerate(helper.queue, 1):
            step = helper.local_step + behind
            self.doubts.append(Doubt(batch, index, helper.incarnation, step, helper.place))
        return list(helper.queue)

    def settle(self, doubt: Doubt, state: str, reason: str, met: int, loss: float | None) -> None:
        """Ps task 0 has said what became of a gradient; a batch that was not applied is to be computed again."""
        if doubt not in self.doubts or state == "open":
            return
        self.doubts.remove(doubt)
        batch = doubt.batch
        if state == "never" or reason == "expired":
            place = sum(b.number < batch.number for b in self.waiting)
            self.waiting.insert(place, batch)
            return
        batch.result = BatchResult(
            number=batch.number,
            loss=loss,
            step=met,
            local_step=doubt.local_step,
            placement=doubt.place,
            accepted=state == "accepted",
            reason=f"{reason}; its task was lost afterwards",
            attempts=batch.attempts,
        )

    def next_possible(self) -> bool:
        """Whether a batch that waits could be given to somebody now."""
        return any(self._choose(batch.wish) is not None for batch in self.waiting)

    def stuck(self) -> list[tuple[Helper, GivenBatch, str]] | None:
        """Returns the unfinished batches if all of them wait for gradients that nobody is computing, else None."""
        if self.doubts or (self.waiting and self.next_possible()):
            return None
        found: list[tuple[Helper, GivenBatch, str]] = []
        for helper in self.helpers.values():
            for batch in helper.queue:
                what = helper.held.get(batch.number, "")
                if not what.startswith(("the quorum", "the slowest worker")):
                    return None
                if self._round_is_made(helper, batch.number):
                    return None
                found.append((helper, batch, what))
        return found or None
