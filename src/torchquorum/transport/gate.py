"""The gate before a listening socket: it lets in who knows the secret, and counts whom ZeroMQ turned away, and why.

A thread of its own per listener, asleep unless somebody comes or goes; the listener starts and ends it. What always holds:
a connection is let in only if its key is the one made from the secret; a stranger costs this thread a few counters and at
most one line of output every `SAY_EVERY_S`; beyond `most` connections, and when no file is left, newcomers are hung up on, so
that nobody waits awake for a file and some are left for the task itself.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq

SAY_EVERY_S = 10.0
MOST_UNTOLD = 100
POLL_MS = 200
KEPT_FILES = 256
HANDSHAKE_MS = 10_000
GREETING_S = HANDSHAKE_MS / 1000 + 1.0
_EVENT = struct.Struct("=HI")
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
STRANGE, UNFINISHED, TOO_MANY = "not torchquorum", "hung up before the greeting", "too many connections"
TALKS_TOO_MUCH = "talks too much"


def most_connections() -> int:
    """Returns how many connections fit beside the files that a task needs; first asks the system for as many as it gives."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard or hard == resource.RLIM_INFINITY:
            wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
            if soft != resource.RLIM_INFINITY and soft < wanted:
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                soft = wanted
    except (ImportError, OSError, ValueError):
        soft = 1024
    return max(64, (soft if soft > 0 else 65536) - KEPT_FILES)


def watch(watched: zmq.Socket[Any], events: int) -> zmq.Socket[Any]:
    """Returns a socket on which ZeroMQ tells what happens to another; `unwatch` it before that is closed."""
    name = f"inproc://torchquorum-watch-{secrets.token_hex(8)}"
    watched.monitor(name, events)
    try:
        told = watched.context.socket(zmq.PAIR)
    except zmq.ZMQError:
        unwatch(watched)
        raise
    told.setsockopt(zmq.RCVHWM, 0)  # or ZeroMQ's own thread would wait for a reader that is busy
    told.connect(name)
    return told


def unwatch(watched: zmq.Socket[Any]) -> None:
    """Ends what `watch` began; the socket that it returned is the caller's to close."""
    watched.monitor(None, 0)


def read_event(told: zmq.Socket[Any]) -> tuple[int, int] | None:
    """Returns the next event and its value from a socket that `watch` returned, or None."""
    try:
        event, value = _EVENT.unpack(told.recv_multipart(zmq.NOBLOCK)[0])
    except zmq.Again:
        return None
    return event, value


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


class Gate:
    """Watches one listening socket that has not been bound yet.

    Args:
        listener: The socket; the gate lives in its context.
        allowed: The raw public key of those who know the secret; None lets everybody in.
        say: Prints a line for people, on the gate's thread.
        most: How many connections there may be at a time.
    """

    def __init__(
        self, listener: zmq.Socket[Any], allowed: bytes | None, say: Callable[[str], None], most: int | None = None
    ) -> None:
        self._allowed, self._say = allowed, say
        self._most = most_connections() if most is None else most
        self.turned_away: Counter[str] = Counter()
        self._open: dict[int, tuple[Any, ...]] = {}
        self._since: dict[int, float] = {}
        self._last = ""
        self._unexplained = 0
        self._strange = 0
        self._gone: tuple[Any, ...] = ()
        self._untold: Counter[str] = Counter()
        self._told_at = 0.0
        self._closing = False
        self._handle = _Handle()
        self._spare: int | None = None
        self._take_spare()
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
        self._thread = threading.Thread(target=self._run, name="torchquorum-gate", daemon=True)
        self._thread.start()

    def counts(self) -> dict[str, int]:
        """Returns how many were turned away, by reason; may be called on any thread."""
        return dict(self.turned_away)

    def hang_up(self, fd: Any) -> None:
        """Ends the connection that a message came by, as the message says; may be called on any thread."""
        if isinstance(fd, int) and (peer := self._open.get(fd)):
            self.turned_away[TALKS_TOO_MUCH] += 1
            self._handle.hang_up(fd, peer)

    def close(self) -> None:
        """Ends the thread."""
        self._closing = True
        self._thread.join(timeout=5.0)
        self._give_back()

    def _give_back(self) -> None:
        self._handle.close()
        self._give_spare()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        if self._zap is not None:
            poller.register(self._zap, zmq.POLLIN)
        try:
            while not self._closing:
                ready = dict(poller.poll(POLL_MS))
                if self._zap in ready:
                    self._judge()
                if self._events in ready:
                    self._notice()
                else:
                    self._take_spare()
                self._count_strange()
                self._tell()
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
            self._turn_away(WRONG_SECRET, address.decode(errors="replace"))
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
                self._give_spare()
            elif event == zmq.EVENT_MONITOR_STOPPED:
                self._closing = True

    def _came(self, fd: int) -> None:
        self._open[fd], self._since[fd] = self._handle.peer_of(fd), time.monotonic()
        self._unexplained += 1
        self._take_spare()  # files may be free again, without anybody's having gone
        if len(self._open) > self._most or self._spare is None:
            self._turn_away(TOO_MANY, _host(self._open[fd]))
            self._handle.hang_up(fd, self._open[fd])

    def _went(self, fd: int) -> None:
        # ZeroMQ says why it fails just before it says which connection is gone.
        peer, why, self._last = self._open.pop(fd, ()), self._last, ""
        self._since.pop(fd, None)
        self._take_spare()
        self._gone = peer or self._gone
        if why == UNFINISHED:
            self.turned_away[why] += 1  # a port scan, or a task that died: worth a number, not a line
        elif why:
            self._turn_away(why, _host(peer))

    def _give_spare(self) -> None:
        """ZeroMQ has no file for somebody who waits, and asks again and again: with ours he is let in, and shown out."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _take_spare(self) -> None:
        if self._spare is None:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _count_strange(self) -> None:
        """Counts those of whom ZeroMQ says nothing but that they are gone: their greeting was none.

        What came, less what got in, less what failed for a reason, less what may still be at its greeting.
        """
        if self._unexplained <= self._strange:
            return
        now = time.monotonic()
        greeting = sum(now - since < GREETING_S for since in self._since.values())
        while self._unexplained - greeting > self._strange:
            self._strange += 1
            self._turn_away(STRANGE, _host(self._gone))

    def _reason(self, code: int) -> str:
        if code == MECHANISM_MISMATCH:
            return NO_SECRET if self._allowed is not None else UNEXPECTED_SECRET
        return WRONG_SECRET if code == _BAD_CRYPTO and self._allowed is not None else STRANGE

    def _turn_away(self, why: str, address: str) -> None:
        self.turned_away[why] += 1
        self._untold[f"{why}, from {address}" if address else why] += 1
        while len(self._untold) > MOST_UNTOLD:  # the oldest lose their address
            count = self._untold.pop(next(iter(self._untold)))  # perhaps the very entry to which it is added
            self._untold[why] += count

    def _tell(self) -> None:
        now = time.monotonic()
        if not self._untold or now - self._told_at < SAY_EVERY_S:
            return
        self._told_at = now
        (what, _), count = self._untold.most_common(1)[0], sum(self._untold.values())
        many = f" (and {count - 1} more)" if count > 1 else ""
        self._untold.clear()
        self._say(f"turned a connection away: {what}{many}")


class _Handle:
    """A handle on connections of ZeroMQ's, which may be gone by now; it has its files, for when no other is left."""

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._file = os.dup(self._nothing)
        except OSError:
            os.close(self._nothing)
            raise
        self._lock = threading.Lock()

    def peer_of(self, fd: int) -> tuple[Any, ...]:
        """Returns address and port of the other end of a connection, or nothing."""
        peer = self._at(fd, lambda found: found.getpeername())
        return peer if isinstance(peer, tuple) else ()

    def hang_up(self, fd: int, peer: tuple[Any, ...]) -> None:
        """Ends a connection, if the file is still the one that it was."""
        self._at(fd, lambda found: found.shutdown(socket.SHUT_RDWR) if found.getpeername() == peer else None)

    def _at(self, fd: int, do: Callable[[socket.socket], Any]) -> Any:
        """Does something with a connection; None if the system will not have it."""
        with self._lock, suppress(OSError):
            os.dup2(fd, self._file, inheritable=False)
            try:
                found = socket.socket(fileno=self._file)
                try:
                    return do(found)
                finally:
                    found.detach()
            finally:
                os.dup2(self._nothing, self._file, inheritable=False)
        return None

    def close(self) -> None:
        """Gives its files back."""
        os.close(self._file)
        os.close(self._nothing)


def _host(peer: tuple[Any, ...]) -> str:
    return str(peer[0]) if peer else ""
