"""The record of a run: each decision once in the ledger, the counts and the fates."""

import math
from pathlib import Path

import msgspec
import pytest

import torchquorum as tq
from tests.protocol.by_hand import make_plan
from torchquorum.formats.journal import GradientNote, Record
from torchquorum.formats.ledger import NAME, Entry, decode_line, encode_line, read_ledger
from torchquorum.formats.ledger_write import open_ledger
from torchquorum.rules.quorum import Accepted, Key, Quorum, Reason, Refused
from torchquorum.server import run_history
from torchquorum.server.arrivals import Arrival
from torchquorum.server.run_history import RunHistory
from torchquorum.server.tally import Tally
from torchquorum.wire.messages import Contribution

KEY = Key(1, 7, 3)


def history(folder: Path | None = None) -> RunHistory:
    ledger = open_ledger(str(folder), print) if folder is not None else None
    return RunHistory(Quorum(tq.Async(), 2), Tally(0.0), ledger)


def test_a_decision_is_in_the_ledger_the_counts_and_the_fates(tmp_path: Path) -> None:
    kept = history(tmp_path)
    kept.decided(Accepted(KEY, 2, 5, Reason.WITHIN_BOUND, 8.0), Arrival(loss=0.25), 9.0, {"train": [4]})
    kept.close()
    entry = next(read_ledger(tmp_path / NAME))
    assert (entry.worker, entry.local_step, entry.version, entry.met, entry.staleness) == (1, 3, 2, 5, 3)
    assert (entry.accepted, entry.reason, entry.loss, entry.batches) == (True, "within bound", 0.25, {"train": [4]})
    counts = kept.tally.worker(1)
    assert (counts.batches, counts.accepted, counts.staleness_max) == (1, 1, 3)
    fate = kept.fate(KEY)
    assert fate is not None and (fate.state, fate.reason, fate.met) == ("accepted", "within bound", 5)


def test_the_ledger_has_the_norm_and_the_one_that_stands_out_is_named(tmp_path: Path) -> None:
    kept = history(tmp_path)
    for step, norm in enumerate([1.0, 1.23456789, 3e41, None, math.inf], 1):
        action = Accepted(Key(1, 7, step), 0, step, Reason.FRESH, 8.0)
        kept.decided(action, Arrival(loss=0.25, norm=norm), 9.0, {})
    line = kept.largest()
    assert line is not None and "/job:worker/task:1, local step 3, at global step 3 has the norm 3e+41" in line
    assert kept.largest() is None
    kept.close()
    assert [entry.norm for entry in read_ledger(tmp_path / NAME)] == [1.0, 1.23457, 3e41, msgspec.UNSET, None]


def test_a_line_of_a_ledger_without_norms_is_read() -> None:
    old = (
        b'{"worker":0,"incarnation":"ab","local_step":1,"version":0,"met":0,"staleness":0,"accepted":true,"reason":"fresh",'
        b'"arrived_at":1.5,"loss":2.5,"took_s":null}\n'
    )
    entry = decode_line(old)
    assert isinstance(entry, Entry) and entry.norm is msgspec.UNSET and encode_line(entry) == old


def test_a_run_without_a_ledger_is_counted_all_the_same() -> None:
    kept = history()
    kept.begin(make_plan())
    kept.decided(Refused(KEY, 2, 5, Reason.STALE, 8.0), Arrival(), 9.0, {})
    kept.flush()
    kept.sync()
    kept.close()
    assert kept.tally.worker(1).refused == {Reason.STALE.value: 1}


def test_what_the_journal_made_again_counts_as_accepted() -> None:
    kept = history()
    kept.restore([Record(6, [], [(1, 7, 3)])])
    fate = kept.fate(KEY)
    assert fate is not None and (fate.state, fate.met) == ("accepted", 5)


def test_only_recent_fates_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_history, "REMEMBERED_FATES", 2)
    kept = history()
    for step in (1, 2, 3):
        kept.decided(Accepted(Key(0, 1, step), 0, 0, Reason.FRESH, 1.0), Arrival(), 1.0, {})
    assert [kept.fate(Key(0, 1, step)) is not None for step in (1, 2, 3)] == [False, True, True]


def test_several_optimizers_are_counted_each_and_their_norms_are_not_compared(tmp_path: Path) -> None:
    quorum = Quorum(tq.Async(), 2, more=[(tq.Async(), 0)])
    kept = RunHistory(quorum, Tally(0.0), open_ledger(str(tmp_path), print), ["G", "D"])
    for step in range(1, 9):
        action = Accepted(Key(1, 7, step), 0, step, Reason.FRESH, 8.0)
        kept.decided(action, Arrival(loss=0.25, norm=1e6 if step % 2 else 1.0, track=step % 2), 9.0, {})
    kept.decided(Refused(Key(1, 7, 9), 2, 5, Reason.STALE, 8.0), Arrival(loss=0.5, track=1), 9.0, {})
    assert kept.largest() is None
    kept.close()
    counts = kept.tally.optimizers
    assert {name: (of.batches, of.accepted, of.loss) for name, of in counts.items()} == {
        "D": (5, 4, 0.5), "G": (4, 4, 0.25),
    }  # fmt: skip
    entries = list(read_ledger(tmp_path / NAME))
    assert {(e.optimizer, e.track) for e in entries} == {("G", msgspec.UNSET), ("D", 1)}


def test_what_workers_wrote_to_the_journal_and_the_ps_did_not_hear_of_is_in_the_ledger_of_the_run_that_goes_on(
    tmp_path: Path,
) -> None:
    before = history(tmp_path)
    before.begin(make_plan())
    before.decided(Accepted(Key(0, 7, 1), 0, 0, Reason.FRESH, 8.0), Arrival(loss=0.5), 9.0, {})
    before.close()
    kept = history(tmp_path)
    records = [
        Record(1, [], [(0, 7, 1)], given=[GradientNote(0, 0.5, 9.0, 1.0, [0.1])]),
        Record(
            2,
            [],
            [(0, 7, 2), (1, 8, 1)],
            given=[GradientNote(1, 0.25, 9.5, 1.0, [0.1]), GradientNote(0, None, 9.6, None)],
        ),
        Record(4, [], [(0, 7, 4)], given=[GradientNote(3, 0.1, 9.9, 1.0)]),  # does not follow
    ]
    kept.restore(records)
    kept.close()
    found = [(e.worker, e.local_step, e.version, e.met, e.reason, e.loss) for e in read_ledger(tmp_path / NAME)]
    assert found == [
        (0, 1, 0, 0, "fresh", 0.5),
        (0, 2, 1, 1, "fresh", 0.25),
        (1, 1, 0, 1, "within bound", None),
    ]


def test_what_is_refused_under_local_steps_is_carried_over_and_lost_with_its_worker() -> None:
    kept, of = history(), Contribution(0.0, 30, 30, 0.25)
    counts = kept.tally.worker(1)
    for step in (1, 2):
        kept.decided(Refused(Key(1, 7, step), 2, 5, Reason.STALE, 8.0), Arrival(of=of), 9.0, {})
    assert (counts.carried, counts.carried_over) == (2, 2)
    kept.decided(Accepted(Key(1, 7, 3), 5, 5, Reason.FRESH, 8.0), Arrival(of=of), 9.0, {})
    assert (counts.carried, counts.snapshot()["inner_step"]) == (0, 30)
    kept.decided(Refused(Key(1, 7, 4), 5, 6, Reason.STALE, 8.0), Arrival(of=of), 9.0, {})
    kept.decided(Refused(Key(1, 7, 5), 6, 6, Reason.NOT_FINITE, 8.0), Arrival(of=of), 9.0, {})
    assert kept.pace_s([0, 1], 0) == 0.25
    assert (counts.begin_anew(), counts.lost, counts.carried_over, counts.carried) == (1, 1, 3, 0)
