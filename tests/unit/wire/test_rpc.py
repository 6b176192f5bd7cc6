"""One ask: repeats, deadlines, refusals, the line for people, and answers that are for somebody else."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import torchquorum.wire.messages as m
from tests.manual_clock import ManualClock, ScriptedChannel
from torchquorum.errors import (
    ConfigError,
    DeadlineError,
    LostCreationError,
    LostPlaceError,
    RefusedError,
    SegmentError,
    TaskLostError,
)
from torchquorum.wire import codec
from torchquorum.wire.codec import Frame
from torchquorum.wire.rpc import Asker, Patience, Pending, error_of

PATIENCE = Patience(silence_s=10.0, probe_s=1.0, say_s=5.0)
Answer = Callable[[m.Message], list[m.Message]]


class Ps:
    """Answers as a test says; keeps what it was sent."""

    def __init__(self, answer: Answer = lambda _: []) -> None:
        self.clock, self.said, self.others, self.meanwhile = ManualClock(), [], [], 0
        self.channel = ScriptedChannel(self.clock, lambda frames: self._answers(answer, frames))
        self.asker = Asker(
            channel=self.channel,
            me="/job:worker/task:1",
            there="/job:ps/task:0 (localhost:1)",
            patience=PATIENCE,
            clock=self.clock,
            say=self.said.append,
            other=lambda message, _frames: self.others.append(message),
            meanwhile=self._count,
        )

    def _answers(self, answer: Answer, frames: list[Frame]) -> list[list[Frame]]:
        return [[codec.encode(message)] for message in answer(codec.split(frames)[0])]

    def _count(self) -> None:
        self.meanwhile += 1

    def sent(self) -> list[m.Message]:
        return [codec.split(frames)[0] for frames in self.channel.sent]


def test_an_answer_comes_back_with_its_frames() -> None:
    ps = Ps()
    ps.channel.arrived.append([codec.encode(m.Settled(True)), b"frame"])
    answer, frames = ps.asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=5.0)
    assert answer.done and [bytes(frame) for frame in frames] == [b"frame"]


def test_a_question_is_repeated_every_probe_until_it_is_answered() -> None:
    asked = 0

    def third_time(_: m.Message) -> list[m.Message]:
        nonlocal asked
        asked += 1
        return [m.Settled(True)] if asked == 3 else []

    ps = Ps(third_time)
    ps.asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=60.0)
    assert ps.sent() == [m.Settle()] * 3 and ps.meanwhile == 2
    assert ps.clock.now() == ManualClock().now() + 2 * PATIENCE.probe_s


def test_one_that_must_not_be_asked_twice_is_followed_by_a_probe_or_by_nothing() -> None:
    probe = m.Probe(1, 2, 3)
    ps = Ps(lambda message: [m.Settled(True)] if message == probe else [])
    ps.asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=60.0, again=probe)
    assert ps.sent() == [m.Settle(), probe]
    silent = Ps()
    with pytest.raises(DeadlineError):
        silent.asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=5.0, again=None, starting=True)
    assert silent.sent() == [m.Settle()]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("ConfigError", ConfigError),
        ("SegmentError", SegmentError),
        ("LostPlaceError", LostPlaceError),
        ("LostCreationError", LostCreationError),
        ("anything", RefusedError),
    ],
)
def test_a_fault_is_the_error_that_it_names(kind: str, error: type[Exception]) -> None:
    assert type(error_of(m.Fault(kind, "why"))) is error
    with pytest.raises(error, match="why"):
        Ps(lambda _: [m.Fault(kind, "why")]).asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=5.0)


def test_what_answers_another_question_goes_to_the_other_side_of_the_house() -> None:
    ps = Ps(lambda _: [m.Status({}, 6), m.Fault("LostPlaceError", "of another", 6), m.Bye(), m.Status({"a": 1}, 7)])
    question = m.StatusRequest(7)
    answer, _ = ps.asker.ask(question, kind=m.Status, what="x", limit_s=5.0, accept=lambda found: found.request == 7)
    assert answer.body == {"a": 1}
    assert ps.others == [m.Status({}, 6), m.Fault("LostPlaceError", "of another", 6), m.Bye()]


def test_a_fault_under_the_questions_own_number_ends_it() -> None:
    with pytest.raises(LostPlaceError):
        Ps(lambda _: [m.Fault("LostPlaceError", "mine", 7)]).asker.ask(
            m.StatusRequest(7), kind=m.Status, what="x", limit_s=5.0
        )


def test_silence_names_who_waited_for_whom_and_for_what() -> None:
    ps = Ps()
    with pytest.raises(TaskLostError) as caught:
        ps.asker.ask(m.Settle(), kind=m.Settled, what="a checkpoint", limit_s=100.0)
    assert str(caught.value).startswith(
        "/job:worker/task:1: /job:ps/task:0 (localhost:1) has not answered for 11 s while this task waited for a checkpoint."
    )
    assert ps.said == [f"/job:worker/task:1: waiting for a checkpoint: {s} s" for s in (5, 10)]


def test_a_task_that_answers_something_else_is_given_up_at_the_deadline_and_not_before() -> None:
    ps = Ps(lambda _: [m.Alive(0, False)])
    with pytest.raises(
        DeadlineError, match=r"waited 31 s for a checkpoint at /job:ps/task:0 \(localhost:1\) and gave up"
    ):
        ps.asker.ask(m.Settle(), kind=m.Settled, what="a checkpoint", limit_s=30.0)


def test_one_that_is_still_starting_may_be_silent() -> None:
    with pytest.raises(DeadlineError):
        Ps().asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=30.0, starting=True)


def test_a_closed_connection_ends_the_wait_at_once() -> None:
    ps = Ps()
    ps.channel.closed = True
    with pytest.raises(TaskLostError, match="has closed the connection while this task waited for x"):
        ps.asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=30.0)
    assert ps.clock.now() <= ManualClock().now() + PATIENCE.probe_s


def test_an_answer_is_taken_on_another_thread_than_the_one_that_hands_it_over() -> None:
    pending = Pending(0, m.StatusRequest(3))
    assert pending.take() is None and pending.number == 3
    thread = threading.Thread(target=lambda: pending.put((m.Bye(), [])))
    thread.start()
    assert pending.take(10.0) == (m.Bye(), [])
    thread.join()
    pending.put(None)
    assert pending.take(10.0) is None
