"""Where workers wait for each other: the ends of epochs, and calls of `session.barrier()`. Who has come, and who may go on.

Owned by the thread of ps task 0 (and by tests). Pure like the quorum: numbers in, numbers out. A worker of `session.epochs` is at a barrier
(epoch, stage): stage 0 when it begins the epoch, 1 when it has used its last batch of it, more where an epoch has several loops. It may
pass a barrier when every live worker has come as far. The calls of `session.barrier()` are a sequence of their own. What always holds:
- a worker that is not alive is not waited for, and a new incarnation begins where the run is;
- the epoch only grows, and its members are those who were alive when it began: the data is divided among them;
- `steps` are what a worker has given in this epoch, over all its incarnations, so that one that comes back goes on after them; `pace` says
  how many batches these are, as a batch may be two gradients (a GAN's) or half of one (accumulated).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torchquorum.rules.batch_pool import WorkerLife
from torchquorum.rules.quorum import Key

EPOCHS, CALLS = "epochs", "calls"


class Barrier(NamedTuple):
    """Where a worker is in a sequence of barriers: an epoch and its stage, or the number of a call and 0."""

    number: int
    stage: int = 0


BEFORE_ALL = Barrier(-1)


class Barriers:
    """The barriers of all workers.

    Attributes:
        epoch: The epoch that the run is in.
        members: The workers among whom its data is divided.
        used: Whether the program has epochs.
        pace: How many batches a worker's program has taken, and how many gradients it has given of them; of the longest count heard of.
    """

    def __init__(self) -> None:
        self.epoch, self.members, self.used = 0, tuple[int, ...](), False
        self.pace = (0, 0)
        self._at: dict[str, dict[WorkerLife, Barrier]] = {EPOCHS: {}, CALLS: {}}
        self._waiting: dict[WorkerLife, tuple[str, Barrier]] = {}
        self._passed = 0  # calls
        self._base: dict[WorkerLife, int] = {}  # how many calls had been passed when this life began
        self._given: Counter[int] = Counter()
        self._pending: dict[Key, None] = {}  # accepted, in no update yet

    # -- events -------------------------------------------------------------------------------------------------------

    def joined(self, life: WorkerLife) -> None:
        """A worker has joined: its first barrier is the next one that the others come to."""
        self._base.setdefault(life, self._passed)

    def gone(self, life: WorkerLife) -> None:
        """A worker's incarnation is over."""
        for passed in self._at.values():
            passed.pop(life, None)
        self._waiting.pop(life, None)
        self._base.pop(life, None)

    def enter(self, life: WorkerLife, known: int, first_members: Iterable[int]) -> int:
        """A worker that begins asks which epoch the run is in; `known` is one that it has been in, or -1. Returns the epoch.

        Args:
            life: Who asks.
            known: The epoch that it was in before ps task 0 was lost, or -1.
            first_members: Among whom the data of the first epoch is divided.
        """
        if not self.used:
            self.used = True
            self.members = self.members or tuple(sorted(first_members))
        if known > self.epoch:
            self._begin(known, self.members)
        self._at[EPOCHS].setdefault(life, Barrier(self.epoch))
        return self.epoch

    def come(self, life: WorkerLife, family: str, barrier: Barrier) -> bool:
        """A worker has come to a barrier, and waits there; False if it was let go on there, and has not heard of it."""
        if family == CALLS:
            barrier = Barrier(barrier.number + self._base.get(life, 0))
        before = self._at[family].get(life, BEFORE_ALL)
        if before >= barrier and life not in self._waiting:
            return False
        self._at[family][life] = max(barrier, before)
        self._waiting[life] = family, barrier
        self.used |= family == EPOCHS
        return True

    def opened(self, live: Iterable[WorkerLife]) -> dict[WorkerLife, str]:
        """Returns the workers whose wait is over, each with what it waited for, and forgets their waits."""
        live = list(live)
        over = {
            life: family
            for life, (family, barrier) in self._waiting.items()
            if not self._missing(family, barrier, live)
        }
        for life in over:
            family, barrier = self._waiting.pop(life)
            if family == CALLS:
                self._passed = max(self._passed, barrier.number)
            elif barrier.number > self.epoch:
                self._begin(barrier.number, tuple(sorted(other.worker for other in live)))
        return over

    def heard(self, pace: tuple[int, int]) -> None:
        """A worker says how many batches it has taken for how many gradients; all of them run the same program."""
        if pace[0] > 0 and pace[1] > self.pace[1]:
            self.pace = pace[0], pace[1]

    def decided(self, key: Key, *, accepted: bool) -> None:
        """A gradient was accepted or refused: its worker has gone on in its data."""
        if self.used:
            self._given[key.worker] += 1
            if accepted:
                self._pending[key] = None

    def applied(self, keys: Iterable[Key]) -> None:
        """These gradients are in the variables."""
        if self.used:
            for key in keys:
                self._pending.pop(key, None)

    def _begin(self, epoch: int, members: tuple[int, ...]) -> None:
        self.epoch, self.members = epoch, members
        self._given.clear()
        self._pending.clear()

    # -- queries ------------------------------------------------------------------------------------------------------

    def steps(self, worker: int) -> int:
        """Returns how many gradients of this epoch were decided on, of all incarnations of a worker."""
        return self._given[worker]

    def missing(self, life: WorkerLife, live: Iterable[WorkerLife]) -> list[int]:
        """Returns the live workers that a waiting one waits for."""
        if life not in self._waiting:
            return []
        return sorted(other.worker for other in self._missing(*self._waiting[life], live))

    def stuck(self, live: Iterable[WorkerLife]) -> str:
        """Says where the workers are if all of them wait, at barriers of which none can be passed; else empty."""
        live = sorted(live)
        if not live or any(life not in self._waiting for life in live):
            return ""
        if any(not self._missing(*self._waiting[life], live) for life in live):
            return ""
        return "; ".join(f"worker {life.worker} waits {_name(*self._waiting[life])}" for life in live)

    def _missing(self, family: str, barrier: Barrier, live: Iterable[WorkerLife]) -> list[WorkerLife]:
        at = self._at[family]
        return [life for life in live if at.get(life, BEFORE_ALL) < barrier]

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint of the current version holds; empty if there are no epochs."""
        if not self.used:
            return {}
        pending = Counter(key.worker for key in self._pending)
        steps = {str(w): count - pending[w] for w, count in sorted(self._given.items())}
        pace = {"pace": list(self.pace)} if any(self.pace) else {}
        return {"epoch": self.epoch, "members": list(self.members), "steps": steps, **pace}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint."""
        epoch, members, steps = state.get("epoch"), state.get("members", []), state.get("steps", {})
        if isinstance(epoch, int) and epoch >= 0 and isinstance(members, list) and isinstance(steps, dict):
            self.epoch, self.members = epoch, tuple(int(w) for w in members)
            self._given = Counter({int(w): int(count) for w, count in steps.items()})
            batches, given = state.get("pace", (0, 0))
            self.heard((int(batches), int(given)))


def _name(family: str, barrier: Barrier) -> str:
    if family == CALLS:
        return f"at session.barrier() number {barrier.number}"
    return f"at the end of epoch {barrier.number + 1 if barrier.stage else barrier.number}"
