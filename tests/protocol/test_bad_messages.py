"""What a ps task does with a message that makes no sense: a fault that says so, and nothing changes."""

import random

import pytest

import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, make_plan, name, only
from torchquorum.wire import codec

GARBAGE = [
    [],
    [b""],
    [b"\xc1"],
    [b"hello"],
    [b"\xff" * 1000],
    [b"\x81\xa1a\x01"],
    [b"[" * 100_000],
    [b"\x91" * 100_000],
    [codec.encode(m.Pull(0, 1, 2))[:-1]],
    [codec.encode(m.Push(0, 1, 2, 1, 0, -1, [], None))[:5]],
    [codec.encode(m.Beat(0, 1)).replace(b"Beat", b"Boat")],
    [b"\x93\xa4Beat\xa1x\x01"],
    [bytes(codec.MAX_HEADER_BYTES + 1)],
]


@pytest.mark.parametrize("frames", GARBAGE, ids=range(len(GARBAGE)))
def test_a_malformed_message_gets_a_fault_and_changes_nothing(running: Ps, frames: list[bytes]) -> None:
    running.push(0, 1, 0)
    before = running.state()
    assert only(running.send_raw(b"stranger", frames), m.Fault, b"stranger").kind == "wire"
    assert running.state() == before


def test_random_and_damaged_messages_never_stop_a_ps(running: Ps) -> None:
    draw = random.Random(3)
    whole = [
        codec.encode(m.Hello(m.PROTOCOL, "/job:worker/task:0", 1, "here", 5)),
        codec.encode(m.Create(make_plan())),
        codec.encode(m.Join(0, 1, 1, m.MemoryRef(1, 0, 4096, 1), make_plan())),
        codec.encode(m.Push(0, 1, 2, 1, 0, -1, [0], 0.5)),
        codec.encode(m.Log(0, 0, [m.Apply([(0, 1, 1)], 1), m.End(True, "")])),
        codec.encode(m.Have(1, 0, 1, 2, 1, 0)),
    ]
    for _ in range(3000):
        header = bytearray(draw.choice(whole))
        for _ in range(draw.randrange(1, 4)):
            header[draw.randrange(len(header))] = draw.randrange(256)
        header = header[: draw.randrange(1, len(header) + 1)] if draw.random() < 0.3 else header
        running.send_raw(b"stranger", [bytes(header), *[draw.randbytes(draw.choice([0, 7, 192]))] * draw.randrange(3)])
    assert running.service.ended is None
    assert running.shard.version <= 1


@pytest.mark.parametrize(
    "frames", [[], [b""], [bytes(191)], [bytes(193)], [bytes(192)] * 2], ids=lambda f: str([len(x) for x in f])
)
def test_a_gradient_of_another_size_gets_a_fault_and_changes_nothing(running: Ps, frames: list[bytes]) -> None:
    before = running.state()
    push = m.Push(0, 1, 2, 1, 0, -1, [], None)
    fault = only(running.send(name(0), push, *frames), m.Fault)
    assert fault.request == 2 and "expected" in fault.text
    assert running.state() == before
    assert running.push(0, 1, 0) == []  # the right one is still welcome
    assert len(running.push(1, 1, 0)) == 2


def test_a_gradient_slot_that_was_never_shared_gets_a_fault(running: Ps) -> None:
    before = running.state()
    assert "slot 3" in only(running.send(name(0), m.Push(0, 1, 2, 1, 0, 3, [], None)), m.Fault).text
    assert running.state() == before


@pytest.mark.parametrize("sizes", [(), (192,), (192, 64, 0), (191, 64), (192, 63), (0, 0)])
def test_variables_of_another_size_get_a_fault_and_change_nothing(ps: Ps, sizes: tuple[int, ...]) -> None:
    before = ps.state()
    only(ps.send(b"chief", m.Create(make_plan()), *(bytes(s) for s in sizes)), m.Fault)
    assert ps.state() == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": m.OptimizerSpec("LBFGS", [{"lr": 1.0}])}, "LBFGS cannot run on a ps"),
        ({"optimizer": m.OptimizerSpec("system", [{}])}, "not a class of torch.optim"),
        ({"schedule": m.ScheduleSpec("NoSuchLR", {})}, "schedule 'NoSuchLR'"),
        ({"optimizer": m.OptimizerSpec("SGD", [])}, ""),
        ({"schedule": m.ScheduleSpec("LambdaLR", {})}, "a function cannot travel"),
        ({"schedule": m.ScheduleSpec("StepLR", {"nonsense": 1})}, "StepLR"),
        ({"placement": "anywhere"}, "round_robin, greedy"),
        ({"average": m.AverageSpec(2.0, True)}, "decay 2.0: must be between 0 and 1"),
        ({"average": m.AverageSpec(float("nan"), True)}, "decay nan: must be between 0 and 1"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_and_a_better_one_accepted(
    ps: Ps, changes: dict, said: str
) -> None:
    fault = only(ps.send(b"chief", m.Create(make_plan(**changes)), bytes(192), bytes(64)), m.Fault)
    assert said in fault.text
    assert ps.service.run is None
    assert only(ps.create(), m.Created) == m.Created(0, False)


@pytest.mark.parametrize(
    "message",
    [m.Alive(1, True), m.Bye(), m.Unknown(3), m.Status({}), m.Variables(1, 1, True, 0, None, None, [])],
    ids=lambda message: type(message).__name__,
)
def test_a_message_that_is_not_for_a_ps_gets_a_fault(running: Ps, message: m.Message) -> None:
    before = running.state()
    assert "is not for a ps task" in only(running.send(b"x", message), m.Fault).text
    assert running.state() == before


def test_a_fault_is_not_answered_so_that_two_ps_tasks_do_not_quarrel_for_ever(running: Ps) -> None:
    assert running.send(b"x", m.Fault("wire", "what?")) == []


@pytest.mark.parametrize("log", [m.Log(0, 0, [m.End(True, "")]), m.Log(0, 2, [m.End(True, ""), m.Drop([(0, 1, 1)])])])
def test_nobody_but_shard_0_writes_the_log(running: Ps, log: m.Log) -> None:
    before = running.state()
    only(running.send(b"leader", log), m.Fault)
    assert running.state() == before and running.service.ended is None


def test_an_assignment_without_its_values_or_of_variables_that_are_not_there_is_refused(running: Ps) -> None:
    before = running.state()
    faults = [
        running.send(name(0), m.Assign(0, 1, 2, 1, 0, True, [0])),
        running.send(name(0), m.Values(0, 1, 1, [0, 9]), running.gradient()),
        running.send(name(0), m.Values(0, 1, 1, [0]), b"short"),
        running.send(name(0), m.Values(0, 1, 1, [0])),
    ]
    assert [only(replies, m.Fault).kind for replies in faults] == ["ValueError"] * 4
    only(running.send(name(0), m.Values(0, 1, 1, [0]), running.gradient()), m.ValuesKept)
    only(running.send(name(0), m.Assign(0, 1, 2, 1, 0, True, [1])), m.Fault)
    assert running.state() == before
    answer = only(running.send(name(0), m.Assign(0, 1, 3, 1, 0, True, [0])), m.Variables)
    again = only(running.send(name(0), m.Assign(0, 1, 4, 1, 0, True, [0])), m.Variables)
    assert (answer.version, again.version) == (1, 1), "asked for twice, made once"


def test_an_optimizer_state_that_does_not_fit_is_refused_and_changes_nothing(running: Ps) -> None:
    before = running.state()
    for ref in [
        m.StateRef([m.StatePiece(0, "momentum_buffer", 1, 4, (), "float32")], {}),
        m.StateRef([m.StatePiece(9, "momentum_buffer", 0, 4, (), "float32")], {}),
        m.StateRef(
            [m.StatePiece(0, "momentum_buffer", 0, 4, (2, 2), "float32")], {}
        ),  # SGD keeps none of its own shape
        m.StateRef([m.StatePiece(0, "momentum_buffer", 0, 4, (), "Tensor")], {}),
        m.StateRef([], {"elsewhere": {"step": 1.0}}),
    ]:
        only(running.send(name(0), m.Values(0, 1, 1, [], ref), bytes(16)), m.Fault)
    only(running.send(name(0), m.Assign(0, 1, 2, 1, 0, True, [], True)), m.Fault)
    assert running.state() == before
