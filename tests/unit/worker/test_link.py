"""A worker's link: its states, and what it hands over when it is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import torchquorum.wire.messages as m
from tests.protocol.by_hand import layout_of, make_plan
from tests.unit.worker.ps_by_hand import PsTasks
from torchquorum.errors import ClusterError, TaskLostError
from torchquorum.wire import codec
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.link import GOODBYE_S, Link, Unsettled

PUSH = m.Push(1, 7, 4, local_step=3, version=2, slot=-1, absent=[], loss=None)


def welcome(host: str = "", created: bool = True) -> m.Welcome:
    return m.Welcome(m.PROTOCOL, "/job:ps/task:0", 1, host, 1, created)


def greeted(ps: PsTasks) -> Link:
    ps.answer = lambda _k, message: [welcome()] if isinstance(message, m.Hello) else []
    link = Link(ps.end)
    assert link.hello() == [True] * len(ps.channels)
    return link


def test_greeting_says_which_ps_tasks_hold_variables_and_that_memory_is_not_shared_elsewhere() -> None:
    link = greeted(PsTasks(2))
    assert link.transports == ["tcp", "tcp"]


def test_shared_memory_that_cannot_be_had_is_an_error_where_it_is_demanded() -> None:
    from dataclasses import replace

    ps = PsTasks()
    ps.answer = lambda _k, _message: [welcome("elsewhere")]
    with pytest.raises(ClusterError, match=r"--transport=shm: /job:ps/task:0 \(localhost:1000\) is not on this host"):
        Link(replace(ps.end, transport="shm")).hello()


def test_a_push_that_was_not_answered_is_handed_over_after_the_link_is_closed() -> None:
    link = greeted(PsTasks())
    assert link.unsettled is None
    link.requests.begin(4, [(PUSH, [])])
    with pytest.raises(TaskLostError):
        link.requests.answers(60.0)
    link.close()
    link.close()
    assert link.unsettled == Unsettled(PUSH)


def test_a_pull_that_was_not_answered_is_nothing_to_take_up() -> None:
    link = greeted(PsTasks())
    link.requests.begin(4, [(m.Pull(1, 7, 4), [])])
    assert link.unsettled is None and link.take_up(None) is None


@pytest.mark.parametrize(("state", "accepted"), [("accepted", True), ("refused", False)])
def test_a_gradient_that_was_decided_on_is_not_pushed_again(state: str, accepted: bool) -> None:
    ps = PsTasks()
    link = greeted(ps)

    def answer(_: int, message: m.Message) -> Sequence[m.Message]:
        return [m.Fate(1, 7, 3, state, "fresh", 5)] if isinstance(message, m.FateOf) else []

    ps.answer = answer
    link.version, link.local_step = 6, 3
    step = link.take_up(Unsettled(PUSH))
    assert step is not None and (step.accepted, step.staleness, step.version) == (accepted, 3, 6)
    assert ps.sent()[-1] == m.FateOf(1, 7, 3)


def test_the_next_link_continues_the_counts() -> None:
    before = greeted(PsTasks())
    before.channels.count, before.local_step, before.version, before.generation, before.tracks[0].lr = (
        41,
        5,
        9,
        2,
        [0.5],
    )
    link = Link(PsTasks().end)
    link.go_on_from(before)
    assert link.channels.next_number() == 42
    assert (link.local_step, link.version, link.generation, link.lr) == (5, 9, 2, [0.5])


def test_a_ps_that_is_gone_does_not_hold_up_a_goodbye() -> None:
    ps = PsTasks(2)
    link = greeted(ps)
    began = ps.clock.now()
    link.leave(loss=0.5)
    assert ps.sent(0)[-1] == ps.sent(1)[-1] == m.Leave(1, 7, 0.5, None, True)
    assert ps.clock.now() - began <= 2 * (GOODBYE_S + 1.0)


def test_variables_are_sent_once_however_long_a_ps_takes_for_them_and_again_if_it_has_not_got_them() -> None:
    ps = PsTasks(index=0)
    link = greeted(ps)
    plan = make_plan()
    flat = FlatParameters(layout_of(plan), [nn.Parameter(torch.zeros(v.shape)) for v in plan.variables])
    asked = 0

    def slowly(_k: int, message: m.Message) -> list[m.Message]:
        nonlocal asked
        asked += isinstance(message, m.Create)
        return {5: [m.Fault("LostCreationError", "it is not here")], 9: [m.Created(0, False)]}.get(asked, [])

    ps.answer = slowly
    assert not link.create(m.Create(plan, generation=5), [flat])
    frames = [len(f) for f in ps.channels[0].sent if isinstance(codec.split(f)[0], m.Create)]
    assert frames == [3, 1, 1, 1, 1, 3, 1, 1, 1]
