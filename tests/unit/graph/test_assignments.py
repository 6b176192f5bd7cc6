"""Which task computes which batch, and what happens to the batches of a task that is lost."""

import pytest

from torchquorum.graph import graph_messages as g
from torchquorum.graph.assignments import Assignments, GivenBatch
from torchquorum.worker.step import Step


def assignments(tasks: int = 2, batches: int = 0, **options: object) -> Assignments:
    made = Assignments(**options)  # type: ignore[arg-type]
    for index in range(tasks):
        made.ready(index, 100 + index, 0, f"/job:worker/task:{index}/device:CPU:0")
    for number in range(batches):
        made.waiting.append(GivenBatch(number, number, [], []))
    return made


def give_all(made: Assignments) -> list[tuple[int, int]]:
    given = []
    while (pair := made.next()) is not None:
        given.append((pair[0].index, pair[1].number))
    return given


def done(number: int, local_step: int, *, accepted: bool = True, reason: str = "fresh") -> g.Done:
    return g.Done("r", "l", number, 0.5, Step(local_step, local_step, accepted, reason, 0, 0.1, False), 0.01)


def test_batches_go_to_whoever_has_least_and_nobody_gets_more_than_the_depth() -> None:
    made = assignments(2, 7)
    assert give_all(made) == [(0, 0), (1, 1), (0, 2), (1, 3)]
    made.done(1, done(1, 1))
    made.done(1, done(3, 2))
    assert give_all(made) == [(1, 4), (1, 5)]
    assert made.room < 0 and made.unfinished == 5


def test_in_turn_the_order_in_which_tasks_finish_does_not_matter() -> None:
    made = assignments(2, 8, in_turn=True)
    give_all(made)
    made.done(1, done(1, 1))
    assert give_all(made) == []  # it is the first one's turn
    made.done(0, done(0, 1))
    assert give_all(made) == [(0, 4), (1, 5)]


def test_in_turn_a_task_of_whose_results_word_is_late_keeps_its_turn() -> None:
    made = assignments(2, 8, in_turn=True)
    give_all(made)
    made.done(1, done(1, 1))
    made.done(1, done(3, 2))  # two rounds are made, in which the first one's 0 and 2 were
    assert give_all(made) == []
    made.assignees[0].waiting_for, made.assignees[0].version = (
        {2: "the quorum (1 of 2)"},
        1,
    )  # what it said before the second
    assert give_all(made) == []
    made.assignees[0].version = 2  # that batch waits in the third round, for which the other one has nothing
    assert give_all(made) == [(1, 4)]


def test_in_turn_a_task_that_came_late_is_not_left_without_work() -> None:
    made = assignments(1, 9, in_turn=True)
    give_all(made)
    for number in (0, 1):
        made.done(0, done(number, number + 1))
        give_all(made)
    made.ready(1, 101, 0, "late")
    assert [index for index, _ in give_all(made)] == [1, 1]


def test_a_preferred_task_gets_its_batches_while_it_lives() -> None:
    made = assignments(2)
    made.waiting.extend(GivenBatch(n, n, [], [], preferred=1) for n in range(3))
    made.waiting.append(GivenBatch(3, 3, [], []))
    assert give_all(made) == [(1, 0), (1, 1), (0, 3)]  # others are not held up by a preference
    made.lost(1)
    assert give_all(made) == [(0, 2)]


def test_the_batches_of_a_lost_task_are_in_doubt_under_the_names_of_their_gradients() -> None:
    made = assignments(2, 4)
    give_all(made)
    made.done(0, done(0, 7))
    made.lost(0)
    (doubt,) = made.doubts
    assert (doubt.batch.number, doubt.worker, doubt.incarnation, doubt.local_step) == (2, 0, 100, 8)
    assert made.unfinished == 3


@pytest.mark.parametrize(("state", "reason"), [("never", ""), ("refused", "expired")])
def test_a_batch_that_was_never_applied_is_given_to_another(state: str, reason: str) -> None:
    made = assignments(2, 2)
    give_all(made)
    made.lost(0)
    made.settle(made.doubts[0], "open", "", 0, None)
    assert made.doubts and not made.waiting  # its task may still push it
    made.settle(made.doubts[0], state, reason, 0, None)
    (again,) = give_all(made)
    assert again == (1, 0)


@pytest.mark.parametrize("state", ["accepted", "refused"])
def test_a_batch_that_was_decided_on_is_not_computed_again(state: str) -> None:
    made = assignments(2, 2)
    give_all(made)
    made.lost(0)
    doubt = made.doubts[0]
    made.settle(doubt, state, "stale", 5, 0.25)
    assert not made.waiting and not made.doubts
    result = doubt.batch.result
    assert result is not None and result.accepted is (state == "accepted") and result.loss == 0.25
    assert "its task was lost afterwards" in result.reason


def test_a_gradient_that_came_after_its_task_was_taken_for_dead_is_computed_again() -> None:
    made = assignments(1, 1)
    give_all(made)
    made.done(0, done(0, 1, accepted=False, reason="expired"))
    assert give_all(made) == [(0, 0)]


def test_a_result_of_a_batch_that_was_taken_away_is_nobodys_business() -> None:
    made = assignments(2, 1)
    give_all(made)
    made.lost(0)
    made.ready(0, 200, 0, "new life")
    made.done(0, done(0, 1))
    assert made.doubts[0].batch.result is None


def test_a_task_that_was_only_thought_to_be_lost_has_its_batches_back_unless_they_were_given_away() -> None:
    made = assignments(2, 6)
    give_all(made)
    assert [b.number for b in made.assignees[0].queue] == [0, 2]
    made.lost(0)
    made.settle(made.doubts[0], "never", "", 0, None)
    assert give_all(made) == []  # the other has enough to do
    made.ready(0, 100, 3, "thawed", busy_with=0)
    assert not made.doubts and [b.number for b in made.assignees[0].queue] == [2]
    assert made.assignees[0].local_step == 4  # it is at work on what is not its any more
    assert give_all(made) == [(0, 0)]


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_batch_behind_a_waiting_one_is_called_back_for_an_idle_task(in_turn: bool) -> None:
    made = assignments(2, 4, in_turn=in_turn)
    give_all(made)
    made.assignees[0].waiting_for = {0: "the quorum (1 of 2)"}
    assert made.to_recall() is None  # the other is not idle
    made.done(1, done(1, 1))
    made.done(1, done(3, 2))
    made.expecting = True
    assert made.to_recall() is None  # it will have something to do soon
    made.expecting = False
    assignee, batch = made.to_recall() or (None, None)
    assert assignee is made.assignees[0] and batch is not None and batch.number == 2
    made.assignees[1].given += 5  # it is the other one's turn, but that one waits
    made.recalled(0, 2)
    assert give_all(made) == [(1, 2)]


def test_a_batch_that_its_task_took_before_an_older_one_is_what_waits_and_the_older_one_is_called_back() -> None:
    made = assignments(2, 4)
    give_all(made)
    made.done(1, done(1, 1))
    made.done(1, done(3, 2))
    made.assignees[0].waiting_for = {2: "the quorum (1 of 2)"}  # of its 0 and 2 it began with the later
    assignee, batch = made.to_recall() or (None, None)
    assert assignee is made.assignees[0] and batch is not None and batch.number == 0
    made.recalled(0, 0)
    assert give_all(made) == [(1, 0)]


def test_it_is_stuck_only_when_every_unfinished_batch_waits_for_what_nobody_computes() -> None:
    made = assignments(2, 2)
    give_all(made)
    made.assignees[0].waiting_for = {0: "the quorum (1 of 2)"}
    assert made.stuck() is None
    made.done(1, done(1, 1))
    made.assignees[0].version = 1
    assert [(b.number, what) for _, b, what in made.stuck() or []] == [(0, "the quorum (1 of 2)")]
    made.assignees[0].waiting_for = {0: "the other ps tasks"}
    assert made.stuck() is None


def test_a_batch_whose_round_was_made_is_not_stuck_though_its_task_said_so_last() -> None:
    made = assignments(2, 2)
    give_all(made)
    made.assignees[0].waiting_for = {0: "the quorum (1 of 2)"}
    made.done(1, done(1, 1))  # the other gradient of that round: both were used
    assert made.stuck() is None
    made.assignees[0].version = 1  # it says that it waits in the next round
    assert made.stuck() is not None
    for assignee in made.assignees.values():
        assignee.version = 0  # the run is back at a checkpoint
    assert made.stuck() is not None
