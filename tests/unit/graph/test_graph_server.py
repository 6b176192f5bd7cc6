"""The smallest clusters: a server alone, and two tasks that know each other."""

import threading

import pytest
import torch

import torchquorum as tq
from tests.ports import free_ports
from torchquorum.errors import AddressInUseError, ClusterError, TorchQuorumError


def test_a_local_server_runs_a_small_graph_and_greets() -> None:
    def join(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.cat([first, second])

    hello, whom = (torch.tensor(list(t), dtype=torch.uint8) for t in (b"Hello, distributed ", b"torchquorum!"))
    with tq.graph.Server.create_local_server() as server:
        assert server.target.startswith("tq://localhost:")
        with tq.graph.connect(server.target) as client:
            greeting = client.run(join, hello, whom)
            assert bytes(greeting.tolist()) == b"Hello, distributed torchquorum!"
            assert [str(task) for task in client.tasks] == ["/job:localhost/task:0"]


def test_the_first_task_waits_visibly_for_the_second_and_the_log_says_who_ran_what(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = {"local": [f"localhost:{port}" for port in free_ports(2)]}

    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    def second() -> None:
        seen.wait(30)
        with tq.graph.Server(cluster, "local", 1):
            done.wait(60)

    seen, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=second)
    thread.start()
    threading.Timer(1.0, seen.set).start()
    try:
        with (
            tq.graph.Server(cluster, job_name="local", task_index=0) as server,
            tq.graph.connect(server.target, log_device_placement=True) as client,
        ):
            assert client.run(double, torch.ones(2)).tolist() == [2.0, 2.0]
            client.run(double, torch.ones(2), on="/job:local/task:1")
    finally:
        done.set()
        thread.join(30)
    out, err = capsys.readouterr()
    assert f"/job:local/task:0: waiting for /job:local/task:1 ({cluster['local'][1]}): " in err
    assert out.splitlines() == [
        "add: (aten.add.Tensor): /job:local/task:0/device:CPU:0",
        "add: (aten.add.Tensor): /job:local/task:1/device:CPU:0",
    ]


@pytest.mark.parametrize(
    ("cluster", "job", "index", "says"),
    [
        ({}, None, 0, "must be a dict"),
        ({"local": []}, None, 0, "no address"),
        ({"lo cal": ["a:1"]}, None, 0, "a job's name"),
        ({"local": ["a:1", "a:1"]}, "local", 0, "each task needs its own"),
        ({"local": ["localhost"]}, "local", 0, "has no port"),
        ({"local": ["a:1"]}, "worker", 0, "the cluster has local"),
        ({"local": ["a:1"]}, "local", 1, "1 tasks, from 0"),
    ],
)
def test_a_cluster_that_makes_no_sense_is_refused(cluster: dict, job: str, index: int, says: str) -> None:
    with pytest.raises(ClusterError, match=says):
        tq.graph.Server(cluster, job, index)


def test_a_port_in_use_is_named_and_a_server_without_ps_tasks_does_not_train() -> None:
    with tq.graph.Server.create_local_server() as server:
        with pytest.raises(AddressInUseError, match=server.address):
            tq.graph.Server({"local": [server.address]}, "local", 0)
        port = free_ports(1)[0]
        with pytest.raises(TorchQuorumError, match="must be host:port"):
            tq.graph.connect(f"http://localhost:{port}")
