"""Every order in which the workers of the fast path can take their stages, with a death, a freeze and a closing at every point.

The stages are the product's own (`torchquorum.fastpath.stages`), on a real page in shared memory, with the product's host, leader and
versions on the other side; the lock is one that can be looked into. A state that was met before is not followed again. What always
holds when nothing is wrong: each gradient is in one version, every version that a worker copies is what its gradients make of the one
before, and everybody comes to an end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torchquorum as tq
from tests.manual_clock import ManualClock
from tests.protocol.by_hand import make_plan
from torchquorum.fastpath.admission import Admission
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
FIRST_INCARNATION = 100
LONG_S = 10.0


def amount(key: Key) -> float:
    """Returns the gradient of a key: a number that no other sum of gradients makes."""
    return 6.0 * (1 << (key.worker + 4 * (key.local_step - 1)))


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
        step = sum(model.gradients.values()) / len(model.gradients) if model.rounds else model.gradients[worker]
        for element in (worker,) if model.rounds else range(model.num_workers):
            model.write(slots, element, step)
        return True


class Gradients:
    """The gradient memory of all workers; that of a dead one cannot be opened any more."""

    sections: tuple[()] = ()

    def __init__(self, model: Model) -> None:
        self._model = model

    def follow(self, reach: Any) -> bool:
        return not self._model.dead


@dataclass
class Worker:
    """One worker in a model."""

    index: int
    page: FastPage
    steps: FastPathSteps
    program: Generator[Any, None, None]
    stage: Any = "start"
    finished: bool = False
    frozen: bool = False
    version: int = 0
    answer: tuple[int, int] | None = None
    asked: bool = False
    gone: bool = False  # the ps has heard of its death


@dataclass
class Budget:
    """How much may go wrong in one run: deaths, freezes, closings, and waits that end too early."""

    deaths: int = 0
    freezes: int = 0
    closings: int = 0
    timeouts: int = 0


class Memory:
    """Shared memory for one model after another."""

    def __init__(self, num_workers: int) -> None:
        self.clock = ManualClock()
        self.pages = [FastPage.create(num_workers, 1, self.clock)]
        for _ in range(num_workers):
            self.pages.append(FastPage.open(self.pages[0].ref, num_workers, 1, self.clock))
        self._bytes = self.pages[0]._segment.bytes

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


class Model:
    """One run of a ps and its workers, an action at a time.

    Attributes:
        owner: Who holds the lock: a worker, -1 for the ps, None for nobody.
        dead: The workers that have died.
        applied: The gradients of each version, as the ps came to know them.
    """

    def __init__(self, memory: Memory, rule: Any, num_workers: int, steps: int, budget: Budget) -> None:
        memory.clear()
        self.clock, self.num_workers, self._steps = memory.clock, num_workers, steps
        self.budget = Budget(**vars(budget))
        variables = [Variable(name="w", shape=(num_workers,), dtype="float64")]
        self.plan = make_plan(variables=variables, rule=rule, num_workers=num_workers)
        self.rounds = rule.max_staleness == 0
        self.region = self.plan.layout().trained[0]
        self.versions = Versions(self.region, num_workers)
        self.values = [sections[0].numpy()[:num_workers] for sections in self.versions.slots.sections]
        self.states = [[0.0] * num_workers for _ in range(2 * num_workers + 4)]
        self.state = SimpleNamespace(current=0)
        self.gradients: dict[int, float] = {}
        self.owner: int | None = None
        self.dead: set[int] = set()
        self.applied: dict[int, list[Key]] = {}
        self.expected: dict[int, float] = {0: 0.0}
        self._answered: dict[int, int] = {}
        self.copied: list[tuple[int, list[float]]] = []
        self.counted: set[Key] = set()
        self.leader = Leader(self.plan, Tally(0.0), None)
        page = memory.pages[0]
        page._lock = Lock(self, -1)  # pyright: ignore[reportAttributeAccessIssue]
        self.page = page
        self.versions.also_busy = page.workers.busy_slots
        self.host = FastPathHost(page, self, self.leader, lambda: False)  # pyright: ignore[reportArgumentType]
        self.crew = [self._worker(index, memory.pages[index + 1]) for index in range(num_workers)]
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
        if self.rounds:
            gradients: Any = Gradients(self)
            kind: Any = RoundSteps(user, gradients, [writer])
        else:
            kind = TurnSteps(user, writer, Admission(user, clock=self.clock), self.clock)
        worker = Worker(index, page, FastPathSteps(page, kind), self._program(index))
        return worker

    # -- a worker's program -------------------------------------------------------------------------------------------

    def _program(self, index: int) -> Generator[Any, None, None]:
        incarnation = FIRST_INCARNATION + index
        for step in range(1, self._steps + 1):
            worker = self.crew[index]
            key, computed_at = Key(index, incarnation, step), worker.version
            self.gradients[index] = amount(key)
            gradient = GradientId(incarnation, step, step + 1, computed_at)
            made = yield from worker.steps.stages(gradient, lambda: None)
            if made is not None:
                yield "copy"
                self._copy(made.version, made.slot)
                worker.steps.done()
                worker.version = made.version
                self.counted.add(key)
                continue
            yield "push"
            self._push(key, computed_at, step + 1)
            worker.asked = True
            while worker.answer is None:
                yield "await"
            worker.asked = False
            (version, slot), worker.answer = worker.answer, None
            yield "copy"
            if self.versions.slots.holds(slot, version):
                self._copy(version, slot)
            worker.version = version
        yield "leave"
        self._leave(index)

    def _copy(self, version: int, slot: int) -> None:
        self.copied.append((version, self.values[slot].tolist()))

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
    lr: ClassVar[list[float]] = [1.0]

    def rates_ahead(self, update: int) -> list[float]:
        return [1.0]

    def knows(self, worker: int, incarnation: int) -> bool:
        return True

    def on_fastpath(self, worker: int, incarnation: int) -> bool:
        return True

    def gradients_of(self, worker: int) -> MemoryRef | None:
        return None

    def store_shared(self, key: Key, request: int) -> None:
        pass

    # -- the ps -------------------------------------------------------------------------------------------------------

    def _look(self, *, close: bool) -> None:
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
                    self._answered[worker] = request
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
        self.expected[version] = self.expected[version - 1] - sum(map(amount, keys)) / len(keys)
        if self.versions.adopt(version):
            return
        busy = {self.state.current, *self.page.workers.busy_states()}
        free = next(slot for slot in range(len(self.states)) if slot not in busy)
        slots = UpdateSlots(self.versions.current, self.versions.next_slot(), self.state.current, free)
        for element in range(self.num_workers):
            self.write(slots, element, sum(map(amount, keys)) / len(keys))
        self.versions.publish(slots.target, version)
        self.state.current = free

    def write(self, slots: UpdateSlots, element: int, step: float) -> None:
        """Makes an update of one element, by an optimizer whose state is the sum of all steps."""
        self.values[slots.target][element] = self.values[slots.current][element] - step
        self.states[slots.state_target][element] = self.states[slots.state][element] + step

    def _advance(self) -> None:
        if self.host.may_open():
            self.host.open()

    def _push(self, key: Key, computed_at: int, request: int) -> None:
        self._look(close=True)
        if self._answered.get(key.worker) == request:  # what became of it on the fast path; as `Answers.again`
            self.crew[key.worker].answer = self.version, self.versions.lease(key.worker)
            return
        arrival = Arrival(computed_at, None)
        self.leader.arrived(0, key, request, self.clock.now(), 0.0, push=arrival)
        self._follow()
        self._advance()

    def _leave(self, index: int) -> None:
        self._look(close=True)
        self.leader.leave(index, FIRST_INCARNATION + index, 0.0)
        self._follow()
        self._advance()

    # -- actions ------------------------------------------------------------------------------------------------------

    def _next(self, worker: Worker) -> None:
        try:
            worker.stage = next(worker.program)
        except StopIteration:
            worker.finished = True

    @property
    def _ps_waits(self) -> bool:
        """Whether the ps would wait for the lock, and get it."""
        return self.owner is not None and self.owner not in self.dead and not self.crew[self.owner].frozen

    def enabled(self) -> list[Action]:
        """Returns what can happen next."""
        found: list[Action] = []
        late: list[Action] = []
        for worker in self.crew:
            w, stage = worker.index, worker.stage
            if worker.finished or w in self.dead:
                if w in self.dead and not worker.gone and not self._ps_waits:
                    found.append(("bury", w))
                continue
            if worker.frozen:
                found.append(("thaw", w))
                if not worker.gone and not self._ps_waits:
                    found.append(("bury", w))
                continue
            if stage is Stage.LOCK and self._ps_waits and self.owner != w:
                pass
            elif isinstance(stage, Sleep) and stage.signal._words.number == stage.seen:
                late.append(("timeout", w))
            elif (stage == "await" and worker.answer is None) or (stage in ("push", "leave") and self._ps_waits):
                pass
            else:
                found.append(("go", w))
            if self.budget.deaths:
                found.append(("kill", w))
            if self.budget.freezes:
                found.append(("freeze", w))
        if self.budget.closings and self.host.is_open and not self._ps_waits:
            found.append(("close", 0))
        if not self.host.is_open and not self._ps_waits and self.host.may_open():
            found.append(("open", 0))
        moving = any(kind in ("go", "open", "bury") for kind, _ in found)
        return found + (late if self.budget.timeouts or not moving else [])

    def do(self, action: Action) -> None:
        """Lets something happen."""
        kind, w = action
        worker = self.crew[w]
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
                self._look(close=True)
                self.leader.lost(w, FIRST_INCARNATION + w, "gone", 0.0)
                self._follow()
            case "close":
                self.budget.closings -= 1
                self._look(close=True)
            case "open":
                self._advance()

    # -- what must be true --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks what must be true whenever nobody that is alive is in the middle of a change."""
        if self.owner is not None and self.owner not in self.dead:
            return
        if self.page.words.state == OPEN:
            made, records = self.page.version, self.page.records
            known = self.version + len({r.version for r in self._pending()})
            assert made <= known, (
                f"version {made} is published, and the ps will hear of {known} ({records.added} records)"
            )

    def _pending(self) -> list[Any]:
        records = self.page.records
        counts = records._counts
        return [records._read(number % records._ring) for number in range(counts.drained, counts.added)]

    def check_end(self) -> None:
        """Checks what must be true when nothing can happen any more."""
        stuck = [w.index for w in self.crew if not w.finished and w.index not in self.dead and not w.frozen]
        assert not stuck, f"workers {stuck} wait for ever: {[self.crew[k].stage for k in stuck]}"
        if not self._ps_waits:
            self._look(close=True)
        for version, values in self.copied:
            due = [self.expected.get(version)] * self.num_workers
            assert values == due, f"a worker copied {values} as version {version}, which is {due}"
        counted = {key for keys in self.applied.values() for key in keys}
        assert self.counted <= counted, f"{self.counted - counted} were made, and do not count"
        current = self.values[self.versions.current].tolist()
        due = [self.expected[self.version]] * self.num_workers
        assert current == due, f"the ps holds {current} at version {self.version}, not {due}"
        state, due = self.states[self.state.current], [-value for value in due]
        assert state == due, f"the optimizer's state is {state} at version {self.version}, not {due}"

    def key(self) -> Any:
        """Returns all that the future depends on."""
        page, words = self.page, self.page.words
        shared = (
            words.state, words.opening_id, words.writer, words.full, words.target, words.state_target, words.head,
            tuple(page.workers.uses), tuple(page.workers.leases), tuple(page.workers.given), tuple(page.workers.written),
            tuple(page.workers.seats), tuple(page.workers.busy_states()), tuple(page.workers.tokens),
            page.records._counts.added, page.records._counts.drained, self.state.current,
            page.news._words.number, page.news._words.waiters, page.queue._words.number,
        )  # fmt: skip
        local = tuple(
            (w.finished, w.frozen, w.gone, w.version, w.answer, w.asked, _where(w.program)) for w in self.crew
        )
        ps = (
            self.version,
            self.versions.current,
            tuple(sorted(self.versions._readers.items())),
            _state(self.leader.quorum),
        )
        slots = repr(self.states), bytes(self.versions.slots._numbers), tuple(tuple(v.tolist()) for v in self.values)
        budget = tuple(vars(self.budget).values())
        return hash((shared, local, ps, slots, budget, self.owner, tuple(sorted(self.dead)), len(self.copied)))

    def close(self) -> None:
        """Gives the memory up; those that died or hang are let go of without a trace."""
        scratch = {"words": type(self.page.words)(), "locked": lambda timeout_s=0.0: _Refusing()}
        for worker in self.crew:
            if not worker.finished:
                worker.page.__dict__.update(scratch)
                worker.program.close()
                worker.page.words = type(self.page.words).from_buffer(self.page.words)
                del worker.page.__dict__["locked"]
        self.versions.close()


class _Refusing:
    """A lock that nobody gets."""

    def __enter__(self) -> bool:
        return False

    def __exit__(self, *_: object) -> None:
        pass


def _state(of: Any) -> Any:
    """Returns all that an object of the rules holds, without its times: two that behave alike have the same."""
    if of is None or isinstance(of, int | str | bytes):
        return of
    if isinstance(of, float):
        return "a time"
    if isinstance(of, dict):
        return tuple((_state(key), _state(value)) for key, value in of.items())
    if isinstance(of, set | frozenset):
        return tuple(sorted(map(_state, of)))
    if isinstance(of, list | tuple | deque):
        return tuple(map(_state, of))
    names = sorted(name for one in type(of).__mro__ for name in getattr(one, "__slots__", ())) or sorted(vars(of))
    assert names, f"{type(of).__name__} tells nothing of what it holds"
    return type(of).__name__, tuple((name, _state(getattr(of, name))) for name in names)


def _where(program: Any) -> tuple[Any, ...]:
    """Returns where a generator stands: the line of each frame, and its numbers."""
    found: list[Any] = []
    while program is not None and getattr(program, "gi_frame", None) is not None:
        frame = program.gi_frame
        numbers = tuple(
            (name, value if isinstance(value, int | str) else repr(value))
            for name, value in sorted(frame.f_locals.items())
            if value is None
            or isinstance(value, int | str | tuple)
            or type(value).__name__ in ("_Turn", "GradientId", "MadeVersion")
        )
        found.append((frame.f_code.co_name, frame.f_lasti, numbers))
        program = program.gi_yieldfrom
    return tuple(found)


@dataclass
class Explored:
    """What came of an exploration."""

    states: int = 0
    runs: int = 0
    ends: int = 0
    broken: str | None = None
    path: list[Action] = field(default_factory=list)
    complete: bool = True


def explore(rule: Any, num_workers: int, steps: int, budget: Budget, most_states: int = 10**9) -> Explored:
    """Follows every order of actions; stops at the first that breaks something."""
    memory, found, seen = Memory(num_workers), Explored(), set[int]()
    left: list[list[Action]] = [[]]
    try:
        while left and found.broken is None:
            path = left.pop()
            model = Model(memory, rule, num_workers, steps, budget)
            found.runs += 1
            try:
                for action in path:
                    model.do(action)
                while (state := model.key()) not in seen:
                    seen.add(state)
                    model.check()
                    actions = model.enabled()
                    if not actions:
                        found.ends += 1
                        model.check_end()
                        break
                    left += [[*path, action] for action in actions[1:]]
                    path = [*path, actions[0]]
                    model.do(actions[0])
            except AssertionError as error:
                found.broken, found.path = str(error), path
            finally:
                model.close()
            if len(seen) >= most_states:
                found.complete = not left
                break
    finally:
        memory.close()
    found.states = len(seen)
    return found


RULES = {"async": tq.Async(), "sync": tq.Sync()}
