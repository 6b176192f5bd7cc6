"""The tables of the page: what it holds of each worker, and the learning rates of the next updates.

Parts of the page (`torchquorum.fastpath.page`), which says who may change what, and when. Each column is a memoryview of shared
integers, indexed by worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchquorum.wire.plan import MemoryRef

RATES = 8192  # as many as there are records, so that the rates of an update are there until the ps has read its records
_ALL = 1 << 62  # known rates, where they are held
_COLUMNS = 11


class WorkerColumns:
    """One entry per worker in each column. Changed under the page's lock unless a column says otherwise.

    Attributes:
        tokens: The incarnation that may use the page as this worker, or 0; changed by the ps.
        uses: The slot that the worker writes or reads, or -1. Set under the lock, cleared by the worker without it.
        leases: The slot that the worker was given by message and may still be reading, or -1.
        state_uses: The slot of optimizer state that the worker writes, or -1; set and cleared with `uses`.
        given: The version to whose round the worker last gave a gradient.
        written: The version of which the worker last wrote its part.
        seats: 1 if the worker may take turns now, else 0; a worker may read its own without the lock.
    """

    def __init__(self, memory: memoryview, num_workers: int) -> None:
        words = memory.cast("q")
        columns = [words[k * num_workers : (k + 1) * num_workers] for k in range(_COLUMNS)]
        self.tokens, self._pids, self._fds, self._sizes, self._slots = columns[:5]
        self.uses, self.leases, self.given, self.written, self.seats, self.state_uses = columns[5:]
        self._busy = words[5 * num_workers : 7 * num_workers]
        self._num_workers = num_workers

    @staticmethod
    def size_bytes(num_workers: int) -> int:
        """Returns how much memory it needs."""
        return 8 * _COLUMNS * num_workers

    def admit(self, worker: int, incarnation: int, gradients: MemoryRef | None) -> None:
        """Lets an incarnation use the page, with the memory in which its gradients lie; 0 and None for nobody."""
        self.tokens[worker] = incarnation
        ref = gradients or MemoryRef(0, 0, 0, 0)
        self._pids[worker], self._fds[worker] = ref.pid, ref.fd
        self._sizes[worker], self._slots[worker] = ref.size_bytes, ref.num_slots

    def gradients(self, worker: int) -> MemoryRef:
        """Returns where a worker's gradients lie."""
        return MemoryRef(self._pids[worker], self._fds[worker], self._sizes[worker], self._slots[worker])

    def alone(self, worker: int) -> bool:
        """Whether no other worker uses the page; needs no lock."""
        return all(token == 0 or w == worker for w, token in enumerate(self.tokens))

    def release_slots(self, worker: int) -> None:
        """The worker uses no slot."""
        self.uses[worker] = self.state_uses[worker] = self.leases[worker] = -1

    def busy_slots(self) -> list[int]:
        """Returns the slots that workers may be writing or reading, and some -1."""
        return self._busy.tolist()

    def busy_states(self) -> list[int]:
        """Returns the slots of optimizer state that workers may be writing, and some -1."""
        return self.state_uses.tolist()

    def begin_rounds(self) -> None:
        """No worker has given or written anything yet."""
        for worker in range(self._num_workers):
            self.given[worker] = self.written[worker] = -1

    def all_given(self, version: int) -> bool:
        """Whether every worker has given a gradient to the round that makes `version`."""
        return self.given.tolist() == [version] * self._num_workers

    def all_written(self, version: int) -> bool:
        """Whether every worker has written its part of `version`."""
        return self.written.tolist() == [version] * self._num_workers

    def seated(self) -> int:
        """Returns how many workers have a seat."""
        return sum(self.seats.tolist())

    def clear_seats(self) -> None:
        """No worker has a seat."""
        for worker in range(self._num_workers):
            self.seats[worker] = 0


class RateTable:
    """The learning rates of each update, in order.

    A schedule's rates the ps writes ahead, and workers read those that are counted. Without a schedule rates are held: each update
    has those of the one before, unless the program of the worker that leads has others; then that worker writes them, under the
    page's lock.
    """

    def __init__(self, memory: memoryview, num_groups: int) -> None:
        self._count: memoryview[int] = memory[:8].cast("q")
        self._rates: memoryview[float] = memory[8:].cast("d")
        self._num_groups = num_groups

    @staticmethod
    def size_bytes(num_groups: int) -> int:
        """Returns how much memory it needs."""
        return 8 + 8 * RATES * num_groups

    @property
    def known(self) -> int:
        """Returns how many updates, counted from the first of the run, have known rates."""
        return self._count[0]

    def begin(self, update: int) -> None:
        """The next rates to be added are those of update number `update`."""
        self._count[0] = update

    def add(self, rates: Sequence[float]) -> None:
        """Adds the rates of the next update, one per parameter group."""
        update = self._count[0]
        self._put(update, rates)
        self._count[0] = update + 1

    @property
    def held(self) -> bool:
        """Whether each update has the rates of the one before, unless they are changed."""
        return self._count[0] == _ALL

    def hold(self, update: int, rates: Sequence[float]) -> None:
        """The ps opens the page: update number `update` has these rates, and so have all after it."""
        self._put(update, rates)
        self._count[0] = _ALL

    def change(self, update: int, rates: Sequence[float]) -> None:
        """The worker that leads gives its gradient to this update, which gets its rates."""
        if self.held:
            self._put(update, rates)

    def use(self, update: int, rates: Sequence[float] | None = None) -> None:
        """Update number `update` is made, with these rates or its own; where rates are held, the next one gets the same."""
        if self.held:
            rates = self.of(update) if rates is None else rates
            self._put(update, rates)
            self._put(update + 1, rates)

    def _put(self, update: int, rates: Sequence[float]) -> None:
        at = (update % RATES) * self._num_groups
        for group, value in enumerate(rates):
            self._rates[at + group] = value

    def of(self, update: int) -> list[float]:
        """Returns the rates of update number `update`, one per parameter group."""
        at = (update % RATES) * self._num_groups
        return list(self._rates[at : at + self._num_groups])
