"""The way to a ps task on the same host: a Unix socket, beside ZeroMQ's TCP, for the small messages of shared memory.

ZeroMQ passes every message through a thread of its own on each side; between processes of one host that costs more than the
message. A door is a SEQPACKET socket in the abstract namespace: it keeps message boundaries, has no file, and is gone with
its process. Only processes of the same user are let in. What always holds: neither side ever blocks on a peer that does
not read; a message that does not fit is lost, as on any channel.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import zmq

from torchquorum.errors import ClusterError
from torchquorum.transport.channel import Channel, Later, Peer, Sent
from torchquorum.transport.codec import Frame
from torchquorum.transport.entrance import Entrance
from torchquorum.transport.lane import PREFIX as LANE
from torchquorum.transport.lane_listener import LaneListener, Take
from torchquorum.transport.zmq_channel import ZmqChannel, ZmqListener, largest_frame_bytes

MAX_PACKET_BYTES = 128 << 10
SPIN_S = 0.001
OUTSIDE_AT_ONCE, OUTSIDE_BESIDE_GUESTS = 64, 4
_PREFIX = b"\0door/"  # nobody may give himself a ZeroMQ identity with a zero in front
_CREDENTIALS = struct.Struct("3i")


def _pack(frames: Sequence[Frame]) -> bytes:
    sizes = [len(f) for f in frames]
    return b"".join([struct.pack(f"<I{len(sizes)}I", len(sizes), *sizes), *frames])


def _unpack(packet: bytes) -> list[Frame]:
    """Returns the frames of a packet; of one that makes no sense, what there is, for the codec to refuse."""
    view = memoryview(packet)
    if len(view) < 4:
        return [view]
    (count,) = struct.unpack_from("<I", view)
    if count > 16 or len(view) < 4 + 4 * count:
        return [view]
    sizes = struct.unpack_from(f"<{count}I", view, 4)
    frames: list[Frame] = []
    at = 4 + 4 * count
    for size in sizes:
        frames.append(view[at : at + size])
        at += size
    return frames


class DoorChannel:
    """A worker's connection to a ps task on this host."""

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(5.0)
        self._socket.connect("\0" + name)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.closed = False

    def send(self, frames: Sequence[Frame]) -> None:
        """Sends a message, or loses it."""
        try:
            self._socket.send(_pack(frames))
        except OSError:
            return  # the ps is gone, or does not read: whoever waits for the answer will notice

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Returns the next message; the first moments are spent awake, giving the core to whoever wants it."""
        awake_until = time.perf_counter() + min(SPIN_S, timeout_s)
        while not (packet := self._read()) and not self.closed and time.perf_counter() < awake_until:
            os.sched_yield()
        if not packet and not self.closed and timeout_s > 0 and self._poll.poll(timeout_s * 1000):
            packet = self._read()
        if self.closed:
            time.sleep(min(timeout_s, 0.05))  # closed by the ps: do not turn every wait into a busy loop
        return _unpack(packet) if packet else None

    def _read(self) -> bytes:
        """Returns a packet, or nothing; notes it if the ps has closed its end."""
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            packet = b""
        self.closed |= not packet
        return packet

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()


def _make_door(name: str) -> socket.socket:
    try:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise ClusterError(f"no door for the tasks of this host: {error.strerror}; see ulimit -n") from None
    door.bind("\0" + name)
    door.listen(128)
    return door


class DoorListener:
    """A ps task's listener with all ways in: ZeroMQ for everybody, a door for its own host, lanes where it has no secret.

    Args:
        outside: The socket that everybody knows.
        lanes: The address on which lanes are offered, or None for none.
        take: Handles a message on a lane's own thread, where lanes have such; None if all are to be received here.
    """

    def __init__(self, outside: ZmqListener, lanes: str | None = None, take: Take | None = None) -> None:
        self._outside = outside
        self._polls = threading.get_ident()
        self._left_here: deque[tuple[Peer, Sequence[Frame], Later]] = deque()
        self.name = f"torchquorum/{secrets.token_hex(16)}"
        self._guests: dict[int, tuple[Peer, socket.socket]] = {}
        self._peers: dict[Peer, socket.socket] = {}
        self._entered = self._strangers = 0
        self._received: deque[tuple[Peer, list[Frame]]] = deque()
        self._poller = zmq.Poller()
        self._poller.register(outside.socket, zmq.POLLIN)
        self._door = Entrance(_make_door(self.name), self._watch)
        self._watched: ZmqChannel | None = None
        self._bell: int | None = None
        self._lanes: LaneListener | None = None
        if lanes is not None:
            with suppress(OSError):  # then all go by ZeroMQ
                self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._poller.register(self._bell, zmq.POLLIN)
                self._lanes = LaneListener(lanes, largest_frame_bytes(), self._watch, take)

    @property
    def lane(self) -> str:
        """Returns how a lane is had, for the Welcome; empty if there are none."""
        return self._lanes.name if self._lanes is not None else ""

    def _watch(self, fd: int, writing: bool | None) -> None:
        if writing is None:
            self._poller.unregister(fd)
        else:
            self._poller.register(fd, zmq.POLLIN | zmq.POLLOUT if writing else zmq.POLLIN)

    @property
    def turned_away(self) -> dict[str, int]:
        """Returns how many connections were refused, by reason."""
        refused = {"another user of this host": self._strangers} if self._strangers else {}
        if self._lanes is not None and self._lanes.turned_away:
            refused["a lane without its word"] = self._lanes.turned_away
        return {**self._outside.turned_away, **refused}

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        """Returns the next message with its sender, or None when none came in time."""
        if not self._received:
            self._collect(timeout_s)
        return self._received.popleft() if self._received else None

    def wait(self, others: Sequence[Channel], timeout_s: float) -> None:
        """Returns when something has come here or on one of the other channels, or when the time is up."""
        for other in others:
            if isinstance(other, ZmqChannel) and other is not self._watched:
                self._poller.register(other.socket, zmq.POLLIN)
                self._watched = other
        if not self._received:
            self._collect(timeout_s)

    def ring(self) -> None:
        """Wakes the thread that polls; may be called on a lane's thread."""
        if self._bell is not None:
            os.eventfd_write(self._bell, 1)

    def _answer_bell(self) -> None:
        assert self._bell is not None
        os.eventfd_read(self._bell)
        while self._left_here:
            peer, frames, later = self._left_here.popleft()
            try:
                later.given_over(self.send(peer, frames))
            except zmq.ZMQError:
                later.given_over(None)  # the peer is gone

    def _collect(self, timeout_s: float) -> None:
        self._polls = threading.get_ident()
        self._door.wake()
        if self._lanes is not None:
            self._lanes.wake()
        self._outside.send_put_off()
        for ready, _ in self._poller.poll(max(0, int(self._outside.at_most(timeout_s) * 1000))):
            if ready is self._outside.socket:
                # While tasks come by the door, they take turns with those outside, so that a flood there holds nobody up.
                most = OUTSIDE_AT_ONCE if not self._guests else OUTSIDE_BESIDE_GUESTS
                for _ in range(most):
                    if (message := self._outside.receive(0.0)) is None:
                        break
                    self._received.append(message)
            elif ready == self._bell:
                self._answer_bell()
            elif ready == self._door.fileno():
                self._let_in()
            elif ready in self._guests:
                self._read(ready)
            elif self._lanes is not None and self._lanes.owns(ready):
                message = self._lanes.ready(ready)
                self._received += [message] if message is not None else []

    def _let_in(self) -> None:
        guest = self._door.accept()
        if guest is None:
            return
        credentials = guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] not in (os.getuid(), 0):
            self._strangers += 1
            guest.close()
            return
        guest.setblocking(False)
        self._entered += 1  # a number is never used again, as that of a file is: late answers go to nobody else
        peer = _PREFIX + str(self._entered).encode()
        self._guests[guest.fileno()] = peer, guest
        self._peers[peer] = guest
        self._poller.register(guest.fileno(), zmq.POLLIN)

    def _read(self, fd: int) -> None:
        peer, guest = self._guests[fd]
        try:
            packet = guest.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet:
            self._received.append((peer, _unpack(packet)))
            return
        self._poller.unregister(fd)
        del self._guests[fd], self._peers[peer]
        guest.close()

    def send(self, peer: Peer, frames: Sequence[Frame]) -> Sent | None:
        """Sends a message by the way its receiver came in; a peer that is gone is no error.

        On a lane's thread only to lanes that have such: all else is sent by the thread that polls.
        """
        if self._lanes is not None and peer.startswith(LANE) and self._lanes.has_carrier(peer):
            return self._lanes.send(peer, frames)
        if threading.get_ident() != self._polls:
            later = Later()
            self._left_here.append((peer, frames, later))
            self.ring()
            return later
        if self._lanes is not None and peer.startswith(LANE):
            return self._lanes.send(peer, frames)
        if not peer.startswith(_PREFIX):
            return self._outside.send(peer, frames)
        guest = self._peers.get(peer)
        if guest is not None:
            try:
                guest.send(_pack(frames))
            except OSError:
                return None  # it does not read, or is gone: it will ask again
        return None

    def hang_up(self, peer: Peer) -> None:
        """Ends the connection of a peer that talks too much; it may come again."""
        if self._lanes is not None and peer.startswith(LANE):
            self._lanes.hang_up(peer)
            return
        guest = self._peers.get(peer)
        if guest is None:
            self._outside.hang_up(peer)
            return
        with suppress(OSError):
            guest.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes all ways in."""
        if self._lanes is not None:
            self._lanes.close()
        if self._bell is not None:
            os.close(self._bell)
        for _, guest in self._guests.values():
            guest.close()
        self._guests.clear()
        self._peers.clear()
        self._door.close()
        self._outside.close()
