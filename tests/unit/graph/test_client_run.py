"""What a compute task knows of its client's run: the lease and the results, at times that the test chooses."""

import pytest

from torchquorum.graph import graph_messages as g
from torchquorum.graph.client_run import REMEMBERED_RESULTS, ClientRun


def run_with(*pending: int) -> ClientRun:
    return ClientRun(heard_at=10.0, lease_s=2.0, lease_at=10.0, pending=set(pending))


def test_a_lease_lasts_from_the_stamp_of_an_answer_that_the_client_has_seen() -> None:
    run = run_with(1, 2)
    assert run.renew(g.Ask("run", [1], 10.5), -1, 11.0) is None and run.pending == {1, 2}
    assert run.is_leased(12.4) and not run.is_leased(12.5) and run.heard_at == 11.0


def test_a_stamp_from_the_future_renews_only_up_to_now() -> None:
    run = run_with()
    run.renew(g.Ask("run", [], 99.0), -1, 11.0)
    assert run.is_leased(12.9) and not run.is_leased(13.0)


def test_an_old_message_renews_nothing_but_the_client_was_heard() -> None:
    run = run_with(1)
    assert run.renew(g.Ask("run", [], 10.0), -1, 12.0) is None
    assert not run.is_leased(12.0) and run.pending == {1} and run.heard_at == 12.0


@pytest.mark.parametrize(("doing", "kept"), [(-1, {2}), (1, {1, 2})])
def test_after_a_lease_has_run_out_only_awaited_batches_and_the_current_one_are_kept(
    doing: int, kept: set[int]
) -> None:
    run = run_with(1, 2, 3)
    assert run.renew(g.Ask("run", [2], 20.0), doing, 20.0) == {2, doing}
    assert run.pending == kept and run.is_leased(21.0)


def test_results_are_remembered_up_to_a_number_and_an_expired_batch_may_come_again() -> None:
    run = run_with(*range(100))
    for number in range(99):
        run.remember(number, b"done")
    run.remember(99, None)
    assert not run.pending and len(run.results) == REMEMBERED_RESULTS
    assert run.knows(98) and not run.knows(0) and not run.knows(99)
