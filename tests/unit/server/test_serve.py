"""The one thread of a ps task, over queues: whom it waits for, whom it watches, and how it ends when it cannot go on."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

import torchquorum.wire.messages as m
from tests.unit.server.on_a_thread import DEADLINE_S, OnAThread
from torchquorum.cluster import ClusterSpec
from torchquorum.errors import DeadlineError, RefusedError, TaskLostError
from torchquorum.memory.segments import host_id
from torchquorum.server import serve as module
from torchquorum.server.processes import LIVES_WATCHED
from torchquorum.server.serve import PsTask, ServeOptions
from torchquorum.wire import codec
from torchquorum.wire.inprocess import InProcessChannel, InProcessListener, InProcessNetwork

CLUSTER = ClusterSpec({"ps": ["localhost:1000", "localhost:1001"], "worker": ["localhost:2000", "localhost:2001"]})


class Served(OnAThread):
    """A ps task that listens on queues."""

    def __init__(self, index: int) -> None:
        self.network = InProcessNetwork()
        said: list[str] = []
        self.shard_0: InProcessListener | None = None
        leader = None
        if index > 0:
            self.shard_0 = self.network.listen("localhost:1000")
            leader = self.network.connect("localhost:1000", b"ps/1")
        listener = self.network.listen(f"localhost:{1000 + index}")
        self.channel: InProcessChannel = self.network.connect(f"localhost:{1000 + index}", b"x")
        super().__init__(PsTask(CLUSTER, index, ServeOptions(say=said.append), listener=listener, leader=leader), said)

    def ask(self, message: m.Message) -> m.AnyMessage:
        """Sends a message and returns the answer."""
        self.channel.send([codec.encode(message)])
        received = self.channel.receive(DEADLINE_S)
        assert received is not None, self.said
        return codec.split(received)[0]


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(index: int = 0) -> Served:
        made.append(Served(index))
        return made[-1]

    yield start
    for served in made:
        served.close()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def answer(served: Served, message: m.Message) -> None:
    """Shard 0 hears of the ps and answers it."""
    assert served.shard_0 is not None
    heard = served.shard_0.receive(DEADLINE_S)
    assert heard is not None and isinstance(codec.split(heard[1])[0], m.ShardHello)
    served.shard_0.send(heard[0], [codec.encode(message)])


def test_a_ps_whose_protocol_shard_0_does_not_speak_ends_and_says_what_to_install(serve) -> None:
    served = serve(1)
    answer(served, m.Fault("protocol", "install the same torchquorum everywhere"))
    error = served.ends()
    assert isinstance(error, RefusedError)
    assert str(error) == "/job:ps/task:1: install the same torchquorum everywhere"


def test_a_ps_ends_when_shard_0_has_been_silent_for_too_long(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEADER_SILENCE_S", 0.3)
    served = serve(1)
    answer(served, m.Alive(0, False))
    error = served.ends()
    assert isinstance(error, TaskLostError)
    assert "/job:ps/task:0 (localhost:1000), which decides for all ps tasks, has not answered for" in str(error)


def test_a_ps_says_that_it_waits_for_the_chief_and_gives_up_in_the_end(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAY_EVERY_S", 0.05)
    monkeypatch.setattr(module, "WAIT_FOR_CHIEF_S", 1.0)
    served = serve()
    error = served.ends()
    assert isinstance(error, DeadlineError)
    assert "for /job:worker/task:0 (localhost:2000) to create the variables and gave up" in str(error)
    assert served.said[0].startswith("/job:ps/task:0: waiting for /job:worker/task:0 (localhost:2000) to create")


def test_the_processes_of_workers_are_watched_and_those_of_old_lives_no_longer(serve) -> None:
    served = serve()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        for life in range(LIVES_WATCHED + 4):
            hello = m.Hello(m.PROTOCOL, "/job:worker/task:1", life, host_id(), child)
            assert isinstance(served.ask(hello), m.Welcome)
            until(lambda life=life: (1, life) in served.server.processes.watched)
        until(lambda: len(served.server.processes.watched) == LIVES_WATCHED)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    until(lambda: not served.server.processes.watched)
    assert served.server.service.pids == {}
    gone = m.Hello(m.PROTOCOL, "/job:worker/task:0", 1, host_id(), child)  # of a process that is no more
    assert isinstance(served.ask(gone), m.Welcome)
    until(lambda: served.server.service.pids == {})
