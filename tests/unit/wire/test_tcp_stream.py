"""Where a task listens: its address, for whom, and what is said when nobody can listen there."""

import os
import socket
import threading

import pytest

from tests.ports import free_port
from tests.unit.wire.no_files import no_file_left
from tests.unit.wire.streams import LOCKED, WAIT_S, settle
from torchquorum.cluster.secret import OPEN, Access
from torchquorum.errors import AddressInUseError, ClusterError, SecretError
from torchquorum.wire.channel import Listener
from torchquorum.wire.entry_channel import EntryChannel
from torchquorum.wire.transport import Listening
from torchquorum.wire.transports import listen, listen_at_entry


def listener_at(address: str, listen_fd: int | None = None, access: Access = OPEN) -> Listener:
    return listen_at_entry(Listening(address=address, listen_fd=listen_fd, access=access))


def is_served(listener: Listener, address: str, access: Access = OPEN) -> bool:
    """Whether a message gets through; both ends are closed."""
    channel = settle(EntryChannel(address, access), lambda: listener.receive(0.0))
    try:
        channel.send([b"hello"])
        received = listener.receive(WAIT_S)
        return received is not None and [bytes(f) for f in received[1]] == [b"hello"]
    finally:
        channel.close()
        listener.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "example.org", "10.1.2.3", "[2001:db8::1]", "*"])
def test_an_address_for_other_hosts_needs_a_secret_or_a_word(host: str) -> None:
    with pytest.raises(SecretError) as raised:
        listener_at(f"{host}:2222")
    for words in ("without a secret", "torchquorum secret --out", "--secret-file", "--insecure"):
        assert words in str(raised.value)


@pytest.mark.parametrize("access", [LOCKED, Access(insecure=True)], ids=["secret", "insecure"])
def test_an_address_for_other_hosts_is_served_with_a_secret_or_the_word(access: Access) -> None:
    port = free_port()
    assert is_served(listener_at(f"some-name:{port}", access=access), f"127.0.0.1:{port}", access)


def test_a_socket_of_the_launcher_is_judged_by_where_it_is_bound() -> None:
    with socket.socket() as made:
        made.bind(("0.0.0.0", 0))
        made.listen()
        with pytest.raises(SecretError, match="without a secret"):
            listener_at(f"localhost:{made.getsockname()[1]}", made.fileno())


def test_a_listening_socket_of_the_launcher_is_taken_over() -> None:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        address = f"localhost:{made.getsockname()[1]}"
        listener = listener_at(address, os.dup(made.fileno()))
    assert is_served(listener, address)


def test_a_port_in_use_is_an_error_that_names_the_address_and_who_holds_it() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"localhost:{holder.getsockname()[1]}"
        with pytest.raises(AddressInUseError) as raised:
            listener_at(address)
    assert f"cannot listen on {address}" in str(raised.value)
    assert f"process {os.getpid()} (" in str(raised.value)
    assert "--ps_hosts" in str(raised.value)


def test_a_port_that_is_given_up_within_a_moment_is_taken() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"localhost:{holder.getsockname()[1]}"
        timer = threading.Timer(0.3, holder.close)
        timer.start()
        listener = listener_at(address)
        timer.join()
        assert holder.fileno() == -1
    assert is_served(listener, address)


@pytest.mark.parametrize("port", ["nowhere", "99999", "65536", "-1", "", "2222 ", "\u0664\u0665", "1" * 5000])
def test_a_port_that_is_none_is_named(port: str) -> None:
    with pytest.raises(ClusterError, match=f"cannot listen on localhost:{port}: .*must be a number up to 65535"):
        listener_at(f"localhost:{port}")


def test_an_address_that_is_not_of_this_host_is_named() -> None:
    with pytest.raises(ClusterError, match=r"cannot listen on \[::1%nowhere\]:2222: .*is that an address of this host"):
        listener_at("[::1%nowhere]:2222")


@pytest.mark.parametrize("files", [0, 1])
@pytest.mark.parametrize("access", [OPEN, LOCKED], ids=["open", "locked"])
def test_no_file_left_to_listen_with_is_an_error_that_says_where_to_look(access: Access, files: int) -> None:
    address = f"127.0.0.1:{free_port()}"
    listener_at(address, access=access).close()  # keys are made
    before = len(os.listdir("/proc/self/fd"))
    with no_file_left(but=files), pytest.raises(ClusterError, match=r"Too many open files; see ulimit -n"):
        listen(Listening(address=address, access=access))
    assert len(os.listdir("/proc/self/fd")) == before
