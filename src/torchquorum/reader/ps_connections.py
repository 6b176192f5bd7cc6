"""A reader's connections to the ps tasks of a run: who they are, and one question to all of them with the answers of all.

Owned by a `RunSource`, used under the reader's lock. What always holds: a question that is not answered is given up after a moment of
silence, and asked anew under another number; while bytes move it is waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torchquorum.wire.messages as m
from torchquorum.clock import Clock
from torchquorum.cluster.secret import Access
from torchquorum.errors import LostPlaceError, RefusedError
from torchquorum.memory.segments import host_id
from torchquorum.reader.source import AwayError
from torchquorum.wire import codec
from torchquorum.wire.channel import wait_for_any
from torchquorum.wire.codec import Frame
from torchquorum.wire.entry_channel import EntryChannel
from torchquorum.wire.rpc import error_of

SILENCE_S = 5.0  # a connection on which nothing comes for so long is made anew
ANSWER_S = 2.0  # without a byte for so long, a question is asked anew
TURN_S = 0.2
Question = tuple[m.Message, Sequence[Frame]]
Arrived = tuple[Any, list[Frame]]


@dataclass(frozen=True)
class Who:
    """Who reads.

    Attributes:
        number: A random number of this reader's own.
        name: What it is called in lines and status.
        shares_memory: Whether it may read from shared memory.
    """

    number: int
    name: str
    shares_memory: bool = True


class PsConnections:
    """The connections to the ps tasks of one run.

    Args:
        address: Of one of them.
        access: The secret, if the cluster has one.
        who: Who reads.
        clock: Tells the time.

    Attributes:
        received_bytes: How many bytes of tensors have come.
        hear: Takes what arrives and is no answer.
    """

    def __init__(self, address: str, access: Access, who: Who, clock: Clock) -> None:
        self._access, self._who, self._clock = access, who, clock
        self._addresses = [address]
        self._channels: dict[str, EntryChannel] = {}
        self._number = 0
        self.received_bytes = 0
        self.hear: Callable[[Any], None] = lambda _message: None

    @property
    def first(self) -> str:
        """Returns ps task 0 with its address, for lines."""
        return f"/job:ps/task:0 ({self._addresses[0]})"

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to every ps task that is known."""
        self.drain()
        return all(a in self._channels and self._channels[a].is_connected for a in self._addresses)

    def meet(self, since_s: float) -> list[m.ReaderWelcome]:
        """Greets all ps tasks; returns what they say, of one creation of the variables.

        Raises:
            AwayError: One does not answer, or holds no variables yet.
            TorchQuorumError: One does not let us in, or speaks another protocol.
        """
        host = host_id() if self._who.shares_memory else ""
        hello = m.ReaderHello(m.PROTOCOL, self._who.number, self._who.name, host, os.getpid(), m.PACKAGE)
        found = self._greet(self._addresses, hello, since_s)
        if found[0].ps != self._addresses:
            self._addresses = list(found[0].ps)
            found = self._greet(self._addresses, hello, since_s)
        if any(w.plan is None for w in found):
            raise AwayError("the chief has not created the variables yet")
        if len({w.generation for w in found}) != 1:
            raise AwayError("the ps tasks are restoring the variables")
        return found

    def _greet(self, addresses: Sequence[str], hello: m.ReaderHello, since_s: float) -> list[m.ReaderWelcome]:
        answers = self._ask(
            addresses, [(hello, ())] * len(addresses), lambda m_: isinstance(m_, _WELCOME), lambda _: 1, since_s
        )
        return [each[0][0] for each in answers]

    def ask(
        self, make: Callable[[int, int], Question], accept: Callable[[Any, int], bool], count: int, within_s: float
    ) -> list[list[Arrived]]:
        """Asks every ps task a question of its own; returns the answers of each.

        Args:
            make: Returns the question to a ps task, by index, under a number.
            accept: Whether a message is an answer to the question of this number.
            count: How many messages are an answer.
            within_s: How long an answer may be waited for while nothing moves.

        Raises:
            AwayError: One does not answer, or holds no variables.
            TorchQuorumError: One refuses.
        """
        self._number += 1
        number = self._number
        questions = [make(k, number) for k in range(len(self._addresses))]
        return self._ask(self._addresses, questions, lambda got: accept(got, number), lambda _: count, within_s, number)

    def _ask(
        self,
        addresses: Sequence[str],
        questions: Sequence[Question],
        accept: Callable[[Any], bool],
        count: Callable[[int], int],
        within_s: float,
        number: int = -1,
    ) -> list[list[Arrived]]:
        channels = [self._channel(address, k) for k, address in enumerate(addresses)]
        for channel, (message, frames) in zip(channels, questions, strict=True):
            channel.send([codec.encode(message), *frames])
        answers: list[list[Arrived]] = [[] for _ in channels]
        moved, moved_at = self._moved(channels), self._clock.now()
        while missing := [k for k, got in enumerate(answers) if len(got) < count(k)]:
            wait_for_any([channels[k] for k in missing], TURN_S, self._clock)
            for k in missing:
                while len(answers[k]) < count(k) and (frames := channels[k].receive(0.0)) is not None:
                    message, tensors = codec.split(frames)
                    self.received_bytes += sum(map(len, frames))
                    if accept(message):
                        answers[k].append((message, tensors))
                    else:
                        self._other(message, k, number)
            now, before = self._clock.now(), moved
            if (moved := self._moved(channels)) != before:
                moved_at = now
            elif now - moved_at > within_s:
                raise AwayError(f"/job:ps/task:{missing[0]} ({addresses[missing[0]]}) does not answer")
        return answers

    def _other(self, message: Any, k: int, number: int) -> None:
        if not isinstance(message, m.Fault):
            self.hear(message)
            return
        if message.request not in (-1, number):
            return
        error = error_of(message)
        if isinstance(error, LostPlaceError):
            raise AwayError(f"/job:ps/task:{k} ({self._addresses[k]}) holds no variables") from None
        raise RefusedError(f"reader {self._who.name}: {error}") if type(error) is RefusedError else error

    def tell_first(self, message: m.Message) -> None:
        """Sends ps task 0 something that need not be answered."""
        channel = self._channel(self._addresses[0], 0)
        if channel.is_connected:
            channel.send([codec.encode(message)])

    def drain(self) -> None:
        """Takes what has come and was not asked for; notices connections that are lost."""
        for channel in self._channels.values():
            while (frames := channel.receive(0.0)) is not None:
                message = codec.split(frames)[0]
                if not isinstance(message, m.Fault):
                    self.hear(message)

    def _moved(self, channels: Sequence[EntryChannel]) -> list[int]:
        return [channel.progress().received for channel in channels]

    def _channel(self, address: str, k: int) -> EntryChannel:
        if address not in self._channels:
            made = EntryChannel(address, self._access, f"/job:ps/task:{k}", self._clock, SILENCE_S)
            self._channels[address] = made
        return self._channels[address]

    def close(self) -> None:
        """Closes them."""
        for channel in self._channels.values():
            channel.flush(0.1)
            channel.close()
        self._channels.clear()


_WELCOME = m.ReaderWelcome
