"""The inbox of a compute task: the thread that clients talk to while another one computes.

Started by `torchquorum.graph.compute`. It owns the socket, answers questions at once, even in the middle of a long batch, and
queues work for the computing thread. What always holds: a batch is taken from the queue once, however often it is sent;
nothing that a peer sends stops the thread; queue, state and run are used only while `_changed` is held.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster import TaskId
from torchquorum.cluster.secret import OPEN, Access
from torchquorum.graph import graph_messages as g
from torchquorum.graph.client_run import ClientRun
from torchquorum.memory.segments import host_id
from torchquorum.wire import codec
from torchquorum.wire.channel import Peer
from torchquorum.wire.codec import Frame, WireError
from torchquorum.wire.messages import PACKAGE, PROTOCOL, Fault, Message, refuse_protocol
from torchquorum.wire.transport import Listening
from torchquorum.wire.transports import listen_at_entry

TAKE_OVER_S = 5.0
TICK_S = 0.25
_URGENT = (g.Fetch, g.Finish)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A message for the computing thread, and its sender."""

    peer: Peer
    message: Any
    frames: list[Frame]


class Inbox:
    """The listening thread of a compute task.

    Args:
        task: The task.
        addresses: The addresses of all tasks by job, as far as this one knows; it listens on its own.
        device: The device it computes on, for people.
        listen_fd: A listening socket for its address, if there is one already.
        access: Who may connect.
        say: Prints a line for people about refused connections.
        clock: Tells the time.
    """

    def __init__(
        self,
        task: TaskId,
        addresses: dict[str, list[str]],
        *,
        device: str = "cpu",
        listen_fd: int | None = None,
        access: Access = OPEN,
        say: Callable[[str], None] = lambda _: None,
        clock: Clock = SYSTEM,
    ) -> None:
        self.task, self.address = task, addresses[task.job][task.index]
        self._addresses, self._device, self._clock = addresses, device, clock
        self.life = secrets.token_hex(8)
        self._listener = listen_at_entry(
            Listening(
                address=self.address,
                listen_fd=listen_fd,
                access=access,
                largest_bytes=g.MAX_FRAME_BYTES,
                reuse=False,  # batches are queued, with their frames
                say=lambda line: say(f"{task}: {line}"),
            )
        )
        self._host = host_id()
        self._changed = threading.Condition()
        self._state, self._run = g.State("", self.life), ClientRun()
        self._caller: tuple[Peer, str] = (b"", "")
        self._queue: deque[Work] = deque()
        self._outbox: deque[tuple[Peer, list[Frame]]] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"torchquorum-inbox-{task}", daemon=True)
        self._thread.start()

    # -- for the computing thread -------------------------------------------------------------------------------------

    def take(self, timeout_s: float, *, urgent: bool = False) -> Work | None:
        """Returns the next piece of work, or None; with `urgent`, only what can be done in the middle of a batch."""
        with self._changed:
            if not self._queue and timeout_s > 0:
                self._changed.wait(timeout_s)
            work = next((w for w in self._queue if not urgent or isinstance(w.message, _URGENT)), None)
            if work is not None:
                self._queue.remove(work)
            return work

    def update(self, **fields: Any) -> None:
        """Sets fields of the State that clients are told."""
        with self._changed:
            for name, value in fields.items():
                setattr(self._state, name, value)

    def reply(self, peer: Peer, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Sends a message; the frames must not change afterwards."""
        self._send(peer, [codec.encode(message), *frames])

    def tell_client(self, message: Message) -> None:
        """Sends a message to the client of the run."""
        with self._changed:
            peer = self._run.peer
        self.reply(peer, message)

    def finish_batch(self, message: g.Done | g.Failed) -> None:
        """Sends the result of a batch, now and whenever it is asked for again."""
        packet = codec.encode(message)
        with self._changed:
            if message.run != self._state.run:
                return  # of a client that is gone; another has taken the run over and counts from the beginning
            expired = (
                isinstance(message, g.Done) and message.step.reason == "expired"
            )  # may be given to this task again
            self._run.remember(message.number, None if expired else packet)
            peer = self._run.peer
            self._state.doing, self._state.waiting_for, self._state.loss = -1, "", None
            if isinstance(message, g.Done):
                self._state.version, self._state.local_step = message.step.version, message.step.local_step
                self._state.stop = self._state.stop or message.step.stop
        self._send(peer, [packet])

    def answer_fetch(self, work: Work, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Answers a Fetch or SaveNow, which may be asked again from now on."""
        with self._changed:
            self._run.fetching.discard(work.message.number)
        self.reply(work.peer, message, frames)

    def forget_batches(self) -> None:
        """Drops batches that have not been begun: the client gives them to others, or sends them again."""
        with self._changed:
            self._run.pending -= self._unqueue(lambda _: True)

    def forget_batch(self, number: int) -> None:
        """Drops a batch that was taken from the queue and is not wanted any more."""
        with self._changed:
            self._run.pending.discard(number)

    def last_heard(self) -> tuple[float, str]:
        """Returns when the client was last heard, and who it is."""
        with self._changed:
            return self._run.heard_at, self._run.client

    def caller(self) -> str:
        """Returns the client that introduced itself last."""
        with self._changed:
            return self._caller[1]

    def finish_request(self) -> g.Finish | None:
        """Returns the client's message that its run is over, if it is in the queue; it stays there."""
        with self._changed:
            return next((w.message for w in self._queue if isinstance(w.message, g.Finish)), None)

    def may_begin(self, number: int) -> bool | None:
        """Whether the client still wants a batch of this task; None while there is no lease, as after a loss of contact."""
        with self._changed:
            return number in self._run.pending if self._run.is_leased(self._clock.now()) else None

    def end_run(self) -> None:
        """The task is free for another run."""
        with self._changed:
            self._state, self._run = g.State("", self.life), ClientRun()
            self._queue.clear()

    def close(self) -> None:
        """Ends the thread; what was sent is still delivered, for a moment."""
        self._closing = True
        self._listener.wake()
        self._thread.join(timeout=5.0)

    def _send(self, peer: Peer, packet: list[Frame]) -> None:
        self._outbox.append((peer, packet))
        self._listener.wake()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not (self._closing and not self._outbox):
            received = self._listener.receive(0.0 if self._outbox else TICK_S)
            if received is not None and not self._closing:
                peer, frames = received
                for answer in self._handle(peer, frames):
                    self._outbox.append((peer, [answer]))
            while self._outbox:
                self._listener.send(*self._outbox.popleft())
        self._listener.close()

    def _handle(self, peer: Peer, frames: Sequence[Frame]) -> list[bytes]:
        try:
            message, tensors = g.split(frames)
            with self._changed:
                answers = self._route(peer, message, tensors)
                self._changed.notify_all()
        except WireError as error:
            text = f"{self.task}: {error}; this is a compute task, which a client of a graph talks to"
            answers = [Fault("wire", text)]
        except Exception as error:  # no message may end the thread
            answers = [Fault(type(error).__name__, f"{self.task}: {error}")]
        return [a if isinstance(a, bytes) else codec.encode(a) for a in answers]

    def _route(self, peer: Peer, message: g.AnyGraphMessage, frames: list[Frame]) -> Sequence[Message | bytes]:
        """Queues a message or returns the answers to it. `_changed` is held."""
        run, work = self._run, Work(peer, message, frames)
        match message:
            case g.Attach():
                self._caller = peer, message.client
                return [self._introduce(message)]
            case g.Execute():
                self._queue.append(work)
            case g.Train():
                return [self._train(work)]
            case g.Finish() if message.ok and not self._state.run and peer == self._caller[0]:
                self._queue.append(work)  # the caller's run has ended well without this task
            case g.Ask() | g.Batch() | g.Recall() | g.Fetch() | g.SaveNow() | g.Finish() if (
                message.run != self._state.run
            ):
                return [self._state_for_others()]
            # From here on the message is about the run that this task is in.
            case g.Ask():
                run.peer = peer
                if (kept := run.renew(message, self._state.doing, self._clock.now())) is not None:
                    self._unqueue(lambda number: number not in kept)
                again = [run.results[n] for n in message.awaiting if n in run.results]
                return [self._answer_state([n for n in message.awaiting if not run.knows(n)]), *again]
            case g.Batch():
                if not run.knows(message.number):
                    run.pending.add(message.number)
                    self._queue.append(work)
            case g.Recall():
                found = self._unqueue(lambda number: number == message.number)
                run.pending -= found
                return [g.Recalled(message.run, self.life, message.number)] if found else []
            case g.Fetch() | g.SaveNow():
                if message.number not in run.fetching:
                    run.fetching.add(message.number)
                    self._queue.append(work)
            case g.Finish():
                if not any(isinstance(w.message, g.Finish) for w in self._queue):
                    self._queue.append(work)
            case Fault():
                pass
            case _:
                return [Fault("wire", f"{type(message).__name__} is not for a compute task")]
        return []

    def _unqueue(self, drop: Callable[[int], bool]) -> set[int]:
        """Removes batches from the queue by their numbers; returns those that were there."""
        dropped = [w for w in self._queue if isinstance(w.message, g.Batch) and drop(w.message.number)]
        for work in dropped:
            self._queue.remove(work)
        return {w.message.number for w in dropped}

    def _introduce(self, attach: g.Attach) -> Message:
        if attach.protocol != PROTOCOL:
            text = refuse_protocol("the client", attach.protocol, attach.package, str(self.task))
            return Fault("protocol", text)
        return g.Attached(
            protocol=PROTOCOL,
            task=str(self.task),
            life=self.life,
            host=self._host,
            pid=os.getpid(),
            device=self._device,
            cluster=dict(self._addresses),
            doing=self._state.state,
            package=PACKAGE,
        )

    def _train(self, work: Work) -> Message:
        """A client wants this task in its run; one that was restarted may go on with the run that it left."""
        message: g.Train = work.message
        now, previous = self._clock.now(), self._run
        if message.run == self._state.run:
            return self._answer_state([])
        # The task is free, or in another run: that one can be taken over if it has the same terms and its client is silent.
        terms = codec.encode(g.Train("", "", message.graph, message.plan, message.options))
        silent_s = now - previous.heard_at
        if self._state.run and (terms != previous.terms or silent_s < TAKE_OVER_S):
            text = f"{self.task} is busy with the run of {previous.client}, last heard {silent_s:.0f} s ago"
            return Fault("busy", f"{text}; end that client, or wait until it has finished")
        fresh = not self._state.run
        self._run = ClientRun(terms, message.client, work.peer, now, message.plan.liveness_s / 2)
        self._state.run = message.run
        self._queue = deque(w for w in self._queue if isinstance(w.message, g.Execute))
        if fresh:
            self._state.state = "loading"
            self._queue.append(work)
        return self._answer_state([])

    def _answer_state(self, unknown: list[int]) -> Message:
        return msgspec.structs.replace(self._state, unknown=unknown, stamp=self._clock.now())

    def _state_for_others(self) -> Message:
        """The answer to a peer that does not name the run: nothing that would let it impersonate client or worker."""
        return g.State("", self.life, self._state.state, stamp=self._clock.now())
