"""Updates made again from the journal give the same bits: whatever the optimizer, with absent gradients and averages."""

from pathlib import Path
from typing import Any

import pytest
import torch

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, make_plan
from torchquorum.placement.layout import Variable
from torchquorum.rules.quorum import Key
from torchquorum.server.journaling import begin_journal, restore_journal
from torchquorum.server.shard import Shard
from torchquorum.wire.frames import tensor_frame
from torchquorum.wire.messages import AverageSpec, Create, JournalRef, OptimizerSpec, ScheduleSpec

VARIABLES = [
    Variable(name="w", shape=(4, 5), dtype="float32"),
    Variable(name="half", shape=(6,), dtype="bfloat16"),
    Variable(name="b", shape=(5,), dtype="float32"),
]
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    ("SGD", {"lr": 0.1, "maximize": True, "weight_decay": 0.1, "foreach": True}),
    ("Adam", {"lr": 0.1, "weight_decay": 0.1, "maximize": True, "amsgrad": True}),
    ("AdamW", {"lr": 0.1}),
    ("RMSprop", {"lr": 0.1, "momentum": 0.5, "centered": True}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
    ("Adadelta", {"lr": 1.0}),
    ("NAdam", {"lr": 0.1}),
    ("ASGD", {"lr": 0.1}),
    ("Rprop", {"lr": 0.1}),
]


def push(shard: Shard, worker: int, step: int, absent: list[int]) -> tuple[int, int, int]:
    torch.manual_seed(100 * worker + step)
    data = torch.zeros(shard.region.size_bytes, dtype=torch.uint8)
    for section in shard.region.sections:
        part = data[section.start_byte : section.start_byte + section.size_bytes]
        values = part.view(getattr(torch, section.dtype))
        for piece in section.pieces:
            if piece.variable not in absent:
                values[piece.offset : piece.offset + piece.numel].normal_()
    shard.tracks[0].store(m.Push(worker, 9, step, step, 0, -1, absent, None), [tensor_frame(data)])
    return (worker, 9, step)


@pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(OPTIMIZERS)])
def test_it_is_bit_for_bit(tmp_path: Path, name: str, arguments: dict[str, Any]) -> None:
    plan = make_plan(
        variables=VARIABLES,
        optimizer=OptimizerSpec(name, [arguments]),
        schedule=ScheduleSpec("StepLR", {"step_size": 2, "gamma": 0.5}),
        average=AverageSpec(0.9, True),
        durable="write",
        logdir=str(tmp_path),
    )
    region = plan.layout().trained[0]
    begun = torch.zeros(region.size_bytes, dtype=torch.uint8)
    frames = tensor_frame(begun), tensor_frame(torch.zeros(plan.layout().constants[0].size_bytes, dtype=torch.uint8))
    create = Create(plan, None, 5, False, JournalRef(0, 0, 0, 1))
    shard, again = Shard(0, plan, frames), Shard(0, plan, frames)
    try:
        shard.journal = begin_journal(shard, create)
        for step in range(1, 7):
            keys = [
                push(shard, 0, step, [1] if step % 3 == 0 else []),
                push(shard, 1, step, [1] if step % 3 == 0 else []),
            ]
            shard.follow(m.Apply(keys if step != 5 else keys[:1], step))
        restored = Create(plan, str(tmp_path / "model.ckpt-0"), 6, True, JournalRef(6, 5, 5, 2))
        assert [r.version for r in restore_journal(again, restored)] == [1, 2, 3, 4, 5, 6]
        assert again.version == 6 and again.gradients.is_decided(Key(0, 9, 6))
        for ours, theirs in zip(
            again.variables.versions.slots.sections[again.variables.versions.current],
            shard.variables.versions.slots.sections[shard.variables.versions.current],
            strict=True,
        ):
            assert torch.equal(ours, theirs)
        assert again.variables.averages is not None and shard.variables.averages is not None
        for ours, theirs in zip(again.variables.averages.shadows, shard.variables.averages.shadows, strict=True):
            assert torch.equal(ours, theirs)
        states = {(p.variable, n): v for p, n, v in shard.variables.update.states()}
        assert {(p.variable, n) for p, n, _ in again.variables.update.states()} == states.keys()
        for piece, state, values in again.variables.update.states():
            assert torch.equal(values, states[piece.variable, state])
        replayed, made = again.variables.update, shard.variables.update
        assert replayed.scalars() == made.scalars() and replayed.rates.now == made.rates.now
    finally:
        shard.close()
        again.close()


def test_other_arguments_are_refused_with_the_difference(tmp_path: Path) -> None:
    ps = Ps()
    ps.close()
    plan = make_plan(durable="write", logdir=str(tmp_path))
    layout = plan.layout()
    frames = [
        tensor_frame(torch.zeros(r.size_bytes, dtype=torch.uint8)) for r in (layout.trained[0], layout.constants[0])
    ]
    shard = Shard(0, plan, frames)
    shard.journal = begin_journal(shard, Create(plan, None, 5, False, JournalRef(0, 0, 0, 1)))
    shard.follow(m.Apply([push(shard, 0, 1, [])], 1))
    shard.close()
    other = make_plan(optimizer=OptimizerSpec("SGD", [{"lr": 0.5}]), logdir=str(tmp_path))
    again = Shard(0, other, frames)
    try:
        with pytest.raises(
            tq.TorchQuorumError, match=r"another optimizer.*lr.*Start once with the arguments as they were"
        ):
            restore_journal(again, Create(other, str(tmp_path / "model.ckpt-0"), 6, True, JournalRef(1, 5, 5, 2)))
    finally:
        again.close()
