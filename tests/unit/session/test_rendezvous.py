"""Tasks that do not know each other's addresses meet at a real store of torch.distributed."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.ports import free_ports
from torchquorum.cluster.finding import Rendezvous
from torchquorum.errors import DeadlineError
from torchquorum.session.rendezvous import close_stores, exchange_addresses

pytestmark = pytest.mark.library_keeps_sockets


def place(rank: int, port: int, *, size: int = 3, prefix: str = "torchquorum/x/0/") -> Rendezvous:
    return Rendezvous(
        host="127.0.0.1", port=port, prefix=prefix, rank=rank, size=size, num_ps=1, one_host=True, hosted=False
    )


@pytest.fixture(autouse=True)
def _stores_end_with_the_test():
    yield
    close_stores()


def test_all_tasks_get_the_same_cluster_and_each_the_socket_that_it_announced() -> None:
    port = free_ports(1)[0]
    with ThreadPoolExecutor(3) as pool:
        found = [f.result(60) for f in [pool.submit(exchange_addresses, place(rank, port)) for rank in range(3)]]
    assert found[0][0] == found[1][0] == found[2][0]
    addresses = [a for hosts in found[0][0].as_dict().values() for a in hosts]
    for address, (_, fd) in zip(addresses, found, strict=True):
        held = socket.socket(fileno=fd)
        assert f"127.0.0.1:{held.getsockname()[1]}" == address
        held.close()


def test_whoever_is_missing_is_named_when_the_time_is_up_and_no_file_stays_open() -> None:
    open_files: list[int] = []
    for _ in range(3):  # what the library opens once and keeps is there after the first
        with pytest.raises(DeadlineError, match="addresses of /job:worker/task:0, /job:worker/task:1 at 127.0.0.1"):
            exchange_addresses(place(0, free_ports(1)[0]), wait_s=0.3)
        close_stores()
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert open_files[2] <= open_files[0]
