"""A message that comes twice, or late, counts once, and does not disturb what came after it."""

import pytest
import torch

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, by_peer, name, only


def test_a_duplicate_push_is_answered_again_and_applied_once(running: Ps) -> None:
    running.push(0, 1, 0)
    first = by_peer(running.push(1, 1, 0))
    again = only(running.push(1, 1, 0), m.Variables, name(1))
    assert again == first[name(1)] and again.outcome == m.Outcome(True, "fresh", 0)
    assert torch.equal(running.values(), torch.ones(25))
    assert running.service.life.tally.updates == 1


def test_a_duplicate_push_while_it_is_held_changes_nothing(running: Ps) -> None:
    running.push(0, 1, 0)
    before = running.state()
    running.now += 1
    assert running.push(0, 1, 0) == []
    assert running.state() == before
    answers = by_peer(running.push(1, 1, 0))
    chief = answers[name(0)]
    assert isinstance(chief, m.Variables) and chief.outcome == m.Outcome(True, "fresh", 0)


@pytest.mark.parametrize("late", ["push", "join", "pull"])
def test_a_late_duplicate_of_an_answered_request_does_not_take_the_place_of_the_open_one(
    running: Ps, late: str
) -> None:
    running.push(0, 1, 0)
    running.push(1, 1, 0)
    running.push(0, 2, 1)
    before = running.state()
    match late:
        case "push":
            assert running.push(0, 1, 0) == []
        case "join":
            assert running.join(0) == []
        case "pull":
            assert running.send(name(0), m.Pull(0, 1, 1)) == []
    assert running.state() == before
    held = only(running.send(name(0), m.Probe(0, 1, 3)), m.Held)
    assert held.missing == [1]
    chief = by_peer(running.push(1, 2, 1))[name(0)]
    assert isinstance(chief, m.Variables)
    assert (chief.request, chief.version, chief.outcome) == (3, 2, m.Outcome(True, "fresh", 1))


def test_a_late_duplicate_of_a_buffered_gradient_does_not_disturb_the_next(ps: Ps) -> None:
    ps.create(rule=tq.Buffered(3))
    ps.join(0)
    assert only(ps.push(0, 1, 0), m.Variables).version == 0
    assert only(ps.push(0, 2, 0), m.Variables).outcome == m.Outcome(True, "fresh", 0)
    assert ps.push(0, 1, 0) == []
    assert only(ps.send(name(0), m.Probe(0, 1, 3)), m.Variables).request == 3
    assert only(ps.push(0, 3, 0), m.Variables).version == 1
    assert torch.equal(ps.values(), torch.ones(25))
