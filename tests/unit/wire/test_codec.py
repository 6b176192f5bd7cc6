"""Every message survives the wire; nothing else is ever taken for one."""

import struct
from typing import Any, get_args

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import torchquorum as tq
import torchquorum.wire.messages as m
from torchquorum.placement import Variable
from torchquorum.wire import codec
from torchquorum.wire.frames import flat_bytes, pack_parts

PLAN = m.Plan(
    variables=[
        Variable(name="layer.0.weight", shape=(3, 4), dtype="float32"),
        Variable(name="scalar", shape=(), dtype="bfloat16", group=1),
        Variable(name="frozen", shape=(2,), dtype="int64", group=-1),
    ],
    optimizer=m.OptimizerSpec("Adam", [{"lr": 0.1, "betas": [0.9, 0.99]}, {"lr": 0.2, "foreach": None}]),
    rule=tq.Sync(aggregate=2),
    num_shards=2,
    num_workers=3,
    schedule=m.ScheduleSpec("SequentialLR", {"schedulers": [{"name": "LinearLR", "arguments": {}}], "milestones": [3]}),
    slice_bytes=100,
    last_step=10,
    logdir="runs/ä",
    buffers=[m.BufferSpec("norm.running_mean", (4,), "float32"), m.BufferSpec("count", (), "int64")],
    buffers_mode="average",
    tied={"head.weight": "layer.0.weight"},
)
numbers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)
memory = st.builds(m.MemoryRef, numbers, numbers, numbers, numbers)
keys = st.lists(st.tuples(numbers, numbers, numbers), max_size=4)
outcomes = st.builds(m.Outcome, st.booleans(), st.text(), numbers)
entries = st.one_of(
    st.builds(m.Apply, keys, numbers, st.dictionaries(st.text(), st.lists(numbers, max_size=3), max_size=2)),
    st.builds(m.Drop, keys),
    st.builds(m.Release, numbers, numbers, numbers, numbers, st.booleans()),
    st.builds(m.ReadOut, numbers, numbers),
    st.builds(m.Snapshot, numbers, numbers, st.text()),
    st.builds(m.End, st.booleans(), st.text()),
)
json = st.recursive(
    st.none() | st.booleans() | numbers | floats | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    m.Hello: st.builds(m.Hello, numbers, st.text(), numbers, st.text(), numbers),
    m.Create: st.just(m.Create(PLAN)),
    m.Join: st.builds(m.Join, numbers, numbers, numbers, st.none() | memory, st.sampled_from([None, PLAN])),
    m.Push: st.builds(
        m.Push, numbers, numbers, numbers, numbers, numbers, numbers, st.lists(numbers, max_size=5), st.none() | floats
    ),
    m.Pull: st.builds(m.Pull, numbers, numbers, numbers),
    m.Values: st.builds(m.Values, numbers, numbers, numbers, st.lists(numbers, max_size=5)),
    m.ValuesKept: st.builds(m.ValuesKept, numbers),
    m.Assign: st.builds(
        m.Assign, numbers, numbers, numbers, numbers, numbers, st.booleans(), st.lists(numbers, max_size=5)
    ),
    m.FateOf: st.builds(m.FateOf, numbers, numbers, numbers),
    m.Fate: st.builds(m.Fate, numbers, numbers, numbers, st.text(), st.text(), numbers, st.none() | floats),
    m.Probe: st.builds(m.Probe, numbers, numbers, numbers),
    m.Beat: st.builds(m.Beat, numbers, numbers),
    m.Leave: st.builds(m.Leave, numbers, numbers, st.none() | floats, st.none() | floats, st.booleans()),
    m.StatusRequest: st.just(m.StatusRequest()),
    m.MeanRequest: st.just(m.MeanRequest()),
    m.Mean: st.builds(m.Mean, numbers, st.lists(st.builds(m.MeanPiece, st.text(), numbers, numbers), max_size=3)),
    m.Welcome: st.builds(m.Welcome, numbers, st.text(), numbers, st.text(), numbers, st.booleans(), st.text()),
    m.Created: st.builds(m.Created, numbers, st.booleans()),
    m.Variables: st.builds(
        m.Variables,
        numbers,
        numbers,
        st.booleans(),
        numbers,
        st.none() | memory,
        st.none() | outcomes,
        st.lists(floats, max_size=3),
    ),
    m.Held: st.builds(m.Held, numbers, st.text(), numbers, numbers, st.lists(numbers, max_size=5)),
    m.Unknown: st.builds(m.Unknown, numbers, numbers),
    m.Alive: st.builds(m.Alive, numbers, st.booleans(), numbers, st.booleans()),
    m.Bye: st.just(m.Bye()),
    m.Status: st.builds(m.Status, st.dictionaries(st.text(), json, max_size=4)),
    m.Fault: st.builds(m.Fault, st.text(), st.text(), numbers),
    m.ShardHello: st.builds(m.ShardHello, numbers, numbers, numbers, numbers, st.text()),
    m.Have: st.builds(m.Have, numbers, numbers, numbers, numbers, numbers, numbers),
    m.Log: st.builds(m.Log, numbers, numbers, st.lists(entries, max_size=5)),
    m.Save: st.builds(m.Save, numbers, numbers, numbers, st.text(), numbers),
    m.SaveState: st.builds(m.SaveState, numbers, st.text(), numbers, st.text(), st.text()),
    m.Settle: st.just(m.Settle()),
    m.Settled: st.builds(m.Settled, st.booleans()),
    m.ReaderHello: st.builds(m.ReaderHello, numbers, numbers, st.text(), st.text(), numbers),
    m.ReaderWelcome: st.builds(
        m.ReaderWelcome,
        numbers,
        st.text(),
        numbers,
        st.lists(st.text(), max_size=3),
        st.sampled_from([None, PLAN]),
        numbers,
        st.lists(memory, max_size=2),
        st.lists(st.none() | memory, max_size=2),
    ),
    m.Read: st.builds(
        m.Read,
        numbers,
        numbers,
        numbers,
        st.lists(numbers, max_size=3),
        tables=st.lists(st.builds(m.TableCursor, numbers, numbers, numbers, numbers), max_size=3),
    ),
    m.ReadRows: st.builds(m.ReadRows, numbers, numbers, keys),
    m.ReaderBeat: st.builds(
        m.ReaderBeat,
        numbers,
        st.text(),
        numbers,
        st.lists(numbers, max_size=3),
        st.none() | st.builds(m.ReaderAges, floats, floats, floats),
    ),
    m.ReaderAlive: st.builds(m.ReaderAlive, numbers, st.booleans()),
    m.VersionRead: st.builds(
        m.VersionRead,
        numbers,
        numbers,
        numbers,
        numbers,
        floats,
        st.text(),
        st.lists(numbers, max_size=3),
        rows=st.lists(st.builds(m.RowsPart, numbers, numbers, numbers, numbers, st.booleans()), max_size=3),
    ),
    m.RowsRead: st.builds(m.RowsRead, numbers, numbers, st.lists(numbers, max_size=3), floats),
    m.HaveRead: st.builds(m.HaveRead, numbers, numbers, numbers, numbers, numbers),
    m.Stop: st.builds(m.Stop, numbers, numbers),
    m.Position: st.builds(m.Position, numbers, numbers, numbers, st.dictionaries(st.text(), json, max_size=4)),
    m.Buffers: st.builds(m.Buffers, numbers, numbers, numbers, numbers, st.booleans()),
    m.TakeBuffers: st.builds(m.TakeBuffers, numbers, numbers, numbers, st.booleans()),
    m.SharedBuffers: st.builds(m.SharedBuffers, numbers, st.lists(numbers, max_size=4)),
    m.TakeBatches: st.builds(
        m.TakeBatches,
        numbers,
        numbers,
        numbers,
        st.builds(m.ShareSpec, st.text(), numbers, numbers, numbers, st.none() | numbers, numbers),
        st.lists(numbers, max_size=4),
        numbers,
        st.booleans(),
    ),
    m.UseBatches: st.builds(
        m.UseBatches, numbers, numbers, numbers, st.text(), st.lists(st.tuples(numbers, numbers), max_size=4)
    ),
    m.LeasedBatches: st.builds(m.LeasedBatches, numbers, st.lists(numbers, max_size=4), st.booleans(), st.booleans()),
    m.AtBarrier: st.builds(m.AtBarrier, numbers, numbers, numbers, numbers, numbers, numbers, st.booleans()),
    m.BarrierStatus: st.builds(
        m.BarrierStatus,
        numbers,
        st.booleans(),
        numbers,
        st.lists(numbers, max_size=4),
        numbers,
        st.lists(numbers, max_size=4),
        numbers,
        st.booleans(),
    ),
    m.BatchesUsed: st.builds(m.BatchesUsed, numbers, st.booleans()),
    m.Scale: st.builds(m.Scale, numbers),
    m.Scaled: st.builds(m.Scaled, numbers, st.lists(numbers, max_size=4), st.lists(numbers, max_size=4)),
    m.Wanted: st.builds(m.Wanted, numbers),
    m.Part: st.builds(
        m.Part,
        numbers,
        numbers,
        numbers,
        st.text(),
        st.lists(st.dictionaries(st.text(), json, max_size=3), max_size=3),
        st.dictionaries(st.text(), json, max_size=3),
        st.text(),
    ),
    m.PartTaken: st.builds(m.PartTaken, numbers),
    m.Over: st.just(m.Over()),
    m.Stay: st.builds(m.Stay, numbers, st.booleans()),
    m.PullRows: st.builds(m.PullRows, numbers, numbers, numbers, numbers),
    m.TakeEvicted: st.builds(m.TakeEvicted, numbers, numbers, numbers, numbers),
    m.Rows: st.builds(m.Rows, numbers, numbers),
    m.Evicted: st.builds(m.Evicted, numbers),
    m.HaveKeys: st.builds(m.HaveKeys, numbers, numbers, numbers, numbers, numbers, numbers),
}


def test_no_message_is_left_out_here() -> None:
    assert set(MESSAGES) == set(get_args(m.AnyMessage))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_message_comes_back_as_it_was_sent(kind: type, data: st.DataObject) -> None:
    message = data.draw(MESSAGES[kind])
    again = codec.decode(codec.encode(message))
    assert type(again) is kind
    assert again == message


def test_a_rule_comes_back_as_a_rule_and_a_shape_as_a_tuple() -> None:
    again = codec.decode(codec.encode(m.Create(PLAN)))
    assert isinstance(again, m.Create)
    assert again.plan.rule == tq.Sync(aggregate=2) and isinstance(again.plan.rule, tq.Rule)
    assert again.plan.variables[0].shape == (3, 4)


ANSWERS = {*MESSAGES, codec.WireError}


def answer_to(frame: bytes) -> type:
    """Returns what a frame is taken for: a kind of message, or a WireError; any other error goes through."""
    try:
        return type(codec.decode(frame))
    except codec.WireError as error:
        return type(error)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(frame: bytes) -> None:
    assert answer_to(frame) in ANSWERS


@settings(max_examples=500, deadline=None)
@given(json)
def test_any_other_msgpack_is_a_wire_error(value: Any) -> None:
    with pytest.raises(codec.WireError):
        codec.decode(msgspec.msgpack.encode(value))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_message_that_was_cut_or_damaged_is_a_message_or_a_wire_error(kind: type, data: st.DataObject) -> None:
    whole = codec.encode(data.draw(MESSAGES[kind]))
    assert answer_to(whole[: data.draw(st.integers(0, len(whole) - 1))]) in ANSWERS
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    assert answer_to(bytes(damaged)) in ANSWERS


@pytest.mark.parametrize("frame", [b"\x91" * 1_000_000, b"\xdd" + struct.pack(">I", 2**32 - 1)], ids=["deep", "long"])
def test_a_message_made_to_exhaust_the_reader_is_a_wire_error(frame: bytes) -> None:
    with pytest.raises(codec.WireError):
        codec.decode(frame)


def test_an_oversized_header_is_refused_unread() -> None:
    with pytest.raises(codec.WireError, match=r"header of 16777217 bytes: at most 16777216 are allowed"):
        codec.decode(bytes(codec.MAX_HEADER_BYTES + 1))


def test_a_rule_with_values_that_are_not_allowed_is_a_wire_error() -> None:
    rule = msgspec.msgpack.encode(-4)
    frame = codec.encode(m.Create(PLAN)).replace(b"\xa9aggregate\x02", b"\xa9aggregate" + rule)
    with pytest.raises(codec.WireError, match="aggregate=-4"):
        codec.decode(frame)


def test_the_tensors_of_a_message_are_what_follows_its_header() -> None:
    message, tensors = codec.split([codec.encode(m.Bye()), b"one", memoryview(b"two")])
    assert message == m.Bye()
    assert [bytes(t) for t in tensors] == [b"one", b"two"]


def test_a_message_without_a_header_is_a_wire_error() -> None:
    with pytest.raises(codec.WireError, match="empty"):
        codec.split([])


def test_the_bytes_of_an_empty_array_of_numpy_whatever_its_strides() -> None:
    empty = torch.from_numpy(np.arange(3)[np.array([], dtype=int)])
    assert len(flat_bytes(empty)) == 0 and len(pack_parts([empty, torch.ones(2, 2)])) == 16
    assert flat_bytes(torch.ones(2, 2)).tolist() == [0, 0, 128, 63] * 4
