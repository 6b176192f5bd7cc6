"""A ps task's end of its lanes: it lets workers in, and gives those who send large frames a thread of their own.

Most of what a ps does for a worker on another host is copying bytes into and out of the system. With one thread it does that
for one worker at a time, and wherever it is waited for by two, a core is idle. So a lane on which large frames come gets
a carrier: a thread that receives a message, has it handled, and sends the answer. Who calls says how a message is handled
on such a thread, one after another. What is small or very large, and who has not yet said the word, needs no carrier: the
ps thread polls these lanes.

What always holds: nobody blocks on a peer that does not read or write; what a stranger can make a ps keep is bounded; on
each lane one message is handled before the next one is read; without a file or thread for a carrier a lane works as well,
slower.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchquorum.transport.channel import Peer, Sent
from torchquorum.transport.codec import Frame
from torchquorum.transport.entrance import Entrance
from torchquorum.transport.lane import LARGE_BYTES, PREFIX, WORD_BYTES, LaneError, Reader, Writer, prepare, widen

MOST_STRANGERS = 64
STRANGER_S = 3.0
LARGE_AHEAD = 2
SMALL_AHEAD = 1000
END_S = 5.0
CARRIED_BYTES = range(LARGE_BYTES, 8 << 20)  # beyond, arithmetic by all cores is worth more than copies side by side
_NONE = range(0)

Take = Callable[[Peer, list[Frame]], None]


@dataclass(slots=True, eq=False)
class _Guest:
    peer: Peer
    socket: socket.socket
    reader: Reader
    writer: Writer
    since: float
    word: bytearray = field(default_factory=bytearray)
    let_in: bool = False
    carrier: _Carrier | None = None

    def read(self, *, carried: range) -> list[Frame] | None:
        """Returns the message whose end has come, None if there is none yet.

        Args:
            carried: Frames of these sizes are left for a carrier.

        Raises:
            OSError: The connection is gone.
            LaneError: What came makes no sense.
        """
        while True:
            try:
                count = self.socket.recv_into(self.reader.room())
            except (BlockingIOError, InterruptedError):
                return None
            if count == 0:
                raise ConnectionResetError
            if (message := self.reader.took(count)) is not None:
                return message
            if self.reader.wanted_bytes in carried:
                return None


class _Carrier:
    """A thread that receives what one guest sends, has it handled and sends what is put into the guest's writer.

    From its beginning on it owns the connection.

    Args:
        guest: Whose bytes.
        take: Handles a message, on this thread.
        gone: Called on this thread when the connection is gone.

    Raises:
        OSError: No file is left to wake it with.
        RuntimeError: No thread can be started.
    """

    def __init__(self, guest: _Guest, take: Take, gone: Callable[[_Guest], None]) -> None:
        self._guest, self._take, self._gone = guest, take, gone
        self._closing = self._over = False
        self._lock = threading.Lock()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"torchquorum-{guest.peer[1:].decode()}", daemon=True)
        guest.carrier = self
        try:
            self._thread.start()
        except BaseException:
            guest.carrier = None
            os.close(self._woken)
            raise

    def wake(self) -> None:
        """Something is to be sent."""
        if self._thread is not threading.current_thread():
            with self._lock:
                if not self._over:
                    os.eventfd_write(self._woken, 1)

    def end(self) -> None:
        """Ends the connection, after what can be sent at once."""
        self._closing = True
        self.wake()

    def alive(self) -> bool:
        """Whether the thread has not ended yet."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Waits for the end."""
        self._thread.join(END_S)

    def _run(self) -> None:
        try:
            self._carry()
        except (OSError, LaneError):
            pass  # the connection is gone, or is given up
        finally:
            with self._lock:
                self._over = True
                os.close(self._woken)
            self._guest.writer.give_up()
            self._guest.socket.close()
            self._gone(self._guest)

    def _carry(self) -> None:
        guest, fd = self._guest, self._guest.socket.fileno()
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        while not self._closing:
            message = guest.read(carried=_NONE)
            if message is not None:
                self._take(guest.peer, message)
            all_sent = guest.writer.flush()
            if message is not None:
                continue  # there may be more, and whoever never pauses must be answered and hung up on like others
            poll.register(fd, select.POLLIN if all_sent else select.POLLIN | select.POLLOUT)
            for ready, _ in poll.poll():
                if ready == self._woken:
                    os.eventfd_read(self._woken)
        guest.writer.flush()


class LaneListener:
    """A ps task's end of its lanes; part of its listener, which polls the files and calls.

    Args:
        bind: The address to listen on; the port is any free one.
        largest_bytes: Whoever announces a larger frame is cut off.
        watch: Called with a file and whether it shall be polled for writing too; None when it is gone.
        take: Handles a message on a carrier's thread; None if there shall be no carriers.
    """

    def __init__(
        self, bind: str, largest_bytes: int, watch: Callable[[int, bool | None], None], take: Take | None = None
    ) -> None:
        self._largest, self._watch, self._take = largest_bytes, watch, take
        self._carried = CARRIED_BYTES if take is not None else _NONE
        self._word = secrets.token_bytes(WORD_BYTES)
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            widen(listening)
            listening.bind((bind, 0))
            listening.listen(128)
        except BaseException:
            listening.close()
            raise
        self._guests: dict[int, _Guest] = {}
        self._peers: dict[Peer, _Guest] = {}
        self._carriers: list[_Carrier] = []
        self._entered = self.turned_away = 0
        self._entrance = Entrance(listening, watch)

    @property
    def name(self) -> str:
        """Returns what a worker needs to come in."""
        return f"{self._entrance.port}/{self._word.hex()}"

    def owns(self, fd: int) -> bool:
        """Whether a file is one of ours."""
        return fd == self._entrance.fileno() or fd in self._guests

    def wake(self) -> None:
        """Lets people in again, if that rested because no file was left; to be called now and then."""
        self._entrance.wake()

    def ready(self, fd: int) -> tuple[Peer, list[Frame]] | None:
        """Something can be read from, or written to, one of our files; returns a message if one is complete."""
        if fd == self._entrance.fileno():
            self._let_in()
            return None
        guest = self._guests[fd]
        try:
            if guest.writer.waiting and guest.writer.flush():
                self._watch(fd, False)
            known = guest.let_in or self._said_the_word(guest)
            message = guest.read(carried=self._carried) if known else None
        except (OSError, LaneError):
            self._forget(guest)
            return None
        if self._take is not None and guest.reader.wanted_bytes in self._carried:
            self._give_carrier(guest, self._take)
        return (guest.peer, message) if message is not None else None

    def send(self, peer: Peer, frames: Sequence[Frame]) -> Sent | None:
        """Sends a message; a peer that is gone is no error, and one that does not read loses what does not fit."""
        guest = self._peers.get(peer)
        if guest is None:
            return None
        large = any(len(f) >= LARGE_BYTES for f in frames)
        if guest.writer.large_waiting >= LARGE_AHEAD if large else guest.writer.waiting >= SMALL_AHEAD:
            return None  # it has not taken what it asked for before; it will ask again
        idle = not guest.writer.waiting
        way = guest.writer.put(frames)
        try:
            if guest.carrier is not None:
                guest.carrier.wake()
            elif idle and not guest.writer.flush():
                self._watch(guest.socket.fileno(), True)
        except OSError:
            self._forget(guest)
            return None
        return None if way.done else way

    def has_carrier(self, peer: Peer) -> bool:
        """Whether a lane has a carrier, so that messages to it may be sent on any thread."""
        guest = self._peers.get(peer)
        return guest is not None and guest.carrier is not None

    def hang_up(self, peer: Peer) -> None:
        """Ends the connection of a peer that talks too much."""
        if (guest := self._peers.get(peer)) is not None:
            self._forget(guest)

    def close(self) -> None:
        """Closes everything."""
        for guest in [*self._guests.values(), *self._peers.values()]:
            self._forget(guest)
        for carrier in self._carriers:
            carrier.join()
        self._entrance.close()

    def _let_in(self) -> None:
        lane = self._entrance.accept()
        if lane is None:
            return
        now = time.monotonic()
        strangers = [g for g in self._guests.values() if not g.let_in]
        for guest in strangers:
            if now - guest.since > STRANGER_S or len(strangers) >= MOST_STRANGERS:
                self.turned_away += 1
                self._forget(guest)
        lane.setblocking(False)
        prepare(lane)
        self._entered += 1
        peer = PREFIX + str(self._entered).encode()
        self._guests[lane.fileno()] = _Guest(peer, lane, Reader(self._largest), Writer(lane), now)
        self._watch(lane.fileno(), False)

    def _said_the_word(self, guest: _Guest) -> bool:
        """Reads the word that a newcomer must say; False if it is not all there yet.

        Raises:
            OSError: He is gone, or does not know it.
        """
        while len(guest.word) < WORD_BYTES:
            try:
                said = guest.socket.recv(WORD_BYTES - len(guest.word))
            except (BlockingIOError, InterruptedError):
                return False
            guest.word += said
            if not said:
                break
        if not hmac.compare_digest(bytes(guest.word), self._word):
            self.turned_away += 1
            raise PermissionError
        guest.let_in = True
        self._peers[guest.peer] = guest
        return True

    def _give_carrier(self, guest: _Guest, take: Take) -> None:
        fd = guest.socket.fileno()
        self._watch(fd, None)
        del self._guests[fd]
        try:
            self._carriers = [*filter(_Carrier.alive, self._carriers), _Carrier(guest, take, self._gone)]
        except (OSError, RuntimeError):  # no file or thread is left for it: the ps thread reads on
            self._guests[fd] = guest
            self._watch(fd, bool(guest.writer.waiting))

    def _gone(self, guest: _Guest) -> None:
        """On a carrier's thread: its connection is gone."""
        self._peers.pop(guest.peer, None)

    def _forget(self, guest: _Guest) -> None:
        self._peers.pop(guest.peer, None)
        if guest.carrier is not None:
            guest.carrier.end()
        elif self._guests.pop(guest.socket.fileno(), None) is not None:
            self._watch(guest.socket.fileno(), None)
            guest.writer.give_up()
            guest.socket.close()
