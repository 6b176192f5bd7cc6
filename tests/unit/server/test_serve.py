"""The one thread of a ps task, over queues: whom it waits for, whom it watches, and how it ends when it cannot go on."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import torchquorum.wire.messages as m
from tests.protocol.by_hand import layout_of, make_plan
from tests.unit.server.on_a_thread import DEADLINE_S, OnAThread
from torchquorum.clock import SystemClock
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

    def __init__(self, index: int, options: dict[str, Any]) -> None:
        self.network = InProcessNetwork()
        said: list[str] = []
        self.shard_0: InProcessListener | None = None
        leader = None
        if index > 0:
            self.shard_0 = self.network.listen("localhost:1000")
            leader = self.network.connect("localhost:1000", b"ps/1")
        listener = self.network.listen(f"localhost:{1000 + index}")
        self.channel: InProcessChannel = self.network.connect(f"localhost:{1000 + index}", b"x")
        super().__init__(
            PsTask(CLUSTER, index, ServeOptions(say=said.append, **options), listener=listener, leader=leader), said
        )

    def ask(self, message: m.Message) -> m.AnyMessage:
        """Sends a message and returns the answer."""
        self.channel.send([codec.encode(message)])
        received = self.channel.receive(DEADLINE_S)
        assert received is not None, self.said
        return codec.split(received)[0]


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(index: int = 0, **options: Any) -> Served:
        made.append(Served(index, options))
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


class JumpingClock(SystemClock):
    """The machine's time, and what a pause of this process adds to it."""

    def __init__(self) -> None:
        self.paused_s = 0.0

    def now(self) -> float:
        return time.monotonic() + self.paused_s


def test_a_shard_0_that_is_paused_or_cut_off_is_waited_for_and_one_that_is_gone_is_not(
    serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEADER_SILENCE_S", 0.3)
    monkeypatch.setattr(module, "SAY_EVERY_S", 0.1)
    gone = False
    served = serve(1, refuses=lambda address: gone)
    answer(served, m.Alive(0, False))
    waiting = r"/job:ps/task:0 \(localhost:1000\), which decides .* has not answered for \d+ s; waiting for it"
    until(lambda: sum(re.search(waiting, line) is not None for line in served.said) >= 3)
    answer(served, m.Alive(0, False))
    gone = True
    assert isinstance(served.ends(), TaskLostError)


def test_a_shard_0_that_does_not_come_back_is_not_waited_for_for_ever(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEADER_SILENCE_S", 0.1)
    monkeypatch.setattr(module, "SAY_EVERY_S", 0.1)
    monkeypatch.setattr(module, "LEADER_LOST_S", 0.5)
    served = serve(1, refuses=lambda address: False)
    answer(served, m.Alive(0, False))
    assert isinstance(served.ends(), TaskLostError)


@pytest.mark.parametrize("pause_s", [40.0, 400.0])
def test_a_pause_of_this_ps_is_not_the_silence_of_shard_0(serve, pause_s: float) -> None:
    clock = JumpingClock()
    served = serve(1, clock=clock, refuses=lambda address: True)
    for _ in range(3):
        answer(served, m.Alive(0, False))
        clock.paused_s += pause_s
    answer(served, m.Alive(0, False))
    assert served.error is None and served.ok is None


def test_a_pause_of_this_ps_is_not_the_silence_of_its_workers_and_their_own_silence_is(serve) -> None:
    clock = JumpingClock()
    served = serve(0, clock=clock)
    plan = make_plan(num_shards=2, liveness_s=3.0)
    layout = layout_of(plan)
    sizes = layout.trained[0].size_bytes, layout.constants[0].size_bytes
    served.channel.send([codec.encode(m.Create(plan)), *(bytes(size) for size in sizes)])
    assert served.channel.receive(DEADLINE_S) is not None
    assert isinstance(served.ask(m.Join(0, 1, 1, None, None)), m.Variables)
    for _ in range(4):
        assert isinstance(served.ask(m.Beat(0, 1)), m.Alive)
        clock.paused_s += 400.0
        time.sleep(0.3)  # a turn or two of the ps
        assert isinstance(served.ask(m.Beat(0, 1)), m.Alive)
    assert not any("counts as dead" in line for line in served.said)
    until(lambda: any("/job:worker/task:0 counts as dead (not heard of for " in line for line in served.said))


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
