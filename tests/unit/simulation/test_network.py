import pytest

from torchquorum.errors import ConfigError
from torchquorum.simulation.network import Network, SharedLink, parse_bandwidth, parse_size


def test_sizes_and_bandwidths_have_units() -> None:
    assert [parse_size(t) for t in ("100", "1kB", "1.5GB", "2MiB")] == [100, 1e3, 1.5e9, 2 * 2**20]
    assert [parse_bandwidth(t) for t in ("8bit", "10Gbit", "100Mbit/s", "1GB/s")] == [1, 1.25e9, 12.5e6, 1e9]
    for wrong in ("fast", "10", "0Gbit", "-1Gbit"):
        with pytest.raises(ConfigError, match="such as 10Gbit"):
            parse_bandwidth(wrong)
    with pytest.raises(ConfigError, match="such as 100MB"):
        parse_size("10Gbit")


def test_transfers_queue_on_the_link_of_the_ps() -> None:
    link = SharedLink(Network(size_bytes=10, bandwidth=10, latency_s=0.5))
    assert [link.transfer(0), link.transfer(0), link.transfer(5)] == [1.5, 2.5, 6.5]


def test_a_slow_worker_does_not_hold_up_the_link() -> None:
    link = SharedLink(Network(size_bytes=10, bandwidth=10, worker_bandwidth=2))
    assert [link.transfer(0), link.transfer(0), link.transfer(0)] == [5, 5, 5]
    with pytest.raises(ConfigError, match="bandwidth above 0"):
        Network(bandwidth=0)
