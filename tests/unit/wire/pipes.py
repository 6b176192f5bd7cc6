"""A transport over pipes of `multiprocessing`, for tests: all that a new transport needs is in this one file."""

from __future__ import annotations

import multiprocessing.connection as mp
import select
import tempfile
from collections import Counter
from collections.abc import Sequence

from torchquorum.clock import Clock
from torchquorum.wire.channel import FOREVER_S, UNKNOWN, Choose, Peer, Pieces, Progress, whole
from torchquorum.wire.codec import Frame
from torchquorum.wire.messages import Way
from torchquorum.wire.stream import pack
from torchquorum.wire.transport import Listening, Transport

KIND = "pipe"
USED: Counter[str] = Counter()


def _send(pipe: mp.Connection, frames: Sequence[Frame]) -> None:
    pipe.send_bytes(pack(frames)[0])
    for frame in frames:
        pipe.send_bytes(frame)


def _receive(pipe: mp.Connection) -> list[Frame]:
    count = int.from_bytes(pipe.recv_bytes()[:4], "little")
    return [pipe.recv_bytes() for _ in range(count)]


class PipeChannel:
    """A worker's end."""

    def __init__(self, where: str) -> None:
        self._pipe = mp.Client(where, "AF_UNIX")
        self.closed = False

    def fileno(self) -> int:
        return self._pipe.fileno()

    def may_wait_s(self) -> float:
        return FOREVER_S

    def receive_into(self, choose: Choose, *, several: bool = False) -> None:
        pass

    def settled(self) -> PipeChannel:
        return self

    def send(self, frames: Sequence[Frame | Pieces]) -> None:
        _send(self._pipe, whole(frames))

    def flush(self, timeout_s: float) -> bool:
        return True

    def progress(self) -> Progress:
        return UNKNOWN

    def receive(self, timeout_s: float) -> list[Frame] | None:
        try:
            return _receive(self._pipe) if self._pipe.poll(timeout_s) else None
        except EOFError:
            self.closed = True
            return None

    def close(self) -> None:
        self._pipe.close()


class PipeListener:
    """The ps task's end."""

    prefix = b"\0pipe-for-tests/"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._listener = mp.Listener(f"{self._folder.name}/pipe", "AF_UNIX", backlog=16)
        self._accepting: int = self._listener._listener._socket.fileno()  # type: ignore[attr-defined]
        self._pipes: dict[int, mp.Connection] = {}
        self._epoll = select.epoll()
        self._epoll.register(self._accepting, select.EPOLLIN)
        self.ways = [Way(KIND, str(self._listener.address))]
        self.turned_away: dict[str, int] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    def may_wait_s(self) -> float:
        return FOREVER_S

    def any_thread(self, peer: Peer) -> bool:
        return False

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        for fd, _ in self._epoll.poll(timeout_s, 1):
            if fd == self._accepting:
                pipe = self._listener.accept()
                self._pipes[pipe.fileno()] = pipe
                self._epoll.register(pipe.fileno(), select.EPOLLIN)
                continue
            try:
                frames = _receive(self._pipes[fd])
            except EOFError:
                self._epoll.unregister(fd)
                self._pipes.pop(fd).close()
                continue
            USED["received"] += 1
            return self.prefix + str(fd).encode(), frames
        return None

    def expect(self, answers: int) -> None:
        pass

    def send(self, peer: Peer, frames: Sequence[Frame]) -> None:
        pipe = self._pipes.get(int(peer.removeprefix(self.prefix)))
        if pipe is not None:
            USED["sent"] += 1
            _send(pipe, frames)

    def moved_bytes(self, peer: Peer) -> int:
        return 0

    def hang_up(self, peer: Peer) -> None:
        pass

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        self._epoll.close()
        self._listener.close()
        self._folder.cleanup()


def _listen(_listening: Listening) -> PipeListener:
    return PipeListener()


def _connect(_host: str, where: str, _clock: Clock) -> PipeChannel:
    return PipeChannel(where)


PIPES = Transport(kind=KIND, same_host=False, listen=_listen, connect=_connect)
