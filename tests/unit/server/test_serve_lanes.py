"""A ps task whose lanes have threads of their own: they take turns in the service, and leave to the ps thread what is its own."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

import torchquorum.transport.messages as m
from tests.ports import free_ports
from tests.unit.server.on_a_thread import DEADLINE_S, OnAThread
from torchquorum.cluster import ClusterSpec
from torchquorum.errors import TaskLostError
from torchquorum.server.serve import Server
from torchquorum.server.service import LEADER
from torchquorum.server.shard import Reply
from torchquorum.transport import codec
from torchquorum.transport.door import DoorListener
from torchquorum.transport.lane import LaneChannel
from torchquorum.transport.zmq_channel import ZmqListener

LARGE = bytes(100_000)


class Served(OnAThread):
    """A ps task that listens on real sockets."""

    def __init__(self, index: int) -> None:
        ports = free_ports(3)
        self.cluster = ClusterSpec({"ps": [f"localhost:{p}" for p in ports[:2]], "worker": [f"localhost:{ports[2]}"]})
        said: list[str] = []
        self.where: list[str] = []
        server = Server(self.cluster, index, say=said.append)
        handle = server.service.handle
        self.fails: BaseException | None = None

        def noted(*args):  # on which thread the service is, and how it fails
            self.where.append(threading.current_thread().name)
            if self.fails is not None:
                raise self.fails
            return handle(*args)

        server.service.handle = noted  # type: ignore[method-assign]
        super().__init__(server, said)

    def lane(self) -> LaneChannel:
        listener = self.server._listener
        assert isinstance(listener, DoorListener)
        return LaneChannel("127.0.0.1", listener.lane, 1 << 20)


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    made = Served(getattr(request, "param", 0))
    yield made
    made.close()


def ask(lane: LaneChannel, message: m.Message) -> m.AnyMessage:
    lane.send([codec.encode(message), LARGE])
    received = lane.receive(DEADLINE_S)
    assert received is not None
    return codec.split(received)[0]


def test_what_comes_on_a_lane_is_handled_there_and_costs_the_ps_thread_none_of_its_cores(served: Served) -> None:
    threads, lane = torch.get_num_threads(), served.lane()
    assert isinstance(ask(lane, m.StatusRequest()), m.Status)
    assert served.where == ["torchquorum-lane/1"] and torch.get_num_threads() == threads
    lane.close()


def test_what_ends_a_ps_ends_it_also_when_it_happens_on_a_lanes_thread(served: Served) -> None:
    lane = served.lane()
    assert isinstance(ask(lane, m.StatusRequest()), m.Status)
    served.fails = TaskLostError("an update cannot be made")
    lane.send([codec.encode(m.StatusRequest()), LARGE])
    assert served.ends() is served.fails
    assert lane.receive(DEADLINE_S) is None and lane.closed
    lane.close()


def test_who_talks_too_much_on_a_lane_of_its_own_is_hung_up_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchquorum.server.strangers.MOST_IDLE_TALK", 5)  # in a second, also of a busy machine
    lane = served.lane()
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        lane.send([codec.encode(m.StatusRequest()), LARGE])
        if lane.receive(DEADLINE_S) is None:
            break
    assert lane.closed
    lane.close()


@pytest.mark.parametrize("served", [1], indirect=True)
def test_a_second_ps_tells_the_first_what_came_on_a_lane(served: Served) -> None:
    """The connection between the two belongs to the ps thread."""
    first = ZmqListener(served.cluster.as_dict()["ps"][0])
    lane, reply = served.lane(), served.server._send_now
    sent = threading.Event()

    def also_to_the_first(replies):
        if threading.current_thread().name.startswith("torchquorum-lane") and not sent.is_set():
            replies = [*replies, Reply(LEADER, m.Stop(0, 77))]
            sent.set()
        reply(replies)

    served.server._send_now = also_to_the_first  # type: ignore[method-assign]
    assert isinstance(ask(lane, m.StatusRequest()), m.Status)
    heard = []
    for _ in range(1000):
        if (received := first.receive(0.1)) is not None:
            heard.append(codec.split(received[1])[0])
            if isinstance(heard[-1], m.Stop):
                break
    assert isinstance(heard[-1], m.Stop) and heard[-1].incarnation == 77
    lane.close()
    first.close()
