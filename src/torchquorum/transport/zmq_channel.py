"""ZeroMQ over TCP: a DEALER on the side that connects, a ROUTER on the side that listens.

ZeroMQ reconnects by itself; what was in flight then is lost, which the protocol expects. Large frames are not copied on
their way out: `send` returns a handle that says when they have left.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import zmq

from torchquorum import env
from torchquorum.cluster import ClusterSpec
from torchquorum.cluster.secret import ADVICE, OPEN, Access
from torchquorum.errors import AddressInUseError, ClusterError, SecretError
from torchquorum.transport.channel import Channel, Later, Peer, Sent
from torchquorum.transport.codec import Frame
from torchquorum.transport.gate import HANDSHAKE_MS, MECHANISM_MISMATCH, Gate, ask_mechanism, read_event, unwatch, watch
from torchquorum.transport.keys import lock_channel, lock_listener

COPY_BELOW_BYTES = 64 << 10
LINGER_MS = 2000
MAX_FRAME_BYTES = 16 << 30
# What one peer can make us keep: messages that it sent and we have not looked at, answers that it does not read.
TAKE_AHEAD = 64
SEND_AHEAD = 1000
LARGE_AHEAD = 2
# That a large answer was taken is told by a thread, which may be late: so the next one is put off for a while before it is lost.
PUT_OFF_S, LOOK_EVERY_S = 1.0, 0.005
BACKLOG = 512
LISTENER_FILES, CHANNEL_FILES = 16, 8
# A task that is just being killed may hang up on us a few times; one that has another secret always does.
HUNG_UP_TIMES = 5
ASK_EVERY_S = 1.0
_NOTICED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def _context() -> zmq.Context[Any]:
    return zmq.Context.instance()


def endpoint(address: str) -> str:
    """Returns the ZeroMQ endpoint of `host:port`, resolved, so that a name which does not exist is an error here."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ClusterError(
            f"host {host!r} in {address!r} cannot be found ({error}); check its spelling and your DNS"
        ) from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    family, _, _, _, where = found[0]
    return f"tcp://[{where[0]}]:{port}" if family == socket.AF_INET6 else f"tcp://{where[0]}:{port}"


class ZmqChannel:
    """A connection to one task that listens.

    Args:
        address: Where it listens, host:port.
        identity: Our name for it; every connection has its own.
        access: The secret, if the cluster has one.
        who: The task's name, for messages.
    """

    def __init__(self, address: str, identity: bytes, access: Access = OPEN, who: str = "the task") -> None:
        self._where, self._access = f"{who} ({address})", access
        try:
            _check_files(CHANNEL_FILES)
            self.socket = _context().socket(zmq.DEALER)
        except (OSError, zmq.ZMQError) as error:
            raise ClusterError(f"no connection to {self._where}: {error.strerror}; see ulimit -n") from None
        try:
            self.socket.setsockopt(zmq.IDENTITY, identity)
            self.socket.setsockopt(zmq.LINGER, LINGER_MS)
            self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
            self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            self.socket.setsockopt(zmq.SNDHWM, 0)
            self.socket.setsockopt(zmq.RCVHWM, 0)
            self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            if access.secret is not None:
                lock_channel(self.socket, access.secret)
            where = endpoint(address)
            if where.startswith("tcp://["):
                self.socket.setsockopt(zmq.IPV6, 1)
            self._events: zmq.Socket[Any] | None = watch(self.socket, _NOTICED)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise ClusterError(f"no connection to {self._where}: {error}; see ulimit -n") from None
        except BaseException:
            self.socket.close(0)
            raise
        self._endpoint, self._failures, self._next_ask = where, 0, 0.0
        self.socket.connect(where)

    def send(self, frames: Sequence[Frame]) -> None:
        """Sends a message; large frames must stay as they are until the answer has come.

        ZeroMQ gives a connection up for good when what is at the other end talks nonsense; then the message is lost, and the
        next `receive` says why.
        """
        with suppress(zmq.Again):
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=all(len(f) < COPY_BELOW_BYTES for f in frames))

    def receive(self, timeout_s: float) -> list[Frame] | None:
        """Returns the next message, or None when none came in time.

        Raises:
            SecretError: The other side does not let us in, or is not a task of torchquorum.
        """
        if not self.socket.poll(max(0, int(timeout_s * 1000))):
            if self._events is not None:
                self._look_at_handshake()
            return None
        return [f.buffer for f in self.socket.recv_multipart(copy=False)]

    def _look_at_handshake(self) -> None:
        """Looks how getting in went; once we are in, there is nothing more to look at."""
        while self._events is not None and (told := read_event(self._events)) is not None:
            kind, value = told
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._stop_looking()
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise SecretError(_explain_wrong_secret(self._where, "it knows another one"))
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                raise SecretError(_explain_mismatch(self._where, self._access, value))
            else:
                self._hung_up_on()

    def _hung_up_on(self) -> None:
        """It hung up without a word, as ZeroMQ does on a key that it cannot read; or it is just being killed."""
        now = time.monotonic()
        self._failures += 1
        if self._failures < HUNG_UP_TIMES or now < self._next_ask:
            return
        mechanism = ask_mechanism(self._endpoint)
        self._next_ask = time.monotonic() + ASK_EVERY_S
        locked = self._access.secret is not None
        if mechanism in ("NULL", "CURVE") and (mechanism == "CURVE") != locked:
            raise SecretError(_explain_mismatch(self._where, self._access, MECHANISM_MISMATCH))
        if mechanism == "CURVE":
            raise SecretError(_explain_wrong_secret(self._where, f"it hung up {self._failures} times"))

    def _stop_looking(self) -> None:
        if self._events is not None:
            unwatch(self.socket)
            self._events.close(0)
            self._events = None

    def close(self) -> None:
        """Closes this end; what was sent is still delivered, for a moment."""
        self._stop_looking()
        self.socket.close()


class ZmqConnector:
    """How tasks of a cluster are reached, by address and identity: over the network."""

    def __init__(self, cluster: ClusterSpec, access: Access) -> None:
        self._names = {cluster.address(task): str(task) for job in cluster.jobs for task in cluster.tasks(job)}
        self._access = access

    def __call__(self, address: str, identity: bytes) -> ZmqChannel:
        """Connects."""
        return ZmqChannel(address, identity, self._access, self._names.get(address, "the task"))


def connector(cluster: ClusterSpec, access: Access) -> ZmqConnector:
    """Returns how tasks of a cluster are reached: a function of address and identity."""
    return ZmqConnector(cluster, access)


class ZmqListener:
    """The socket a task listens on.

    Args:
        address: host:port of this task in the cluster; loopback names bind to loopback, all others to every interface.
        listen_fd: A listening socket that the launcher made and passed on, so that nobody else can take the port.
        max_frame_bytes: Whoever sends a larger frame is cut off.
        access: Whom to let in.
        say: Prints a line for people about whom was not.

    Raises:
        SecretError: The address is not loopback and there is no secret.
        ClusterError: Nobody can listen there, or no file is left for it.
    """

    def __init__(
        self,
        address: str,
        listen_fd: int | None = None,
        *,
        max_frame_bytes: int | None = None,
        access: Access = OPEN,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        host, _, port = address.rpartition(":")
        if not (port.isascii() and port.isdigit() and int(port[:6]) <= 65535):
            raise ClusterError(f"cannot listen on {address}: port {port!r}: must be a number up to 65535")
        where = _bind_to(host, port)
        _refuse_open_door(address, where, listen_fd, access)
        # A context of its own: ZeroMQ asks one handler per context whom to let in.
        self._context: zmq.Context[Any] | None = None
        self._gate: Gate | None = None
        try:
            _check_files(LISTENER_FILES)
            self._context = zmq.Context() if access.secret is not None else None
            self.socket = (self._context or _context()).socket(zmq.ROUTER)
        except (OSError, zmq.ZMQError) as error:
            raise _no_file(address, error) from None
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.SNDHWM, SEND_AHEAD)
        self.socket.setsockopt(zmq.RCVHWM, TAKE_AHEAD)
        self.socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Without a domain ZeroMQ takes any bytes for a message of a peer of 2010; with one it wants a modern greeting.
        self.socket.setsockopt(zmq.ZAP_DOMAIN, b"torchquorum")
        self.socket.setsockopt(zmq.MAXMSGSIZE, largest_frame_bytes() if max_frame_bytes is None else max_frame_bytes)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._unwanted: set[Peer] = set()
        self._large: dict[Peer, deque[Sent]] = {}
        self._put_off: dict[Peer, tuple[Sequence[Frame], Later, float]] = {}
        self._next_look = 0.0
        if where.startswith("tcp://["):
            self.socket.setsockopt(zmq.IPV6, 1)
        if listen_fd is not None:
            self.socket.setsockopt(zmq.USE_FD, listen_fd)
        try:
            allowed = lock_listener(self.socket, access.secret) if access.secret is not None else None
            self._gate = Gate(self.socket, allowed, say)
            self._bind(where, address)
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise _no_file(address, error) from None
        except BaseException:
            self.close()
            raise

    @property
    def turned_away(self) -> dict[str, int]:
        """Returns how many connections were refused, by reason."""
        return self._gate.counts() if self._gate is not None else {}

    def _bind(self, where: str, address: str) -> None:
        """Binds; a port that its last owner has only just given up gets a moment."""
        deadline = time.monotonic() + 2.0
        while True:
            try:
                self.socket.bind(where)
                return
            except zmq.ZMQError as error:
                if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                if error.errno == errno.EADDRINUSE:
                    raise AddressInUseError(_in_use(address)) from None
                raise ClusterError(
                    f"cannot listen on {address}: {error.strerror}; is that an address of this host?"
                ) from None

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        """Returns the next message with its sender, or None when none came in time."""
        self.send_put_off()
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            if timeout_s <= 0 or not self.socket.poll(int(self.at_most(timeout_s) * 1000)):
                return None
            frames = self.socket.recv_multipart(copy=False)
        peer = bytes(frames[0].buffer)
        if peer in self._unwanted and self._gate is not None:
            self._unwanted.discard(peer)
            self._gate.hang_up(frames[-1].get(zmq.SRCFD))
        return peer, [f.buffer for f in frames[1:]]

    def hang_up(self, peer: Peer) -> None:
        """Ends the connection of a peer that talks too much, with the next thing it says; it may come again."""
        self._unwanted.add(peer)
        if len(self._unwanted) > 1000:
            self._unwanted.pop()

    def wait(self, others: Sequence[Channel], timeout_s: float) -> None:
        """Returns when something has come here or on one of the other channels, or when the time is up."""
        self.send_put_off()
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        for other in others:
            if isinstance(other, ZmqChannel):
                poller.register(other.socket, zmq.POLLIN)
        poller.poll(int(self.at_most(timeout_s) * 1000))

    def send(self, peer: Peer, frames: Sequence[Frame]) -> Sent | None:
        """Sends a message; a peer that is gone is no error, and one that does not read loses what does not fit."""
        if all(len(f) < COPY_BELOW_BYTES for f in frames):
            self.socket.send_multipart([peer, *frames])
            return None
        if len(self._under_way(peer)) < LARGE_AHEAD:
            return self._send_large(peer, frames)
        if peer in self._put_off:
            return None  # it has not taken what it asked for before; it will ask again
        later = Later()
        self._put_off[peer] = frames, later, time.monotonic() + PUT_OFF_S
        return later

    def _send_large(self, peer: Peer, frames: Sequence[Frame]) -> Sent | None:
        sent = self.socket.send_multipart([peer, *frames], copy=False, track=True)
        if sent is not None:
            self._under_way(peer).append(sent)
        return sent

    def at_most(self, timeout_s: float) -> float:
        """Returns how long to wait for messages: less while one is put off, as nobody wakes us when it can go."""
        return min(timeout_s, LOOK_EVERY_S) if self._put_off else timeout_s

    def send_put_off(self) -> None:
        """Sends what was put off to those who have taken something since; who takes nothing for a while loses it."""
        if not self._put_off or (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        for peer, (frames, later, until) in [*self._put_off.items()]:
            taken = len(self._under_way(peer)) < LARGE_AHEAD
            if taken or now >= until:
                del self._put_off[peer]
                sent: Sent | None = None
                with suppress(zmq.ZMQError):  # the peer is gone
                    sent = self._send_large(peer, frames) if taken else None
                later.given_over(sent)

    def _under_way(self, peer: Peer) -> deque[Sent]:
        """Returns the large messages that a peer has not taken yet."""
        under_way = self._large.get(peer)
        if under_way is None:
            self._large = {p: sent for p, sent in self._large.items() if not all(s.done for s in sent)}
            under_way = self._large[peer] = deque()
        while under_way and under_way[0].done:
            under_way.popleft()
        return under_way

    def close(self) -> None:
        """Stops listening; what was sent is still delivered, for a moment."""
        for peer, (frames, _, _) in self._put_off.items():
            with suppress(zmq.ZMQError):
                self._send_large(peer, frames)
        self._put_off.clear()
        if self._gate is not None:
            unwatch(self.socket)
        self.socket.close()
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        if self._context is not None:
            self._context.term()
            self._context = None


def largest_frame_bytes() -> int:
    """Returns how large a frame may be: a shard of more than a quarter of the memory could not be trained anyway."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return MAX_FRAME_BYTES
    return max(1 << 28, min(MAX_FRAME_BYTES, memory // 4))


def is_loopback(host: str) -> bool:
    """Whether only tasks of this host can reach a socket that is bound to this address."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _refuse_open_door(address: str, where: str, listen_fd: int | None, access: Access) -> None:
    if access.secret is not None or access.insecure:
        return
    bound = where.removeprefix("tcp://").rpartition(":")[0]
    if listen_fd is not None:
        with socket.socket(fileno=os.dup(listen_fd)) as held:
            bound = str(held.getsockname()[0])
    if not is_loopback(bound):
        raise SecretError(
            f"cannot listen on {address} without a secret: other hosts could reach it, and whoever does could read the "
            f"variables and change the run. {ADVICE}"
        )


def _check_files(count: int) -> None:
    """Raises OSError unless this process may open so many files more: ZeroMQ ends a process that has none for its threads."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for fd in opened:
            os.close(fd)


def _no_file(address: str, error: OSError | zmq.ZMQError) -> ClusterError:
    return ClusterError(f"cannot listen on {address}: {error.strerror}; see ulimit -n")


def _explain_wrong_secret(where: str, what: str) -> str:
    return (
        f"{where} does not accept this task's secret: {what}. Give every task the same --secret-file, or check that the "
        "port is the one of that task"
    )


def _explain_mismatch(where: str, access: Access, code: int) -> str:
    if code != MECHANISM_MISMATCH:
        return (
            f"{where} is not a task of torchquorum: it does not speak ZeroMQ as we do ({code:#x}); check host and port"
        )
    if access.secret is None:
        return (
            f"{where} lets in only who knows the cluster's secret, and this task was given none. Copy the file with the "
            f"secret here and say --secret-file=FILE, or set {env.SECRET_FILE}"
        )
    return (
        f"{where} runs without a secret, and this task has one, so it does not talk to it. Start that task with the same "
        f"--secret-file, or this one without (is {env.SECRET_FILE} or {env.SECRET} set?)"
    )


def _bind_to(host: str, port: str) -> str:
    if host == "localhost":
        return f"tcp://127.0.0.1:{port}"
    if is_loopback(host):
        return f"tcp://{host}:{port}"
    return f"tcp://*:{port}"


def bind_host(address: str) -> str:
    """Returns the address of this host that a task with that address listens on."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return "127.0.0.1"
    return host if is_loopback(host) else "0.0.0.0"


def _in_use(address: str) -> str:
    port = int(address.rpartition(":")[2])
    holder = holder_of_port(port)
    who = f"held by {holder}" if holder else "held by a process that this user may not look at"
    return (
        f"cannot listen on {address}: the port is in use, {who}. "
        f"End that process, or give this task another port in --ps_hosts or --worker_hosts (on every task)."
    )


def holder_of_port(port: int) -> str | None:
    """Returns 'process 123 (name)' of whoever listens on a TCP port of this host, where that can be told."""
    from torchquorum.transport.procnet import listening_process

    return listening_process(port)
