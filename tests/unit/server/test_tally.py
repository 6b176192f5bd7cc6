"""The counts of a run."""

from torchquorum.server.tally import Tally, WorkerTally


def test_a_workers_gradients_are_counted_by_outcome() -> None:
    worker = WorkerTally(joined_at=10.0)
    worker.decided(accepted=True, reason="fresh", staleness=0, loss=0.5, at=11.0)
    worker.decided(accepted=True, reason="within bound", staleness=3, loss=None, at=12.0)
    worker.decided(accepted=False, reason="stale", staleness=9, loss=0.25, at=14.0)
    body = worker.snapshot()
    assert (body["updates"], body["batches"], body["refused"]) == (2, 3, 1)
    assert body["refused_reasons"] == {"stale": 1}
    assert (body["staleness_mean"], body["staleness_max"]) == (1.5, 3)
    assert (body["seconds"], body["batches_per_s"], body["loss"]) == (4.0, 0.75, 0.25)


def test_the_final_loss_counts_for_more_than_that_of_the_last_batch() -> None:
    worker = WorkerTally()
    worker.decided(accepted=True, reason="fresh", staleness=0, loss=0.5, at=1.0)
    worker.final_loss = 0.125
    assert worker.snapshot()["loss"] == 0.125


def test_waiting_is_counted_from_hold_to_release() -> None:
    worker = WorkerTally()
    worker.release(1.0)
    worker.hold(2.0)
    worker.release(5.0)
    worker.release(9.0)
    assert worker.snapshot()["waited_s"] == 3.0


def test_the_totals_are_those_of_all_workers() -> None:
    tally = Tally(started_at=100.0)
    for index, staleness in ((0, 0), (1, 2)):
        tally.worker(index).joined_at = 104.0 + index
        tally.worker(index).decided(accepted=True, reason="", staleness=staleness, loss=1.0 + index, at=110.0)
        tally.updated(110.0 + index)
    body = tally.snapshot()
    assert (body["updates"], body["batches"], body["refused"]) == (2, 2, 0)
    assert (body["seconds"], body["start_up_s"]) == (7.0, 10.0)
    assert (body["staleness_mean"], body["staleness_max"], body["loss"]) == (1.0, 2, 1.0)
    assert [w["start_up_s"] for w in body["per_worker"].values()] == [10.0, 10.0]


def test_a_run_in_which_nothing_happened_has_a_report_too() -> None:
    body = Tally(started_at=0.0).snapshot()
    assert (body["updates"], body["batches_per_s"], body["loss"], body["start_up_s"]) == (0, 0.0, None, None)
