"""A listening socket whose process has no file left: it shows newcomers out, or rests; it never keeps its task awake."""

import select
import socket
import time
from collections.abc import Iterator

import pytest

from tests.unit.transport.no_files import no_file_left
from torchquorum.transport import entrance as entrance_module
from torchquorum.transport.entrance import Entrance


class Host:
    """The poll loop around an entrance."""

    def __init__(self) -> None:
        self.poll = select.poll()
        self.entrance = Entrance(socket.create_server(("127.0.0.1", 0)), self._watch)

    def _watch(self, fd: int, writing: bool | None) -> None:
        if writing is None:
            self.poll.unregister(fd)
        else:
            self.poll.register(fd, select.POLLIN)

    def newcomer(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.entrance.port), timeout=30)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.entrance.close()


def test_who_comes_is_let_in_and_when_nobody_waits_that_is_no_error(host: Host) -> None:
    with host.newcomer():
        assert host.poll.poll(30_000)
        guest = host.entrance.accept()
        assert guest is not None
        guest.close()
    assert host.entrance.accept() is None and host.entrance.shown_out == 0
    host.entrance.wake()


def test_with_no_file_left_newcomers_are_shown_out_one_by_one(host: Host) -> None:
    newcomers = [host.newcomer() for _ in range(3)]
    with no_file_left():
        for newcomer in newcomers:
            assert host.poll.poll(30_000)
            assert host.entrance.accept() is None
            assert newcomer.recv(1) == b""
        assert host.poll.poll(0) == []
    assert host.entrance.shown_out == 3
    for newcomer in newcomers:
        newcomer.close()


def test_without_even_a_spare_file_the_entrance_rests_and_opens_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrance_module, "REST_S", 0.05)
    spare, host.entrance._spare = host.entrance._spare, None  # another thread took it when it was free for a moment
    assert spare is not None
    with host.newcomer(), no_file_left():
        assert host.poll.poll(30_000)
        assert host.entrance.accept() is None
        assert host.poll.poll(0) == []  # he still waits, and nobody is awake for it
        host.entrance.wake()
        assert host.poll.poll(0) == []
        spare.close()
        deadline = time.monotonic() + 30
        while not host.poll.poll(1) and time.monotonic() < deadline:
            host.entrance.wake()  # to no effect until it has rested
        assert host.entrance.accept() is None and host.entrance.shown_out == 1


def test_an_entrance_that_rests_can_be_closed() -> None:
    host = Host()
    spare, host.entrance._spare = host.entrance._spare, None
    assert spare is not None
    with host.newcomer(), no_file_left():
        assert host.entrance.accept() is None
    host.entrance.close()
    spare.close()
