"""A ps task whose connections have threads of their own: they take turns in the service, and leave to the ps thread what is its own."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

import torchquorum.wire.messages as m
from tests.ports import free_ports
from tests.unit.server.on_a_thread import DEADLINE_S, OnAThread
from tests.unit.wire.streams import settle
from torchquorum.cluster import ClusterSpec
from torchquorum.errors import TaskLostError
from torchquorum.server.reply import LEADER, Reply
from torchquorum.server.serve import PsTask, ServeOptions
from torchquorum.wire import codec
from torchquorum.wire.channel import Channel
from torchquorum.wire.entry_channel import EntryChannel
from torchquorum.wire.transport import Listening
from torchquorum.wire.transports import listen_at_entry

LARGE = bytes(100_000)


class Served(OnAThread):
    """A ps task that listens on real sockets."""

    def __init__(self, index: int) -> None:
        ports = free_ports(3)
        self.cluster = ClusterSpec({"ps": [f"localhost:{p}" for p in ports[:2]], "worker": [f"localhost:{ports[2]}"]})
        said: list[str] = []
        self.where: list[str] = []
        server = PsTask(self.cluster, index, ServeOptions(say=said.append))
        handle = server.service.handle
        self.fails: BaseException | None = None
        self.more: list[Reply] = []

        def noted(*args):  # on which thread the service is, how it fails, and what it says besides
            self.where.append(threading.current_thread().name)
            if self.fails is not None:
                raise self.fails
            more, self.more = self.more, []
            return handle(*args) + more

        server.service.handle = noted  # type: ignore[method-assign]
        super().__init__(server, said)

    def connect(self) -> Channel:
        return settle(EntryChannel(self.server.service.life.me.cluster.address(self.server.task)))


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    made = Served(getattr(request, "param", 0))
    yield made
    made.close()


def ask(channel: Channel, message: m.Message) -> m.AnyMessage:
    channel.send([codec.encode(message), LARGE])
    received = channel.receive(DEADLINE_S)
    assert received is not None
    return codec.split(received)[0]


def test_what_is_large_is_handled_on_its_connections_thread_and_costs_the_ps_thread_none_of_its_cores(
    served: Served,
) -> None:
    threads, channel = torch.get_num_threads(), served.connect()
    assert isinstance(ask(channel, m.StatusRequest()), m.Status)
    assert served.where == ["torchquorum-stream-tcp/1"] and torch.get_num_threads() == threads
    channel.close()


def test_what_ends_a_ps_ends_it_also_when_it_happens_on_a_connections_thread(served: Served) -> None:
    channel = served.connect()
    assert isinstance(ask(channel, m.StatusRequest()), m.Status)
    served.fails = TaskLostError("an update cannot be made")
    channel.send([codec.encode(m.StatusRequest()), LARGE])
    assert served.ends() is served.fails
    assert channel.receive(DEADLINE_S) is None and channel.closed
    channel.close()


def test_a_peer_that_sends_too_much_on_a_thread_of_its_own_is_hung_up_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchquorum.server.rate_limit.MOST_PER_SECOND", 5)  # in a second, also of a busy machine
    channel = served.connect()
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        channel.send([codec.encode(m.StatusRequest()), LARGE])
        if channel.receive(DEADLINE_S) is None:
            break
    assert channel.closed
    channel.close()


@pytest.mark.parametrize("served", [1], indirect=True)
def test_a_second_ps_tells_the_first_what_came_on_a_connections_thread(served: Served) -> None:
    """The connection between the two belongs to the ps thread."""
    first = listen_at_entry(Listening(address=served.cluster.as_dict()["ps"][0]))
    channel = served.connect()
    served.more = [Reply(LEADER, m.Stop(0, 77))]
    assert isinstance(ask(channel, m.StatusRequest()), m.Status)
    heard = []
    for _ in range(1000):
        if (received := first.receive(0.1)) is not None:
            heard.append(codec.split(received[1])[0])
            if isinstance(heard[-1], m.Stop):
                break
    assert isinstance(heard[-1], m.Stop) and heard[-1].incarnation == 77
    channel.close()
    first.close()
