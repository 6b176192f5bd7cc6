"""Several optimizers in one quorum: one membership, a rule, a round and a version for each, and never a mixture."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from torchquorum.rules import Async, Bounded, Buffered, Quorum, Rule, Sync
from torchquorum.rules.quorum import Accepted, Action, Applied, Died, Key, Reason, Refused, Released, Stuck

G, D = 0, 1


@dataclass
class Worker:
    """A program that steps its optimizers in a fixed order, again and again."""

    index: int
    life: int = 1
    order: tuple[int, ...] = (D, G)
    at: int = 0
    step: int = 0
    holds: dict[int, int] = field(default_factory=lambda: {G: 0, D: 0})
    waits: bool = False
    stop: bool = False

    @property
    def track(self) -> int:
        return self.order[self.at % len(self.order)]


class Cluster:
    """A quorum of two tracks, and programs that go through their steps when they are told to."""

    def __init__(self, rules: tuple[Rule, Rule], workers: int, *, order=(D, G), last_step=None, joined=None):
        self.quorum = Quorum(rules[G], workers, more=[(rules[D], 0)], last_step=last_step)
        self.workers: dict[int, Worker] = {}
        self.order, self.now = order, 0.0
        self.made: list[Applied] = []
        self.stuck: Stuck | None = None
        self.verdicts: Counter[Reason] = Counter()
        self.tracks: dict[Key, int] = {}
        for index in range(workers if joined is None else joined):
            self.join(index)

    def join(self, index: int, order: tuple[int, ...] | None = None) -> None:
        life = self.workers[index].life + 1 if index in self.workers else 1
        self.workers[index] = Worker(index, life, order or self.order)
        self.workers[index].waits = True
        self.follow(self.quorum.join(index, life, self.now))

    def push(self, index: int, *, finite: bool = True) -> list[Action]:
        worker = self.workers[index]
        assert not worker.waits, "a worker that waits computes nothing"
        worker.step += 1
        worker.waits = True
        key = Key(index, worker.life, worker.step)
        self.tracks[key] = worker.track
        version = worker.holds[worker.track]
        return self.follow(self.quorum.push(key, version, self.now, finite=finite, track=worker.track))

    def follow(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            match action:
                case Applied(keys, version, track):
                    assert {self.tracks[key] for key in keys} == {track}, "a round mixes gradients of two optimizers"
                    assert version == 1 + sum(1 for a in self.made if a.track == track)
                    self.made.append(action)
                case Released(index, life, _, _, stop) if self.workers[index].life == life:
                    worker = self.workers[index]
                    worker.stop |= stop
                    if worker.step:
                        worker.holds[worker.track] = self.quorum.tracks[worker.track].version
                        worker.at += 1
                    else:
                        worker.holds = {t.index: t.version for t in self.quorum.tracks}
                    worker.waits = False
                case Accepted() | Refused():
                    self.verdicts[action.reason] += 1
                case Stuck():
                    self.stuck = action
                case _:
                    pass
        return actions

    def lost(self, index: int) -> None:
        self.follow(self.quorum.lost(index, self.workers[index].life, "its process ended"))

    def go(self, steps: int, *, but: tuple[int, ...] = ()) -> None:
        """Lets everybody who computes push, in turn, so many times."""
        for _ in range(steps):
            for index, worker in self.workers.items():
                if index not in but and not worker.waits and index in self.quorum.alive:
                    self.push(index)

    @property
    def versions(self) -> list[int]:
        return [t.version for t in self.quorum.tracks]


def test_each_optimizer_has_a_version_of_its_own_and_the_first_says_how_far_the_run_is():
    cluster = Cluster((Sync(), Sync()), 2, order=(D, D, G))
    cluster.go(6)
    assert cluster.versions == [2, 4] and cluster.quorum.version == 2 and cluster.quorum.place == 6


def test_a_lone_worker_under_sync_of_two_never_mixes_the_gradients_of_two_optimizers():
    cluster = Cluster((Sync(), Sync()), 2, joined=1)
    cluster.go(8)
    assert cluster.versions == [2, 2] and cluster.stuck is None
    cluster.join(1)
    cluster.go(8)
    assert cluster.stuck is None and cluster.quorum.version >= 5


def test_each_has_its_own_rule():
    cluster = Cluster((Sync(), Async()), 3)
    cluster.go(1)
    assert cluster.versions == [0, 3]
    cluster.go(1)
    assert cluster.versions == [1, 3]


def test_workers_that_wait_in_rounds_of_different_optimizers_are_stuck():
    cluster = Cluster((Sync(), Sync()), 2, joined=0)
    cluster.join(0, (D,))
    cluster.join(1, (G,))
    cluster.go(1)
    assert cluster.stuck == Stuck(((G, (1,)), (D, (0,))))


def test_so_are_those_that_step_in_another_order():
    cluster = Cluster((Sync(), Sync()), 3, joined=0)
    for index in range(3):
        cluster.join(index, (D, G) if index < 2 else (G, D))
    cluster.go(1)
    assert cluster.stuck == Stuck(((G, (2,)), (D, (0, 1))))


def test_a_worker_that_comes_back_in_the_middle_is_let_go_until_it_is_in_step():
    for others_ahead in range(7):
        cluster = Cluster((Sync(), Sync()), 3, order=(D, D, D, D, D, G))
        cluster.go(3 + others_ahead)
        cluster.lost(2)
        cluster.go(4)
        cluster.join(2)
        cluster.go(60)
        assert cluster.stuck is None
        assert not any(w.out_of_step for w in cluster.quorum.workers.values())
        before = cluster.verdicts[Reason.STALE]
        cluster.go(24)
        assert cluster.verdicts[Reason.STALE] == before, "in step nobody is refused"


def test_one_whose_gradient_is_refused_goes_on_with_its_program_and_nobody_waits_for_ever():
    cluster = Cluster((Sync(), Sync()), 2)
    cluster.push(0)
    cluster.push(1, finite=False)
    cluster.go(20)
    assert cluster.stuck is None and cluster.quorum.version > 8


def test_programs_that_differ_are_stuck_also_when_one_came_later():
    cluster = Cluster((Sync(), Sync()), 2, joined=1, order=(D,))
    cluster.go(3)
    cluster.join(1, (G,))
    cluster.go(600)
    assert cluster.stuck is not None


def test_after_the_last_step_of_the_first_the_others_complete_what_was_begun():
    cluster = Cluster((Sync(), Sync()), 2, order=(G, D), last_step=3)
    cluster.go(5)
    assert cluster.quorum.stopped and not cluster.quorum.closed and cluster.versions == [3, 2]
    cluster.go(1)
    assert cluster.versions == [3, 3]
    cluster.go(1)
    assert cluster.versions == [3, 3] and cluster.verdicts[Reason.PAST_LAST_STEP] == 2


def test_nobody_waits_long_for_one_that_completes_nothing():
    cluster = Cluster((Sync(), Sync()), 2, order=(G, D), last_step=1)
    cluster.go(1)
    cluster.push(0)
    assert cluster.workers[0].waits
    for _ in range(40):
        cluster.now += 1.0
        for worker in (0, 1):
            cluster.quorum.seen(worker, 1, cluster.now)
        cluster.follow(cluster.quorum.expire(cluster.now))
    assert not cluster.workers[0].waits and cluster.quorum.closed


def test_a_stop_ends_all_of_them():
    cluster = Cluster((Sync(), Sync()), 2)
    cluster.push(0)
    cluster.follow(cluster.quorum.stop())
    assert not cluster.workers[0].waits and cluster.workers[0].stop
    cluster.push(1)
    assert cluster.verdicts[Reason.PAST_LAST_STEP] == 1


def test_values_given_to_one_are_the_next_version_of_that_one():
    cluster = Cluster((Sync(), Sync()), 2)
    cluster.push(0)
    cluster.follow(cluster.quorum.assign(D))
    assert cluster.versions == [0, 1] and cluster.quorum.tracks[D].round == [Key(0, 1, 1)]


RULES = st.one_of(
    st.just(Async()),
    st.just(Sync()),
    st.just(Sync(aggregate=2)),
    st.builds(Bounded, st.integers(0, 2)),
    st.just(Buffered(2)),
)


class Several(RuleBasedStateMachine):
    """Programs of one order, that die, freeze, come back, and whose gradients are refused: all of them go on for ever."""

    @initialize(g=RULES, d=RULES, workers=st.integers(1, 4), cycle=st.integers(1, 4), late=st.booleans())
    def start(self, g: Rule, d: Rule, workers: int, cycle: int, late: bool) -> None:
        self.cluster = Cluster((g, d), workers, order=(D,) * cycle + (G,), joined=1 if late else workers)

    @rule(index=st.integers(0, 3))
    def joins(self, index: int) -> None:
        cluster = self.cluster
        if index < cluster.quorum.num_workers:
            cluster.join(index)

    @rule(order=st.lists(st.integers(0, 3), min_size=1, max_size=12), finite=st.sampled_from([True] * 5 + [False]))
    def they_push(self, order: list[int], finite: bool) -> None:
        for index in order:
            worker = self.cluster.workers.get(index)
            if worker is not None and not worker.waits:
                self.cluster.push(index, finite=finite)

    @precondition(lambda self: len(self.cluster.workers) > 1)
    @rule(index=st.integers(0, 3))
    def dies(self, index: int) -> None:
        if index in self.cluster.workers and self.cluster.quorum.alive != [index]:
            self.cluster.lost(index)

    @rule(heard=st.sets(st.integers(0, 3), min_size=1))
    def time_passes(self, heard: set[int]) -> None:
        cluster = self.cluster
        cluster.now += 6.0
        for index in heard & set(cluster.workers):
            cluster.quorum.seen(index, cluster.workers[index].life, cluster.now)
        cluster.follow(cluster.quorum.expire(cluster.now))

    @invariant()
    def the_counts_are_right(self) -> None:
        quorum = self.cluster.quorum
        workers = quorum.workers
        assert quorum.held == {i for i, w in workers.items() if w.held}
        assert quorum.live == sum(w.counted for w in workers.values())
        assert quorum.idle == sum(w.counted and w.held for w in workers.values())
        for track in quorum.tracks:
            assert track.held == {i for i, w in workers.items() if w.waits_in == track.index}
            assert len(track.round) < track.needed
        assert not Counter(k for a in self.cluster.made for k in a.keys).most_common(1)[:1] or (
            Counter(k for a in self.cluster.made for k in a.keys).most_common(1)[0][1] == 1
        )

    @invariant()
    def somebody_computes(self) -> None:
        quorum = self.cluster.quorum
        assert self.cluster.stuck is None, "they all run the same program"
        assert not quorum.live or quorum.live > quorum.idle or quorum.came_back

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        cluster.follow(cluster.quorum.expire(cluster.now))
        before = cluster.versions
        cluster.go(120)
        assert not cluster.quorum.alive or all(a > b for a, b in zip(cluster.versions, before, strict=True))
        assert cluster.stuck is None


def test_a_worker_that_is_ahead_and_gives_to_rounds_of_one_is_still_out_of_step():
    """Two workers whose first gradients are refused are a step ahead of a third; under Bounded each gradient is a round of its own."""
    cluster = Cluster((Bounded(0), Sync()), 3, order=(D, D, D, G))
    cluster.now += 6.0
    cluster.quorum.seen(2, 1, cluster.now)
    cluster.follow(cluster.quorum.expire(cluster.now))
    for index in (0, 1):  # frozen for so long that what they compute is refused
        cluster.quorum.seen(index, 1, cluster.now)
    cluster.go(40)
    assert cluster.verdicts[Reason.EXPIRED] == 2
    assert cluster.stuck is None and cluster.quorum.version > 20


def test_whatever_happens_to_programs_of_one_order_all_of_their_optimizers_go_on():
    assert Several.TestCase is not None
    run_state_machine_as_test(
        Several,
        settings=settings(
            max_examples=40,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_a_death_is_told_once():
    cluster = Cluster((Sync(), Sync()), 2)
    actions = cluster.quorum.lost(1, 1, "its process ended")
    assert [a for a in actions if isinstance(a, Died)] == [Died(1, 1, "its process ended")]
