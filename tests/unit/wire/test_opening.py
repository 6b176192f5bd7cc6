"""The first bytes of a connection: what they show, and what a peer of another kind is told. Who is let in: test_entry_channel."""

import socket
import struct

import pytest

import torchquorum.wire.messages as m
from tests.unit.wire.streams import SECRET
from torchquorum.wire import codec
from torchquorum.wire.opening import LOCKED, OPEN, SIZE, ListenerOpening, RefusedConnection, recognise
from torchquorum.wire.refusals import OTHER_PROTOCOL, OTHER_VERSION, ZEROMQ
from torchquorum.wire.tls_keys import listening_side

ZMTP = b"\xff" + struct.pack(">QB", 1, 0x7F)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (OPEN, "OPEN"),
        (LOCKED, "LOCKED"),
        (b"\x16\x03\x01\x02\x00", "TLS"),
        (b"\x15\x03\x03\x00\x02", "TLS"),
        (ZMTP, ZEROMQ),
        (b"tquorum/9 open\r\n", OTHER_VERSION),
        (b"GET / HTTP/1.1\r\n", OTHER_PROTOCOL),
        (b"\0", OTHER_PROTOCOL),
        (b"\x16\x02", OTHER_PROTOCOL),
    ],
)
def test_a_peer_is_known_by_its_first_bytes_and_by_no_fewer(said: bytes, shown: str) -> None:
    assert recognise(said) == shown and recognise(b"") is None
    known = [recognise(said[:at]) for at in range(1, len(said) + 1)]
    first = next(at for at, found in enumerate(known) if found is not None)
    assert set(known[first:]) == {shown} and first < SIZE


@pytest.mark.parametrize("locked", [False, True])
def test_a_torchquorum_of_before_is_told_in_its_own_language_and_counted(locked: bool) -> None:
    ours, theirs = socket.socketpair()
    refused = f"a torchquorum of before protocol {m.PROTOCOL}"
    with ours, theirs:
        ours.setblocking(False)
        opening = ListenerOpening(ours, listening_side(SECRET) if locked else None, "/job:ps/task:0")
        theirs.sendall(ZMTP)
        with pytest.raises(BlockingIOError):
            opening.advance()
        # A greeting of ZMTP 3.0 with the mechanism, then a command: flags, size, name.
        told = theirs.recv(10_000)
        assert told[:12] == ZMTP + b"\3\0" and told[12:17].rstrip(b"\0") == (b"CURVE" if locked else b"NULL")
        assert told[64] == 4 and told[65] == len(told) - 66
        assert told[66:].startswith(b"\3BAD" if locked else b"\5READY")
        theirs.sendall(bytes(54))
        with pytest.raises(BlockingIOError):
            opening.advance()
        theirs.sendall(b"\4\6\5READY")
        with pytest.raises(RefusedConnection, match=refused):
            opening.advance()
        # Now a message of one frame: flags, size, body.
        said = theirs.recv(10_000)
        assert theirs.recv(1) == b""
    assert said[:1] == b"\2" and struct.unpack(">Q", said[1:9]) == (len(said) - 9,)
    fault = codec.decode(said[9:])
    assert isinstance(fault, m.Fault) and fault.request == -1
    assert f"/job:ps/task:0 speaks protocol {m.PROTOCOL}" in fault.text and "install the same torchquorum" in fault.text


def test_a_torchquorum_of_before_that_hangs_up_is_counted_as_one() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        theirs.sendall(ZMTP)
        theirs.close()
        with pytest.raises(RefusedConnection, match="a torchquorum of before protocol"):
            ListenerOpening(ours, None).advance()
