"""Addresses of tasks."""

import socket

import pytest

from torchquorum.errors import ClusterError
from torchquorum.wire.address import bind_place, find_place, is_loopback, largest_frame_bytes


def test_a_host_that_does_not_exist_is_an_error_that_names_it() -> None:
    with pytest.raises(ClusterError, match="no-such-host.invalid"):
        find_place("no-such-host.invalid:2222")


def test_places_are_resolved() -> None:
    assert find_place("127.0.0.1:80") == (socket.AF_INET, ("127.0.0.1", 80))
    assert find_place("localhost:80")[1][:2] in (("127.0.0.1", 80), ("::1", 80))
    assert find_place("[::1]:80") == (socket.AF_INET6, ("::1", 80, 0, 0))


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("[::1]", True), ("0.0.0.0", False), ("*", False)],
)
def test_loopback_is_known_by_its_address(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("localhost:80", "127.0.0.1"),
        ("127.9.9.9:80", "127.9.9.9"),
        ("[::1]:80", "::1"),
        ("host.example:80", "0.0.0.0"),
        ("[2001:db8::1]:80", "::"),
    ],
)
def test_loopback_names_bind_to_loopback_and_others_to_every_interface(address: str, host: str) -> None:
    assert bind_place(address) == (host, 80)


def test_a_frame_may_be_as_large_as_a_quarter_of_the_memory() -> None:
    assert 1 << 28 <= largest_frame_bytes() <= 16 << 30
