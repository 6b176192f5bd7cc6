"""What comes late, from a life that is over, or by memory that is used again: it changes nothing, or exactly what it should."""

from pathlib import Path

import torch

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, name, only
from tests.protocol.saving import Make, save, start, until
from torchquorum.placement.layout import Variable
from torchquorum.rules.quorum import remembered_lives
from torchquorum.server.saver import Published
from torchquorum.wire import codec
from torchquorum.wire.stream import Room


def test_gradients_in_memory_that_a_lane_uses_again_count_each_with_what_was_in_it(ps: Ps) -> None:
    ps.create(rule=tq.Async())
    ps.join(0)
    room = Room(len(ps.gradient()))
    for step, value in ((1, -1.0), (2, -5.0), (3, -0.5)):
        room[:] = ps.gradient(value)
        push = m.Push(0, 1, step + 1, step, step - 1, -1, [], 0.5)
        ps.service.handle(name(0), [codec.encode(push), memoryview(room)], ps.now, ps.wall)
    assert torch.equal(ps.values(), torch.full_like(ps.values(), 6.5))
    assert isinstance(room.cut, tuple)  # its views were made once


def test_memory_that_was_cut_for_another_model_is_cut_anew(ps: Ps) -> None:
    ps.create(rule=tq.Async())
    ps.join(0)
    room = Room(len(ps.gradient()))
    room.cut = ("of", "another shard")
    room[:] = ps.gradient()
    push = m.Push(0, 1, 2, 1, 0, -1, [], 0.5)
    ps.service.handle(name(0), [codec.encode(push), memoryview(room)], ps.now, ps.wall)
    assert torch.equal(ps.values(), torch.ones_like(ps.values()))
    small = Room(8)
    refused = ps.service.handle(
        name(0), [codec.encode(m.Push(0, 1, 3, 2, 1, -1, [], 0.5)), memoryview(small)], ps.now, ps.wall
    )
    assert isinstance(only(refused, m.Fault).text, str) and torch.equal(ps.values(), torch.ones_like(ps.values()))


def test_earlier_lives_of_a_worker_are_remembered_up_to_a_number_and_stay_refused(running: Ps) -> None:
    most = remembered_lives(running.plan.num_workers)
    for incarnation in range(2, most + 5):
        running.join(1, incarnation=incarnation)
    shard = running.shard
    assert shard.workers.num_replaced == most
    assert only(running.join(1, incarnation=most), m.Fault).kind == "replaced"
    assert running.push(1, 1, 0, incarnation=most) != [] and shard.version == 0


def test_a_pull_of_a_life_that_is_over_is_refused_and_of_one_that_lives_repeated(running: Ps) -> None:
    assert only(running.send(name(1), m.Pull(1, 9, 2)), m.Fault).request == 2
    first = only(running.send(name(1), m.Pull(1, 1, 2)), m.Variables)
    assert only(running.send(name(1), m.Pull(1, 1, 2)), m.Variables).version == first.version
    assert running.send(name(1), m.Pull(1, 1, 1)) == []  # late, or doubled on its way


def test_the_end_of_a_checkpoint_of_before_a_restore_is_not_taken_for_the_one_in_the_making(
    make: Make, tmp_path: Path
) -> None:
    ps = make()
    start(ps, tmp_path, steps=1)
    assert save(ps, 1, tmp_path).state == "running"
    checkpoints = ps.run.checkpoints
    assert checkpoints is not None and checkpoints.saving is not None
    checkpoints.published(Published(checkpoints.saving.number + 7, tmp_path / "model.ckpt-9", ""), ps.now)
    assert checkpoints.saving is not None and not any("model.ckpt-9" in line for line in ps.said)
    until(ps, lambda: (tmp_path / "model.ckpt-1").exists() and not checkpoints.busy, pace_s=1.0)


def test_a_variable_without_elements_is_trained_like_any_other_and_its_mean_can_be_asked_for(ps: Ps) -> None:
    empty = Variable(name="nothing", shape=(0, 3), dtype="float32")
    ps.create(rule=tq.Async(), variables=[empty, Variable(name="w", shape=(2,), dtype="float32")])
    ps.join(0)
    for step in (1, 2):
        only(ps.send(b"x", m.MeanRequest()), m.Mean)
        ps.push(0, step, step - 1)
    mean = only(ps.send(b"x", m.MeanRequest()), m.Mean)
    assert [piece.name for piece in mean.pieces] == ["nothing", "w"]
    assert torch.equal(ps.values(), torch.full((2,), 2.0))
