"""The leader: what happens becomes decisions of the quorum, and these become entries of the log."""

from pathlib import Path

import torchquorum as tq
from tests.protocol.by_hand import make_plan
from tests.unit.server.parts import WALL, leader, push
from torchquorum.formats.ledger import Event, read_records
from torchquorum.formats.ledger_write import LedgerWriter
from torchquorum.rules.quorum import Key
from torchquorum.server.arrivals import REMEMBERED_ARRIVALS, Arrivals
from torchquorum.server.leader import Leader
from torchquorum.server.run_status import describe_run
from torchquorum.server.tally import Tally
from torchquorum.wire.messages import Apply, Drop, End, Outcome, Release, Snapshot

FIRST, SECOND = Key(0, 1, 1), Key(1, 1, 1)


def test_a_full_round_is_one_update_and_releases_everyone_who_waits() -> None:
    run = leader(rule=tq.Sync())
    run.arrived(0, FIRST, 2, 1.0, WALL, push=push(0, 0.5))
    assert run.log.entries == []
    held = run.wait_of(0, 1, 2)
    assert held is not None and (held.have, held.need, held.missing) == (1, 2, [1])
    run.arrived(0, SECOND, 2, 1.5, WALL, push=push(0))
    applied, *released = run.log.entries
    assert applied == Apply([(0, 1, 1), (1, 1, 1)], 1, {}, evicted_at=WALL)
    assert released == [Release(0, 1, 2, 1, False), Release(1, 1, 2, 1, False)]
    assert run.effects.outcomes == {0: Outcome(True, "fresh", 0), 1: Outcome(True, "fresh", 0)}
    assert run.wait_of(0, 1, 2) is None


def test_a_gradient_counts_when_every_shard_has_its_part() -> None:
    run = leader(rule=tq.Async(), num_shards=2)
    run.arrived(1, FIRST, 2, 1.0, WALL)
    assert run.log.entries == []
    run.arrived(0, FIRST, 2, 1.0, WALL, push=push(0))
    assert run.log.entries == [Apply([(0, 1, 1)], 1, {}, evicted_at=WALL), Release(0, 1, 2, 1, False)]


def test_a_refused_gradient_is_dropped_by_every_shard_and_its_worker_hears_why() -> None:
    run = leader(rule=tq.Async())
    run.arrived(0, FIRST, 2, 1.0, WALL, push=push(0, finite=False))
    assert run.log.entries == [Drop([(0, 1, 1)]), Release(0, 1, 2, 0, False)]
    assert run.effects.outcomes[0] == Outcome(False, "not finite", 0)
    assert run.fate(FIRST).state == "refused"


def test_a_gradient_that_was_decided_on_is_answered_again_and_counts_once() -> None:
    run = leader(rule=tq.Async())
    run.arrived(0, FIRST, 2, 1.0, WALL, push=push(0))
    run.log.entries.clear()
    run.arrived(0, FIRST, 5, 2.0, WALL, push=push(0))
    assert run.log.entries == [Release(0, 1, 5, 1, False)] and run.quorum.version == 1
    run.asked_again(FIRST, 5)  # no later request than the one that was answered
    assert len(run.log.entries) == 1


def test_a_worker_that_comes_back_loses_what_reached_only_some_shards() -> None:
    run = leader(rule=tq.Async(), num_shards=2)
    run.arrived(0, FIRST, 2, 1.0, WALL, push=push(0))
    run.join(0, 2, 1, 2.0, WALL, "tcp")
    assert run.notes == ["/job:worker/task:0 came back"]
    assert run.log.entries[0] == Drop([(0, 1, 1)])
    assert run.fate(FIRST).state == "never"


def test_a_process_that_was_replaced_does_not_join_again() -> None:
    run = leader()
    run.join(0, 2, 1, 1.0, WALL, "tcp")
    before = len(run.log.entries)
    run.join(0, 1, 9, 2.0, WALL, "tcp")
    assert len(run.log.entries) == before and run.quorum.workers[0].incarnation == 2


def test_while_the_chief_is_dead_the_first_live_worker_leads() -> None:
    run = leader(logdir="somewhere")
    assert run.lead == 0
    run.lost(0, 1, "its process ended", WALL)
    assert run.lead == 1
    assert run.notes == [
        "/job:worker/task:0 counts as dead (its process ended); the run goes on without it (ps task 0 saves in its place)"
    ]


def test_where_the_chief_is_done_and_the_run_is_not_the_first_live_worker_leads() -> None:
    run = leader(last_step=2)
    run.leave(0, 1, WALL)
    assert run.lead == 1
    run.stop(WALL)
    assert run.lead == 0, "what is to be done at the end the chief has done"


def test_the_last_step_releases_all_with_the_news() -> None:
    run = leader(rule=tq.Sync(), last_step=1)
    for key in (FIRST, SECOND):
        run.arrived(0, key, 2, 1.0, WALL, push=push(0))
    assert [entry.stop for entry in run.log.entries if isinstance(entry, Release)] == [True, True]


def test_the_end_says_which_gradients_were_accepted_and_not_used() -> None:
    run = leader(rule=tq.Buffered(3))
    run.arrived(0, FIRST, 2, 1.0, WALL, push=push(0))
    run.end(ok=True, why="the run is over")
    assert run.log.entries[-1] == End(True, "the run is over")
    assert run.notes == ["1 accepted gradients were not used: the run ended before their round closed"]


def test_a_snapshot_is_an_entry_at_the_version_of_the_moment() -> None:
    run = leader(rule=tq.Async())
    run.arrived(0, FIRST, 2, 1.0, WALL, push=push(0))
    run.snapshot(7, "folder")
    assert run.log.entries[-1] == Snapshot(7, 1, "folder")


def test_arrivals_forget_the_oldest_that_never_became_complete() -> None:
    arrivals = Arrivals(2)
    for step in range(REMEMBERED_ARRIVALS + 1):
        assert arrivals.add(0, Key(0, 1, step), push(0)) is None
    assert arrivals.add(1, Key(0, 1, 0), None) is None
    assert arrivals.add(1, Key(0, 1, REMEMBERED_ARRIVALS), None) is not None


def test_the_number_that_auto_chooses_is_said_in_ledger_status_and_output(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path)
    run = Leader(make_plan(rule=tq.Sync("auto", floor=1)), Tally(0.0), writer)
    for worker in (0, 1):
        run.join(worker, 1, 1, 0.0, WALL, "tcp")
    assert describe_run(run)["aggregate"] == 2
    now, ends, versions, steps = 0.0, {0: 1.0, 1: 9.0}, {0: 0, 1: 0}, {0: 0, 1: 0}
    while run.quorum.needed == 2:  # worker 0 takes one second, worker 1 nine
        worker = min(ends, key=lambda w: ends[w])
        now, steps[worker] = ends.pop(worker), steps[worker] + 1
        run.arrived(0, Key(worker, 1, steps[worker]), 1 + steps[worker], now, WALL + now, push=push(versions[worker]))
        for entry in run.log.entries:
            if isinstance(entry, Release):
                ends[entry.worker], versions[entry.worker] = now + (1.0, 9.0)[entry.worker], entry.version
        run.log.entries.clear()
        assert now < 100
    writer.close()
    (chose,) = [e for e in read_records(tmp_path) if isinstance(e, Event) and e.event == "chose"]
    assert chose.values == {"aggregate": 1, "live": 2, "round_s": 1.0} and chose.at == WALL + now
    assert "an update takes 1 gradients of 2 workers from now on" in run.notes
    assert describe_run(run)["aggregate"] == 1 and "aggregate" not in describe_run(leader(rule=tq.Sync()))
