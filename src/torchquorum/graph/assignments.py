"""Which compute task computes which batch; without sockets, threads or a clock.

Owned by the client's dispatcher. A batch waits, is assigned to a compute task, and comes back as a result. If its task is lost,
it is in doubt until ps task 0 has said what became of its gradient; only a batch that was not applied, and cannot be any more, is
assigned again. What always holds: an unfinished batch is in exactly one of `waiting`, a task's `queue` and `doubts`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torchquorum.graph import graph_messages as g
from torchquorum.wire.codec import Frame


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
    """A batch that was submitted, with everything needed to send it again; `preferred` is the task that the user chose."""

    number: int
    seed: int
    specs: list[g.TensorSpec]
    frames: list[Frame]
    preferred: int | None = None
    attempts: int = 0
    result: BatchResult | None = None
    error: str = ""

    @property
    def over(self) -> bool:
        """Whether its result is there."""
        return self.result is not None or bool(self.error)


@dataclass(slots=True)
class Doubt:
    """A batch whose task was lost, and the gradient as which it may have been applied."""

    batch: GivenBatch
    worker: int
    incarnation: int
    local_step: int
    place: str


@dataclass(slots=True)
class Assignee:
    """A compute task that is ready.

    Attributes:
        index, incarnation, local_step: Which worker it is, and how many gradients it has computed.
        place: Its device, as placement logs write it.
        given: How many batches it was given; a new task starts level with the others.
        queue: Its unfinished batches, in the order they were given.
        waiting_for: What a batch waits for at the ps tasks, by number.
        loss, version: The loss of the current batch and the newest version, as the task last reported them.
    """

    index: int
    incarnation: int
    local_step: int
    place: str
    given: int = 0
    queue: list[GivenBatch] = field(default_factory=list)
    waiting_for: dict[int, str] = field(default_factory=dict)
    loss: float | None = None
    version: int = 0

    def take(self, number: int) -> GivenBatch | None:
        """Removes a batch from the queue and returns it, if it is there."""
        batch = next((b for b in self.queue if b.number == number), None)
        if batch is not None:
            self.queue.remove(batch)
        return batch

    def describe_queue(self) -> str:
        """Returns the numbers of its batches and what they wait for, for people."""
        waits = {number: f" (waits for {what})" for number, what in self.waiting_for.items()}
        return ", ".join(f"{b.number}{waits.get(b.number, '')}" for b in self.queue)


class Assignments:
    """All unfinished batches of a run.

    Args:
        depth: How many batches a task may have: one that it computes, and others on their way.
        in_turn: Give batches to the tasks strictly in turn, so that a sync run is the same every time.
    """

    def __init__(self, *, depth: int = 2, in_turn: bool = False) -> None:
        self.depth, self._in_turn = depth, in_turn
        self.waiting: deque[GivenBatch] = deque()
        self.assignees: dict[int, Assignee] = {}
        self.doubts: list[Doubt] = []
        self.expecting = False  # whether the client is about to bring more batches by itself

    @property
    def unfinished(self) -> int:
        """Returns how many batches have no result yet."""
        return len(self.waiting) + len(self.doubts) + sum(len(a.queue) for a in self.assignees.values())

    @property
    def room(self) -> int:
        """Returns how many batches could be assigned now, beyond those that wait already."""
        free = sum(self.depth - len(a.queue) for a in self.assignees.values())
        return free - len(self.waiting) - len(self.doubts)

    def ready(self, index: int, incarnation: int, local_step: int, place: str, *, busy_with: int = -1) -> None:
        """A task is ready to compute; it counts as if it had done as many batches as the others.

        If it was wrongly taken for lost, its batches that are still in doubt are its own again. It may also be busy with a batch
        that was given to another task meanwhile; that batch takes one of its local steps.
        """
        level = min((a.given - len(a.queue) for a in self.assignees.values()), default=0)
        assignee = self.assignees[index] = Assignee(index, incarnation, local_step, place, given=level)
        its_own = [d for d in self.doubts if (d.worker, d.incarnation) == (index, incarnation)]
        self.doubts = [d for d in self.doubts if d not in its_own]
        assignee.queue = [d.batch for d in its_own]
        if busy_with >= 0 and busy_with not in [b.number for b in assignee.queue]:
            assignee.local_step += 1

    def next(self) -> tuple[Assignee, GivenBatch] | None:
        """Assigns the oldest waiting batch that can be assigned now, and returns it with its task."""
        for batch in self.waiting:
            assignee = self._choose(batch.preferred)
            if assignee is not None:
                self.waiting.remove(batch)
                assignee.queue.append(batch)
                assignee.given += 1
                batch.attempts += 1
                return assignee, batch
        return None

    def _choose(self, preferred: int | None) -> Assignee | None:
        """Returns the task that gets the next batch, or None while it, or every task, has enough."""
        if not self.assignees:
            return None
        if preferred in self.assignees:
            chosen = self.assignees[preferred]
        elif self._in_turn:
            chosen = min(self.assignees.values(), key=lambda a: (a.given, a.index))
            if len(chosen.queue) >= self.depth and self._waits(chosen):  # perhaps for a task that has nothing to do
                chosen = next((a for a in self.assignees.values() if not a.queue), chosen)
        else:
            chosen = min(self.assignees.values(), key=lambda a: (len(a.queue), a.given, a.index))
        return chosen if len(chosen.queue) < self.depth else None

    def _waits(self, assignee: Assignee) -> bool:
        """Whether a task waits at the ps tasks; False if only its results are late, so that it keeps its turn."""
        return any(not self._round_is_made(assignee, number) for number in assignee.waiting_for)

    def _round_is_made(self, assignee: Assignee, number: int) -> bool:
        """Whether the round that a batch was reported to wait for has been made: its result is on its way."""
        newest = max(a.version for a in self.assignees.values())
        return assignee.waiting_for.get(number, "").startswith("the quorum") and assignee.version < newest

    def to_recall(self) -> tuple[Assignee, GivenBatch] | None:
        """Returns a batch that lies behind one that waits for its round, while another task has nothing to do.

        None while the client brings more: then the other task has something to do soon, and a sync run stays the same every
        time. A task that was frozen may have taken its batches in another order than the queue has.
        """
        if self.waiting or self.expecting or all(a.queue for a in self.assignees.values()):
            return None
        for assignee in self.assignees.values():
            behind = [b for b in assignee.queue if not assignee.waiting_for.get(b.number)]
            if behind and len(behind) < len(assignee.queue):
                return assignee, behind[-1]
        return None

    def recalled(self, index: int, number: int) -> None:
        """A task has given a batch back without having begun it."""
        batch = self._take(index, number)
        if batch is not None:
            # Not the same task again.
            batch.preferred = next((a.index for a in self.assignees.values() if not a.queue), None)
            self.waiting.append(batch)

    def done(self, index: int, message: g.Done) -> None:
        """A task has computed a batch. A batch that was taken from it meanwhile is ignored; an expired one is computed again."""
        batch = self._take(index, message.number)
        if batch is None:
            return
        assignee, step = self.assignees[index], message.step
        assignee.local_step, assignee.version = step.local_step, step.version
        if step.reason == "expired":  # its task had been taken for dead; the gradient was not used
            self.waiting.appendleft(batch)
            return
        batch.result = BatchResult(
            number=message.number,
            loss=message.loss,
            step=step.version,
            local_step=step.local_step,
            placement=assignee.place,
            accepted=step.accepted,
            reason=step.reason,
            staleness=step.staleness,
            lr=step.lr,
            attempts=batch.attempts,
            seconds=message.seconds,
        )
        batch.frames = []

    def failed(self, index: int, number: int, text: str) -> None:
        """A task could not compute a batch, and no other could."""
        batch = self._take(index, number)
        if batch is not None:
            batch.error, batch.frames = text, []

    def _take(self, index: int, number: int) -> GivenBatch | None:
        assignee = self.assignees.get(index)
        return assignee.take(number) if assignee is not None else None

    def lost(self, index: int) -> list[GivenBatch]:
        """A task is lost: its batches are in doubt."""
        assignee = self.assignees.pop(index, None)
        if assignee is None:
            return []
        for behind, batch in enumerate(assignee.queue, 1):
            step = assignee.local_step + behind
            self.doubts.append(Doubt(batch, index, assignee.incarnation, step, assignee.place))
        return list(assignee.queue)

    def settle(self, doubt: Doubt, state: str, reason: str, met: int, loss: float | None) -> None:
        """Ps task 0 has said what became of a gradient; a batch that was not applied is computed again."""
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

    def stuck(self) -> list[tuple[Assignee, GivenBatch, str]] | None:
        """Returns the unfinished batches if all of them wait for gradients that no task is computing, else None."""
        if self.doubts or any(self._choose(batch.preferred) is not None for batch in self.waiting):
            return None
        found: list[tuple[Assignee, GivenBatch, str]] = []
        for assignee in self.assignees.values():
            for batch in assignee.queue:
                what = assignee.waiting_for.get(batch.number, "")
                if not what.startswith(("the quorum", "the slowest worker")):
                    return None
                if self._round_is_made(assignee, batch.number):
                    return None
                found.append((assignee, batch, what))
        return found or None

    def settle_stuck(self) -> None:
        """Gives stuck batches the result that they are computed and wait: what they wait for may never come."""
        for assignee, batch, what in self.stuck() or []:
            if not batch.over:
                batch.result = BatchResult(
                    number=batch.number,
                    loss=assignee.loss,
                    step=assignee.version,
                    local_step=assignee.local_step + 1,
                    placement=assignee.place,
                    accepted=True if what.startswith("the slowest") else None,
                    reason=f"waits for {what}",
                    attempts=batch.attempts,
                )
