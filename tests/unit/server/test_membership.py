"""How many workers are wanted, and who is asked to leave."""

import pytest

import torchquorum as tq
from tests.protocol.by_hand import make_plan
from torchquorum.errors import ConfigError
from torchquorum.rules.quorum import Quorum
from torchquorum.server.membership import Membership


def elastic(workers: int = 4, at_least: int = 2, joined: int = 4) -> tuple[Membership, Quorum]:
    plan = make_plan(rule=tq.Async(), num_workers=workers, min_workers=at_least)
    quorum = Quorum(plan.rule, workers)
    for worker in range(joined):
        quorum.join(worker, 1, 0.0)
    return Membership(plan, quorum), quorum


def test_the_highest_leave_first_and_the_chief_never() -> None:
    membership, _ = elastic(at_least=1)
    scaled = membership.scale(2)
    assert (scaled.workers, scaled.leaving) == (2, [2, 3])
    assert [membership.must_leave(worker, 1) for worker in range(4)] == [False, False, True, True]
    assert not membership.must_leave(3, 2)  # another incarnation was not asked
    assert membership.scale(1).leaving == [1, 2, 3]


def test_a_worker_that_joins_after_fewer_were_asked_for_is_asked_to_leave() -> None:
    membership, quorum = elastic(joined=2)
    assert membership.scale(2).leaving == []
    quorum.join(2, 1, 1.0)
    assert membership.changed() is None and membership.must_leave(2, 1)


def test_a_number_out_of_range_and_a_fixed_cluster_are_refused() -> None:
    membership, quorum = elastic()
    with pytest.raises(ConfigError, match="5 workers: this run has 2 to 4"):
        membership.scale(5)
    with pytest.raises(ConfigError, match="neither more nor fewer"):
        Membership(make_plan(), quorum).scale(2)
    assert membership.status() == {"min_workers": 2, "wanted": None, "asked": 0}
    assert Membership(make_plan(), quorum).status() == {}


def test_a_shortage_is_said_once_until_it_is_over() -> None:
    membership, quorum = elastic(at_least=3)
    quorum.lost(3, 1, "its process ended")
    assert membership.changed() is None
    quorum.lost(2, 1, "its process ended")
    assert membership.changed() == "2 of at least 3 workers are alive; the run goes on"
    assert membership.changed() is None
    quorum.join(2, 2, 1.0)
    assert membership.changed() is None
    quorum.lost(2, 2, "its process ended")
    assert membership.changed() == "2 of at least 3 workers are alive; the run goes on"


def test_an_elastic_run_says_at_its_beginning_what_makes_an_update() -> None:
    membership, quorum = elastic()
    assert membership.begin() == "2 to 4 workers may come and go: under Async() every gradient is an update"
    assert Membership(make_plan(), quorum).begin() is None
