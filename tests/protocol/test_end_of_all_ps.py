"""How all ps tasks end: shard 0 says when, and does not leave before the others have heard of it, whatever becomes of connections."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import torchquorum.wire.messages as m
from tests.protocol.by_hand import layout_of, make_plan
from tests.unit.server.on_a_thread import OnAThread
from torchquorum.cluster import ClusterSpec
from torchquorum.errors import TaskLostError
from torchquorum.server import farewell
from torchquorum.server import serve as module
from torchquorum.server.serve import PsTask, ServeOptions
from torchquorum.wire import codec
from torchquorum.wire.inprocess import InProcessChannel, InProcessNetwork

CLUSTER = ClusterSpec({"ps": ["localhost:1000", "localhost:1001"], "worker": ["localhost:2000"]})
PLAN = make_plan(num_shards=2, num_workers=1)
DEADLINE_S = 30.0


class Cable:
    """Shard 1's connection to shard 0, which a fault may cut: what is sent meanwhile is lost for good."""

    def __init__(self, channel: InProcessChannel) -> None:
        self._channel, self.cut = channel, False
        self.loses: Callable[[m.AnyMessage], bool] = lambda _: False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, frames: Any) -> None:
        if not self.cut and not self.loses(codec.split(frames)[0]):
            self._channel.send(frames)

    def receive(self, timeout_s: float) -> Any:
        received = self._channel.receive(timeout_s)
        return None if self.cut else received


class Pair:
    """Two ps tasks, and a worker that the test speaks for."""

    def __init__(self) -> None:
        network = InProcessNetwork()
        self.cable = Cable(network.connect("localhost:1000", b"ps/1"))
        self.gone: set[str] = set()
        self.ps: list[OnAThread] = []
        self.worker = [network.connect(f"localhost:{1000 + i}", b"worker/0") for i in range(2)]
        for index, leader in enumerate((None, self.cable)):
            said: list[str] = []
            options = ServeOptions(say=said.append, refuses=self.gone.__contains__)
            listener = network.listen(f"localhost:{1000 + index}")
            self.ps.append(OnAThread(PsTask(CLUSTER, index, options, listener=listener, leader=leader), said))  # pyright: ignore[reportArgumentType]

    def ask(self, index: int, message: m.Message, *frames: bytes) -> m.AnyMessage:
        """Asks a ps task for something."""
        self.worker[index].send([codec.encode(message), *frames])
        received = self.worker[index].receive(DEADLINE_S)
        assert received is not None, [ps.said for ps in self.ps]
        return codec.split(received)[0]

    def train(self) -> None:
        """The worker creates the variables and joins."""
        layout = layout_of(PLAN)
        for index in (1, 0):
            sizes = layout.trained[index].size_bytes, layout.constants[index].size_bytes
            assert isinstance(self.ask(index, m.Create(PLAN, generation=7), *(bytes(s) for s in sizes)), m.Created)
        self.worker[1].send([codec.encode(m.Join(0, 1, 1, None, None))])  # answered at its place in shard 0's log
        assert isinstance(self.ask(0, m.Join(0, 1, 1, None, None)), m.Variables)

    def leave(self, *, stays: bool) -> None:
        """The worker's session is over; its program may go on."""
        for index in (0, 1):
            if stays:
                self.worker[index].send([codec.encode(m.Stay(0))])
            self.worker[index].send([codec.encode(m.Leave(0, 1, None, None, finished=True))])

    def ended(self, index: int) -> bool:
        """Whether a ps task has ended."""
        return self.ps[index].ok is not None or self.ps[index].error is not None

    def end_well(self) -> None:
        """Both end, without an error."""
        assert [ps.ends() for ps in self.ps] == [None, None], [ps.said for ps in self.ps]
        assert [ps.ok for ps in self.ps] == [True, True]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(module, "LEADER_SILENCE_S", 3.0)
    found = Pair()
    yield found
    found.cable.cut = False
    for ps in found.ps:
        ps.close()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_shard_that_heard_nothing_of_the_end_is_waited_for_until_its_connection_is_back(pair: Pair) -> None:
    pair.train()
    pair.cable.cut = True
    pair.leave(stays=False)
    until(lambda: pair.ps[0].server.ended)
    time.sleep(0.5)
    assert not pair.ended(0), "shard 1 does not know yet that the run is over"
    pair.cable.cut = False
    pair.end_well()


def test_all_ps_tasks_stay_for_a_program_and_end_together_though_one_does_not_hear_that_it_has_ended(
    pair: Pair,
) -> None:
    pair.train()
    pair.leave(stays=True)
    until(lambda: all(ps.server.service.run is None for ps in pair.ps))
    for _ in range(2):
        for index in (0, 1):
            pair.worker[index].send([codec.encode(m.Stay(0))])
        time.sleep(0.3)
        assert not pair.ended(0) and not pair.ended(1), "the program may begin another session"
    pair.worker[0].send([codec.encode(m.Stay(0, gone=True))])  # the word for shard 1 is lost
    pair.end_well()


def test_a_shard_that_is_cut_off_while_others_stay_is_told_of_the_end_when_it_is_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(farewell, "FAREWELL_S", 0.3)
    pair.train()
    pair.cable.cut = True
    pair.leave(stays=True)
    until(lambda: pair.ps[0].server.service.run is None)  # it stays for the program, and has given up on shard 1
    assert any("/job:ps/task:1 (localhost:1001): has not answered for" in line for line in pair.ps[0].said)
    assert pair.ps[1].server.ended is None
    pair.cable.cut = False
    until(lambda: pair.ps[1].server.service.run is None)
    pair.worker[0].send([codec.encode(m.Stay(0, gone=True))])
    pair.end_well()


def test_a_shard_whose_last_word_was_lost_and_that_has_forgotten_the_run_is_not_waited_for(pair: Pair) -> None:
    pair.train()
    pair.cable.loses = lambda message: isinstance(message, m.ShardHello) and message.followed > 0
    began = time.monotonic()
    pair.leave(stays=False)
    pair.end_well()
    assert time.monotonic() - began < farewell.FAREWELL_S / 2


def test_a_shard_that_is_gone_is_not_waited_for(pair: Pair) -> None:
    pair.train()
    pair.cable.cut = True
    pair.gone.add("localhost:1001")
    began = time.monotonic()
    pair.leave(stays=False)
    assert pair.ps[0].ends() is None and pair.ps[0].ok
    assert time.monotonic() - began < farewell.FAREWELL_S / 2


def test_a_shard_whose_shard_0_has_gone_after_the_end_ends_well(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEADER_SILENCE_S", 0.5)
    pair.gone.add("localhost:1000")
    pair.train()
    pair.leave(stays=True)
    until(lambda: pair.ps[1].server.service.run is None)
    pair.ps[0].server.end("killed")
    pair.worker[1].send([codec.encode(m.Stay(0, gone=True))])
    assert pair.ps[1].ends() is None and pair.ps[1].ok


@pytest.mark.parametrize("heard", [True, False])
def test_a_shard_whose_shard_0_has_gone_in_a_run_ends_with_an_error(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    monkeypatch.setattr(module, "LEADER_SILENCE_S", 0.5)
    pair.cable.cut = not heard
    pair.gone.add("localhost:1000")
    pair.train()
    if heard:
        until(lambda: pair.ps[1].server.service.shard_0.heard_at is not None)
    pair.ps[0].server.end("killed")
    assert isinstance(pair.ps[1].ends(), TaskLostError)
