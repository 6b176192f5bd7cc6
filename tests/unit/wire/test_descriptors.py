"""File descriptors when few are left, and a handle on those of another library."""

import os
import resource
import socket

import pytest

from tests.unit.wire.no_files import no_file_left
from torchquorum.wire.descriptors import KEPT_FILES, Handle, Reserve, check_files, most_connections


def test_as_many_connections_are_allowed_as_the_system_gives_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    given = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        assert most_connections() == given - KEPT_FILES
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (given, hard)
        assert most_connections() == given - KEPT_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_check_for_descriptors_leaves_none_open_whether_there_are_enough_or_not() -> None:
    before = os.listdir("/proc/self/fd")
    check_files(3)
    with no_file_left(but=2), pytest.raises(OSError, match="Too many open files"):
        check_files(3)
    assert os.listdir("/proc/self/fd") == before


def test_a_reserve_is_given_for_one_moment_and_taken_again_when_one_is_free() -> None:
    reserve = Reserve()
    with no_file_left():
        with pytest.raises(OSError, match="Too many"):
            socket.socket()
        reserve.give()
        with socket.socket():
            reserve.take()
            assert not reserve.held
        reserve.take()
        assert reserve.held
    reserve.give()


def test_a_connection_is_ended_only_if_the_descriptor_is_still_its_own() -> None:
    handle = Handle()
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as one,
        listening.accept()[0] as other,
    ):
        peer = handle.peer_of(other.fileno())
        assert peer == one.getsockname()
        handle.hang_up(other.fileno(), ("192.0.2.1", 1))  # as if the connection that was meant had gone
        other.sendall(b"still there")
        assert one.recv(100) == b"still there"
        handle.hang_up(other.fileno(), peer)
        assert one.recv(100) == b""
    assert handle.peer_of(-1) == ()
    with open(os.devnull) as file:
        assert handle.peer_of(file.fileno()) == ()
    handle.close()
