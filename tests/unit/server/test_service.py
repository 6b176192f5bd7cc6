"""A whole ps task in one thread on a virtual clock: driven by handle, tick and commit, it needs no thread, socket or sleep."""

from pathlib import Path

import pytest

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.manual_clock import Inline, ManualClock
from tests.protocol.by_hand import layout_of, make_plan, name, only
from torchquorum.cluster import ClusterSpec
from torchquorum.errors import LostPlaceError
from torchquorum.formats.checkpoint import load_manifest
from torchquorum.server.identity import Identity
from torchquorum.server.reply import Reply
from torchquorum.server.saver import Saver
from torchquorum.server.service import Service
from torchquorum.wire import codec

CLUSTER = ClusterSpec({"ps": ["localhost:1000"], "worker": ["localhost:2000", "localhost:2001"]})


class VirtualPs:
    """A ps task and its clock."""

    def __init__(self) -> None:
        self.clock, self.said = ManualClock(2_000_000.0), list[str]()
        me = Identity(cluster=CLUSTER, index=0, incarnation=7, host="here", started_at=self.clock.wall())
        self.service = Service(me, self.said.append, self.clock, Saver(self.clock, Inline()))

    def send(self, peer: bytes, message: m.Message, *frames: bytes) -> list[Reply]:
        return self.service.handle(peer, [codec.encode(message), *frames], self.clock.now(), self.clock.wall())

    def create(self, create: m.Create) -> list[Reply]:
        layout = layout_of(create.plan)
        sizes = layout.trained[0].size_bytes, layout.constants[0].size_bytes
        return self.send(b"chief", create, *(bytes(size) for size in sizes if create.restore is None))

    def later(self, seconds: float) -> list[Reply]:
        self.clock.advance(seconds)
        return self.service.tick(self.clock.now(), self.clock.wall())


@pytest.fixture
def ps():
    ps = VirtualPs()
    yield ps
    ps.service.close()


def test_a_run_with_a_checkpoint_and_an_end_takes_no_real_time(ps: VirtualPs, tmp_path: Path) -> None:
    plan = make_plan(rule=tq.Async(), logdir=str(tmp_path))
    assert only(ps.create(m.Create(plan, generation=1)), m.Created) == m.Created(0, False)
    assert only(ps.send(name(0), m.Join(0, 1, 1, None, None)), m.Variables).version == 0
    gradient = bytes(layout_of(plan).trained[0].size_bytes)
    assert only(ps.send(name(0), m.Push(0, 1, 2, 1, 0, -1, [], 0.5), gradient), m.Variables).version == 1
    assert only(ps.send(name(0), m.Save(0, 1, 1, str(tmp_path), 5)), m.SaveState).state == "running"
    ps.later(1.0)  # the part is written
    ps.send(name(0), m.Position(0, 1, 1, {"epoch": 2}))
    ps.later(1.0)  # it is published
    ps.later(1.0)
    assert only(ps.send(name(0), m.Save(0, 1, 1, str(tmp_path), 5)), m.SaveState).state == "done"
    manifest = load_manifest(tmp_path / "model.ckpt-1")
    assert manifest.created_at in (2_000_001.0, 2_000_002.0) and manifest.workers == {"0": {"epoch": 2, "version": 1}}
    ps.send(name(0), m.Leave(0, 1, None, None, True))
    ps.later(1.0)
    assert ps.service.ended is None  # worker 1 may still come
    ps.later(11.0)
    assert ps.service.ended == m.End(True, "the run is over")


def test_a_creation_that_replaces_another_leaves_nothing_of_it(ps: VirtualPs, tmp_path: Path) -> None:
    plan = make_plan(rule=tq.Async(), logdir=str(tmp_path))
    ps.create(m.Create(plan, generation=1))
    ps.send(name(0), m.Join(0, 1, 1, None, None))
    before = ps.service.run
    ps.send(name(0), m.Save(0, 1, 1, str(tmp_path), 5))
    ps.later(1.0)
    assert list(tmp_path.glob(".*partial*"))
    assert only(ps.create(m.Create(plan, generation=2, replace=True)), m.Created) == m.Created(0, False)
    assert ps.service.run is not before and ps.service.generation == 2 and not list(tmp_path.glob(".*partial*"))
    assert only(ps.send(name(0), m.Pull(0, 1, 2)), m.Fault).kind == LostPlaceError.__name__
    assert only(ps.create(m.Create(plan, generation=2, replace=True)), m.Created) == m.Created(0, False)  # asked twice


def test_a_creation_that_fails_leaves_no_run_and_another_may_follow(ps: VirtualPs) -> None:
    plan = make_plan(optimizer=m.OptimizerSpec("NoSuchOptimizer", [{}]))
    assert isinstance(ps.create(m.Create(plan))[0].message, m.Fault) and ps.service.run is None
    only(ps.send(name(0), m.Join(0, 1, 1, None, None)), m.Held)
    answers = {reply.peer: reply.message for reply in ps.create(m.Create(make_plan()))}
    assert answers[b"chief"] == m.Created(0, False) and isinstance(answers[name(0)], m.Variables)
