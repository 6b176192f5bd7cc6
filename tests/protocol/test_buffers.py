"""The home of the buffers on ps task 0: who is asked, who is left out, what is repeated, what is refused."""

import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, layout_of, make_plan, name, only
from torchquorum.server.buffer_home import ANSWER_S, REMEMBERED_ANSWERS
from torchquorum.server.reply import Reply
from torchquorum.wire.packing import Packing

SPECS = [m.BufferSpec("mean", (2,), "float32"), m.BufferSpec("count", (), "int64")]


def frame(mean: float, count: int) -> bytes:
    """Two floats, then, on the next cache line, a whole number."""
    return struct.pack("<2f56xq56x", mean, mean, count)


def create(ps: Ps, mode: str, *, buffers: bytes = frame(0.5, 0), **changes: Any) -> list[Reply]:
    ps.plan = make_plan(num_workers=3, buffers=SPECS, buffers_mode=mode, **changes)
    layout = layout_of(ps.plan)
    sizes = layout.trained[0].size_bytes, layout.constants[0].size_bytes
    return ps.send(b"chief", m.Create(ps.plan), *(bytes(size) for size in sizes), buffers)


@pytest.fixture
def ps() -> Iterator[Ps]:
    made = Ps(workers=3)
    yield made
    made.close()


def link(worker: int) -> bytes:
    return f"buffers/{worker}".encode()


def give(
    ps: Ps, worker: int, mean: float, count: int, *, number: int = -1, version: int = 0, final: bool = False
) -> Any:
    return ps.send(link(worker), m.Buffers(worker, 1, version, number, final), frame(mean, count))


def take(ps: Ps, worker: int, number: int, *, joining: bool = False) -> list[Reply]:
    return ps.send(link(worker), m.TakeBuffers(worker, 1, number, joining))


def taken(replies: list[Reply]) -> tuple[float, int, list[int]]:
    [reply] = [r for r in replies if isinstance(r.message, m.SharedBuffers)]
    first, _, count = struct.unpack("<2f56xq56x", bytes(reply.frames[0]))
    assert isinstance(reply.message, m.SharedBuffers)
    return first, count, reply.message.whose


def started(ps: Ps, mode: str) -> None:
    create(ps, mode)
    for worker in range(3):
        ps.join(worker)
    for worker in range(3):
        ps.push(worker, 1, 0)
    assert ps.shard.version == 1


def asked(replies: list[Reply]) -> set[bytes]:
    return {reply.peer for reply in replies if isinstance(reply.message, m.Wanted)}


@pytest.mark.parametrize("mode", ["chief", "average"])
def test_who_joins_before_the_first_update_gets_the_chiefs_at_once(ps: Ps, mode: str) -> None:
    create(ps, mode)
    ps.join(1)
    assert taken(take(ps, 1, 7, joining=True)) == (0.5, 0, [0])


def test_under_average_every_live_worker_is_asked_and_whole_numbers_take_the_maximum(ps: Ps) -> None:
    started(ps, "average")
    assert give(ps, 0, 1.0, 5, number=9) == []
    assert asked(take(ps, 0, 9)) == {name(1), name(2)}
    assert give(ps, 1, 2.0, 3, number=9) == []
    assert taken(give(ps, 2, 6.0, 4, number=9)) == (3.0, 5, [0, 1, 2])


def test_under_chief_the_chief_is_asked_and_in_its_absence_the_first_that_lives(ps: Ps) -> None:
    started(ps, "chief")
    assert asked(take(ps, 2, 1)) == {name(0)}
    assert taken(give(ps, 0, 4.0, 1, number=1)) == (4.0, 1, [0])
    ps.service.process_ended(0, 1, ps.now, ps.wall)
    assert asked(take(ps, 2, 2)) == {name(1)}
    assert taken(give(ps, 1, 8.0, 2, number=2)) == (8.0, 2, [1])


def test_a_worker_that_dies_meanwhile_is_left_out(ps: Ps) -> None:
    started(ps, "average")
    give(ps, 0, 1.0, 0, number=9)
    take(ps, 0, 9)
    give(ps, 1, 3.0, 0, number=9)
    ps.service.process_ended(2, 1, ps.now, ps.wall)
    assert taken(ps.later(0.3)) == (2.0, 0, [0, 1])


def test_a_worker_that_does_not_answer_is_asked_again_then_left_out_and_named(ps: Ps) -> None:
    started(ps, "average")
    give(ps, 0, 1.0, 0, number=9)
    take(ps, 0, 9)
    give(ps, 1, 3.0, 0, number=9)
    found: list[Reply] = []
    for _ in range(int(ANSWER_S) + 2):
        for worker in range(3):
            ps.send(b"beat", m.Beat(worker, 1))
        found = ps.later(1.0)
        if any(isinstance(reply.message, m.SharedBuffers) for reply in found):
            break
        assert asked(found) == {name(2)}
    assert taken(found) == (2.0, 0, [0, 1])
    assert any("/job:worker/task:2 gave no buffers within 30 s" in line for line in ps.said)


def test_if_the_one_that_is_asked_dies_another_is_asked(ps: Ps) -> None:
    started(ps, "chief")
    assert asked(take(ps, 2, 9, joining=True)) == {name(0)}
    ps.service.process_ended(0, 1, ps.now, ps.wall)
    assert asked(ps.later(1.0)) == {name(1)}
    ps.service.process_ended(1, 1, ps.now, ps.wall)
    assert taken(ps.later(1.0)) == (0.5, 0, [0])  # nobody is left: what is known


def test_who_waits_hears_that_the_ps_lives_and_an_answer_that_was_lost_comes_again(ps: Ps) -> None:
    started(ps, "average")
    give(ps, 0, 1.0, 0, number=9)
    take(ps, 0, 9)
    assert isinstance(take(ps, 0, 9)[0].message, m.Alive)
    give(ps, 1, 3.0, 0, number=9)
    first = taken(give(ps, 2, 5.0, 0, number=9))
    assert taken(take(ps, 0, 9)) == first


def test_at_the_end_each_counts_with_what_it_had_even_if_it_has_left(ps: Ps) -> None:
    started(ps, "average")
    for worker in range(3):
        give(ps, worker, float(worker), worker, final=True)
    ps.leave(2)
    assert taken(take(ps, 1, 4)) == (1.0, 2, [0, 1, 2])


def test_one_that_joins_while_the_run_goes_on_gets_those_of_the_others_not_its_own(ps: Ps) -> None:
    started(ps, "chief")
    give(ps, 0, 9.0, 9, version=1)
    assert asked(take(ps, 0, 3, joining=True)) == {name(1)}
    assert taken(give(ps, 1, 2.0, 2, number=3)) == (2.0, 2, [1])


def test_what_makes_no_sense_is_refused_and_changes_nothing(ps: Ps) -> None:
    assert only(take(ps, 0, 1), m.Fault).kind == "LostPlaceError"
    assert "tensor frame of 0 bytes, expected 128" in only(create(ps, "chief", buffers=b""), m.Fault).text
    for plan in (
        {"buffers": [m.BufferSpec("mean", (-2,), "float32")]},
        {"buffers": [m.BufferSpec("mean", (2,), "pickle")]},
        {"buffers": [SPECS[0], SPECS[0]]},
        {"buffers": SPECS, "buffers_mode": "all"},
    ):
        wrong = make_plan(num_workers=3, **{"buffers_mode": "chief", **plan})
        layout = layout_of(wrong)
        sizes = layout.trained[0].size_bytes, layout.constants[0].size_bytes
        only(ps.send(b"chief", m.Create(wrong), *(bytes(s) for s in sizes), frame(0, 0)), m.Fault)
        assert ps.service.run is None
    started(ps, "average")
    before = ps.state()
    for message, frames in (
        (m.Buffers(0, 1, 0), []),
        (m.Buffers(0, 1, 0), [b"short"]),
        (m.Buffers(7, 1, 0), [frame(0, 0)]),
        (m.Buffers(0, 2, 0), [frame(0, 0)]),
        (m.TakeBuffers(0, 2, 1, False), []),
        (m.TakeBuffers(-1, 1, 1, True), []),
    ):
        only(ps.send(b"stranger", message, *frames), m.Fault)
    assert ps.state() == before


def test_the_mean_is_rounded_once() -> None:
    values = [torch.tensor([0.1], dtype=torch.bfloat16) * k for k in (1, 2, 4)]
    exact = torch.stack(values).double().mean(0).to(torch.bfloat16)
    home = Ps(workers=3)
    try:
        specs = [m.BufferSpec("half", (1,), "bfloat16"), m.BufferSpec("on", (1,), "bool")]
        plan = make_plan(num_workers=3, buffers=specs, buffers_mode="average")
        layout = layout_of(plan)
        sizes = layout.trained[0].size_bytes, layout.constants[0].size_bytes
        home.send(b"chief", m.Create(plan), *(bytes(s) for s in sizes), bytes(128))
        assert home.run.buffers is not None
        packing = Packing(specs)
        packed = [packing.pack({"half": v, "on": torch.tensor([i == 1])}) for i, v in enumerate(values)]
        combined = packing.views(home.run.buffers.combine(packed))
        assert torch.equal(combined["half"], exact) and bool(combined["on"])
    finally:
        home.close()


def test_buffers_that_nobody_asks_for_are_not_kept_without_end(ps: Ps) -> None:
    started(ps, "chief")
    for number in range(100):
        assert give(ps, 1, 1.0, 1, number=number) == []
    assert ps.run.buffers is not None
    assert ps.run.buffers.unclaimed == list(range(100 - REMEMBERED_ANSWERS, 100))
