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
from torchquorum.wire.channel import Progress
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
        silent.asker.at_start().ask(m.Settle(), kind=m.Settled, what="x", limit_s=5.0, again=None)
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
        Ps().asker.at_start().ask(m.Settle(), kind=m.Settled, what="x", limit_s=30.0)


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


def test_while_a_message_comes_nothing_is_asked_again_and_the_line_says_how_much_has_come() -> None:
    """A download of a minute: longer than the silence that is allowed, and than the limit of the wait."""
    ps = Ps()
    size, count = 60_000_000, 0
    ps.channel.moved = Progress(coming=size)

    def come() -> None:
        nonlocal count
        count += 1
        ps.channel.moved = Progress(received=count * 1_000_000, coming=size, came=count * 1_000_000)
        if count == 60:
            ps.channel.moved = Progress(received=size)
            ps.channel.arrived.append([codec.encode(m.Settled(True))])

    ps.asker.meanwhile = come
    ps.asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=20.0)
    assert ps.sent() == [m.Settle()]
    assert ps.said[:2] == [
        "/job:worker/task:1: waiting for x: 5 s, 4.0 of 60.0 MB have come",
        "/job:worker/task:1: waiting for x: 10 s, 9.0 of 60.0 MB have come",
    ]
    assert len(ps.said) == 12


def test_while_a_question_leaves_it_is_not_asked_again_and_the_line_says_how_much_has_left() -> None:
    ps = Ps()
    size = left = 60_000_000
    ps.channel.moved = Progress(leaving=left)

    def leave() -> None:
        nonlocal left
        left -= 1_000_000
        ps.channel.moved = Progress(delivered=size - left, leaving=left)
        if left == 0:
            ps.channel.arrived.append([codec.encode(m.Settled(True))])

    ps.asker.meanwhile = leave
    ps.asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=20.0)
    assert ps.sent() == [m.Settle()]
    assert ps.said[0] == "/job:worker/task:1: waiting for x: 5 s, 4.0 of 60.0 MB have left"


def test_a_large_question_that_has_arrived_is_not_sent_again_before_the_other_has_had_as_long_for_it() -> None:
    """A model whose upload takes 8 s; the other takes 6 s to take it up."""
    ps = Ps()
    turns = 0
    ps.channel.moved = Progress(leaving=80_000_000)

    def pass_time() -> None:
        nonlocal turns
        turns += 1
        ps.channel.moved = Progress(delivered=10_000_000 * turns, leaving=max(0, 80_000_000 - 10_000_000 * turns))
        if turns == 14:
            ps.channel.arrived.append([codec.encode(m.Settled(True))])

    ps.asker.meanwhile = pass_time
    ps.asker.ask(m.Settle(), [bytes(1 << 17)], kind=m.Settled, what="x", limit_s=60.0)
    assert len(ps.channel.sent) == 1


def test_one_that_was_lost_is_sent_again_after_ever_longer_times() -> None:
    ps = Ps()
    with pytest.raises(TaskLostError):
        ps.asker.ask(m.Settle(), [bytes(1 << 17)], kind=m.Settled, what="x", limit_s=60.0)
    assert len(ps.channel.sent) > 3


@pytest.mark.parametrize("stuck", [Progress(leaving=9), Progress(coming=100_000, came=9)])
def test_a_message_that_does_not_move_is_no_sign_of_life(stuck: Progress) -> None:
    ps = Ps()
    ps.channel.moved = stuck
    with pytest.raises(TaskLostError, match="has not answered for 11 s"):
        ps.asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=60.0)


def test_probes_that_the_other_system_takes_are_no_sign_of_life() -> None:
    """As of a process that is frozen, or behind something that has stalled: its kernel, or that, takes what is sent, at once."""
    ps = Ps()
    ps.asker.meanwhile = lambda: setattr(ps.channel, "moved", Progress(delivered=50 * len(ps.channel.sent)))
    with pytest.raises(TaskLostError, match="has not answered for 11 s"):
        ps.asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=60.0)
    assert len(ps.channel.sent) > 5


def test_answers_to_probes_are_no_transfer_so_a_wait_for_the_right_one_has_its_limit() -> None:
    count = 0

    def answer(_message: m.Message) -> list[m.Message]:
        nonlocal count
        count += 1
        ps.channel.moved = Progress(received=count * 50, delivered=count * 50)
        return [m.Alive(0, False)]

    ps = Ps(answer)
    with pytest.raises(DeadlineError, match="gave up"):
        ps.asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=30.0)


@pytest.mark.parametrize("leaving", [0, 9])
def test_an_answered_beat_is_life_unless_nothing_that_was_sent_arrives(leaving: int) -> None:
    ps = Ps()
    ps.channel.moved = Progress(leaving=leaving)
    ps.asker.beats = lambda: int(ps.clock.now())
    with pytest.raises(TaskLostError if leaving else DeadlineError):
        ps.asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=60.0)


@pytest.mark.parametrize("pause_s", [40.0, 400.0, 4000.0])
def test_a_pause_of_the_task_that_waits_is_not_the_silence_of_the_other(pause_s: float) -> None:
    ps = Ps()
    turns = 0

    def pause() -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            ps.clock.advance(pause_s)
        if turns == 5:
            ps.channel.arrived.append([codec.encode(m.Settled(True))])

    ps.asker.meanwhile = pause
    ps.asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=20.0)
    with pytest.raises(TaskLostError):  # awake, it notices as ever
        ps.asker.ask(m.Settle(), kind=m.Settled, what="x", limit_s=20.0)
