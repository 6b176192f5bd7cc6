"""A ps and workers on the fast path, an action at a time: the product's stages on a real page, with its host, leader and versions.

The stages are `torchquorum.fastpath.stages`; the lock is one that can be looked into, and a value is the list of the gradients that it was
made of. `tests.hunt.explorer` takes the actions in every order. What always holds when nothing is wrong: each gradient is in one version;
every version that a worker copies is what its gradients make of the one before; nobody reads what another writes; all come to an end.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Self

from tests.hunt.fastpath_state import describe
from tests.manual_clock import ManualClock
from tests.protocol.by_hand import make_plan
from torchquorum.fastpath.admission import Admission, SeatTimes
from torchquorum.fastpath.host import FastPathHost
from torchquorum.fastpath.page import OPEN, FastPage
from torchquorum.fastpath.participant import Participant, UpdateSlots
from torchquorum.fastpath.records import GradientId
from torchquorum.fastpath.rounds import RoundSteps
from torchquorum.fastpath.stages import Sleep, Stage
from torchquorum.fastpath.steps import FastPathSteps
from torchquorum.fastpath.turns import TurnSteps
from torchquorum.memory.slots import Slots
from torchquorum.placement.layout import Variable
from torchquorum.rules.quorum import Key
from torchquorum.server.arrivals import Arrival
from torchquorum.server.leader import Leader
from torchquorum.server.tally import Tally
from torchquorum.server.versions import Versions
from torchquorum.wire.messages import Apply, Drop, MemoryRef, Release

Action = tuple[str, int]
Value = tuple[
    tuple[tuple[int, int], ...], ...
]  # of each update that it was made by: the gradients, as (worker, local step)
FIRST_INCARNATION = 100
LONG_S = 10.0
NEVER_STRAIGHT_BACK = SeatTimes(back_s=-1.0)


class Lock:
    """The page's lock, as one process has it: it knows who holds it."""

    timeout_s = 0.0

    def __init__(self, model: Model, who: int) -> None:
        self._model, self._who = model, who

    def __enter__(self) -> bool:
        model = self._model
        if model.owner is not None and model.owner not in model.dead:
            return False  # a frozen process has it
        model.owner = self._who
        return True

    def __exit__(self, *_: object) -> None:
        if self._model.owner == self._who:
            self._model.owner = None


class Writer:
    """Writes versions: all of one in a turn, this worker's element of one in a round."""

    direct, loads, norm = True, False, None

    def __init__(self, model: Model, worker: int) -> None:
        self._model, self._worker = model, worker

    def ready(self) -> bool:
        return True

    def reach(self, gradients: Slots) -> None:
        pass

    def finish(self, target: int) -> None:
        pass

    def write(self, *args: Any, held: bool = True) -> Any:
        model, worker = self._model, self._worker
        slots: UpdateSlots = args[1] if model.rounds else args[0]
        step = tuple(sorted(model.gradients.values())) if model.rounds else (model.gradients[worker],)
        for element in (worker,) if model.rounds else range(model.num_workers):
            model.write(slots, element, step)
        return True


class Gradients:
    """The gradient memory of all workers, as one of them sees it: that of a dead one cannot be opened any more."""

    sections: tuple[()] = ()

    def __init__(self, model: Model, worker: int) -> None:
        self._model, self._opened = model, model.opened[worker]

    def follow(self, reach: Any) -> bool:
        for other in range(self._model.num_workers):
            if other not in self._opened:
                if other in self._model.dead:
                    return False
                self._opened.add(other)
        return True


@dataclass
class Worker:
    """One worker in a model.

    Attributes:
        copies: The slot from which it is going to copy; -1 for none.
        gone: The ps has heard of its death.
    """

    index: int
    page: FastPage
    steps: FastPathSteps
    admission: Admission | None
    program: Generator[Any, None, None]
    stage: Any = "start"
    finished: bool = False
    frozen: bool = False
    version: int = 0
    answer: tuple[int, int] | None = None
    copies: int = -1
    gone: bool = False


@dataclass
class Budget:
    """How much may go wrong in one run: deaths, freezes, closings, and waits that end too early."""

    deaths: int = 0
    freezes: int = 0
    closings: int = 0
    timeouts: int = 0


class Memory:
    """Shared memory for one model after another."""

    def __init__(self, rule: Any, num_workers: int) -> None:
        self.clock, self.num_workers = ManualClock(), num_workers
        variables = [Variable(name="w", shape=(num_workers,), dtype="float64")]
        self.plan = make_plan(variables=variables, rule=rule, num_workers=num_workers)
        self._versions = Versions(self.plan.layout().trained[0], num_workers)
        self.pages = [FastPage.create(num_workers, 1, self.clock)]
        for _ in range(num_workers):
            self.pages.append(FastPage.open(self.pages[0].ref, num_workers, 1, self.clock))
        self._bytes = self.pages[0]._segment.bytes

    def versions(self) -> Versions:
        """Returns the slots of a run that begins."""
        made = copy.copy(self._versions)
        made._readers, made._sending, made._published, made.current, made.version = {}, [], {}, 0, 0
        for slot in range(len(made.slots)):
            made.slots.mark(slot, -1 if slot else 0)
        return made

    def clear(self) -> None:
        """Makes the page as new."""
        page = self.pages[0]
        self._bytes.zero_()
        page.words.writer = -1
        for worker in range(page.num_workers):
            page.workers.release_slots(worker)

    def close(self) -> None:
        """Gives the memory up."""
        self.pages[0].close()
        self._versions.close()


class Model:
    """One run of a ps and its workers, an action at a time.

    Attributes:
        owner: Who holds the lock: a worker, -1 for the ps, None for nobody.
        last: The worker that has done the last action; -1 at the beginning, -2 for the ps.
        dead: The workers that have died.
        applied: The gradients of each version, as the ps came to know them.
        expected: What each of these versions is made of.
        copied: What workers have copied of versions that the ps has not heard of yet.
        counted: The gradients that count, as their workers know, and the ps does not know yet.
        opened: Whose gradient memory each worker has opened.
    """

    def __init__(self, memory: Memory, steps: int, budget: Budget) -> None:
        memory.clear()
        self.clock, self.num_workers, self._steps = memory.clock, memory.num_workers, steps
        self.budget = Budget(**vars(budget))
        self.plan, self.versions = memory.plan, memory.versions()
        self.rounds = self.plan.rule.max_staleness == 0
        nothing: Value = ()
        self.values: list[list[Value]] = [[nothing] * self.num_workers for _ in range(len(self.versions.slots))]
        self.states: list[list[Value]] = [[nothing] * self.num_workers for _ in range(2 * self.num_workers + 4)]
        self.state = SimpleNamespace(current=0)
        self.gradients: dict[int, tuple[int, int]] = {}
        self.owner: int | None = None
        self.last = -1
        self.dead: set[int] = set()
        self.applied: dict[int, list[Key]] = {}
        self.expected: dict[int, Value] = {0: nothing}
        self.answered: dict[int, int] = {}
        self.copied: list[tuple[int, tuple[Value, ...]]] = []
        self.counted: set[Key] = set()
        self.opened = [{index} for index in range(self.num_workers)]
        self.leader = Leader(self.plan, Tally(0.0), None)
        page = memory.pages[0]
        page._lock = Lock(self, -1)  # pyright: ignore[reportAttributeAccessIssue]
        self.page = page
        self.versions.also_busy = page.busy_slots
        self.host = FastPathHost(page, self, self.leader, lambda: False)  # pyright: ignore[reportArgumentType]
        self.crew = [self._worker(index, memory.pages[index + 1]) for index in range(self.num_workers)]
        for worker in self.crew:
            self.leader.join(worker.index, FIRST_INCARNATION + worker.index, 1, self.clock.now(), 0.0, "shm")
        self._follow()
        self._advance()
        for worker in self.crew:
            worker.answer = None
            self._next(worker)

    def _worker(self, index: int, page: FastPage) -> Worker:
        page._lock = Lock(self, index)  # pyright: ignore[reportAttributeAccessIssue]
        user = Participant(
            page,
            index,
            FIRST_INCARNATION + index,
            self.versions.slots,
            cores=self.num_workers,
            wait_s=1.0,
            clock=self.clock,
        )
        user.spins = False  # a look without a sleep is a sleep that ends at once
        writer: Any = Writer(self, index)
        admission = None
        if self.rounds:
            gradients: Any = Gradients(self, index)
            kind: Any = RoundSteps(user, gradients, [writer])
        else:
            admission = Admission(user, times=NEVER_STRAIGHT_BACK, clock=self.clock)
            kind = TurnSteps(user, writer, admission, self.clock)
        return Worker(index, page, FastPathSteps(page, kind), admission, self._program(index))

    # -- a worker's program -------------------------------------------------------------------------------------------

    def _program(self, index: int) -> Generator[Any, None, None]:
        incarnation = FIRST_INCARNATION + index
        for step in range(1, self._steps + 1):
            yield "begin"
            worker = self.crew[index]
            computed_at = worker.version
            self.gradients[index] = index, step
            made = yield from worker.steps.stages(GradientId(incarnation, step, step + 1, computed_at), lambda: None)
            if made is not None:
                worker.copies = made.slot
                yield "copy"
                self._copy(worker, made.version)
                worker.steps.done()
                if made.version > self.version:
                    self.counted.add(Key(index, incarnation, step))
                else:
                    self._check_counts(Key(index, incarnation, step))
                continue
            yield "push"
            self._push(Key(index, incarnation, step), computed_at, step + 1)
            while worker.answer is None:
                yield "await"
            (version, worker.copies), worker.answer = worker.answer, None
            yield "copy"
            self._copy(worker, version, looks=True)
        yield "leave"
        self._leave(index)

    def _copy(self, worker: Worker, version: int, *, looks: bool = False) -> None:
        """Copies a version; one that came in an answer may have been taken away, which the slot's number tells."""
        slot, worker.copies, worker.version = worker.copies, -1, version
        if not looks or self.versions.slots.holds(slot, version):
            self.copied.append((version, tuple(self.values[slot])))

    def _check_counts(self, key: Key) -> None:
        there = any(key in keys for keys in self.applied.values())
        assert there, f"{key} was made, and does not count"

    # -- what the host asks of a shard --------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.versions.version

    @property
    def variables(self) -> Self:
        return self

    busy = False

    @property
    def update(self) -> Model:
        return self

    @property
    def workers(self) -> Model:
        return self

    steps_by_group: ClassVar[list[int]] = [0]
    rates = SimpleNamespace(now=[1.0], ahead=lambda update: [1.0])

    def knows(self, worker: int, incarnation: int) -> bool:
        return True

    def on_fastpath(self, worker: int, incarnation: int) -> bool:
        return True

    def gradients_of(self, worker: int) -> MemoryRef | None:
        return None

    def store_shared(self, key: Key, request: int) -> None:
        pass

    # -- the ps -------------------------------------------------------------------------------------------------------

    def look(self, *, close: bool) -> None:
        """As `Leading.look_at_fastpath`."""
        if not self.host.is_open:
            return
        made, unfinished = self.host.close() if close else (self.host.look(), [])
        self.host.take_up(made, made=True)
        self._follow(silent=True)
        self.host.take_up(unfinished, made=False)
        self._follow()

    def _follow(self, *, silent: bool = False) -> None:
        log = self.leader.log
        first, entries = log.unseen_by(0)
        for entry in entries:
            match entry:
                case Apply(keys, version, _):
                    self._apply([Key(*key) for key in keys], version)
                case Release(worker, _, request, version):
                    self.answered[worker] = request
                    assert version == self.version, f"a release at {version} while the ps is at {self.version}"
                    if silent:
                        self.versions.forget(worker)
                    else:
                        self.crew[worker].answer = version, self.versions.lease(worker)
                case Drop():
                    pass
        log.followed(0, first + len(entries))

    def _apply(self, keys: list[Key], version: int) -> None:
        assert version == len(self.applied) + 1, f"version {version} after {len(self.applied)}"
        twice = [key for keys_before in self.applied.values() for key in keys_before if key in keys]
        assert not twice, f"{twice} are in version {version} again"
        self.applied[version] = keys
        self.counted -= set(keys)
        step = tuple(sorted((key.worker, key.local_step) for key in keys))
        self.expected[version] = (*self.expected[version - 1], step)
        if self.versions.adopt(version):
            return
        busy = {self.state.current, *self.page.busy_states()}
        free = next(slot for slot in range(len(self.states)) if slot not in busy)
        slots = UpdateSlots(self.versions.current, self.versions.next_slot(), self.state.current, free)
        for element in range(self.num_workers):
            self.write(slots, element, step)
        self.versions.publish(slots.target, version)
        self.state.current = free

    def write(self, slots: UpdateSlots, element: int, step: tuple[tuple[int, int], ...]) -> None:
        """Makes an update of one element, and of the optimizer's state that belongs to it."""
        self.values[slots.target][element] = (*self.values[slots.current][element], step)
        self.states[slots.state_target][element] = (*self.states[slots.state][element], step)

    def _advance(self) -> None:
        if self.host.may_open():
            self.host.open()

    def _push(self, key: Key, computed_at: int, request: int) -> None:
        self.look(close=True)
        self.crew[key.worker].gone = False  # it is heard of
        if self.answered.get(key.worker) == request:  # what became of it on the fast path; as `Answers.again`
            self.crew[key.worker].answer = self.version, self.versions.lease(key.worker)
            return
        arrival = Arrival(computed_at, None)
        self.leader.arrived(0, key, request, self.clock.now(), 0.0, push=arrival)
        self._follow()
        self._advance()

    def _leave(self, index: int) -> None:
        self.look(close=True)
        self.leader.leave(index, FIRST_INCARNATION + index, 0.0)
        self._follow()
        self._advance()

    def _hear_of_all(self) -> None:
        """The ps has a sign of life of every worker that lives; as `Leading.tick`."""
        self.look(close=True)
        for worker in self.crew:
            if worker.index not in self.dead and not worker.frozen and not worker.gone:
                self.leader.quorum.seen(worker.index, FIRST_INCARNATION + worker.index, self.clock.now())
        self.leader.tick(self.clock.now(), 0.0)
        self._follow()
        self._advance()

    # -- actions ------------------------------------------------------------------------------------------------------

    def _next(self, worker: Worker) -> None:
        try:
            worker.stage = next(worker.program)
        except StopIteration:
            worker.finished = True

    @property
    def ps_waits(self) -> bool:
        """Whether the ps would wait for the lock, and get it."""
        return self.owner is not None and self.owner not in self.dead and not self.crew[self.owner].frozen

    def moves_alone(self, worker: Worker) -> bool:
        """Whether what a worker does next changes nothing that another one, or the ps, could see, hinder or do before it.

        In a critical section nobody else can enter it; a target slot is read by its writer only, which `check` looks after; the
        others come back to what all see after the next lock.
        """
        stage = worker.stage
        if worker.finished or worker.frozen or worker.index in self.dead:
            return False
        if stage in (Stage.LOCKED, Stage.WRITE, Stage.WRITTEN):
            return True
        if isinstance(stage, Sleep):
            return stage.signal._words.number != stage.seen
        return stage == "await" and worker.answer is not None

    def can_move(self, worker: Worker) -> bool:
        """Whether a worker that is alive can do what comes next."""
        stage = worker.stage
        if stage is Stage.LOCK:
            return not self.ps_waits or self.owner == worker.index
        if isinstance(stage, Sleep):
            return stage.signal._words.number != stage.seen
        if stage == "await":
            return worker.answer is not None
        return stage not in ("push", "leave") or not self.ps_waits

    def do(self, action: Action) -> None:
        """Lets something happen."""
        kind, w = action
        worker, self.last = self.crew[w], -2 if kind in ("bury", "beat", "close", "open") else w
        match kind:
            case "go":
                self._next(worker)
            case "timeout":
                self.budget.timeouts = max(0, self.budget.timeouts - 1)
                self.clock.advance(LONG_S)
                self.page.ps_looks()
                self._next(worker)
            case "kill":
                self.budget.deaths -= 1
                self.dead.add(w)
            case "freeze":
                self.budget.freezes -= 1
                worker.frozen = True
            case "thaw":
                worker.frozen = False
            case "bury":
                worker.gone = True
                self.look(close=True)
                self.leader.lost(w, FIRST_INCARNATION + w, "gone", 0.0)
                self._follow()
            case "beat":
                worker.gone = False
                self._hear_of_all()
            case "close":
                self.budget.closings -= 1
                self.look(close=True)
            case "open":
                self._advance()
        self._check_copied()

    # -- what must be true --------------------------------------------------------------------------------------------

    def _check_copied(self) -> None:
        for found in [found for found in self.copied if found[0] <= self.version]:
            self.copied.remove(found)
            version, values = found
            due = (self.expected[version],) * self.num_workers
            assert values == due, f"a worker copied {values} as version {version}, which is {due}"

    def check(self) -> None:
        """Checks what must be true whenever nobody that is alive is in the middle of a change."""
        if self.owner is not None and self.owner not in self.dead:
            return
        if self.page.words.state == OPEN:
            made, records = self.page.version, self.page.records
            known = self.version + len({r.version for r in self.pending()})
            assert made <= known, (
                f"version {made} is published, and the ps will hear of {known} ({records.added} records)"
            )
        self._check_slots()

    def _check_slots(self) -> None:
        """What a worker is going to write nobody else reads, and, in turns, nobody else writes."""
        targets = {
            worker.index: self.page.workers.uses[worker.index]
            for worker in self.crew
            if worker.stage in (Stage.WRITE, Stage.WRITTEN) and worker.index not in self.dead
        }
        current = self.page.slot if self.page.words.state == OPEN else self.versions.current
        for index, target in targets.items():
            if target < 0:
                continue
            assert target != current, f"worker {index} writes into the current version"
            readers = [w.index for w in self.crew if w.copies == target and w.index not in (index, *self.dead)]
            assert not readers, f"worker {index} writes into slot {target}, from which {readers} copy"
            others = [w for w, other in targets.items() if other == target and w != index]
            assert self.rounds or not others, f"workers {index} and {others} write into slot {target}"

    def pending(self) -> list[Any]:
        """Returns the records that the ps has not read."""
        records = self.page.records
        counts = records._counts
        return [records._read(number % records._ring) for number in range(counts.drained, counts.added)]

    def check_end(self) -> None:
        """Checks what must be true when nothing can happen any more."""
        stuck = [w.index for w in self.crew if not w.finished and w.index not in self.dead and not w.frozen]
        assert not stuck, f"workers {stuck} wait for ever: {[self.crew[k].stage for k in stuck]}"
        if not self.ps_waits:
            self.look(close=True)
        self._check_copied()
        assert not self.copied, f"{self.copied} were copied, and the ps has never heard of them"
        assert not self.counted, f"{self.counted} were made, and do not count"
        current, due = self.values[self.versions.current], [self.expected[self.version]] * self.num_workers
        assert current == due, f"the ps holds {current} at version {self.version}, not {due}"
        state = self.states[self.state.current]
        assert state == due, f"the optimizer's state is {state} at version {self.version}, not {due}"

    def key(self, places: tuple[int, ...]) -> int:
        """Returns all that the future depends on, as one number, with the workers renamed."""
        return hash(describe(self, places))

    def close(self) -> None:
        """Gives the memory up; those that died or hang are let go of without a trace."""
        scratch = {"words": type(self.page.words)(), "locked": lambda timeout_s=0.0: _Refusing()}
        for worker in self.crew:
            if not worker.finished:
                worker.page.__dict__.update(scratch)
                worker.program.close()
                worker.page.words = type(self.page.words).from_buffer(self.page.words)
                del worker.page.__dict__["locked"]


class _Refusing:
    """A lock that nobody gets."""

    def __enter__(self) -> bool:
        return False

    def __exit__(self, *_: object) -> None:
        pass
