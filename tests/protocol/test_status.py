"""What a ps task tells about a run: its status, its report and its ledger."""

from pathlib import Path

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, only
from torchquorum.formats.ledger import name_life, read_ledger

REPORTED = {
    *("rule", "ps", "workers", "transport", "updates", "batches", "seconds", "batches_per_s", "loss", "accuracy"),
    *("refused", "staleness_mean", "staleness_max", "start_up_s"),
}
PER_WORKER = REPORTED - {"rule", "ps", "workers"}


def status(ps: Ps) -> dict:
    return only(ps.send(b"anybody", m.StatusRequest()), m.Status).body


def test_the_status_at_each_stage(ps: Ps) -> None:
    known = {"task": "/job:ps/task:0", "ready": False, "ps": 1, "workers": 2, "turned_away": {}}
    assert status(ps) == {**known, "leader": "localhost:1000"}
    ps.create(last_step=2)
    assert status(ps)["ready"] and status(ps)["global_step"] == 0 and status(ps)["live"] == []
    ps.join(0)
    ps.join(1)
    assert [w["state"] for w in status(ps)["per_worker"].values()] == ["computing", "computing"]
    ps.push(0, 1, 0)
    assert [w["state"] for w in status(ps)["per_worker"].values()] == ["waiting", "computing"]
    ps.push(1, 1, 0)
    ps.push(0, 2, 1)
    ps.push(1, 2, 1)
    assert (status(ps)["global_step"], status(ps)["stopped"]) == (2, True)
    ps.leave(0)
    ps.now += 10
    ps.later(0)
    assert [w["state"] for w in status(ps)["per_worker"].values()] == ["left", "dead"]


def test_the_report_has_every_field_and_the_same_per_worker(ps: Ps) -> None:
    ps.create(last_step=2, rule=tq.Async())
    ps.join(0)
    ps.join(1)
    ps.now += 4
    ps.push(0, 1, 0)
    ps.push(1, 1, 0)
    ps.push(1, 2, 1)
    ps.leave(0, loss=0.25, accuracy=0.975)
    ps.leave(1)
    report = ps.service.status()
    assert report.keys() >= REPORTED
    assert all(worker.keys() >= PER_WORKER for worker in report["per_worker"].values())
    assert (report["rule"], report["ps"], report["workers"], report["transport"]) == ("Async()", 1, 2, "tcp")
    assert (report["updates"], report["batches"], report["refused"]) == (2, 3, 1)
    assert (report["seconds"], report["batches_per_s"], report["start_up_s"]) == (4.0, 0.75, 104.0)
    assert (report["loss"], report["accuracy"]) == (0.25, 0.975)
    assert (report["staleness_mean"], report["staleness_max"]) == (0.5, 1)
    assert report["per_worker"]["1"]["refused_reasons"] == {"past last step": 1}


def test_the_ledger_has_every_gradient_with_its_reason(ps: Ps, tmp_path: Path) -> None:
    ps.create(last_step=2, rule=tq.Async(), logdir=str(tmp_path))
    ps.join(0, incarnation=171)
    ps.join(1)
    ps.push(0, 1, 0, incarnation=171)
    ps.push(1, 1, 0)
    ps.push(1, 2, 1)
    ps.later(0)
    entries = list(read_ledger(tmp_path))
    assert [(e.worker, e.local_step, e.version, e.met, e.staleness, e.accepted, e.reason) for e in entries] == [
        (0, 1, 0, 0, 0, True, "fresh"),
        (1, 1, 0, 1, 1, True, "within bound"),
        (1, 2, 1, 2, 1, False, "past last step"),
    ]
    assert [e.incarnation for e in entries] == [name_life(171), name_life(1), name_life(1)]
    assert {e.arrived_at for e in entries} == {ps.wall}
    assert {e.loss for e in entries} == {0.5}


def test_a_folder_that_cannot_be_written_costs_the_ledger_and_not_the_run(ps: Ps, tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    assert only(ps.create(logdir=str(taken / "run")), m.Created) == m.Created(0, False)
    assert any("the ledger" in line and "cannot be written" in line and "training goes on" in line for line in ps.said)
