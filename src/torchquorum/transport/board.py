"""The board: a page of shared memory on which workers of one host make updates by themselves while a ps has nothing to decide.

Made by the ps (`torchquorum.server.board_host`), used by the workers (`torchquorum.worker.board_steps`). It says which version
is current and in which slot it lies, whose turn it is, who has given a gradient, which learning rates come next; and it
keeps a record of every gradient, which the ps takes up afterwards. Only small things are here; the values lie in slots.

What always holds, whoever dies or freezes at whatever moment:
- everything is changed under the lock, which is held for microseconds; the current version is one word, changed last;
- the ps may close the board at any time, and then nothing that workers were still doing counts: they push by message;
- a slot that somebody writes or reads stands in `uses` or `leases` until he himself is done with it.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchquorum.transport.memory import Segment
from torchquorum.transport.messages import MemoryRef
from torchquorum.transport.shared_lock import LOCK_BYTES, SharedLock, wait_while, wake

CLOSED, OPEN, GONE = 0, 1, 2
RECORDS = 8192
RATES = 8192
LOCK_S = 0.2
_SLOT_BITS = 16
_RECORD_WORDS = 10
_RECORD = struct.Struct("=7q3d")
_PER_WORKER = 10

# The first words of the page, after the lock.
_STATE, _HEAD, _WRITER, _LIMIT, _TAIL, _DRAINED, _SEEN, _FULL, _TARGET, _SIGNAL = range(10)
_WAITERS, _RATED, _ERA, _CALL, _QUEUE, _USED = range(10, 16)
_FIRST = LOCK_BYTES // 8
_HEADER_WORDS = 24


@dataclass(frozen=True, slots=True)
class Record:
    """One gradient that was applied on the board: whose it was, computed at which version, and what it became."""

    worker: int
    incarnation: int
    local_step: int
    request: int
    computed_at: int
    version: int
    slot: int
    loss: float | None
    wall: float
    now: float


@dataclass(frozen=True, slots=True)
class Given:
    """What a worker says of a gradient when it gives it."""

    incarnation: int
    local_step: int
    request: int
    computed_at: int


class Board:
    """The words of the board, by name. Whoever changes one holds the lock, unless it says otherwise."""

    def __init__(self, segment: Segment, num_workers: int, num_groups: int, *, create: bool) -> None:
        self._segment = segment
        self.num_workers, self.num_groups = num_workers, num_groups
        memory = self._bytes = memoryview(segment.bytes.numpy())  # pyright: ignore[reportArgumentType]
        self._q, self._d = memory.cast("q"), memory.cast("d")
        base = segment.bytes.data_ptr()
        self._lock = SharedLock(base, create=create)
        self._signal_at, self._call_at = base + 8 * (_FIRST + _SIGNAL), base + 8 * (_FIRST + _CALL)
        self._workers_at = _HEADER_WORDS
        self._rates_at = self._workers_at + _PER_WORKER * num_workers
        self._records_at = self._rates_at + RATES * num_groups
        if create:
            for worker in range(num_workers):
                self.release_slots(worker)

    @staticmethod
    def size_bytes(num_workers: int, num_groups: int) -> int:
        """Returns how large the page is."""
        return 8 * (_HEADER_WORDS + _PER_WORKER * num_workers + RATES * num_groups + RECORDS * _RECORD_WORDS)

    @classmethod
    def create(cls, num_workers: int, num_groups: int) -> Board:
        """Makes a board, closed."""
        segment = Segment.create("board", cls.size_bytes(num_workers, num_groups))
        return cls(segment, num_workers, num_groups, create=True)

    @classmethod
    def open(cls, ref: MemoryRef, num_workers: int, num_groups: int) -> Board:
        """Opens the board of a ps on this host."""
        return cls(Segment.open(ref), num_workers, num_groups, create=False)

    @property
    def ref(self) -> MemoryRef:
        """Returns how a worker of this host opens the board."""
        return self._segment.ref(1)

    def close(self) -> None:
        """The ps gives the board up for good; needs no lock."""
        self._q[_FIRST + _STATE] = GONE
        self.announce()
        self.wake()
        self._segment.close()

    # -- the lock -----------------------------------------------------------------------------------------------------

    def locked(self, timeout_s: float = LOCK_S) -> SharedLock:
        """Holds the lock for a block, which gets False if it could not be had: somebody is frozen while he holds it."""
        self._lock.timeout_s = timeout_s
        return self._lock

    # -- words --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> int:
        """Returns CLOSED, OPEN or GONE; may be read without the lock."""
        return self._q[_FIRST + _STATE]

    @state.setter
    def state(self, value: int) -> None:
        self._q[_FIRST + _STATE] = value

    @property
    def version(self) -> int:
        """Returns the current version; may be read without the lock."""
        return self._q[_FIRST + _HEAD] >> _SLOT_BITS

    @property
    def slot(self) -> int:
        """Returns the slot of the current version."""
        return self._q[_FIRST + _HEAD] & ((1 << _SLOT_BITS) - 1)

    def publish(self, version: int, slot: int) -> None:
        """Makes a slot the current version: one word, so it has happened or it has not."""
        self._d[_FIRST + _USED] = time.monotonic()
        self._q[_FIRST + _HEAD] = version << _SLOT_BITS | slot

    @property
    def idle_s(self) -> float:
        """Returns how long ago the current version was made."""
        return time.monotonic() - self._d[_FIRST + _USED]

    @property
    def writer(self) -> int:
        """Returns the worker whose turn it is to write the next version, or -1."""
        return self._q[_FIRST + _WRITER] - 1

    @writer.setter
    def writer(self, worker: int) -> None:
        self._q[_FIRST + _WRITER] = worker + 1

    @property
    def limit(self) -> int:
        """Returns the last version that may be made on the board."""
        return self._q[_FIRST + _LIMIT]

    @limit.setter
    def limit(self, version: int) -> None:
        self._q[_FIRST + _LIMIT] = version

    @property
    def full(self) -> int:
        """Returns the version for which all gradients have been given; may be read without the lock."""
        return self._q[_FIRST + _FULL]

    @full.setter
    def full(self, version: int) -> None:
        self._q[_FIRST + _FULL] = version

    @property
    def target(self) -> int:
        """Returns the slot into which the version `full` is written."""
        return self._q[_FIRST + _TARGET]

    @target.setter
    def target(self, slot: int) -> None:
        self._q[_FIRST + _TARGET] = slot

    @property
    def era(self) -> int:
        """Returns how often the board has been opened; may be read without the lock."""
        return self._q[_FIRST + _ERA]

    @era.setter
    def era(self, number: int) -> None:
        self._q[_FIRST + _ERA] = number

    @property
    def ps_silent_s(self) -> float:
        """Returns how long ago the ps last looked at the board."""
        return time.monotonic() - self._d[_FIRST + _SEEN]

    def ps_looks(self) -> None:
        """The ps is alive; needs no lock."""
        self._d[_FIRST + _SEEN] = time.monotonic()

    # -- of each worker -----------------------------------------------------------------------------------------------

    def _of(self, worker: int, field: int) -> int:
        return self._workers_at + field * self.num_workers + worker

    def token(self, worker: int) -> int:
        """Returns the incarnation that may use the board as this worker, or 0."""
        return self._q[self._of(worker, 0)]

    def only(self, worker: int) -> bool:
        """Whether nobody but this worker uses the board; may be read without the lock."""
        return all(token == 0 or w == worker for w, token in enumerate(self._q[self._of(0, 0) : self._of(0, 1)]))

    def admit(self, worker: int, incarnation: int, gradients: MemoryRef | None) -> None:
        """The ps lets an incarnation in, with the memory in which its gradients lie; 0 and None for nobody."""
        self._q[self._of(worker, 0)] = incarnation
        numbers = (gradients.pid, gradients.fd, gradients.size_bytes, gradients.num_slots) if gradients else (0,) * 4
        for field, number in enumerate(numbers, 1):
            self._q[self._of(worker, field)] = number

    def gradients(self, worker: int) -> MemoryRef:
        """Returns where a worker's gradients lie."""
        return MemoryRef(*(self._q[self._of(worker, field)] for field in range(1, 5)))

    def use(self, worker: int, slot: int) -> None:
        """Says which slot a worker writes or reads; -1 for none. Set under the lock, cleared by the worker without it."""
        self._q[self._of(worker, 5)] = slot

    def lease(self, worker: int, slot: int) -> None:
        """Says which slot a worker was given by message and may still be reading; -1 for none."""
        self._q[self._of(worker, 6)] = slot

    def release_slots(self, worker: int) -> None:
        """A worker uses no slot."""
        self.use(worker, -1)
        self.lease(worker, -1)

    def busy(self) -> list[int]:
        """Returns the slots that workers may be writing or reading, and -1 for each that uses none."""
        first = self._workers_at + 5 * self.num_workers
        return self._q[first : first + 2 * self.num_workers].tolist()

    def give(self, worker: int, given: Given, loss: float | None, version: int) -> None:
        """Notes that a worker's gradient for `version` lies in its memory."""
        self._q[self._of(worker, 7)] = version
        self._write(RECORDS - 1 - worker, worker, given, loss, version, -1)  # the last records are the rounds' own

    def begin_rounds(self) -> None:
        """Nobody has given anything yet."""
        for worker in range(self.num_workers):
            self._q[self._of(worker, 7)] = self._q[self._of(worker, 8)] = -1
        self.full = -1

    def gave(self, worker: int) -> int:
        """Returns the version to which a worker has last given a gradient."""
        return self._q[self._of(worker, 7)]

    def finish(self, worker: int, version: int) -> None:
        """Notes that a worker has written its part of `version`."""
        self._q[self._of(worker, 8)] = version

    def finished(self, worker: int) -> int:
        """Returns the version of which a worker has last written its part."""
        return self._q[self._of(worker, 8)]

    # -- places, where there are more workers than cores --------------------------------------------------------------

    def stand(self, worker: int, *, there: bool) -> None:
        """Says whether a worker has a place at the board, so that it may take turns."""
        self._q[self._of(worker, 9)] = there

    def stands(self, worker: int) -> bool:
        """Whether a worker has a place; a worker may read its own without the lock."""
        return self._q[self._of(worker, 9)] != 0

    def standing(self) -> int:
        """Returns how many workers have a place."""
        return sum(self._q[self._of(0, 9) : self._of(0, 10)].tolist())

    def nobody_stands(self) -> None:
        """All places are free."""
        for worker in range(self.num_workers):
            self.stand(worker, there=False)

    @property
    def queue(self) -> int:
        """Returns how many sleep in the queue for a place. Whoever dies there is counted for ever."""
        return self._q[_FIRST + _QUEUE]

    def begin_queue(self) -> int:
        """Says that somebody is going to sleep in the queue, and returns the call that he has heard."""
        self._q[_FIRST + _QUEUE] += 1
        return self._q[_FIRST + _CALL]

    def end_queue(self) -> None:
        """Says that somebody has left the queue."""
        self._q[_FIRST + _QUEUE] -= 1

    def wait_in_queue(self, heard: int, timeout_s: float) -> None:
        """Sleeps until somebody is called since `heard`, or until the time is up; needs no lock."""
        wait_while(self._call_at, heard, timeout_s)

    def call(self) -> None:
        """There is a place: `wake_queue` shall be called once the lock is free."""
        self._q[_FIRST + _CALL] = (self._q[_FIRST + _CALL] + 1) & 0x7FFFFFFF

    def wake_queue(self) -> None:
        """Whoever has slept longest in the queue shall look; needs no lock."""
        if self._q[_FIRST + _QUEUE] > 0:
            wake(self._call_at, 1)

    # -- learning rates -----------------------------------------------------------------------------------------------

    @property
    def rated(self) -> int:
        """Returns how many updates, counted from the first, have known learning rates."""
        return self._q[_FIRST + _RATED]

    def rate(self, update: int, rates: Sequence[float]) -> None:
        """Says at which rates update number `update` is made; they are given in order."""
        at = self._rates_at + (update % RATES) * self.num_groups
        for group, value in enumerate(rates):
            self._d[at + group] = value
        self._q[_FIRST + _RATED] = update + 1

    def begin_rates(self, update: int) -> None:
        """The rates begin with those of update number `update`."""
        self._q[_FIRST + _RATED] = update

    def rates(self, update: int) -> list[float]:
        """Returns the rates of update number `update`."""
        at = self._rates_at + (update % RATES) * self.num_groups
        return [float(self._d[at + group]) for group in range(self.num_groups)]

    # -- records ------------------------------------------------------------------------------------------------------

    def room(self) -> int:
        """Returns how many gradients may still be recorded before the ps has taken some up."""
        ring = RECORDS - self.num_workers
        return ring - (self._q[_FIRST + _TAIL] - self._q[_FIRST + _DRAINED])

    def record(self, worker: int, given: Given, loss: float | None, version: int, slot: int) -> None:
        """Notes a gradient that has become part of a version."""
        self._write(self._q[_FIRST + _TAIL] % (RECORDS - self.num_workers), worker, given, loss, version, slot)
        self._q[_FIRST + _TAIL] += 1

    def record_round(self, version: int, slot: int) -> None:
        """Notes the gradients of all workers, which together have become a version."""
        for worker in range(self.num_workers):
            tail = self._q[_FIRST + _TAIL]
            source = self._records_at + (RECORDS - 1 - worker) * _RECORD_WORDS
            target = self._records_at + (tail % (RECORDS - self.num_workers)) * _RECORD_WORDS
            self._q[target : target + _RECORD_WORDS] = self._q[source : source + _RECORD_WORDS]
            self._q[target + 6] = slot
            self._q[_FIRST + _TAIL] = tail + 1

    def _write(self, index: int, worker: int, given: Given, loss: float | None, version: int, slot: int) -> None:
        _RECORD.pack_into(
            self._bytes,
            8 * (self._records_at + index * _RECORD_WORDS),
            worker,
            given.incarnation,
            given.local_step,
            given.request,
            given.computed_at,
            version,
            slot,
            math.nan if loss is None else loss,
            time.time(),
            time.monotonic(),
        )

    @property
    def undrained(self) -> bool:
        """Whether there is something for the ps to take up."""
        return self._q[_FIRST + _TAIL] != self._q[_FIRST + _DRAINED]

    @property
    def recorded(self) -> int:
        """Returns how many gradients have ever been recorded."""
        return self._q[_FIRST + _TAIL]

    def drain(self, recorded: int | None = None) -> list[Record]:
        """Returns what has been recorded since; the ps alone calls this, and needs no lock for what it knows of."""
        end = self.recorded if recorded is None else recorded
        ring = RECORDS - self.num_workers
        found = [self._read(number % ring) for number in range(self._q[_FIRST + _DRAINED], end)]
        self._q[_FIRST + _DRAINED] = end
        return found

    def round(self) -> list[Record]:
        """Returns the gradients that were given to the round that is being made, in order of worker."""
        return [self._read(RECORDS - 1 - worker) for worker in range(self.num_workers)]

    def _read(self, index: int) -> Record:
        at = self._records_at + index * _RECORD_WORDS
        found = Record(*_RECORD.unpack_from(self._bytes, 8 * at))
        return replace(found, loss=None) if found.loss is not None and math.isnan(found.loss) else found

    # -- waiting ------------------------------------------------------------------------------------------------------

    @property
    def signal(self) -> int:
        """Returns a number that changes with every piece of news; may be read without the lock."""
        return self._q[_FIRST + _SIGNAL]

    def begin_wait(self) -> int:
        """Says that somebody is going to sleep, and returns the signal that he has seen."""
        self._q[_FIRST + _WAITERS] += 1
        return self._q[_FIRST + _SIGNAL]

    def end_wait(self) -> None:
        """Says that somebody has woken up. Whoever dies in his sleep is counted for ever, which costs others a call each."""
        self._q[_FIRST + _WAITERS] -= 1

    @property
    def waiters(self) -> int:
        """Returns how many sleep; may be read without the lock."""
        return self._q[_FIRST + _WAITERS]

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleeps until there is news since `seen`, or until the time is up; needs no lock."""
        wait_while(self._signal_at, seen, timeout_s)

    def announce(self) -> None:
        """There is news: `wake` shall be called once the lock is free, because who is woken may take the waker's core."""
        self._q[_FIRST + _SIGNAL] = (self._q[_FIRST + _SIGNAL] + 1) & 0x7FFFFFFF

    def wake(self, count: int = 1 << 30) -> None:
        """Everybody who sleeps shall look, or as many as there is news for; needs no lock."""
        if self.waiters > 0:
            wake(self._signal_at, count)
