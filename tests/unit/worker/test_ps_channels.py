"""The channels to the ps tasks: questions, those of other threads, and what nobody asked for."""

from __future__ import annotations

import threading

import pytest

import torchquorum.wire.messages as m
from tests.unit.worker.ps_by_hand import PsTasks
from torchquorum.errors import LostPlaceError
from torchquorum.worker.ps_channels import MOST_PENDING, PsChannels


def test_a_question_is_repeated_until_it_is_answered() -> None:
    ps = PsTasks()
    channels = PsChannels(ps.end)
    question = channels.question(m.UseBatches(1, 7, 0, "data", []))
    ps.answer = lambda _k, message: [m.BatchesUsed(message.request, True)] if isinstance(message, m.UseBatches) else []
    assert channels.finish(question, "x")[0].ok
    assert ps.sent() == [m.UseBatches(1, 7, question.number, "data", [])] * 2


def test_a_question_that_is_refused_raises() -> None:
    ps = PsTasks()
    channels = PsChannels(ps.end)
    ps.answer = lambda _k, message: [m.Fault("LostPlaceError", "no", getattr(message, "request", -1))]
    with pytest.raises(LostPlaceError):
        channels.finish(channels.question(m.UseBatches(1, 7, 0, "data", [])), "x")


def test_what_nobody_asked_for_is_handed_on() -> None:
    ps = PsTasks()
    unasked: list[m.Message] = []
    channels = PsChannels(ps.end)
    channels.unasked = unasked.append
    ps.send(0, m.Wanted(3))
    assert channels.attend() and not channels.attend()
    assert unasked == [m.Wanted(3)]
    ps.send(0, m.Fault("LostPlaceError", "out"))
    with pytest.raises(LostPlaceError):
        channels.attend()


def test_another_thread_leaves_its_question_and_the_owner_sends_it() -> None:
    ps = PsTasks(2)
    ps.answer = lambda _k, message: (
        [m.Status({"k": 1}, message.request)] if isinstance(message, m.StatusRequest) else []
    )
    channels = PsChannels(ps.end)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(channels.leave_question(1, m.StatusRequest()).take(30.0)))
    thread.start()
    while thread.is_alive():
        for k in range(2):
            channels.attend(k)
    [answer] = found
    assert answer == (m.Status({"k": 1}, 1), [])
    assert ps.sent(0) == [] and ps.sent(1) == [m.StatusRequest(1)]


def test_questions_get_nothing_from_channels_that_are_closed() -> None:
    channels = PsChannels(PsTasks().end)
    left, sent = channels.leave_question(0, m.StatusRequest()), channels.question(m.UseBatches(1, 7, 0, "data", []))
    channels.close()
    assert left.take(30.0) is None and sent.take(30.0) is None


def test_questions_whose_answers_are_lost_do_not_pile_up() -> None:
    channels = PsChannels(PsTasks().end)
    first, *others = [channels.leave_question(0, m.StatusRequest()) for _ in range(MOST_PENDING + 1)]
    channels.attend()
    assert first.take(1.0) is None  # given up at once, for the newest
    channels.route(0, m.Status({}, others[0].number), [])
    assert others[0].take() == (m.Status({}, others[0].number), [])
