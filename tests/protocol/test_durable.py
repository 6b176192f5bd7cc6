"""Durable runs, by hand: nobody is let in before the first checkpoint, and no update that was told of is lost."""

from pathlib import Path

import pytest
import torch

import torchquorum.wire.messages as m
from tests.protocol.by_hand import make_plan, name, only
from tests.protocol.saving import Make, start, told, until
from torchquorum.formats.journal import find_common


@pytest.mark.parametrize("durable", ["write", "fsync"])
def test_a_durable_run_lets_nobody_in_before_its_first_checkpoint_and_loses_no_update(
    make: Make, tmp_path: Path, durable: str
) -> None:
    ps = make()
    ps.plan = make_plan(durable=durable, logdir=str(tmp_path))
    create = m.Create(ps.plan, generation=5, journal=m.JournalRef(0, 0, 0, 1))
    assert only(ps.send(b"chief", create, bytes(192), bytes(64)), m.Created).version == 0
    held = only(ps.join(0), m.Held)
    assert held.what == "the first checkpoint, from which a journal goes on"
    assert only(ps.send(name(0), m.Probe(0, 1, 1)), m.Held).what == held.what
    assert len(ps.join(1)) == 1
    replies = until(ps, lambda: (tmp_path / "model.ckpt-0").exists() and not ps.run.checkpoints.busy)
    replies += ps.later(0.1)
    assert {r.peer for r in replies if isinstance(r.message, m.Variables)} == {name(0), name(1)}
    for step in (1, 2):
        for worker in (0, 1):
            ps.push(worker, step, step - 1)
    journal = ps.shard.journal
    assert journal is not None and journal.uncommitted is (durable == "fsync")
    ps.service.commit()
    assert not journal.uncommitted
    ps.service.commit()

    version = find_common(tmp_path, 1, 5, 0).version
    assert version == 2
    again = make()
    again.plan = ps.plan
    restore = str(tmp_path / "model.ckpt-0")
    create = m.Create(ps.plan, restore, generation=6, replace=True, journal=m.JournalRef(2, 5, 5, 2))
    assert only(again.send(b"chief", create), m.Created).version == 2
    assert "/job:ps/task:0: updates 1 to 2 are back from the journal" in again.said
    assert torch.equal(again.values(), ps.values())
    fate = only(again.send(b"x", m.FateOf(1, 1, 2)), m.Fate)
    assert (fate.state, fate.met) == ("accepted", 1)
    again.join(0, 8)
    assert only(again.send(name(0), m.Save(0, 8, 1, str(tmp_path), 5)), m.SaveState).state == "running"
    until(again, lambda: (tmp_path / "model.ckpt-2").exists(), pace_s=1.0)


def test_a_durable_run_whose_first_checkpoint_fails_does_not_begin(make: Make, tmp_path: Path) -> None:
    ps = make()
    (tmp_path / "model.ckpt-0").write_text("in the way")
    assert only(ps.create(durable="write", logdir=str(tmp_path)), m.Created)
    ps.join(0)
    until(ps, lambda: ps.run.broken, alive=())
    told = only(ps.send(name(0), m.Probe(0, 1, 1)), m.Fault)
    assert told.kind == "UpdateError" and "the run cannot be durable: its first checkpoint failed: " in told.text
    until(ps, lambda: ps.service.ended is not None, alive=(), pace_s=1.0)
    assert ps.service.ended is not None and not ps.service.ended.ok


def test_a_journal_that_cannot_be_begun_or_followed_is_refused_and_no_variables_are_left(
    make: Make, tmp_path: Path
) -> None:
    ps = make()
    assert "needs a folder for its journal" in only(ps.create(durable="write"), m.Fault).text
    assert ps.service.run is None
    start(ps, tmp_path)
    path = told(ps, 1, tmp_path).path
    again = make()
    create = m.Create(ps.plan, path, generation=6, journal=m.JournalRef(9, 5, 5, 2))
    fault = only(again.send(b"chief", create), m.Fault)
    assert fault.kind == "RefusedError" and "not 9" in fault.text and again.service.run is None
