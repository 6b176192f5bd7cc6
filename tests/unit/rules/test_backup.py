"""The choice of how many gradients to wait for, alone and in the quorum."""

from __future__ import annotations

import random

import pytest

from torchquorum.rules import Quorum, Rule, Sync, backup
from torchquorum.rules.backup import (
    CHANGED,
    EVERY,
    LATE,
    MINIATURE,
    MOST_ROUNDS_BETWEEN,
    WARM,
    BackupChooser,
    play_rounds,
    search,
)
from torchquorum.rules.quorum import Applied, Chose, Key, Released


def known(seconds: dict[int, list[float]], noise: float | None = None) -> BackupChooser:
    """A chooser that has seen these steps of these workers."""
    chooser = BackupChooser(noise)
    for worker, steps in seconds.items():
        chooser.times.joins(worker)
        now = 0.0
        for step in [1.0, *steps]:
            chooser.times.begins(worker, now)
            now += step
            chooser.times.ends(worker, now)
    return chooser


def constant(*seconds: float) -> dict[int, list[float]]:
    return {i: [s] * WARM for i, s in enumerate(seconds)}


def test_the_figures_that_decide_when_it_chooses() -> None:
    """Stated once more here: every other test takes them from the module, and would follow a change without a word."""
    assert (WARM, EVERY, MOST_ROUNDS_BETWEEN, MINIATURE, CHANGED, LATE) == (4, 32, 128, 64, 16, 4.0)


def test_what_is_unknown_is_no_sample_and_answers_are_plain() -> None:
    chooser = BackupChooser(None)
    assert chooser.is_due(0, [0, 1]) is False and chooser.is_late(0.0, 1e9) is False
    assert chooser.choose([0, 1], 1, 1, 0, 0.0) == 2


def test_a_first_choice_counts_changes_of_speed_from_then_on() -> None:
    """With sixteen workers one change is not enough, with fifteen it is; counted from none at the beginning."""
    for workers, due in ((16, False), (15, True)):
        chooser = known(constant(*[1.0] * workers))
        chooser.choose(range(workers), 1, workers, 0, 100.0)
        assert not chooser.is_due(1, range(workers))
        chooser.times.changes += 1
        assert chooser.is_due(1, range(workers)) is due


def test_a_round_that_began_early_is_late_by_the_clock_alone() -> None:
    chooser = known(constant(1.0, 1.0))
    chooser.choose([0, 1], 1, 2, 0, 100.0)
    assert chooser.round_s is not None
    late = LATE * chooser.round_s
    assert chooser.is_late(-0.5, late) and not chooser.is_late(-0.5, late + 0.1)


def test_the_miniature_has_the_speeds_of_the_cluster_in_their_proportion() -> None:
    """Every other worker is slow, in turn: taken by number, all chosen ones could be of one kind."""
    seconds = [1.0 if i % 2 == 0 else 4.0 for i in range(4 * MINIATURE)]
    chooser = known(constant(*seconds))
    chosen = chooser.choose(range(len(seconds)), 1, len(seconds), 0, 100.0)
    assert abs(chosen - len(seconds) // 2) <= 4


# -- rounds in miniature ----------------------------------------------------------------------------------------------


def test_a_round_takes_as_long_as_the_slowest_of_those_waited_for() -> None:
    samples = [[1.0], [2.0], [5.0]]
    assert [play_rounds(samples, k) for k in (1, 2, 3)] == pytest.approx([1.0, 2.0, 5.0])
    descending = [[9.0], [5.0], [2.0], [1.0]]
    assert [play_rounds(descending, k) for k in (1, 2, 3)] == pytest.approx([1.0, 2.0, 5.0])


def test_a_late_worker_ends_its_old_gradient_before_it_begins_another() -> None:
    """Two waited for of steps 1, 1 and, in turn, 3 and 1: the third never counts, and the first two need no third."""
    assert play_rounds([[1.0], [1.0], [3.0, 1.0]], 2) == pytest.approx(1.0)
    # Waited for 2 of 2, where one takes 1 and 3 in turn: (1 + 3) / 2.
    assert play_rounds([[1.0], [1.0, 3.0]], 2) == pytest.approx(2.0)


def test_times_of_zero_are_no_division_by_zero() -> None:
    assert play_rounds([[0.0], [0.0]], 2) > 0


# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ((1.0, 1.0, 1.0, 1.0), 4),  # nobody is slow
        ((1.0, 1.0, 1.0, 1.2), 4),  # 4 / 1.2 is more than 3 / 1
        ((1.0, 1.0, 1.0, 1.5), 3),  # and 4 / 1.5 is less
        ((1.0, 1.0, 9.0, 9.0), 2),
        ((1.0, 5.0, 5.0, 9.0), 3),  # 1 / 1 would be the most, but the floor is two; 3 / 5 is more than 2 / 5
    ],
)
def test_the_number_with_the_most_gradients_per_second_is_chosen(seconds: tuple[float, ...], best: int) -> None:
    assert known(constant(*seconds)).choose(range(4), 2, 4, 0, 0.0) == best


def test_never_below_the_floor_and_never_more_than_live_beyond_it() -> None:
    chooser = known(constant(1.0, 5.0, 9.0, 20.0))
    assert [chooser.choose(range(4), floor, 4, 0, 0.0) for floor in (1, 2, 3, 4, 6)] == [1, 2, 3, 4, 6]
    assert chooser.choose(range(2), 1, 4, 0, 0.0) == 1
    assert known(constant(1.0, 1.0, 9.0)).choose([0, 1], 1, 3, 0, 0.0) == 2


def test_with_noise_known_fewer_gradients_may_be_worth_as_much() -> None:
    seconds = constant(1.0, 1.0, 1.0, 1.2)
    assert known(seconds).choose(range(4), 1, 4, 0, 0.0) == 4
    assert known(seconds, noise=0.0).choose(range(4), 1, 4, 0, 0.0) in (1, 2, 3)  # an update is an update: no slow one
    assert known(seconds, noise=100.0).choose(range(4), 1, 4, 0, 0.0) == 4
    assert BackupChooser(8.0).gain(8) == 0.5 and BackupChooser(None).gain(8) == 8.0


def test_a_number_that_promises_little_more_is_not_chosen() -> None:
    seconds = constant(1.0, 1.0, 1.0, 1.34)  # 3 / 1 is half a percent more than 4 / 1.34
    assert known(seconds).choose(range(4), 1, 4, 0, 0.0) == 4
    assert known(seconds).choose(range(4), 1, 3, 0, 0.0) == 3


def test_who_is_not_known_is_taken_for_a_typical_one() -> None:
    chooser = known(constant(1.0, 1.0, 9.0))
    assert chooser.choose(range(4), 1, 4, 0, 0.0) == 3  # the fourth is as the first two
    assert BackupChooser(None).choose(range(3), 1, 2, 0, 0.0) == 3  # nothing is known: all are waited for


@pytest.mark.parametrize(("workers", "slow"), [(100, 20), (1000, 30)])
def test_in_a_large_cluster_the_slow_ones_are_found_too(workers: int, slow: int) -> None:
    source = random.Random(1)
    seconds = {i: [source.uniform(0.9, 1.1) * (9.0 if i < slow else 1.0) for _ in range(WARM)] for i in range(workers)}
    chosen = known(seconds).choose(range(workers), workers // 2, workers, 0, 0.0)
    assert workers - slow - 2 * workers / MINIATURE <= chosen <= workers - slow


def test_it_is_due_once_all_are_known_and_then_ever_more_rarely() -> None:
    chooser = known({0: [1.0] * WARM, 1: [1.0] * (WARM - 1)})
    assert not chooser.is_due(5, [0, 1]) and chooser.is_due(5, [0])
    version, gaps = 5, []
    chooser.choose([0, 1], 1, 2, version, 0.0)
    for _ in range(4):
        due = next(v for v in range(version + 1, version + 1000) if chooser.is_due(v, [0, 1]))
        gaps.append(due - version)
        version = due
        chooser.choose([0, 1], 1, 2, version, 0.0)
    assert gaps == [2 * EVERY, 4 * EVERY, MOST_ROUNDS_BETWEEN, MOST_ROUNDS_BETWEEN]
    chooser.times.joins(2)  # something is new
    assert chooser.is_due(version + 1, [0, 1, 2])


def test_a_round_is_late_once_per_doubling() -> None:
    chooser = known(constant(1.0, 1.0))
    assert not chooser.is_late(0.0, 1e9)  # nothing is expected yet
    chooser.choose([0, 1], 1, 2, 0, 0.0)
    assert chooser.round_s == pytest.approx(1.0)
    late = [now for now in range(1, 40) if chooser.is_late(0.0, float(now))]
    assert late == [LATE + 1, 2 * (LATE + 1), 4 * (LATE + 1)]
    assert (
        chooser.is_late(39.0, 50.0) is True and chooser.is_late(39.0, 51.0) is False
    )  # another round, and again too soon


def test_the_first_round_that_is_late_is_looked_at_however_short_rounds_are() -> None:
    chooser = known(constant(0.001, 0.001))
    chooser.choose([0, 1], 1, 2, 0, 100.0)
    assert chooser.is_late(0.0, 0.01)


def test_few_numbers_are_tried_of_many() -> None:
    for best in (1, 300, 950, 999):
        tried: list[int] = []

        def rate(k: int, best: int = best, tried: list[int] = tried) -> float:
            tried.append(k)
            return -abs(k - best)

        assert search(rate, 1, 1000) == best and len(set(tried)) < 50
    seen = set[int]()
    assert search(lambda k: seen.add(k) or float(k), 1, 20) == 20
    assert sorted(seen) == [1, 7, 11, 14, 16, 17, 18, 19, 20]  # the more, the farther apart


# -- in the quorum ----------------------------------------------------------------------------------------------------


class Cluster:
    """Workers with constant times around a quorum, in virtual time."""

    def __init__(self, rule: Rule, *seconds: float) -> None:
        self.quorum = Quorum(rule, len(seconds))
        self.seconds = dict(enumerate(seconds))
        self.now = 0.0
        self.ends: dict[int, float] = {}
        self.at: dict[int, int] = {}
        self.steps = dict.fromkeys(self.seconds, 0)
        self.sizes: list[int] = []
        self.chose: list[Chose] = []
        for worker in self.seconds:
            self.follow(self.quorum.join(worker, 1, 0.0))

    def follow(self, actions: list) -> None:
        for action in actions:
            match action:
                case Released(worker, _, _, version):
                    self.ends[worker] = self.now + self.seconds[worker]
                    self.at[worker] = version
                case Applied(keys):
                    self.sizes.append(len(keys))
                case Chose():
                    self.chose.append(action)

    def run(self, updates: int) -> None:
        goal = self.quorum.version + updates
        while self.quorum.version < goal:
            worker = min(self.ends, key=lambda w: self.ends[w])
            self.now = self.ends.pop(worker)
            self.steps[worker] += 1
            key = Key(worker, 1, self.steps[worker])
            self.follow(self.quorum.push(key, self.at[worker], self.now))


def test_a_quorum_with_auto_leaves_out_the_slow_worker_once_it_knows_it() -> None:
    cluster = Cluster(Sync("auto"), 1.0, 1.0, 1.0, 5.0)
    cluster.run(20)
    assert cluster.sizes == [4] * (WARM + 1) + [3] * (20 - WARM - 1)
    (chose,) = cluster.chose
    assert chose == Chose(3, 4, chose.round_s, chose.now)
    assert (chose.round_s, chose.now) == pytest.approx((1.0, 5.0 * (WARM + 1)))
    assert cluster.quorum.needed == 3


def test_it_takes_the_worker_back_when_that_is_fast_again() -> None:
    cluster = Cluster(Sync("auto"), 1.0, 1.0, 1.0, 5.0)
    cluster.run(20)
    cluster.seconds[3] = 1.0
    cluster.run(20)
    assert cluster.sizes[-1] == 4 and [c.aggregate for c in cluster.chose] == [3, 4]
    cluster.seconds[0] = cluster.seconds[1] = 4.0
    cluster.run(40)
    assert cluster.sizes[-1] == 2


def test_a_worker_that_hangs_is_not_waited_for_longer_than_a_few_rounds() -> None:
    cluster = Cluster(Sync("auto"), 1.0, 1.1, 1.2)
    cluster.run(10)
    cluster.seconds[2] = 1e6
    cluster.run(1)
    for worker in (0, 1):
        cluster.now = cluster.ends.pop(worker)
        cluster.steps[worker] += 1
        cluster.follow(cluster.quorum.push(Key(worker, 1, cluster.steps[worker]), cluster.at[worker], cluster.now))
    assert len(cluster.quorum.round) == 2
    began, version = cluster.now - 1.1, cluster.quorum.version
    for _ in range(40):
        cluster.now += 0.25
        for worker in cluster.seconds:
            cluster.quorum.seen(worker, 1, cluster.now)
        cluster.follow(cluster.quorum.expire(cluster.now))
    assert cluster.quorum.version > version and cluster.sizes[-1] == 2
    assert cluster.chose[-1].now - began < 2 * LATE * 1.2
    assert cluster.quorum.needed == 2


def test_a_death_makes_it_choose_among_those_left_and_closes_the_round_whole() -> None:
    cluster = Cluster(Sync("auto", floor=1), 1.0, 1.0, 1.0, 1.0)
    cluster.run(10)
    for worker in (0, 1, 2):
        cluster.now = cluster.ends.pop(worker)
        cluster.steps[worker] += 1
        cluster.follow(cluster.quorum.push(Key(worker, 1, cluster.steps[worker]), cluster.at[worker], cluster.now))
    version = cluster.quorum.version
    cluster.follow(cluster.quorum.lost(3, 1, "its process ended"))
    assert cluster.quorum.version == version + 1 and cluster.sizes[-1] == 3
    assert (cluster.chose[-1].aggregate, cluster.chose[-1].live) == (3, 3)
    for worker in (1, 2):
        cluster.follow(cluster.quorum.lost(worker, 1, "its process ended"))
    assert cluster.quorum.needed == 1


def test_before_it_knows_anything_it_waits_for_all_as_sync_does() -> None:
    auto, plain = Quorum(Sync("auto"), 3), Quorum(Sync(), 3)
    for quorum in (auto, plain):
        quorum.join(0, 1, 0.0)
        quorum.lost(0, 1, "its process ended")
        quorum.join(0, 2, 1.0)
    assert auto.needed == plain.needed == 3
    assert auto.push(Key(0, 2, 1), 0, 2.0) == plain.push(Key(0, 2, 1), 0, 2.0)


def test_the_same_events_make_the_same_choices() -> None:
    one, two = (Cluster(Sync("auto"), 1.0, 1.3, 1.1, 4.0) for _ in range(2))
    for cluster in (one, two):
        cluster.run(60)
    assert one.chose == two.chose and one.sizes == two.sizes


# -- in numbers -------------------------------------------------------------------------------------------------------


def test_a_late_round_is_looked_at_again_when_it_has_lasted_twice_as_long() -> None:
    chooser = known(constant(1.0, 1.0))
    chooser.choose([0, 1], 1, 2, 0, 100.0)
    assert chooser.round_s == pytest.approx(1.0)
    assert [chooser.is_late(10.0, now) for now in (14.0, 14.5, 17.0, 18.9, 19.5)] == [False, True, False, False, True]


def test_where_there_is_nothing_to_choose_nothing_is_expected() -> None:
    chooser = known(constant(1.0, 1.0))
    assert chooser.choose([0, 1], 2, 1, 0, 100.0) == 2 and chooser.round_s is None


def test_a_worker_of_which_nothing_is_known_is_a_typical_one() -> None:
    """Of speeds 1, 5 and 9 the typical one is 5: then three gradients in 5 s are best; as fast as the first, 2; as the last, all."""
    assert known(constant(1.0, 5.0, 9.0)).choose([0, 1, 2, 3], 2, 4, 0, 100.0) == 3
    chooser = known({0: [1.0] * 4, 1: [4.5, 5.0, 5.0, 30.0], 2: [9.0] * 4})
    chosen = chooser.choose([0, 1, 2, 3], 3, 4, 0, 100.0)
    samples = [[1.0] * 4, [4.5, 5.0, 5.0, 30.0], [9.0] * 4]
    assert chooser.round_s == play_rounds([*samples, [5.0]], chosen)
    assert all(chooser.round_s != play_rounds([*samples, [other]], chosen) for other in (4.5, 30.0))


def test_a_large_cluster_is_played_with_every_so_many_th_of_its_workers_by_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played: list[list[float]] = []

    def note(samples: list[list[float]], k: int) -> float:
        played.append([own[0] for own in samples])
        return play_rounds(samples, k)

    monkeypatch.setattr(backup, "play_rounds", note)
    speeds = [1.0 + i / 100 for i in range(2 * MINIATURE)]
    known(constant(*speeds)).choose(range(len(speeds)), 1, len(speeds), 0, 1e6)
    assert played and all(own == pytest.approx(speeds[1::2]) for own in played)


def test_rounds_are_played_from_the_beginning_so_many_times() -> None:
    """256 of one worker, 128 of two, 16 of seventeen: a step that is longer comes in the last of them."""
    assert play_rounds([[1.0] * 255 + [257.0] + [1.0] * 1000], 1) == 2.0
    assert play_rounds([[1.0] * 127 + [129.0] + [1.0] * 1000, [1.0]], 2) == 2.0
    assert play_rounds([[1.0] * 15 + [17.0] + [1.0] * 100, *[[1.0]] * 16], 17) == 2.0
    assert play_rounds([[1.0], [1.5]], 1) == 1.0
    assert play_rounds([[1.0], [3.0, 1.0]], 2) == 2.0
    assert play_rounds([[3.0, 1.0]], 1) == 2.0
    assert play_rounds([[1.0, 4.0], [3.0, 1.0]], 2) == 3.5


def test_the_best_of_a_range_is_found_wherever_it_is() -> None:
    for peak in range(1, 201):
        assert search(lambda k, peak=peak: -abs(k - peak), 1, 200) == peak
    assert search(lambda k: {9: 10.0, 6: 9.0}.get(k, 0.0), 6, 10) == 9  # few: all are tried
