"""The transport for other hosts: offered only where nothing is to be encrypted and a port can be had."""

import pytest

from tests.unit.wire.streams import Host
from torchquorum.clock import SYSTEM
from torchquorum.cluster.secret import Access, Secret
from torchquorum.wire.tcp_stream import TCP, listen_on
from torchquorum.wire.transport import Listening

SECRET = Access(secret=Secret("the-secret-of-this-cluster-0123456789abcdef"))


def test_with_a_secret_it_is_not_offered_as_it_does_not_encrypt() -> None:
    assert TCP.listen(Listening(address="127.0.0.1:0", access=SECRET)) is None


def test_where_no_port_can_be_had_it_is_not_offered() -> None:
    with pytest.raises(OSError, match="assign"):
        listen_on("192.0.2.1", Listening(address="192.0.2.1:0"))
    assert TCP.listen(Listening(address="[::1%nowhere]:0")) is None


def test_a_way_that_makes_no_sense_is_an_error_and_leaves_nothing_behind() -> None:
    host = Host(TCP)
    with pytest.raises(ValueError, match="hex"):
        TCP.connect("127.0.0.1", host.where + "no token", SYSTEM)
    with pytest.raises(ValueError, match="int"):
        TCP.connect("127.0.0.1", "no port", SYSTEM)
    assert host.next(0.2) is None
    host.close()
    with pytest.raises(OSError, match="refused"):
        TCP.connect("127.0.0.1", host.where, SYSTEM)
