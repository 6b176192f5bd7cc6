"""The transport for one host: its socket has no file, and only the same user is admitted."""

import os
import socket
import time
from pathlib import Path

import pytest

from tests.unit.wire.no_files import no_file_left
from tests.unit.wire.streams import WAIT_S, Host
from torchquorum.errors import ClusterError
from torchquorum.wire.transport import Listening
from torchquorum.wire.unix_stream import UNIX


def test_the_socket_has_no_file_and_is_gone_when_closed() -> None:
    host = Host("unix")
    assert "@" + host.where in Path("/proc/net/unix").read_text()
    host.close()
    assert "@" + host.where not in Path("/proc/net/unix").read_text()
    with pytest.raises(OSError, match="refused"):
        host.connect()


@pytest.mark.parametrize("files", [0, 1])
def test_no_descriptor_left_to_listen_with_is_an_error_that_says_where_to_look(files: int) -> None:
    why = "no Unix socket for the tasks of this host: Too many open files; see ulimit -n"
    with no_file_left(but=files), pytest.raises(ClusterError, match=why):
        UNIX.listen(Listening(address="127.0.0.1:0"))


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_is_not_admitted() -> None:
    host = Host("unix")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.settimeout(WAIT_S)
                peer.connect("\0" + host.where)
                code = 0 if peer.recv(10) == b"" else 2
        except ConnectionError:
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + WAIT_S
    done, status = 0, 0
    while not done and time.monotonic() < deadline:
        assert host.listener.receive(0.02) is None
        done, status = os.waitpid(child, os.WNOHANG)
    assert done and os.waitstatus_to_exitcode(status) == 0
    assert host.listener.turned_away == {"another user of this host": 1}
    host.close()
