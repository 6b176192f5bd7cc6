"""A slow link is slow, not lost: what is on its way is not sent again, and bytes that come are life."""

from dataclasses import dataclass

import pytest

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, make_plan, name, only
from torchquorum.server.reply import Reply


@dataclass
class Sent:
    """A message that a test lets arrive."""

    on_its_way: bool = True
    done: bool = False


def give_over(replies: list[Reply]) -> Sent:
    """Sends the one large answer of some replies, as the outbox does."""
    (reply,) = [r for r in replies if r.delivery is not None]
    assert reply.delivery is not None
    reply.delivery.sent = sent = Sent()
    return sent


@pytest.mark.parametrize("again", ["probe", "push"])
def test_an_answer_on_its_way_is_not_sent_again_and_one_that_was_lost_is(ps: Ps, again: str) -> None:
    ps.create(rule=tq.Async())
    ps.join(0)
    sent = give_over(ps.push(0, 1, 0))

    def ask() -> list[Reply]:
        return ps.send(name(0), m.Probe(0, 1, 2)) if again == "probe" else ps.push(0, 1, 0)

    for _ in range(3):
        (reply,) = ask()
        assert reply.message == m.Held(2, "the rest of the variables", 0, 1, []) and not reply.frames
    sent.on_its_way = False
    assert only(ask(), m.Variables).version == 1


def test_an_answer_on_its_way_to_a_connection_that_is_gone_is_sent_to_the_new_one(ps: Ps) -> None:
    ps.create(rule=tq.Async())
    ps.join(0)
    give_over(ps.push(0, 1, 0))
    push = m.Push(0, 1, 2, 1, 0, -1, [], 0.5)
    answer = only(ps.send(b"another connection", push, ps.gradient()), m.Variables, b"another connection")
    assert answer.version == 1


def test_an_answer_that_never_left_is_sent_again(ps: Ps) -> None:
    """As when too much was waiting for its peer already: then nothing is on its way."""
    ps.create(rule=tq.Async())
    ps.join(0)
    (reply,) = [r for r in ps.push(0, 1, 0) if r.delivery is not None]
    assert reply.delivery is not None and reply.delivery.sent is None
    assert only(ps.send(name(0), m.Probe(0, 1, 2)), m.Variables).version == 1


def test_bytes_of_a_gradient_that_is_long_on_its_way_keep_its_worker_alive(running: Ps) -> None:
    counts = {name(0): 0, name(1): 0}
    running.service.moved_bytes = lambda peer: counts.get(peer, 0)
    liveness_s = make_plan().liveness_s
    for _ in range(4):
        counts[name(0)] += 1000
        running.later(liveness_s * 0.6)
    assert running.run.leader.quorum.alive == [0]  # of the other one nothing came
    running.later(liveness_s * 1.1)
    assert running.run.leader.quorum.alive == []
