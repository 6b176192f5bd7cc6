"""Asking a ps from outside: once or again and again, with a deadline, on a clock that the test moves."""

from typing import Any

import pytest

from tests.manual_clock import ManualClock, ScriptedChannel
from torchquorum.cluster.secret import OPEN
from torchquorum.errors import DeadlineError, RefusedError
from torchquorum.launcher.watch import RunWatcher, Watcher, ask_ps
from torchquorum.wire import codec
from torchquorum.wire import messages as m
from torchquorum.wire.codec import Frame

WHERE = "alpha:2222"


class Ps:
    """Answers status requests from the `after`-th on, with how often it was asked."""

    def __init__(self, after: int = 1) -> None:
        self.asked, self._after = 0, after

    def __call__(self, frames: list[Frame]) -> list[list[Frame]]:
        assert isinstance(codec.split(frames)[0], m.StatusRequest)
        self.asked += 1
        return [[codec.encode(m.Status({"asked": self.asked}))]] if self.asked >= self._after else []


def watcher(ps: Any, clock: ManualClock, every_s: float = 0.5) -> Watcher:
    return Watcher(WHERE, every_s, OPEN, clock=clock, connect=lambda *_: ScriptedChannel(clock, ps))


def test_a_poll_asks_only_when_it_is_time_and_never_waits() -> None:
    clock, ps = ManualClock(), Ps()
    watched = watcher(ps, clock)
    assert watched.poll() and watched.status == {"asked": 1}
    clock.advance(0.4)
    assert not watched.poll() and ps.asked == 1
    assert watched.silent_s == pytest.approx(0.4)
    clock.advance(0.2)
    assert watched.poll() and watched.status == {"asked": 2} and watched.silent_s == 0.0
    assert clock.now() == pytest.approx(1000.6)


def test_a_question_is_repeated_until_it_is_answered() -> None:
    clock = ManualClock()
    assert watcher(Ps(after=4), clock).ask(5.0) == {"asked": 4}
    assert clock.now() == pytest.approx(1001.5)


def test_a_question_without_an_answer_ends_at_its_deadline_and_names_the_address() -> None:
    clock = ManualClock()
    with pytest.raises(
        DeadlineError, match=rf"no answer from {WHERE} within 3 s.*torchquorum doctor --ps_hosts={WHERE}"
    ):
        watcher(Ps(after=1000), clock).ask(3.0)
    assert 3.0 <= clock.now() - 1000.0 <= 4.0


def test_a_question_that_must_be_asked_once_is_sent_once() -> None:
    clock = ManualClock()
    channel = ScriptedChannel(clock, lambda frames: [])
    with pytest.raises(DeadlineError):
        ask_ps(channel, WHERE, m.Scale(3), m.Scaled, 10.0, repeat=False, clock=clock)
    assert [codec.split(frames)[0] for frames in channel.sent] == [m.Scale(3)]


def test_a_refusal_is_raised_with_its_text() -> None:
    clock = ManualClock()
    channel = ScriptedChannel(clock, lambda frames: [[codec.encode(m.Fault("scale", "the run has 2 to 4 workers"))]])
    with pytest.raises(RefusedError, match="the run has 2 to 4 workers"):
        ask_ps(channel, WHERE, m.Scale(9), m.Scaled, 10.0, repeat=False, clock=clock)


def test_a_run_without_an_address_yet_has_no_news() -> None:
    watched = RunWatcher(lambda: None)
    assert not watched.poll() and watched.status == {}
    watched.close()
