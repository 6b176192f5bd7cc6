"""ZeroMQ over TCP, the side that connects: a DEALER. The other side is in `zmq_listener`.

ZeroMQ reconnects by itself; what was in flight then is lost, which the protocol expects. Large frames are not copied when they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq

from torchquorum import env
from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster.secret import OPEN, Access
from torchquorum.errors import ClusterError, SecretError
from torchquorum.wire.address import endpoint
from torchquorum.wire.channel import FOREVER_S, Choose, Pieces, whole
from torchquorum.wire.codec import Frame
from torchquorum.wire.descriptors import check_files
from torchquorum.wire.zmq_access import MECHANISM_MISMATCH, ask_mechanism
from torchquorum.wire.zmq_events import read_event, unwatch, watch
from torchquorum.wire.zmq_keys import lock_channel

COPY_BELOW_BYTES = 64 << 10
LINGER_MS = 2000
CHANNEL_FILES = 8
# A task that is just being killed may hang up on us a few times; one that has another secret always does.
HUNG_UP_TIMES = 5
ASK_EVERY_S = 1.0
_NOTICED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def context() -> zmq.Context[Any]:
    """Returns the context of this process's channels, and of listeners without a secret."""
    return zmq.Context.instance()


class ZmqChannel:
    """A connection to one task that listens.

    Args:
        address: Where it listens, host:port.
        identity: Our name for it; every connection has its own.
        access: The secret, if the cluster has one.
        who: The task's name, for messages.
        clock: Tells the time.
    """

    closed = False  # ZeroMQ connects again by itself and does not say

    def __init__(
        self, address: str, identity: bytes, access: Access = OPEN, who: str = "the task", clock: Clock = SYSTEM
    ) -> None:
        self.address, self._where = address, f"{who} ({address})"
        self._access, self._clock = access, clock
        try:
            check_files(CHANNEL_FILES)
            self.socket = context().socket(zmq.DEALER)
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
        self._fd = int(self.socket.getsockopt(zmq.FD))
        self.socket.connect(where)

    def fileno(self) -> int:
        """Returns ZeroMQ's descriptor, which shows only changes: ask `may_wait_s` before it is waited for."""
        return self._fd

    def may_wait_s(self) -> float:
        """Returns 0.0 if a message is here, which the descriptor need not show."""
        return 0.0 if int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN else FOREVER_S

    def receive_into(self, choose: Choose) -> None:
        """Does nothing: ZeroMQ receives into memory of its own."""

    def send(self, frames: Sequence[Frame | Pieces]) -> None:
        """Sends a message; large frames must stay as they are until the answer has come.

        ZeroMQ gives a connection up for good when what is at the other end talks nonsense; then the message is lost, and the
        next `receive` says why.
        """
        parts = whole(frames)
        with suppress(zmq.Again):
            self.socket.send_multipart(parts, zmq.NOBLOCK, copy=all(len(f) < COPY_BELOW_BYTES for f in parts))

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
        now = self._clock.now()
        self._failures += 1
        if self._failures < HUNG_UP_TIMES or now < self._next_ask:
            return
        mechanism = ask_mechanism(self._endpoint)
        self._next_ask = self._clock.now() + ASK_EVERY_S
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
            f"{where} accepts only tasks that know the cluster's secret, and this task was given none. Copy the file with the "
            f"secret here and say --secret-file=FILE, or set {env.SECRET_FILE}"
        )
    return (
        f"{where} runs without a secret, and this task has one, so it does not talk to it. Start that task with the same "
        f"--secret-file, or this one without (is {env.SECRET_FILE} or {env.SECRET} set?)"
    )
