"""What the future of a model of the fast path depends on, and nothing else, so that few states have to be followed.

Used by `tests.hunt.fastpath_model`. What always holds: states with equal descriptions behave alike, up to the names of the workers. Left
out are times, apart from whether they are over; numbers that only grow, apart from whether they are the newest; what is in slots that
nobody reads; and where a dead worker stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchquorum.fastpath.participant import MadeVersion
from torchquorum.fastpath.records import GradientId, GradientRecord
from torchquorum.fastpath.stages import Sleep
from torchquorum.fastpath.turns import _Turn
from torchquorum.rules.quorum import Key, Quorum
from torchquorum.rules.quorum import Worker as Member
from torchquorum.rules.track import Standing, Track

if TYPE_CHECKING:
    from tests.hunt.fastpath_model import Model, Value, Worker

# What is described below of the rules' objects, or is the same in all states or a time: a new attribute has to be thought about here.
QUORUM = {
    "num_workers", "last_step", "liveness_s", "tracks", "workers", "replaced", "held", "live", "idle", "done", "stopped", "closed",
    "_now", "_stopped_at", "came_back", "_out_of_step",
}  # fmt: skip
TRACK = {
    "index", "rule", "num_workers", "version", "round", "held", "needed", "chooser", "grace", "round_began", "slowest", "_clocks", "_low",
}  # fmt: skip
MEMBER = {
    "incarnation", "last_seen", "places", "local_step", "alive", "waits_in", "fenced", "left", "failed", "paused", "done", "out_of_step",
    "seen_in",
}  # fmt: skip
STANDING = {"clock", "gave_at", "local_step"}
# Of a worker's frames: who it is, which is said elsewhere, and what has parts that stand beside it.
SAID_ELSEWHERE = {"index", "incarnation", "seen", "begun", "worker_index"}


def check_known(quorum: Quorum) -> None:
    """Sees that the rules have no state that is not described here."""
    for known, there in (
        (QUORUM, vars(quorum).keys()),
        (TRACK, Track.__slots__),
        (MEMBER, Member.__slots__),
        (STANDING, Standing.__slots__),
    ):
        new = set(there) - known
        assert not new, (
            f"the explorer does not know {sorted(new)}: say in tests/hunt/fastpath_state.py what depends on it"
        )


def describe(model: Model, places: tuple[int, ...]) -> tuple[Any, ...]:
    """Describes a model; worker w is called `places[w]`."""
    page, words, columns = model.page, model.page.words, model.page.workers
    order = sorted(range(model.num_workers), key=places.__getitem__)
    readers, published = model.versions._readers, model.versions._published
    slots = {page.slot, model.versions.current, *columns.busy_slots(), *readers.values(), *published.values()}
    slots.update(worker.copies for worker in model.crew)
    states = {page.state_slot, model.state.current, *columns.busy_states()}
    if model.rounds:
        slots.add(words.target)
        states.add(words.state_target)
    numbers = model.versions.slots._numbers
    shared = (
        words.state, places[words.writer] if words.writer >= 0 else -1, words.full, words.target, words.state_target, words.head,
        tuple(_record(record, places) for record in model.pending()),
        tuple((s, int(numbers[s]), _values(model.values[s], places, order)) for s in sorted(slots) if s >= 0),
        tuple((s, _values(model.states[s], places, order)) for s in sorted(states) if s >= 0),
    )  # fmt: skip
    ps = (
        model.version, model.versions.current, model.state.current, tuple(sorted(published.items())),
        tuple(sorted((v, _values(values, places, order)) for v, values in model.copied)),
        tuple(sorted((places[key.worker], key.local_step) for key in model.counted)),
    )  # fmt: skip
    owner = model.owner if model.owner is None or model.owner < 0 else places[model.owner]
    faults = tuple(vars(model.budget).values())
    last = (places[model.last] if model.last >= 0 else model.last) if model.budget.deaths else 0
    return (
        shared, ps, _quorum(model.leader.quorum, places), tuple(_worker(model, w, places) for w in order), owner, faults, last,
    )  # fmt: skip


def _values(values: Sequence[Value], places: tuple[int, ...], order: Sequence[int]) -> tuple[Any, ...]:
    """Describes the elements of a slot, the element of each worker in the place of that worker."""
    return tuple(tuple(tuple(sorted((places[w], s) for w, s in step)) for step in values[w]) for w in order)


def _record(record: GradientRecord, places: tuple[int, ...]) -> tuple[int, ...]:
    return places[record.worker], record.local_step, record.version, record.slot


def _worker(model: Model, w: int, places: tuple[int, ...]) -> tuple[Any, ...]:
    worker, columns, page = model.crew[w], model.page.workers, model.page
    shared = (
        columns.tokens[w] != 0, columns.uses[w], columns.state_uses[w], columns.leases[w], columns.given[w], columns.written[w],
        columns.seats[w], model.versions._readers.get(w, -1), model.answered.get(w, 0), worker.gone,
    )  # fmt: skip
    given = page.records._read(len_of_ring(model) - 1 - w) if model.rounds and columns.given[w] >= 0 else None
    kept = (given.local_step, given.version) if given is not None else ()
    gradient = model.gradients[w][1] if model.rounds and w in model.gradients else 0
    if w in model.dead or worker.finished:
        return shared, kept, gradient, w in model.dead
    opened = tuple(sorted(places[other] for other in model.opened[w])) if model.rounds else ()
    wakes = isinstance(worker.stage, Sleep) and worker.stage.signal._words.number != worker.stage.seen
    own = (worker.frozen, worker.version, worker.answer, worker.copies, wakes)
    return shared, kept, gradient, opened, own, _admission(model, worker), _where(model, worker)


def len_of_ring(model: Model) -> int:
    """Returns how many records the page has, with those of the round that is being made."""
    return model.page.records._ring + model.num_workers


def _admission(model: Model, worker: Worker) -> tuple[Any, ...]:
    of = worker.admission
    if of is None:
        return ()
    now = model.clock.now()
    return (
        of._closed_in == model.page.words.opening_id, of.straight_back, of._must_wake, of._seated_at < now, of._stays_until < now,
    )  # fmt: skip


def _where(model: Model, worker: Worker) -> tuple[Any, ...]:
    """Returns where a worker's program stands: the instruction of each frame, and its numbers."""
    found: list[Any] = []
    program: Any = worker.program
    now, opening = model.clock.now(), model.page.words.opening_id
    while program is not None and (frame := getattr(program, "gi_frame", None)) is not None:
        numbers: list[Any] = []
        for name, value in frame.f_locals.items():
            kind = type(value)
            if name in SAID_ELSEWHERE:
                continue
            if name == "opening_id":
                numbers.append((name, value == opening))
            elif kind is float:
                numbers.append((name, value < now))
            elif kind is int or kind is bool or value is None:
                numbers.append((name, value))
            elif kind is GradientId:
                numbers.append((name, value.local_step, value.computed_at))
            elif kind is _Turn:
                numbers.append((name, value.version, value.slots, value.opening_id == opening))
            elif kind is MadeVersion:
                numbers.append((name, value.met, value.version, value.slot))
        found.append((frame.f_code.co_name, frame.f_lasti, tuple(numbers)))
        program = program.gi_yieldfrom
    return tuple(found)


def _quorum(quorum: Quorum, places: tuple[int, ...]) -> tuple[Any, ...]:
    members = sorted(
        (
            places[w], m.places[0].clock, m.places[0].gave_at, m.places[0].local_step, m.local_step, m.alive, m.waits_in, m.fenced,
            m.left, m.failed, m.paused,
        )
        for w, m in quorum.workers.items()
    )  # fmt: skip
    track = quorum.tracks[0]
    return tuple(members), track.version, _keys(track.round, places), track.slowest, quorum.stopped, quorum.came_back


def _keys(keys: Sequence[Key], places: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(sorted((places[key.worker], key.local_step) for key in keys))
