"""The desk of a compute task: the thread that clients talk to while another one computes.

Started by `torchquorum.session.compute`. It owns the socket, answers questions at once, even in the middle of a long batch,
and puts work into a tray from which the computing thread takes it. What always holds: a batch is taken from the tray once,
however often it is sent; nothing that a stranger sends stops the thread.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from torchquorum.cluster.secret import OPEN, Access
from torchquorum.errors import TorchQuorumError
from torchquorum.transport import codec
from torchquorum.transport import graph_messages as g
from torchquorum.transport.channel import Peer
from torchquorum.transport.codec import Frame, WireError
from torchquorum.transport.memory import host_id
from torchquorum.transport.messages import PACKAGE, PROTOCOL, Fault, Message, refuse_protocol
from torchquorum.transport.zmq_channel import ZmqListener

REMEMBERED_RESULTS = 64
TAKE_OVER_S = 5.0
TICK_S = 0.25
_URGENT = (g.Fetch, g.Finish)


@dataclass(frozen=True, slots=True)
class Work:
    """A message in the tray, and who sent it."""

    peer: Peer
    message: Any
    frames: list[Frame]


@dataclass(slots=True)
class Standing:
    """What the desk tells whoever asks; the computing thread keeps it up to date."""

    run: str = ""
    state: str = "free"
    text: str = ""
    incarnation: int = 0
    version: int = 0
    local_step: int = 0
    doing: int = -1
    held: str = ""
    loss: float | None = None
    stop: bool = False


@dataclass(slots=True)
class _Run:
    """What the desk remembers of the run that the task is part of."""

    terms: bytes = b""
    client: str = ""
    peer: Peer = b""
    heard_at: float = 0.0
    lease_s: float = 0.0
    lease_at: float = 0.0
    inside: set[int] = field(default_factory=set)
    results: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    fetching: set[int] = field(default_factory=set)


class Desk:
    """The listening thread of a compute task.

    Args:
        task: The task's name.
        address: host:port to listen on.
        listen_fd: A listening socket for it, if somebody has made one.
        device: The device it computes on, for people.
        cluster: The addresses of all tasks by job, as far as this one knows.
        access: Whom to let in.
        say: Prints a line for people about whom was not.
    """

    def __init__(
        self,
        task: str,
        address: str,
        *,
        listen_fd: int | None,
        device: str,
        cluster: dict[str, list[str]],
        access: Access = OPEN,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.task, self.address, self.device, self._cluster = task, address, device, cluster
        self.life = secrets.token_hex(8)
        self._listener = ZmqListener(
            address,
            listen_fd,
            max_frame_bytes=g.MAX_FRAME_BYTES,
            access=access,
            say=lambda line: say(f"{task}: {line}"),
        )
        self._host, self._wake = host_id(), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._changed = threading.Condition()
        self._standing, self._run = Standing(), _Run()
        self._caller: tuple[Peer, str] = (b"", "")
        self._tray: deque[Work] = deque()
        self._outbox: deque[tuple[Peer, list[Frame]]] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"torchquorum-desk-{task}", daemon=True)
        self._thread.start()

    # -- for the computing thread -------------------------------------------------------------------------------------

    def take(self, timeout_s: float, *, urgent: bool = False) -> Work | None:
        """Returns the next piece of work, or None; with `urgent`, only what can be done in the middle of a batch."""
        with self._changed:
            if not self._tray and timeout_s > 0:
                self._changed.wait(timeout_s)
            if not urgent:
                return self._tray.popleft() if self._tray else None
            for work in self._tray:
                if isinstance(work.message, _URGENT):
                    self._tray.remove(work)
                    return work
            return None

    def update(self, **fields: Any) -> None:
        """Says how the task is doing."""
        with self._changed:
            for name, value in fields.items():
                setattr(self._standing, name, value)

    def reply(self, peer: Peer, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Sends a message; the frames are not touched afterwards."""
        self._outbox.append((peer, [codec.encode(message), *frames]))
        os.eventfd_write(self._wake, 1)

    def tell_client(self, message: Message) -> None:
        """Sends a message to the client of the run."""
        with self._changed:
            peer = self._run.peer
        self.reply(peer, message)

    def finish_batch(self, message: g.Done | g.Failed) -> None:
        """Says what became of a batch, now and whenever it is asked for again."""
        packet = codec.encode(message)
        with self._changed:
            if message.run != self._standing.run:
                return  # of a client that is gone; another has taken the run over and counts anew
            self._run.inside.discard(message.number)
            if not (isinstance(message, g.Done) and message.reason == "expired"):  # that one may be given to us again
                self._run.results[message.number] = packet
            while len(self._run.results) > REMEMBERED_RESULTS:
                self._run.results.popitem(last=False)
            peer = self._run.peer
            self._standing.doing, self._standing.held, self._standing.loss = -1, "", None
            if isinstance(message, g.Done):
                self._standing.version, self._standing.local_step = message.version, message.local_step
                self._standing.stop = self._standing.stop or message.stop
        self._outbox.append((peer, [packet]))
        os.eventfd_write(self._wake, 1)

    def answer_fetch(self, work: Work, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Answers a Fetch or SaveNow, which may be asked again from now on."""
        with self._changed:
            self._run.fetching.discard(work.message.number)
        self.reply(work.peer, message, frames)

    def forget_batches(self) -> None:
        """Throws away batches that have not been begun: the client gives them to others, or sends them again."""
        with self._changed:
            kept = [w for w in self._tray if not isinstance(w.message, g.Batch)]
            self._run.inside -= {w.message.number for w in self._tray if isinstance(w.message, g.Batch)}
            self._tray = deque(kept)

    def drop(self, number: int) -> None:
        """A batch is not wanted any more."""
        with self._changed:
            self._run.inside.discard(number)

    def heard(self) -> tuple[float, str]:
        """Returns when the client was last heard of, and who it is."""
        with self._changed:
            return self._run.heard_at, self._run.client

    def caller(self) -> str:
        """Returns who introduced himself last."""
        with self._changed:
            return self._caller[1]

    def told_to_finish(self) -> g.Finish | None:
        """Returns the client's word that its run is over, if it lies in the tray; it stays there."""
        with self._changed:
            return next((w.message for w in self._tray if isinstance(w.message, g.Finish)), None)

    def may_begin(self, number: int) -> bool | None:
        """Whether the client still wants a batch of us; None while that is not known, after we were cut off or frozen."""
        with self._changed:
            if time.monotonic() - self._run.lease_at >= self._run.lease_s:
                return None
            return number in self._run.inside

    def end_run(self) -> None:
        """The task is free for another run."""
        with self._changed:
            self._standing, self._run = Standing(), _Run()
            self._tray.clear()

    def close(self) -> None:
        """Ends the thread; what was sent is still delivered, for a moment."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=5.0)
        os.close(self._wake)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._listener.socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while True:
            self._send_all()
            if self._closing:
                break
            for ready, _ in poller.poll(int(TICK_S * 1000)):
                if ready == self._wake:
                    os.eventfd_read(self._wake)
            while not self._closing and (received := self._listener.receive(0.0)) is not None:
                peer, frames = received
                for answer in self._handle(peer, frames):
                    self._outbox.append((peer, answer))
        self._listener.close()

    def _send_all(self) -> None:
        while self._outbox:
            peer, frames = self._outbox.popleft()
            try:
                self._listener.send(peer, frames)
            except zmq.ZMQError:
                continue  # the client is gone

    def _handle(self, peer: Peer, frames: Sequence[Frame]) -> list[list[Frame]]:
        try:
            message, tensors = g.split(frames)
            with self._changed:
                answers = self._route(peer, message, tensors)
                self._changed.notify_all()
            return [[a if isinstance(a, bytes) else codec.encode(a)] for a in answers]
        except WireError as error:
            text = f"{self.task}: {error}; this is a compute task, which a client of a graph talks to"
            return [[codec.encode(Fault("wire", text))]]
        except TorchQuorumError as error:
            return [[codec.encode(Fault(type(error).__name__, f"{self.task}: {error}"))]]
        except Exception as error:  # whatever a stranger may have sent, the desk stays open
            return [[codec.encode(Fault(type(error).__name__, f"{self.task}: {error}"))]]

    def _route(self, peer: Peer, message: g.AnyGraphMessage, frames: list[Frame]) -> list[Message | bytes]:
        run, work = self._run, Work(peer, message, frames)
        match message:
            case g.Attach():
                self._caller = peer, message.client
                return [self._introduce(message)]
            case g.Execute():
                self._tray.append(work)
                return []
            case g.Train():
                return [self._train(work)]
            case g.Finish() if message.ok and not self._standing.run and peer == self._caller[0]:
                self._tray.append(work)  # his run has ended well without us
                return []
            case g.Ask() | g.Batch() | g.Recall() | g.Fetch() | g.SaveNow() | g.Finish() if (
                message.run != self._standing.run
            ):
                return [self._state_for_others()]
            case g.Ask():
                run.peer = peer
                self._renew(message)
                again = [run.results[n] for n in message.awaiting if n in run.results]
                lost = [n for n in message.awaiting if n not in run.results and n not in run.inside]
                return [self._state(lost), *again]
            case g.Batch():
                if message.number not in run.inside and message.number not in run.results:
                    run.inside.add(message.number)
                    self._tray.append(work)
                return []
            case g.Recall():
                found = [w for w in self._tray if isinstance(w.message, g.Batch) and w.message.number == message.number]
                for there in found:
                    self._tray.remove(there)
                    run.inside.discard(message.number)
                return [g.Recalled(message.run, self.life, message.number)] if found else []
            case g.Fetch() | g.SaveNow():
                if message.number not in run.fetching:
                    run.fetching.add(message.number)
                    self._tray.append(work)
                return []
            case g.Finish():
                if not any(isinstance(w.message, g.Finish) for w in self._tray):
                    self._tray.append(work)
                return []
            case Fault():
                return []
            case _:
                return [Fault("wire", f"{type(message).__name__} is not for a compute task")]

    def _renew(self, ask: g.Ask) -> None:
        """The client knew us to be alive when it sent this, unless it lay about while we were frozen.

        While the lease lasts the client cannot have given our batches to others. If it had run out, what the client does not
        wait for now is not ours any more.
        """
        run, now = self._run, time.monotonic()
        run.heard_at = now
        if now - ask.stamp >= run.lease_s:
            return
        if now - run.lease_at >= run.lease_s:
            kept = {*ask.awaiting, self._standing.doing}
            self._tray = deque(w for w in self._tray if not isinstance(w.message, g.Batch) or w.message.number in kept)
            run.inside &= kept
        run.lease_at = min(ask.stamp, now)

    def _introduce(self, attach: g.Attach) -> Message:
        if attach.protocol != PROTOCOL:
            return Fault("protocol", refuse_protocol("the client", attach.protocol, attach.package, self.task))
        doing = self._standing.state
        return g.Attached(
            PROTOCOL, self.task, self.life, self._host, os.getpid(), self.device, dict(self._cluster), doing, PACKAGE
        )

    def _train(self, work: Work) -> Message:
        """A client wants this task in its run; one that was restarted may go on with the run that it left."""
        message: g.Train = work.message
        if message.run == self._standing.run:
            return self._state([])
        terms = codec.encode(g.Train("", "", message.graph, message.plan, message.options))
        silent_s = time.monotonic() - self._run.heard_at
        if self._standing.run and (terms != self._run.terms or silent_s < TAKE_OVER_S):
            text = f"{self.task} is busy with the run of {self._run.client}, heard of {silent_s:.0f} s ago"
            return Fault("busy", f"{text}; end that client, or wait until it has finished")
        fresh = not self._standing.run
        self._run = _Run(terms, message.client, work.peer, time.monotonic(), message.plan.liveness_s / 2)
        self._standing.run = message.run
        self._tray = deque(w for w in self._tray if isinstance(w.message, g.Execute))
        if fresh:
            self._standing.state = "loading"
            self._tray.append(work)
        return self._state([])

    def _state_for_others(self) -> Message:
        """What somebody hears who does not name the run: that it is not his, and nothing with which to speak in its name."""
        state = self._standing.state
        return g.State("", self.life, state, "", 0, 0, 0, -1, "", None, [], False, time.monotonic())

    def _state(self, unknown: list[int]) -> Message:
        s = self._standing
        return g.State(
            s.run,
            self.life,
            s.state,
            s.text,
            s.incarnation,
            s.version,
            s.local_step,
            s.doing,
            s.held,
            s.loss,
            unknown,
            s.stop,
            time.monotonic(),
        )
