"""Which assignments are made, once each, and whose wait is over then."""

from torchquorum.rules import Async, Sync
from torchquorum.rules.quorum import Applied, Key, Quorum, Released
from torchquorum.server.value_assignments import ValueAssignments
from torchquorum.wire.messages import Assign


def asks(worker: int, number: int = 1, *, values: bool = False, incarnation: int = 7) -> Assign:
    return Assign(worker, incarnation, 1, number, 0, values, [0])


def quorum(*joined: int) -> Quorum:
    found = Quorum(Sync(), 3)
    for worker in joined:
        found.join(worker, 7, 0.0)
    return found


def test_only_the_chiefs_values_are_due_and_only_once() -> None:
    found, run = ValueAssignments(), quorum(0, 1)
    assert not found.is_due(asks(1, values=True), run)
    assert not found.is_due(asks(0), run)
    assert found.is_due(asks(0, values=True), run)
    found.make(asks(0, values=True))
    assert not found.is_due(asks(0, values=True), run), "asked again, after a connection was lost"
    assert found.is_due(asks(0, values=True, incarnation=8), run), "another process"


def test_the_nth_waits_until_n_are_made() -> None:
    found = ValueAssignments()
    for assign in (asks(0, 1, values=True), asks(1, 1), asks(2, 2)):
        found.wait(assign)
    assert found.over(stopped=False) == []
    found.make(asks(0, 1, values=True))
    assert [a.worker for a in found.over(stopped=False)] == [0, 1]
    assert [a.worker for a in found.over(stopped=True)] == [2]
    assert not found.waiting


def test_the_first_alive_stands_in_for_a_chief_that_is_dead_or_gone_and_not_for_one_that_is_late() -> None:
    found, run = ValueAssignments(), quorum(1, 2)
    found.wait(asks(2))
    found.wait(asks(1))
    assert found.stand_in(run) is None, "the chief has not come yet"
    run.join(0, 7, 0.0)
    assert found.stand_in(run) is None
    run.lost(0, 7, "test")
    asked = found.stand_in(run)
    assert asked is not None and asked.worker == 1 and 1 not in found.waiting
    found.wait(asks(1, values=True))
    assert found.stand_in(run) is None, "it has given its values"
    assert found.is_due(asks(1, values=True), run)
    found.make(asks(1, values=True))
    run.leave(1, 7)
    assert not found.is_due(asks(2, values=True), run), "late: that was assigned by the one that stood in before it"
    assert found.is_due(asks(2, 2, values=True), run)


def test_a_version_of_an_assignment_leaves_the_open_round_as_it_is() -> None:
    run = Quorum(Sync(), 2)
    for worker in (0, 1):
        run.join(worker, 7, 0.0)
    run.push(Key(1, 7, 1), 0, 0.0)
    assert run.assign() == [] and run.version == 1
    assert run.held == {1} and len(run.round) == 1, "who gave to the round still waits for it"
    made = run.push(Key(0, 7, 1), 1, 0.0)
    assert [a.version for a in made if isinstance(a, Applied)] == [2]
    assert {a.worker for a in made if isinstance(a, Released)} == {0, 1}


def test_an_assignment_can_be_the_last_step() -> None:
    run = Quorum(Async(), 1, last_step=1)
    run.join(0, 7, 0.0)
    run.assign()
    assert run.stopped
