"""Ps tasks for tests of a worker's link: what they answer is a function, and waiting for them moves a manual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torchquorum.wire.messages as m
from tests.manual_clock import ManualClock, ScriptedChannel
from torchquorum.cluster import ClusterSpec
from torchquorum.wire import codec
from torchquorum.wire.codec import Frame
from torchquorum.wire.rpc import Patience
from torchquorum.worker.worker_end import WorkerEnd

PATIENCE = Patience(start_s=60.0, round_s=60.0, silence_s=10.0, probe_s=1.0, say_s=5.0)
Answers = Callable[[int, m.Message], Sequence[m.Message]]


class PsTasks:
    """Some ps tasks. `answer(k, message)` says what ps task k answers; a test may change it."""

    def __init__(self, count: int = 1, *, index: int = 1) -> None:
        self.clock, self.said, self.channels = ManualClock(), list[str](), list[ScriptedChannel]()
        self.answer: Answers = lambda _k, _message: []
        cluster = ClusterSpec(
            {"ps": [f"localhost:{1000 + k}" for k in range(count)], "worker": ["localhost:2000", "localhost:2001"]}
        )
        self.end = WorkerEnd(
            cluster=cluster,
            index=index,
            incarnation=7,
            connect=self._connect,
            patience=PATIENCE,
            say=self.said.append,
            clock=self.clock,
        )

    def _connect(self, address: str, identity: bytes) -> ScriptedChannel:
        k = int(address.rpartition(":")[2]) - 1000

        def reply(frames: list[Frame]) -> list[list[Frame]]:
            return [[codec.encode(answer)] for answer in self.answer(k, codec.split(frames)[0])]

        self.channels.append(ScriptedChannel(self.clock, reply))
        return self.channels[-1]

    def send(self, k: int, message: m.Message) -> None:
        """Ps task k sends something by itself."""
        self.channels[k].arrived.append([codec.encode(message)])

    def sent(self, k: int = 0) -> list[m.Message]:
        """Returns what ps task k was sent."""
        return [codec.split(frames)[0] for frames in self.channels[k].sent]


def variables(request: int, version: int = 1, generation: int = 0) -> m.Variables:
    """One version, as a ps task answers."""
    return m.Variables(request, version, False, 0, None, None, [0.1], generation=generation)
