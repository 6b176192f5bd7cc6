"""The quorum under arbitrary joins, deaths, duplicates and reorderings: what must hold whatever happens.

The workers of the model behave as real ones: a released worker computes at the version of its release and then pushes;
one that waits pushes nothing new. The network repeats what it has carried, as late as it likes, and processes that were
replaced still send what they had computed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from torchquorum.rules import Async, Bounded, Buffered, Quorum, Rule, Sync
from torchquorum.rules.quorum import (
    Accepted,
    Action,
    Applied,
    Died,
    Discarded,
    Key,
    Reason,
    Refused,
    Released,
    Repeated,
    Worker,
)
from torchquorum.rules.track import Track

WORKERS = st.integers(0, 4)
BOUNDS = st.none() | st.integers(0, 3)
PRESETS = st.one_of(
    st.just(Async()),
    st.builds(Sync, st.none() | st.integers(1, 5)),
    st.builds(Bounded, st.integers(0, 3)),
    st.builds(Buffered, st.integers(1, 5)),
    st.builds(Sync, st.just("auto"), floor=st.none() | st.integers(1, 5), noise=st.none() | st.floats(0, 10)),
)
CUSTOM = st.builds(Rule, aggregate=st.integers(1, 5), max_staleness=BOUNDS, max_lead=BOUNDS)


@dataclass
class Process:
    """One life of a worker, as it sees itself."""

    worker: int
    incarnation: int
    version: int = 0
    local_step: int = 0
    waits: bool = False
    told_to_stop: bool = False


class World(RuleBasedStateMachine):
    """A quorum, its workers, a network that repeats itself, and the books that are kept about all of them.

    Every rule and every invariant asserts. `seen` counts what happened in all the worlds together.
    """

    seen: ClassVar[Counter[type]] = Counter()

    @initialize(
        rule=PRESETS | CUSTOM,
        num_workers=st.integers(1, 5),
        joined=st.sampled_from([5, 5, 5, 1, 0]),
        version=st.integers(0, 2),
        last_step=st.sampled_from([None, None, None, 1, 4, 12]),
    )
    def start(self, rule: Rule, num_workers: int, joined: int, version: int, last_step: int | None) -> None:
        self.quorum = Quorum(rule, num_workers, version=version, last_step=last_step)
        self.start_version = version
        self.now = 0.0
        self.births = 0
        self.current: dict[int, Process] = {}
        self.ghosts: list[Process] = []
        self.joins: list[tuple[int, int]] = []
        self.sent: list[tuple[Key, int]] = []
        self.alive: set[int] = set()
        self.left: set[int] = set()
        self.accepted: dict[Key, Accepted] = {}
        self.refused: set[Key] = set()
        self.applied: Counter[Key] = Counter()
        self.updates = 0
        self.unsettled = False  # somebody came back to life by a mere sign of it; the next event or tick settles that
        for worker in range(min(joined, num_workers)):
            self.a_process_starts(worker)

    # -- what happens ---------------------------------------------------------------------------------------------

    @rule(worker=WORKERS)
    def a_process_starts(self, worker: int) -> None:
        assume(worker < self.quorum.num_workers)
        self.births += 1
        if worker in self.current:
            self.ghosts.append(self.current[worker])
        self.current[worker] = Process(worker, self.births)
        self.joins.append((worker, self.births))
        self.left.discard(worker)
        self.alive.add(worker)
        self.unsettled = False
        actions = self.quorum.join(worker, self.births, self.now)
        self.follow(actions)
        assert any(isinstance(a, Released) and a.worker == worker for a in actions)

    @precondition(lambda self: self.joins)
    @rule(data=st.data())
    def a_join_is_delivered_again(self, data: st.DataObject) -> None:
        worker, incarnation = data.draw(st.sampled_from(self.joins))
        if self.is_current(worker, incarnation):
            self.alive.add(worker)
            self.unsettled = False
        self.follow(self.quorum.join(worker, incarnation, self.now))

    @rule(workers=st.lists(WORKERS, min_size=1, max_size=8), finite=st.sampled_from([True, True, True, False]))
    def workers_push(self, workers: list[int], finite: bool) -> None:
        for worker in workers:
            if worker in self.able():
                self.push(self.current[worker], finite)

    @rule(worker=WORKERS)
    def a_worker_pushes(self, worker: int) -> None:
        if worker in self.able():
            self.push(self.current[worker], True)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def a_push_is_delivered_again(self, data: st.DataObject) -> None:
        key, version = data.draw(st.sampled_from(self.sent))
        if self.is_current(key.worker, key.incarnation):
            self.unsettled |= key.worker not in self.alive
            self.alive.add(key.worker)
        before = self.quorum.version, list(self.quorum.round)
        assert self.quorum.push(key, version, self.now) == [Repeated(key)]
        assert before == (self.quorum.version, self.quorum.round)

    @precondition(lambda self: self.ghosts)
    @rule(data=st.data())
    def a_replaced_process_pushes(self, data: st.DataObject) -> None:
        ghost = data.draw(st.sampled_from(self.ghosts))
        if not ghost.waits:
            actions = self.push(ghost, True)
            assert [a.reason for a in actions if isinstance(a, Refused)] == [Reason.OLD_INCARNATION]

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def a_process_ends(self, data: st.DataObject) -> None:
        process = self.pick(data)
        if self.is_current(process.worker, process.incarnation):
            self.alive.discard(process.worker)
        self.follow(self.quorum.lost(process.worker, process.incarnation, "its process ended"))

    @precondition(lambda self: len(self.left) + 1 < len(self.current))
    @rule(data=st.data())
    def a_worker_leaves(self, data: st.DataObject) -> None:
        process = self.pick(data)
        if self.is_current(process.worker, process.incarnation):
            self.alive.discard(process.worker)
            self.left.add(process.worker)
        self.follow(self.quorum.leave(process.worker, process.incarnation))

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def a_sign_of_life_arrives(self, data: st.DataObject) -> None:
        process = self.pick(data)
        if self.is_current(process.worker, process.incarnation):
            self.unsettled |= process.worker not in self.alive
            self.alive.add(process.worker)
        self.quorum.seen(process.worker, process.incarnation, self.now)

    @rule(step_s=st.sampled_from([0.0, 1.0, 4.0, 6.0, 100.0]), heard=st.sets(WORKERS))
    def time_passes(self, step_s: float, heard: set[int]) -> None:
        self.now += step_s
        for worker in heard & self.alive:
            self.quorum.seen(worker, self.current[worker].incarnation, self.now)
        actions = self.quorum.expire(self.now)
        self.alive -= {a.worker for a in actions if isinstance(a, Died)}
        self.unsettled = False
        self.follow(actions)

    @precondition(lambda self: self.updates > 8)
    @rule()
    def the_run_is_stopped(self) -> None:
        self.follow(self.quorum.stop())

    def pick(self, data: st.DataObject) -> Process:
        """One of the lives that count or, more rarely, one that has been replaced."""
        return data.draw(st.sampled_from([*self.current.values()] * 3 + self.ghosts[-2:]))

    # -- how the workers behave -----------------------------------------------------------------------------------

    def is_current(self, worker: int, incarnation: int) -> bool:
        """Whether this is the life of the worker that counts, and it has not left."""
        return self.current[worker].incarnation == incarnation and worker not in self.left

    def able(self) -> list[int]:
        """The workers that have something to push: also frozen ones, which come back to life with it."""
        return [i for i, p in self.current.items() if i not in self.left and not p.waits and not p.told_to_stop]

    def push(self, process: Process, finite: bool) -> list[Action]:
        process.local_step += 1
        process.waits = True
        key = Key(process.worker, process.incarnation, process.local_step)
        self.sent.append((key, process.version))
        if self.is_current(process.worker, process.incarnation):
            self.alive.add(process.worker)
            self.unsettled = False
        self.needed = self.quorum.needed  # "auto" may choose another number in the course of the call
        actions = self.quorum.push(key, process.version, self.now, finite=finite)
        verdict = actions[0]
        assert isinstance(verdict, Accepted | Refused) and verdict.key == key
        self.follow(actions)
        return actions

    def follow(self, actions: list[Action]) -> None:
        """Does what the quorum said, and keeps the books."""
        for action in actions:
            self.seen[type(action)] += 1
            match action:
                case Accepted(key):
                    assert key not in self.accepted and key not in self.refused
                    self.check_acceptance(action)
                    self.accepted[key] = action
                case Refused(key):
                    assert key not in self.accepted and key not in self.refused
                    self.refused.add(key)
                case Applied(keys, version):
                    self.updates += 1
                    self.applied.update(keys)
                    assert version == self.start_version + self.updates
                    assert len(keys) >= self.quorum.rule.least(self.quorum.num_workers)
                    assert len(keys) == self.quorum.needed or self.quorum.rule.auto
                    assert list(keys) == sorted(keys)
                    assert all(key in self.accepted for key in keys)
                case Released(worker, incarnation, local_step, version, stop):
                    process = self.current[worker]
                    assert incarnation == process.incarnation and worker not in self.left
                    assert local_step == process.local_step
                    process.waits, process.version, process.told_to_stop = False, version, stop
                case _:
                    pass

    def check_acceptance(self, accepted: Accepted) -> None:
        rule, key = self.quorum.rule, accepted.key
        assert not self.quorum.stopped or self.quorum.version == accepted.met + 1
        if rule.max_staleness is not None:
            assert accepted.met - accepted.version <= rule.max_staleness
            twice = any(k.worker == key.worker and a.met == accepted.met for k, a in self.accepted.items())
            assert not (twice and len(self.alive) >= self.needed)

    # -- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def no_gradient_is_applied_twice_and_none_is_lost(self) -> None:
        assert all(count == 1 for count in self.applied.values())
        assert {key for key, _ in self.sent} == self.accepted.keys() | self.refused
        assert not self.accepted.keys() & self.refused
        pending = self.quorum.round
        assert len(pending) == len(set(pending)) < self.quorum.needed
        assert self.accepted.keys() == self.applied.keys() | set(pending)
        assert not self.applied.keys() & set(pending)

    @invariant()
    def the_version_counts_the_updates_and_ends_at_the_last_step(self) -> None:
        quorum = self.quorum
        assert quorum.version == self.start_version + self.updates
        if quorum.last_step is not None:
            assert quorum.version <= max(quorum.last_step, self.start_version)
            assert quorum.stopped or quorum.version < quorum.last_step

    @invariant()
    def the_counts_agree_with_the_workers(self) -> None:
        quorum = self.quorum
        assert set(quorum.alive) == self.alive and quorum.live == len(self.alive)
        assert quorum.held == {i for i, w in quorum.workers.items() if w.held}
        assert quorum.held == {i for i, p in self.current.items() if p.waits and i not in self.left}
        assert quorum.idle == len(quorum.held & self.alive)

    @invariant()
    def somebody_computes_unless_the_run_is_over(self) -> None:
        quorum = self.quorum
        if quorum.stopped:
            assert not quorum.held
        elif quorum.live and not self.unsettled:
            assert quorum.live > quorum.idle

    @invariant()
    def who_waits_can_say_for_what(self) -> None:
        for worker in self.current:
            wait = self.quorum.waits_for(worker)
            assert (wait is not None) == (worker in self.quorum.held)
            if wait is not None and worker in self.alive and not self.unsettled:
                assert wait.missing

    def teardown(self) -> None:
        """Drives the live workers in turn: that must lead to updates, and then to an end without anyone waiting."""
        if not hasattr(self, "quorum"):
            return
        self.follow(
            self.quorum.expire(max((w.last_seen for w in self.quorum.workers.values() if w.alive), default=0.0))
        )
        for _ in range(3):
            self.drive_to_the_next_version()
        self.follow(self.quorum.stop())
        assert not self.quorum.held
        pending = tuple(self.quorum.round)
        assert self.quorum.close() == ([Discarded(pending)] if pending else [])
        assert self.accepted.keys() == self.applied.keys() | set(pending)

    def drive_to_the_next_version(self) -> None:
        before = self.quorum.version
        turns = 3 * self.quorum.needed + 5 * (1 + (self.quorum.rule.max_lead or 0))
        for _ in range(turns):
            if self.quorum.stopped or not self.alive or self.quorum.version > before:
                return
            computing = [i for i in self.able() if i in self.alive]
            assert computing, "everyone alive waits"
            for worker in computing:
                if not self.current[worker].waits and not self.current[worker].told_to_stop:
                    self.push(self.current[worker], True)
        assert self.quorum.version > before, "the workers push and push, and nothing is applied"


def test_whatever_happens_the_invariants_hold_and_nobody_waits_for_ever():
    World.seen.clear()
    run_state_machine_as_test(
        World,
        settings=settings(
            max_examples=300,  # `make fuzz` tries many more
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )
    # The worlds were worth asking: gradients came and were refused, updates were made, workers went on and died.
    assert set(World.seen) >= {Accepted, Refused, Applied, Released, Died}


# -- cost: a simulator of thousands of workers must not pay for all of them at every event ----------------------------


class Counting(Quorum):
    """Counts how often the quorum looks at a waiting worker."""

    looks = 0

    def must_wait(self, worker: Worker, of: Track, slowest: int) -> bool:
        self.looks += 1
        return super().must_wait(worker, of, slowest)


def joined(rule: Rule, num_workers: int) -> Counting:
    quorum = Counting(rule, num_workers)
    for worker in range(num_workers):
        quorum.join(worker, 1, 0.0)
    return quorum


@pytest.mark.parametrize("dead", [0, 1, 900])
def test_a_sync_round_of_thousands_costs_as_much_as_it_has_gradients(dead):
    quorum = joined(Sync(), 2000)
    for worker in range(dead):
        quorum.lost(worker, 1, "its process ended")
    quorum.looks, pushes = 0, 0
    steps = dict.fromkeys(range(dead, 2000), 0)
    for version in range(1, 4):
        while quorum.version < version:
            for worker in steps:
                if worker not in quorum.held and quorum.version < version:
                    steps[worker] += 1
                    pushes += 1
                    quorum.push(Key(worker, 1, steps[worker]), quorum.version, 0.0)
    assert quorum.version == 3 and pushes == 6000
    assert quorum.looks <= 3 * pushes


@pytest.mark.parametrize("rule", [Async(), Bounded(3), Buffered(100)], ids=str)
def test_twenty_thousand_pushes_of_two_thousand_workers_cost_a_look_each(rule):
    quorum = joined(rule, 2000)
    quorum.looks = 0
    for step in range(1, 11):
        for worker in range(2000):
            quorum.push(Key(worker, 1, step), quorum.version, 0.0)
    assert quorum.version == 20_000 // quorum.needed
    assert quorum.looks <= 3 * 20_000


def test_thousands_of_deaths_at_once_are_settled_once():
    quorum = joined(Sync(), 2000)
    for worker in range(1000):
        quorum.push(Key(worker, 1, 1), 0, 0.0)
    for worker in range(10):
        quorum.seen(worker, 1, 9.0)
    quorum.looks = 0
    actions = quorum.expire(10.0)
    assert sum(isinstance(a, Died) for a in actions) == 1990
    assert quorum.live == 10 and quorum.looks <= 2000
