"""Whether a Ray cluster answers at an address."""

import socket

import pytest

from torchquorum.errors import ConfigError
from torchquorum.launcher.ray_address import find_cluster


@pytest.mark.parametrize(
    "address", ["rubbish", "host:", ":6379", "host:port", "host:99999", "http://host:8265", "ray://x"]
)
def test_an_address_of_another_form_is_refused(address: str):
    with pytest.raises(ConfigError, match="must be auto, host:port or ray://host:port"):
        find_cluster(address)


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_a_cluster_that_is_not_there_is_told_at_once(form: str):
    with socket.socket() as held:  # bound and not listening: nobody else can take the port meanwhile
        held.bind(("127.0.0.1", 0))
        address = form.format(held.getsockname()[1])
        with pytest.raises(ConfigError, match=f"--address {address}: no Ray cluster answers there .*ray start --head"):
            find_cluster(address)
