"""The page of the fast path: shared memory with which workers of one host make updates by themselves.

Made by the ps (`torchquorum.fastpath.host`), used by the workers (`torchquorum.fastpath.steps`). It holds the current version and
its slot, whose turn it is, who has given a gradient, the learning rates to come, and a record of every gradient for the ps. Only
small things are here; the values lie in slots.

What always holds, at whatever moment a process dies or freezes:
- all words are changed under the lock, which is held for microseconds, unless a word says otherwise;
- the current version is one word, changed last;
- the ps may close the page at any time; what workers were doing then does not count, and they push by message;
- a slot that a worker writes or reads stands in `workers.uses` or `workers.leases` until that worker has finished with it; one that is
  frozen while it holds the lock may still take any of the first `slots_in_reach`, so the ps stays clear of those (`abandon`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torchquorum.clock import SYSTEM, Clock
from torchquorum.fastpath.journal_tail import JournalTail
from torchquorum.fastpath.page_tables import RateTable, WorkerColumns
from torchquorum.fastpath.records import RecordRing
from torchquorum.fastpath.stages import Sleep, Stage, Stages, run
from torchquorum.memory.lock import LOCK_BYTES, SIGNAL_BYTES, SharedLock, Signal
from torchquorum.memory.segments import Segment
from torchquorum.wire.plan import MemoryRef

CLOSED, OPEN, GONE = 0, 1, 2
NOBODY = -1
LOCK_S = 0.2
_SLOT_BITS = 16
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class PageWords(ctypes.Structure):
    """The words of the page that belong to no worker.

    Attributes:
        state: CLOSED, OPEN, or GONE for good; may be read without the lock.
        opening_id: How often the page was opened; may be read without the lock.
        writer: The worker whose turn it is to write the next version, or NOBODY; may be read without the lock.
        limit: The last version that workers may make.
        lead: The worker whose program says with which learning rates updates are made.
        full: The version for whose round all gradients have been given; may be read without the lock.
        target: The slot into which the version `full` is written.
        state_target: The slot into which its optimizer state is written.
        head: The current version, its slot and that of its state, see `FastPage.version`; may be read without the lock.
        published_at: When `head` was written, in seconds of the clock that never goes back.
        ps_seen_at: When the ps last looked at the page; written without the lock.
    """

    _fields_ = (
        ("state", ctypes.c_int64),
        ("opening_id", ctypes.c_int64),
        ("writer", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        ("lead", ctypes.c_int64),
        ("full", ctypes.c_int64),
        ("target", ctypes.c_int64),
        ("state_target", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("published_at", ctypes.c_double),
        ("ps_seen_at", ctypes.c_double),
    )
    state: int
    opening_id: int
    writer: int
    limit: int
    lead: int
    full: int
    target: int
    state_target: int
    head: int
    published_at: float
    ps_seen_at: float


class FastPage:
    """The mapped page, cut into its parts.

    Attributes:
        words: What belongs to no worker.
        workers: What belongs to each worker.
        rates: The learning rates of the next updates.
        records: The gradients that were applied.
        journal: Where the journal ends, in a durable run.
        steps: Of each parameter group, how many updates its state had seen at version 0, below 0 if it began later.
        news: Changes with every version, round and opening.
        queue: Changes when a seat is free.
    """

    def __init__(self, segment: Segment, num_workers: int, num_groups: int, *, create: bool, clock: Clock) -> None:
        self.num_workers = num_workers
        self._segment, self._clock, self._abandoned = segment, clock, False
        base, memory = segment.bytes.data_ptr(), memoryview(segment.bytes.numpy())  # pyright: ignore[reportArgumentType]
        self._lock = SharedLock(base, create=create)
        self.news, self.queue = Signal(base + LOCK_BYTES), Signal(base + LOCK_BYTES + SIGNAL_BYTES)
        at, parts = LOCK_BYTES + 2 * SIGNAL_BYTES, []
        for size in _sizes(num_workers, num_groups):
            parts.append(memory[at : at + size])
            at += size
        self.words = PageWords.from_buffer(parts[0])
        self.workers, self.rates = WorkerColumns(parts[1], num_workers), RateTable(parts[2], num_groups)
        self.steps = parts[4].cast("q")
        self.journal = JournalTail(parts[5], create=create)
        self.records = RecordRing(parts[3], num_workers, clock, self.rates)
        if create:
            self.words.writer = NOBODY
            for worker in range(num_workers):
                self.workers.release_slots(worker)

    @classmethod
    def create(cls, num_workers: int, num_groups: int, clock: Clock = SYSTEM) -> FastPage:
        """Makes a page, closed."""
        size_bytes = LOCK_BYTES + 2 * SIGNAL_BYTES + sum(_sizes(num_workers, num_groups))
        return cls(Segment.create("fastpath", size_bytes), num_workers, num_groups, create=True, clock=clock)

    @classmethod
    def open(cls, ref: MemoryRef, num_workers: int, num_groups: int, clock: Clock = SYSTEM) -> FastPage:
        """Opens the page of a ps on this host."""
        return cls(Segment.open(ref), num_workers, num_groups, create=False, clock=clock)

    @property
    def ref(self) -> MemoryRef:
        """Returns how a worker of this host opens the page."""
        return self._segment.ref(1)

    def close(self) -> None:
        """The ps gives the page up for good; needs no lock."""
        self.words.state = GONE
        self.news.announce()
        self.news.wake()
        self._segment.close()

    # -- slots --------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """A frozen worker has the lock: the page is never opened again, and what that worker may take when it goes on is its own."""
        self.words.state, self._abandoned = GONE, True

    def busy_slots(self) -> list[int]:
        """Returns the slots of versions that workers may be writing or reading, now or later, and some -1; for the ps."""
        busy = self.workers.busy_slots()
        return [*busy, *range(slots_in_reach(self.num_workers))] if self._abandoned else busy

    def busy_states(self) -> list[int]:
        """Returns the slots of optimizer state that workers may be writing, now or later, and some -1; for the ps."""
        busy = self.workers.busy_states()
        return [*busy, *range(states_in_reach(self.num_workers))] if self._abandoned else busy

    # -- the lock and the wait for news -------------------------------------------------------------------------------

    def locked(self, timeout_s: float = LOCK_S) -> SharedLock:
        """Holds the lock for a block, which gets False if a frozen process has it."""
        self._lock.timeout_s = timeout_s
        return self._lock

    def wait_for_news(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Sleeps until there is news, unless `reached` already holds; False if the lock cannot be had."""
        return run(self.wait_stages(reached, timeout_s))

    def wait_stages(self, reached: Callable[[], bool], timeout_s: float) -> Stages[bool]:
        """The stages of `wait_for_news`."""
        yield Stage.LOCK
        with self.locked() as held:
            if not held:
                return False
            if reached():
                return True
            seen = self.news.begin_wait()
        # Lock free: news since `seen` ends the wait at once, as the number has changed.
        yield Sleep(self.news, seen, timeout_s)
        yield Stage.LOCK
        with self.locked() as held:
            if held:
                self.news.end_wait()
        return held

    # -- the current version ------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether workers may be making versions."""
        return self.words.state == OPEN

    @property
    def head(self) -> tuple[int, int]:
        """Returns the current version and its slot, which are one word."""
        head = self.words.head
        return head >> 2 * _SLOT_BITS, head & _SLOT_MASK

    @property
    def version(self) -> int:
        """Returns the current version; may be read without the lock."""
        return self.words.head >> 2 * _SLOT_BITS

    @property
    def slot(self) -> int:
        """Returns the slot of the current version."""
        return self.words.head & _SLOT_MASK

    @property
    def state_slot(self) -> int:
        """Returns the slot of the optimizer's state at the current version."""
        return self.words.head >> _SLOT_BITS & _SLOT_MASK

    def publish(self, version: int, slot: int, state_slot: int = 0) -> None:
        """Makes a slot, with one of state, the current version: one word, so it has happened or it has not."""
        self.words.published_at = self._clock.now()
        self.words.head = (version << _SLOT_BITS | state_slot) << _SLOT_BITS | slot

    @property
    def idle_s(self) -> float:
        """Returns how long ago the current version was made."""
        return self._clock.now() - self.words.published_at

    # -- the ps -------------------------------------------------------------------------------------------------------

    @property
    def ps_silent_s(self) -> float:
        """Returns how long ago the ps last looked at the page."""
        return self._clock.now() - self.words.ps_seen_at

    def ps_looks(self) -> None:
        """The ps is alive; needs no lock."""
        self.words.ps_seen_at = self._clock.now()


class PageView:
    """What those who only read see of a page: whether workers make the versions, and which is the current one."""

    def __init__(self, ref: MemoryRef) -> None:
        segment = Segment.open(ref, read_only=True)
        self._words = memoryview(segment.bytes.numpy())[LOCK_BYTES + 2 * SIGNAL_BYTES :][: ctypes.sizeof(PageWords)]  # pyright: ignore

    @property
    def current(self) -> tuple[int, int, float] | None:
        """Returns the current version, its slot and when it was made; None while the ps makes the versions."""
        words = PageWords.from_buffer_copy(self._words)
        head = words.head
        return (head >> 2 * _SLOT_BITS, head & _SLOT_MASK, words.published_at) if words.state == OPEN else None


def slots_in_reach(num_workers: int) -> int:
    """Returns how many slots of versions workers choose from: the first that is neither current nor one of two of each worker's."""
    return 2 * num_workers + 2


def states_in_reach(num_workers: int) -> int:
    """Returns how many slots of optimizer state workers choose from: the first that is neither current nor another worker's."""
    return num_workers + 2


def _sizes(num_workers: int, num_groups: int) -> tuple[int, ...]:
    """Returns the sizes in bytes of the parts, in their order; all are multiples of 8."""
    return (
        ctypes.sizeof(PageWords),
        WorkerColumns.size_bytes(num_workers),
        RateTable.size_bytes(num_groups),
        RecordRing.size_bytes(),
        8 * num_groups,
        JournalTail.size_bytes(),
    )
