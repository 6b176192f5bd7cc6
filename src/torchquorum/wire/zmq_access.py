"""Access to a listening ZeroMQ socket: only keys made from the secret are accepted, and refused connections are counted with the reason.

A thread of its own per listener, asleep unless a connection begins or ends; the listener starts and ends it. What always holds: a
connection is accepted only if its key is the one made from the secret; beyond `most` connections, and when no file descriptor is left, new
ones are closed, so that no thread stays awake for them and some descriptors are left for the task itself.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from typing import Any

import zmq

from torchquorum.clock import SYSTEM, Clock
from torchquorum.wire.descriptors import Address, Handle, Reserve, most_connections
from torchquorum.wire.refusals import Refusals
from torchquorum.wire.zmq_events import read_event, watch

POLL_MS = 200
HANDSHAKE_MS = 10_000
GREETING_S = HANDSHAKE_MS / 1000 + 1.0
MECHANISM_MISMATCH = 0x11000002
_BAD_CRYPTO = 0x11000001
_NO_FILE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NOTICED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_MONITOR_STOPPED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

WRONG_SECRET, NO_SECRET, UNEXPECTED_SECRET = "wrong secret", "no secret", "a secret where none is used"
OTHER_PROTOCOL, UNFINISHED, TOO_MANY = "not torchquorum", "hung up before the greeting", "too many connections"
TALKS_TOO_MUCH = "talks too much"


def ask_mechanism(endpoint: str, timeout_s: float = 1.0) -> str:
    """Returns what a ZeroMQ socket wants of those who connect, NULL or CURVE; nothing if it is none, or not there.

    Both sides of a connection send their greeting (ZMTP, RFC 23) before they judge the other's, so half of ours is enough.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    greeting = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as asked:
            asked.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3\0")
            while len(greeting) < 32 and (more := asked.recv(64)):
                greeting += more
    except OSError:
        return ""
    return greeting[12:32].rstrip(b"\0").decode(errors="replace") if greeting[:1] == b"\xff" else ""


class AccessMonitor:
    """Watches one listening socket that has not been bound yet.

    Args:
        listener: The socket; the monitor uses its context.
        allowed: The raw public key of those who know the secret; None accepts everybody.
        say: Prints a line for people, on the monitor's thread.
        most: How many connections there may be at a time.
        reserve: The descriptor with which a connection is accepted and closed when no other is left.
        poll_ms: How long it sleeps when nothing happens.
        clock: Tells the time.
    """

    def __init__(
        self,
        listener: zmq.Socket[Any],
        allowed: bytes | None,
        say: Callable[[str], None],
        *,
        most: int | None = None,
        reserve: Reserve | None = None,
        poll_ms: int = POLL_MS,
        clock: Clock = SYSTEM,
    ) -> None:
        self._allowed, self._poll_ms, self._clock = allowed, poll_ms, clock
        self._most = most_connections() if most is None else most
        self.refusals = Refusals(say, clock=clock)
        self._open: dict[int, tuple[Address, float]] = {}  # the connections by descriptor: other end, and since when
        self._last = ""
        self._unexplained = 0
        self._strange = 0
        self._gone: Address = ()
        self._closing = False
        self._handle = Handle()
        self._reserve = Reserve() if reserve is None else reserve
        self._zap: zmq.Socket[Any] | None = None
        try:
            if allowed is not None:
                asked = self._zap = listener.context.socket(zmq.ROUTER)
                asked.bind("inproc://zeromq.zap.01")
            self._events = watch(listener, _NOTICED)
        except BaseException:
            if self._zap is not None:
                self._zap.close(0)
            self._give_back()
            raise
        self._thread = threading.Thread(target=self._run, name="torchquorum-access", daemon=True)
        self._thread.start()

    def counts(self) -> dict[str, int]:
        """Returns how many connections were refused, by reason; may be called on any thread."""
        return dict(self.refusals.counts)

    def hang_up(self, fd: Any) -> None:
        """Ends the connection that a message came by, as the message names it; may be called on any thread."""
        if isinstance(fd, int) and (found := self._open.get(fd)):
            self.refusals.counts[TALKS_TOO_MUCH] += 1
            self._handle.hang_up(fd, found[0])

    def close(self) -> None:
        """Ends the thread."""
        self._closing = True
        self._thread.join(timeout=5.0)
        self._give_back()

    def _give_back(self) -> None:
        self._handle.close()
        self._reserve.give()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        if self._zap is not None:
            poller.register(self._zap, zmq.POLLIN)
        try:
            while not self._closing:
                ready = dict(poller.poll(self._poll_ms))
                if self._zap in ready:
                    self._judge()
                if self._events in ready:
                    self._notice()
                else:
                    self._reserve.take()
                self._count_strange()
                self.refusals.report()
        except zmq.ContextTerminated:
            pass
        finally:
            for held in (self._events, self._zap):
                if held is not None:
                    held.close(0)

    def _judge(self) -> None:
        """Answers ZeroMQ's question whether a key is allowed (ZAP, RFC 27)."""
        assert self._zap is not None
        envelope, _, version, request, _, address, _, mechanism, *given = self._zap.recv_multipart()
        fine = mechanism == b"CURVE" and given == [self._allowed]
        if not fine:
            self.refusals.add(WRONG_SECRET, address.decode(errors="replace"))
        status, text = (b"200", b"OK") if fine else (b"400", b"not allowed")
        self._zap.send_multipart([envelope, b"", version, request, status, text, b"", b""])

    def _notice(self) -> None:
        for _ in range(1000):
            if (told := read_event(self._events)) is None:
                return
            event, value = told
            if event == zmq.EVENT_ACCEPTED:
                self._came(value)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._unexplained -= 1
            elif event == zmq.EVENT_DISCONNECTED:
                self._went(value)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._last = self._reason(value)
                self._unexplained -= 1
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._last = UNFINISHED
                self._unexplained -= 1
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._unexplained -= 1  # counted where it was judged
            elif event == zmq.EVENT_ACCEPT_FAILED and value in _NO_FILE:
                self._reserve.give()  # ZeroMQ tries again and again: with this one it accepts, and `_came` closes
            elif event == zmq.EVENT_MONITOR_STOPPED:
                self._closing = True

    def _came(self, fd: int) -> None:
        peer = self._handle.peer_of(fd)
        self._open[fd] = peer, self._clock.now()
        self._unexplained += 1
        self._reserve.take()  # descriptors may be free again though no connection has ended
        if len(self._open) > self._most or not self._reserve.held:
            self.refusals.add(TOO_MANY, _host(peer))
            self._handle.hang_up(fd, peer)

    def _went(self, fd: int) -> None:
        # ZeroMQ says why it fails just before it says which connection is gone.
        (peer, _), why, self._last = self._open.pop(fd, ((), 0.0)), self._last, ""
        self._reserve.take()
        self._gone = peer or self._gone
        if why == UNFINISHED:
            self.refusals.counts[why] += 1  # a port scan, or a task that died: worth a number, not a line
        elif why:
            self.refusals.add(why, _host(peer))

    def _count_strange(self) -> None:
        """Counts connections of which ZeroMQ says nothing but that they are gone: their greeting was none.

        What came, less what was accepted, less what failed for a reason, less what may still be at its greeting.
        """
        if self._unexplained <= self._strange:
            return
        now = self._clock.now()
        greeting = sum(now - since < GREETING_S for _, since in self._open.values())
        while self._unexplained - greeting > self._strange:
            self._strange += 1
            self.refusals.add(OTHER_PROTOCOL, _host(self._gone))

    def _reason(self, code: int) -> str:
        if code == MECHANISM_MISMATCH:
            return NO_SECRET if self._allowed is not None else UNEXPECTED_SECRET
        return WRONG_SECRET if code == _BAD_CRYPTO and self._allowed is not None else OTHER_PROTOCOL


def _host(peer: Address) -> str:
    return str(peer[0]) if peer else ""
