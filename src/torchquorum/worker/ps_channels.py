"""A worker's channels to the ps tasks, one each: messages, questions, and the way of every answer to the one that asked.

Owned by the worker's thread, through its link. Other threads leave their questions in an inbox, which the owner sends while it waits or
steps. What always holds: whatever arrives while something else is awaited is kept for the one that asked; a question and a
request never have the same number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torchquorum.wire.messages as m
from torchquorum.wire import codec
from torchquorum.wire.channel import Channel
from torchquorum.wire.codec import Frame
from torchquorum.wire.rpc import Arrived, Asker, Pending, SignsOfLife, error_of
from torchquorum.worker.worker_end import WorkerEnd

MOST_PENDING = 64
_Kind = TypeVar("_Kind", bound=m.Message)


class PsChannels:
    """One worker's channels to all ps tasks.

    Attributes:
        end: Who this worker is.
        count: The last number that a request or question was given.
        while_waiting: Is called while the owner waits; may raise to end the wait.
        is_for_request: Takes what belongs to the open request; returns whether it did.
        unasked: Takes what arrives and answers nothing.
        takes_rows: Each takes rows that it has asked for ahead of time; returns whether it did.
    """

    def __init__(self, end: WorkerEnd) -> None:
        self.end = end
        # A new name for every connection: a closed one may linger, and must not take the answers of the next.
        identity = f"worker/{end.index}/{end.incarnation:016x}/{end.random_bits(32):08x}".encode()
        self._askers = [self._asker(k, end.connect(end.cluster.address(ps), identity)) for k, ps in enumerate(end.ps)]
        self.count = 0
        self._pending: dict[int, Pending] = {}  # questions by number
        self._inbox: deque[Pending] = deque()  # questions of other threads
        self.while_waiting: Callable[[], None] = lambda: None
        self.is_for_request: Callable[[int, Any, list[Frame]], bool] = lambda _k, _message, _frames: False
        self.unasked: Callable[[m.Message], None] = lambda _message: None
        self.takes_rows: list[Callable[[int, Any, list[Frame]], bool]] = []

    def _asker(self, k: int, channel: Channel) -> Asker:
        end = self.end
        return Asker(
            channel=channel,
            me=str(end.task),
            there=end.where(k),
            patience=end.patience,
            clock=end.clock,
            say=end.say,
            other=lambda message, frames: self.route(k, message, frames),
            meanwhile=self.meanwhile,
            beats=end.beats if k == 0 else lambda: 0,
        )

    def __len__(self) -> int:
        return len(self._askers)

    def asker(self, k: int) -> Asker:
        """Returns what asks ps task k, with its channel."""
        return self._askers[k]

    def life(self, k: int, now: float) -> SignsOfLife:
        """Returns the signs of life of ps task k, for a wait that begins now."""
        asker = self._askers[k]
        return SignsOfLife(asker.channel, now, asker.beats)

    def closed(self, k: int) -> bool:
        """Whether ps task k is known to have closed the connection."""
        return self._askers[k].channel.closed

    def next_number(self) -> int:
        """Returns the number of a new request or question."""
        self.count += 1
        return self.count

    def close(self) -> None:
        """Closes the channels; questions that are open get no answer any more."""
        for asker in self._askers:
            asker.channel.close()
        for pending in [*self._pending.values(), *self._inbox]:
            pending.put(None)
        self._pending.clear()

    # -- messages -----------------------------------------------------------------------------------------------------

    def post(self, k: int, message: m.Message, frames: Sequence[Any] = ()) -> None:
        """Sends a message to ps task k; nothing waits for an answer."""
        self.end.check_process()
        self._askers[k].channel.send([codec.encode(message), *frames])

    def arrive(self, k: int, timeout_s: float) -> Arrived | None:
        """Returns the next message of ps task k, whatever it is, or None when none came in time."""
        received = self._askers[k].channel.receive(timeout_s)
        return codec.split(received) if received is not None else None

    def attend(self, k: int = 0) -> bool:
        """Takes a message that ps task k has sent, without waiting; returns whether there was one."""
        self.send_inbox()
        arrived = self.arrive(k, 0.0)
        if arrived is None:
            return False
        if isinstance(arrived[0], m.Fault) and arrived[0].request == -1:
            raise error_of(arrived[0])
        self.route(k, *arrived)
        return True

    def meanwhile(self) -> None:
        """Is called while the owner waits."""
        self.send_inbox()
        self.while_waiting()

    def route(self, k: int, message: Any, frames: list[Frame]) -> None:
        """Hands what has arrived to the one that waits for it; an answer that nobody waits for any more is dropped."""
        if self.is_for_request(k, message, frames) or any(takes(k, message, frames) for takes in self.takes_rows):
            return
        pending = self._pending.pop(getattr(message, "request", -1), None)
        if pending is not None:
            pending.put((message, frames))
        else:
            self.unasked(message)

    # -- questions to one ps task -------------------------------------------------------------------------------------

    def ask(
        self,
        k: int,
        message: m.Message,
        frames: Sequence[Any] = (),
        *,
        kind: type[_Kind],
        what: str,
        limit_s: float,
        starting: bool = False,
    ) -> _Kind:
        """Sends a message to ps task k until it answers with one of `kind`; see `torchquorum.wire.rpc`."""
        self.end.check_process()
        asker = self._askers[k]
        asker = asker.at_start() if starting else asker
        return asker.ask(message, frames, kind=kind, what=what, limit_s=limit_s)[0]

    def question(self, message: m.Message) -> Pending:
        """Numbers a question to ps task 0 and sends it; its answer is kept until `finish` or its own `take`."""
        return self._send_question(Pending(0, message))

    def finish(self, pending: Pending, what: str) -> Arrived:
        """Waits for the answer to a question, which is repeated until it comes.

        Raises:
            TaskLostError, DeadlineError: See `torchquorum.wire.rpc`.
            TorchQuorumError: What a Fault in answer stands for.
        """
        answer = pending.take()
        if answer is None:
            answer = self._askers[pending.k].wait(
                m.Message,
                lambda message: getattr(message, "request", -1) == pending.number,
                what=what,
                limit_s=self.end.patience.round_s,
                repeat=lambda: self.post(pending.k, pending.message),
            )
            self._pending.pop(pending.number, None)
        if isinstance(answer[0], m.Fault):
            raise error_of(answer[0])
        return answer

    def leave_question(self, k: int, message: m.Message) -> Pending:
        """Leaves a question to ps task k, which is sent when the channels' owner next looks; may be called on any thread."""
        pending = Pending(k, message)
        self._inbox.append(pending)
        return pending

    def send_inbox(self) -> None:
        """Sends the questions that other threads have left."""
        while self._inbox:
            self._send_question(self._inbox.popleft())

    def _send_question(self, pending: Pending) -> Pending:
        while len(self._pending) >= MOST_PENDING:  # those that were lost are never answered
            self._pending.pop(next(iter(self._pending))).put(None)
        pending.message.request = number = self.next_number()
        self._pending[number] = pending
        self.post(pending.k, pending.message)
        return pending
