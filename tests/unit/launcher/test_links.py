"""Rates of links, and what is refused before any link is made."""

import os
import subprocess
import sys

import pytest

from torchquorum.errors import ConfigError
from torchquorum.launcher.links import LinkedHosts, LinkRate, missing


@pytest.mark.parametrize(
    ("text", "bits"), [("20mbit", 20e6), ("1.5 Gbit/s", 1.5e9), ("300kbps", None), ("300kbit", 3e5), ("2mbitps", 2e6)]
)
def test_a_rate_is_read_in_bits_a_second(text: str, bits: float | None) -> None:
    if bits is None:
        with pytest.raises(ConfigError, match=r"--link 300kbps: must be a rate in kbit, mbit or gbit a second"):
            LinkRate.read(text)
        return
    assert LinkRate.read(text).bits_per_s == bits


@pytest.mark.parametrize("text", ["", "fast", "0mbit", "-1mbit", "20"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 20mbit"):
        LinkRate.read(text)


@pytest.mark.netns
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_hosts_are_behind_links_of_their_rate_and_leave_nothing() -> None:
    before = os.readlink("/proc/thread-self/ns/net")
    hosts = LinkedHosts(LinkRate.read("8mbit"), 1)
    try:
        assert os.readlink("/proc/thread-self/ns/net") != before
        receive = (
            "import socket, time; s = socket.create_server(('', 7777)); print('up', flush=True); c = s.accept()[0]; t = time.monotonic()\n"
            "n = 0\nwhile d := c.recv(65536): n += len(d)\nprint(n / (time.monotonic() - t))"
        )
        send = "import socket, sys; socket.create_connection((sys.argv[1], 7777)).sendall(bytes(600_000))"
        ps = subprocess.Popen([sys.executable, "-c", receive], stdout=subprocess.PIPE, text=True)
        assert ps.stdout is not None and ps.stdout.readline() == "up\n"
        subprocess.run(hosts.command("worker", 0, [sys.executable, "-c", send, hosts.ps_host]), check=True, timeout=30)
        rate = float(ps.communicate(timeout=30)[0])
        assert rate < 1.3e6  # one megabyte a second, and what the bucket held
        ((up, down),) = hosts.bytes()
        assert 600_000 < up < 660_000 and down < 60_000
    finally:
        hosts.close()
    assert os.readlink("/proc/thread-self/ns/net") == before
    assert f"tq{os.getpid()}-" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    hosts.close()
