"""A listening socket whose process has no descriptor left: it refuses new connections, or rests; it never keeps its task awake."""

import select
import socket
from collections.abc import Iterator

import pytest

from tests.manual_clock import ManualClock
from tests.unit.wire.no_files import no_file_left
from torchquorum.wire.acceptor import REST_S, Acceptor
from torchquorum.wire.descriptors import Reserve

WAIT_MS = 30_000


class Host:
    """The poll loop around an acceptor."""

    def __init__(self) -> None:
        self.poll, self.clock, self.reserve = select.poll(), ManualClock(), Reserve()
        listening = socket.create_server(("127.0.0.1", 0))
        self._where = listening.getsockname()
        self.acceptor = Acceptor(listening, self._watch, reserve=self.reserve, clock=self.clock)

    def _watch(self, fd: int, wanted: bool) -> None:
        if wanted:
            self.poll.register(fd, select.POLLIN)
        else:
            self.poll.unregister(fd)

    def connect(self) -> socket.socket:
        return socket.create_connection(self._where, timeout=30)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.acceptor.close()


def test_a_connection_is_accepted_and_no_connection_is_no_error(host: Host) -> None:
    with host.connect():
        assert host.poll.poll(WAIT_MS)
        accepted = host.acceptor.accept()
        assert accepted is not None
        accepted.close()
    assert host.acceptor.accept() is None and host.acceptor.refused == 0
    host.acceptor.resume()


def test_with_no_descriptor_left_connections_are_refused_one_by_one(host: Host) -> None:
    connections = [host.connect() for _ in range(3)]
    with no_file_left():
        for connection in connections:
            assert host.poll.poll(WAIT_MS)
            assert host.acceptor.accept() is None
            assert connection.recv(1) == b""
        assert host.poll.poll(0) == []
    assert host.acceptor.refused == 3
    for connection in connections:
        connection.close()


def test_without_even_a_reserve_the_acceptor_rests_and_goes_on_later(host: Host) -> None:
    with host.connect(), no_file_left():
        host.reserve.give()
        taken = socket.socket()  # by another thread, in the moment when it was free
        assert host.poll.poll(WAIT_MS)
        assert host.acceptor.accept() is None
        assert host.poll.poll(0) == []  # the connection still waits, and nobody is awake for it
        host.clock.advance(REST_S / 2)
        host.acceptor.resume()
        assert host.poll.poll(0) == []
        taken.close()
        host.clock.advance(REST_S / 2)
        host.acceptor.resume()
        assert host.reserve.held and host.poll.poll(WAIT_MS)
        assert host.acceptor.accept() is None and host.acceptor.refused == 1


def test_an_acceptor_that_rests_can_be_closed() -> None:
    host = Host()
    with host.connect(), no_file_left():
        host.reserve.give()
        with socket.socket():
            assert host.acceptor.accept() is None
    host.acceptor.close()
