"""File descriptors when few are left."""

import resource
import socket

import pytest

from tests.unit.wire.no_files import no_file_left
from torchquorum.wire.descriptors import KEPT_FILES, Reserve, most_connections


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
