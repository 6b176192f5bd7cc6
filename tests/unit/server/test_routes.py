"""The table of messages: what it promises of each row holds for every row."""

from collections.abc import Iterator

import pytest

import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, only
from torchquorum.server.reply import LEADER
from torchquorum.server.routes import ROUTES

GUESSED = 4711
SHARE = m.ShareSpec("data", 4, 1, 4, None, 0)
OF_WORKERS: list[m.Message] = [
    m.Push(0, GUESSED, 2, 1, 0, -1, [], None),
    m.PullRows(0, GUESSED, 2, 0),
    m.TakeEvicted(0, GUESSED, 1, 0),
    m.Pull(0, GUESSED, 2),
    m.PullRows(0, GUESSED, 2, 0),
    m.TakeEvicted(0, GUESSED, 2, 0),
    m.Values(0, GUESSED, 1, [0]),
    m.Assign(0, GUESSED, 2, 1, 0, False, []),
    m.Stop(0, GUESSED),
    m.Save(0, GUESSED, 1, "/nowhere", 5),
    m.Position(0, GUESSED, 0, {}),
    m.Buffers(0, GUESSED, 0),
    m.TakeBuffers(0, GUESSED, 1, False),
    m.TakeBatches(0, GUESSED, 1, SHARE, [1]),
    m.UseBatches(0, GUESSED, 1, "data", []),
    m.AtBarrier(0, GUESSED, 1, 0, 1),
]


@pytest.fixture
def running() -> Iterator[Ps]:
    ps = Ps()
    ps.create()
    ps.join(0)
    yield ps
    ps.close()


def test_every_message_of_joined_workers_is_tried_below() -> None:
    assert {type(message) for message in OF_WORKERS} == {kind for kind, route in ROUTES.items() if route.joined}


@pytest.mark.parametrize("message", OF_WORKERS, ids=lambda message: type(message).__name__)
def test_an_incarnation_that_has_not_joined_is_told_so_or_not_answered_and_changes_nothing(
    running: Ps, message: m.Message
) -> None:
    before, replies = running.state(), running.send(b"x", message)
    assert running.state() == before
    if ROUTES[type(message)].quiet:
        assert replies == []
    else:
        fault = only(replies, m.Fault, b"x")
        assert (fault.kind, fault.request) == ("LostPlaceError", getattr(message, "request", -1))


@pytest.mark.parametrize("message", [m.Log(0, 0, []), m.PartTaken(1), m.Alive(1, True)])
def test_what_only_shard_0_sends_is_refused_from_others(message: m.Message) -> None:
    assert ROUTES[type(message)].from_shard_0
    second = Ps(1, ps=2)
    try:
        second.create()
        assert "is not for a ps task" in only(second.send(b"x", message), m.Fault, b"x").text
        assert second.send(LEADER, message) == []
    finally:
        second.close()


@pytest.mark.parametrize(
    "message", [m.StatusRequest(), m.Settle(), m.MeanRequest(), m.Scale(2), m.Hello(0, "", 0, "", 0)]
)
def test_what_anybody_may_send_is_counted(running: Ps, message: m.Message) -> None:
    for _ in range(1000):
        running.send(b"flood", message)
    assert running.service.rate_limit.exceeded == [b"flood"]
