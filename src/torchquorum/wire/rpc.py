"""One way to ask: a message is sent until it is answered, and every wait has a deadline, a name and a line for people.

Used by workers, by clients of graphs and by the command line; imports no torch. What always holds: a wait ends with the answer, or
with an error that names who waited, the task with its address, what was waited for and what to do. A channel delivers at most once,
so a question is repeated every `probe_s`; one that must not be asked twice is followed by a probe, or by nothing. While a message is
on its way, in either direction, nothing is repeated: a slow connection is slow, not lost.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torchquorum.wire.messages as m
from torchquorum.clock import SYSTEM, Clock, SeenTime
from torchquorum.errors import (
    ConfigError,
    DeadlineError,
    LostCreationError,
    LostPlaceError,
    RefusedError,
    SegmentError,
    TaskLostError,
    UpdateError,
)
from torchquorum.wire import codec
from torchquorum.wire.channel import UNKNOWN, Channel, Pieces
from torchquorum.wire.codec import Frame
from torchquorum.wire.stream import LARGE_BYTES

_Kind = TypeVar("_Kind", bound=m.Message)
Arrived = tuple[Any, list[Frame]]
SAME: Any = object()
ADVICE = "Check that the task runs, that host and port are the same in --ps_hosts of every task, and that no firewall stands between."


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a task waits, and how often it asks and says so; `tq.Session(patience=tq.types.Patience(start_s=60))`.

    Attributes:
        start_s: For others to come up, and for a ps that was lost to come back.
        round_s: For a round to close, or a lead to shrink.
        save_s: For how long the last checkpoint of the run is tried again if it fails.
        silence_s: Without a sign of life, after which a ps counts as lost.
        probe_s: Between two questions about an open request.
        say_s: Between two lines about a wait.
    """

    start_s: float = 1800.0
    round_s: float = 1800.0
    save_s: float = 120.0
    silence_s: float = 10.0
    probe_s: float = 1.0
    say_s: float = 10.0

    def seen_time(self, clock: Clock) -> SeenTime:
        """Returns the time for a loop that waits at most `probe_s` at a time: a pause of this task itself does not count."""
        return SeenTime(clock, max(2 * self.probe_s, self.silence_s / 4))


def error_of(fault: m.Fault) -> Exception:
    """Returns the error that a Fault stands for."""
    kinds: dict[str, type[Exception]] = {
        "ConfigError": ConfigError,
        "SegmentError": SegmentError,
        "LostPlaceError": LostPlaceError,
        "LostCreationError": LostCreationError,
        "UpdateError": UpdateError,
    }
    return kinds.get(fault.kind, RefusedError)(fault.text)


class Pending:
    """A question that was left to the owner of a channel, or sent; its answer is put here by that thread, taken on any.

    Args:
        k: Which ps task is asked.
        message: The question; it has a `request`, which the owner of the channel fills in.
    """

    def __init__(self, k: int, message: Any) -> None:
        self.k, self.message = k, message
        self._answers: queue.SimpleQueue[Arrived | None] = queue.SimpleQueue()

    @property
    def number(self) -> int:
        """Returns the question's number."""
        return int(self.message.request)

    def put(self, arrived: Arrived | None) -> None:
        """Hands the answer over; None says that none will come."""
        self._answers.put(arrived)

    def take(self, timeout_s: float = 0.0) -> Arrived | None:
        """Returns the answer, if it comes in time."""
        try:
            return self._answers.get(timeout=timeout_s) if timeout_s > 0 else self._answers.get_nowait()
        except queue.Empty:
            return None


class SignsOfLife:
    """The signs of life on one channel during a wait: messages, bytes that come, a message of ours that arrives little by little, beats.

    What arrives at once is none: the system of the other side, or something between, takes it also for a process that is gone or frozen.

    Args:
        channel: The channel.
        now: When the wait begins.
        beats: Counts the other task's answers to a heartbeat, which has a channel of its own.

    Attributes:
        heard: When there was the last sign.
        transferred: When a large message last went on, in either direction.
        progress: What had moved at the last look.
    """

    def __init__(self, channel: Channel, now: float, beats: Callable[[], int] = lambda: 0) -> None:
        self._channel, self._beats = channel, beats
        self.heard = self.transferred = now
        self.progress = channel.progress()
        self._answered = beats()
        self._to_leave = self.progress.leaving

    def look(self, now: float) -> bool:
        """Looks what has moved since the last look; returns whether a message is on its way, in either direction."""
        before, self.progress = self.progress, self._channel.progress()
        answered, self._answered = self._answered, self._beats()
        arrives = before.delivered != self.progress.delivered and before.leaving > 0
        moved = before.received != self.progress.received or arrives
        # A beat says that the task lives. It does not say that this connection does, if nothing that we sent arrives.
        if moved or (answered != self._answered and not self.progress.leaving):
            self.heard = now
        if moved and max(before.leaving, before.coming, self.progress.coming) >= LARGE_BYTES:
            self.transferred = now
        self._to_leave = max(self._to_leave, self.progress.leaving) if self.progress.leaving else 0
        return self.progress.under_way

    @property
    def left(self) -> tuple[int, int]:
        """Returns how many bytes of ours have arrived there, of how many that were on their way."""
        return self._to_leave - self.progress.leaving, self._to_leave


def tell_bytes(lives: Sequence[SignsOfLife]) -> str:
    """Returns what has moved during a wait, as the end of a line for people; nothing where it is not known."""
    coming = sum(life.progress.coming for life in lives)
    if coming:
        return f", {sum(life.progress.came for life in lives) / 1e6:.1f} of {coming / 1e6:.1f} MB have come"
    to_leave = sum(life.left[1] for life in lives)
    if to_leave >= LARGE_BYTES:
        return f", {sum(life.left[0] for life in lives) / 1e6:.1f} of {to_leave / 1e6:.1f} MB have left"
    known = any(life.progress != UNKNOWN for life in lives)
    return ", 0.0 MB have come" if known else ""


@dataclass(kw_only=True)
class Asker:
    """One task's questions to another, over one channel. Owned by the thread that owns the channel.

    Attributes:
        channel: The connection; may be replaced between two questions.
        me: Who asks, as lines and errors name it.
        there: Whom, with the address: `/job:ps/task:0 (host:port)`.
        patience: How long to wait.
        clock: Tells the time.
        say: Prints a line for people.
        split: Decodes what arrives.
        other: Takes what arrives and is no answer.
        meanwhile: Is called while it waits, at least every `probe_s`; may raise to end the wait.
        beats: Counts the other task's answers to a heartbeat.
        advice: What to do when the time is up, in a sentence or two.
        starting: Whether the other task may be silent because it is not up yet, or busy with a large model.
    """

    channel: Channel
    me: str
    there: str
    patience: Patience = field(default_factory=Patience)
    clock: Clock = SYSTEM
    say: Callable[[str], None] = lambda _: None
    split: Callable[[Sequence[Frame]], tuple[Any, list[Frame]]] = codec.split
    other: Callable[[Any, list[Frame]], None] = lambda _message, _frames: None
    meanwhile: Callable[[], None] = lambda: None
    beats: Callable[[], int] = lambda: 0
    advice: str = ADVICE
    starting: bool = False

    def at_start(self) -> Asker:
        """Returns what asks the same task in the same way, and takes silence for a slow start."""
        return replace(self, starting=True)

    def ask(
        self,
        message: m.Message,
        frames: Sequence[Any] = (),
        *,
        kind: type[_Kind],
        what: str,
        limit_s: float,
        accept: Callable[[_Kind], bool] = lambda _: True,
        again: m.Message | None = SAME,
    ) -> tuple[_Kind, list[Frame]]:
        """Sends a message until an answer of `kind` has come that `accept` takes; returns it with its frames.

        Args:
            message: What is asked.
            frames: What follows it.
            kind: The kind of the answer.
            what: What is waited for, in a sentence: "waiting for {what}".
            limit_s: When to give up.
            accept: Tells this question's answer from that of an older one.
            again: What is sent every `probe_s` while no answer comes: by default the same; a probe; or None for nothing.

        Raises:
            TaskLostError: The connection is closed, or the other task says nothing any more.
            DeadlineError: It answers, but not what was asked for.
            TorchQuorumError: What a Fault in answer stands for.
        """
        packet = [codec.encode(message), *frames]
        repeated = packet if again is SAME else [codec.encode(again)] if again is not None else None
        number = getattr(message, "request", -1)
        large = (
            repeated is packet
            and sum(f.size_bytes() if isinstance(f, Pieces) else len(f) for f in frames) >= LARGE_BYTES
        )
        self.channel.send(packet)
        return self.wait(
            kind,
            accept,
            what=what,
            limit_s=limit_s,
            repeat=lambda: self.channel.send(repeated) if repeated is not None else None,
            number=number,
            large=large,
        )

    def wait(
        self,
        kind: type[_Kind],
        accept: Callable[[_Kind], bool],
        *,
        what: str,
        limit_s: float,
        repeat: Callable[[], None],
        number: int = -1,
        large: bool = False,
    ) -> tuple[_Kind, list[Frame]]:
        """Waits for the answer to what was sent already; as `ask`, but calls `repeat` every `probe_s`, unless something is on its way.

        Args:
            kind: The kind of the answer.
            accept: Tells this question's answer from that of an older one.
            what: What is waited for.
            limit_s: When to give up.
            repeat: Sends the question, or a probe, once more.
            number: The question's number: a Fault under it is its answer, as one without a number is.
            large: Whether what is repeated is large: the other task has as long to answer as that was on its way, then twice as long.
        """
        seen = self.patience.seen_time(self.clock)
        started = reported = asked = seen.now()
        life = SignsOfLife(self.channel, started, self.beats)
        arrived, repeats = started, 0
        while True:
            received = self.channel.receive(self.patience.probe_s)
            now = seen.turn()
            if received is not None:
                # Something has arrived: the answer, a refusal, or news for somebody else.
                life.heard = now
                answer, tensors = self.split(received)
                if isinstance(answer, kind) and accept(answer):
                    return answer, tensors
                if isinstance(answer, m.Fault) and answer.request in (-1, number):
                    raise error_of(answer)
                self.other(answer, tensors)
            under_way = life.look(now)
            if under_way:
                arrived = now
            if now - asked >= self.patience.probe_s:
                asked = now
                if not under_way and (not large or now - arrived >= (arrived - started) * 2**repeats):
                    repeat()
                    repeats += 1
                self.meanwhile()
            self.check(now - max(started, life.transferred), now - life.heard, limit_s, what)
            if now - reported >= self.patience.say_s:
                reported = now
                self.say(f"{self.me}: waiting for {what}: {now - started:.0f} s{tell_bytes([life])}")

    def check(self, waited_s: float, silent_s: float, limit_s: float, what: str) -> None:
        """Ends a wait that has grown too long, or whose other side is gone.

        Raises:
            TaskLostError: The connection is closed, or the other task says nothing.
            DeadlineError: It answers, but not what was asked for.
        """
        if self.channel.closed:
            raise TaskLostError(
                f"{self.me}: {self.there} has closed the connection while this task waited for {what}: its process is gone. "
                "Look at that task's output; if it does not come back by itself, start it again."
            )
        if not self.starting and silent_s > self.patience.silence_s:
            raise TaskLostError(
                f"{self.me}: {self.there} has not answered for {silent_s:.0f} s while this task waited for {what}. "
                "Look at that task's output; if it is gone, start it again."
            )
        if waited_s > limit_s:
            where = "" if what == self.there else f" at {self.there}"  # the other task itself may be what is waited for
            raise DeadlineError(f"{self.me}: waited {waited_s:.0f} s for {what}{where} and gave up. {self.advice}")
