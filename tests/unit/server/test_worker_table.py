"""The workers that have joined a shard: one incarnation each, and the order of its requests."""

import pytest

from torchquorum.placement.layout import Variable, place
from torchquorum.rules.quorum import remembered_lives
from torchquorum.server.worker_table import TrackWorkers, WorkerTable
from torchquorum.wire.messages import Join

REGION = place([Variable(name="a", shape=(10,), dtype="float32")], 1).trained[0]


@pytest.fixture
def table() -> WorkerTable:
    table = WorkerTable(2, [REGION])
    assert table.admit(b"first", Join(1, 7, 3, None, None)) == []
    return table


def test_only_the_incarnation_that_joined_is_known(table: WorkerTable) -> None:
    assert table.knows(1, 7) and not table.knows(1, 8) and not table.knows(0, 7)
    assert not TrackWorkers(table, 0).on_fastpath(1, 7) and TrackWorkers(table, 0).gradients_of(1) is None


def test_a_newer_incarnation_replaces_the_older_which_stays_refused(table: WorkerTable) -> None:
    table.admit(b"second", Join(1, 8, 1, None, None))
    assert table.knows(1, 8) and not table.knows(1, 7)
    assert table.replaced(1, 7) and not table.replaced(1, 8)
    assert table.peer_of(1) == b"second"


def test_replaced_incarnations_are_remembered_up_to_a_number_and_what_is_forgotten_is_told(table: WorkerTable) -> None:
    most = remembered_lives(2)
    forgotten = [life for i in range(most + 2) for life in table.admit(b"x", Join(1, 100 + i, 1, None, None))]
    assert table.num_replaced == most and forgotten == [(1, 7), (1, 100)]


def test_answers_go_where_the_newest_request_came_from_and_older_ones_are_refused(table: WorkerTable) -> None:
    assert table.is_current(1, b"other", 4) and table.peer_of(1) == b"other"
    assert not table.is_current(1, b"first", 3) and table.peer_of(1) == b"other"
    assert table.is_current(1, b"third", 4) and table.peer_of(1) == b"third"


def test_a_join_is_told_from_one_with_another_request(table: WorkerTable) -> None:
    assert table.joined_by(Join(1, 7, 3, None, None)) and table.is_join(1, 3)
    assert not table.joined_by(Join(1, 7, 4, None, None)) and not table.is_join(1, 4)
    assert not table.joined_by(Join(0, 7, 3, None, None)) and not table.is_join(0, 3)
