"""A client that runs small graphs: what it waits for, what comes back, and what it says when a task does not answer."""

from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.manual_clock import ManualClock, ScriptedChannel
from tests.ports import free_ports
from torchquorum.cluster import TaskId
from torchquorum.cluster.secret import OPEN
from torchquorum.errors import ClusterError, DeadlineError, GraphError, TaskLostError, TorchQuorumError
from torchquorum.graph import graph_messages as g
from torchquorum.graph.graph_client import TaskConnections
from torchquorum.wire import codec
from torchquorum.wire import messages as m
from torchquorum.wire.codec import Frame

CLUSTER = {"ps": ["p:1"], "local": ["a:1", "b:2", "c:3"]}


class Network:
    """The tasks of CLUSTER: each answers Attach from a time on, and Execute never."""

    def __init__(self, up_at: dict[str, float]) -> None:
        self.clock, self.up_at = ManualClock(0.0), up_at
        self.channels: list[ScriptedChannel] = []

    def connect(self, address: str, *_: Any) -> ScriptedChannel:
        def answer(frames: list[Frame]) -> list[list[Frame]]:
            if self.clock.now() < self.up_at.get(address, 0.0) or not isinstance(g.split(frames)[0], g.Attach):
                return []
            task = f"/job:local/task:{CLUSTER['local'].index(address)}"
            attached = g.Attached(m.PROTOCOL, task, "life", "host", 1, "cpu", CLUSTER, "free")
            return [[codec.encode(attached)]]

        self.channels.append(ScriptedChannel(self.clock, answer))
        return self.channels[-1]

    def find(self, wait_s: float = 60.0) -> TaskConnections:
        return TaskConnections("a:1", OPEN, wait_s, clock=self.clock, connect=self.connect)


def test_all_tasks_but_the_ps_are_found_and_those_that_are_late_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    network = Network({"b:2": 26.0, "c:3": 2.0})
    found = network.find()
    assert found.master == TaskId("local", 0) and list(found.askers) == [TaskId("local", n) for n in range(3)]
    assert 26.0 <= network.clock.now() < 28.0
    first, *later = capsys.readouterr().err.splitlines()
    assert first == "/job:local/task:0: waiting for /job:local/task:1 (b:2), /job:local/task:2 (c:3): 0 s"
    assert later and all(line.startswith("/job:local/task:0: waiting for /job:local/task:1 (b:2): ") for line in later)


def test_the_tasks_share_one_deadline_and_every_connection_is_closed_when_it_has_passed() -> None:
    network = Network({"b:2": 8.0, "c:3": 100.0})
    with pytest.raises(
        DeadlineError, match=r"for /job:local/task:2 \(c:3\) and gave up. Start it with the same cluster"
    ):
        network.find(wait_s=10.0)
    assert 10.0 <= network.clock.now() < 11.0
    assert all(channel.closed for channel in network.channels)


def test_what_is_no_compute_task_is_named() -> None:
    clock = ManualClock()
    with pytest.raises(TorchQuorumError, match="a:1 is not a compute task: not a torchquorum message"):
        TaskConnections(
            "a:1", OPEN, 5.0, clock=clock, connect=lambda *_: ScriptedChannel(clock, lambda _: [[b"hello"]])
        )


def test_a_graph_is_sent_once_and_a_task_that_is_silent_meanwhile_is_lost() -> None:
    network = Network({})
    found = network.find()
    task, began = TaskId("local", 1), network.clock.now()
    channel = network.channels[2]
    channel.sent.clear()
    network.up_at["b:2"] = began + 1e9
    with pytest.raises(TaskLostError, match=r"/job:local/task:1 \(b:2\) has not answered for 10 s"):
        found.execute(task, g.Execute(1, g.GraphSpec("graph", [], [], []), []), [])
    kinds = [type(g.split(frames)[0]) for frames in channel.sent]
    assert kinds[0] is g.Execute and set(kinds[1:]) == {g.Attach}


def test_a_graph_may_take_long_while_its_task_is_known_to_live() -> None:
    network = Network({})
    found = network.find()
    with pytest.raises(DeadlineError, match=r"client: waited 600 s for /job:local/task:1 to run a graph"):
        found.execute(TaskId("local", 1), g.Execute(1, g.GraphSpec("graph", [], [], []), []), [])


def test_a_client_gets_back_what_the_function_returned_and_hears_of_mistakes() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Buffer(torch.tensor([2.0, 3.0]))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"scaled": x * self.scale, "total": x.sum()}

    def index(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return x[at]

    with tq.graph.Server.create_local_server() as server, tq.graph.connect(server.target) as client:
        found = client.run(Scaled(), torch.tensor([1.0, 2.0]))
        assert found["scaled"].tolist() == [2.0, 6.0] and found["total"].item() == 3.0
        with pytest.raises(GraphError, match=r"/job:localhost/task:0: .*aten.index"):
            client.run(index, torch.ones(2), torch.tensor([7]))
        with pytest.raises(GraphError, match="parameter"):
            client.run(nn.Linear(2, 2), torch.ones(1, 2))
        with pytest.raises(ClusterError, match="the tasks are /job:localhost/task:0"):
            client.run(index, torch.ones(2), torch.tensor([0]), on=3)
        assert client.run(index, torch.ones(2), torch.tensor([0])).tolist() == [1.0]


def test_a_task_that_never_comes_is_named_when_the_wait_is_over() -> None:
    first, second = free_ports(2)
    with (
        tq.graph.Server({"local": f"localhost:{first}, localhost:{second}"}, "local", 0) as server,
        pytest.raises(DeadlineError, match=rf"/job:local/task:1 \(localhost:{second}\) and gave up"),
    ):
        tq.graph.connect(server.target, wait_s=0.5)
    with pytest.raises(DeadlineError, match=f"a server at localhost:{first}"):
        tq.graph.connect(f"localhost:{first}", wait_s=0.5)
