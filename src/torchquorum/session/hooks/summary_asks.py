"""Questions to the ps tasks that training does not wait for: how the run is doing, and the mean gradient of a recent update.

Asked by the summary thread, over the worker's link, whose owner sends the questions and hands the answers over; and by the evaluator,
which has no link, over a connection of its own. What always holds: an answer that does not come in time is done without.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

import torchquorum.wire.messages as m
from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import TorchQuorumError
from torchquorum.wire.channel import Channel
from torchquorum.wire.codec import Frame
from torchquorum.wire.rpc import Arrived, Asker, Patience
from torchquorum.worker.link import Link

ANSWER_S = 1.0
LINK_ANSWER_S = 60.0  # the link's owner sends a question when it steps or waits, and a step may take long
MEAN_S = 2.0
AGAIN_S = 0.05


Question = m.StatusRequest | m.MeanRequest


class AskPs(Protocol):
    """A way to ask a ps task."""

    def ask(self, k: int, message: Question) -> Arrived | None:
        """Returns ps task k's answer with its frames; None if it does not come in time, or is a refusal."""
        ...

    def attend(self) -> None:
        """Is called on the training loop's thread while that waits for the one that asks."""
        ...

    def close(self) -> None:
        """Closes what belongs to it."""
        ...


class OverLink:
    """Asks over a worker's link, on another thread than the link's owner.

    Args:
        link: Returns the link; another one after a loss, None when the session is over.
    """

    def __init__(self, link: Callable[[], Link | None]) -> None:
        self._link = link

    def ask(self, k: int, message: Question) -> Arrived | None:
        """Leaves the question to the link's owner and waits for the answer."""
        link = self._link()
        arrived = link.channels.leave_question(k, message).take(LINK_ANSWER_S) if link is not None else None
        return arrived if arrived is not None and not isinstance(arrived[0], m.Fault) else None

    def attend(self) -> None:
        """Sends what was left to ask and takes answers; called by the link's owner."""
        link = self._link()
        with suppress(TorchQuorumError):
            if link is not None:
                link.attend()

    def close(self) -> None:
        """Does nothing: the link is the session's."""


class OverConnection:
    """Asks over connections of its own, which are made when they are needed.

    Args:
        connect: Makes a channel to a ps task, by its index.
        clock: Tells the time.
    """

    def __init__(self, connect: Callable[[int], Channel], clock: Clock = SYSTEM) -> None:
        self._connect, self._clock = connect, clock
        self._askers: dict[int, Asker] = {}
        self._asked = 0

    def ask(self, k: int, message: Question) -> Arrived | None:
        """Sends the question and waits for the answer."""
        if k not in self._askers:
            patience = Patience(probe_s=ANSWER_S / 5)
            there = f"/job:ps/task:{k}"
            self._askers[k] = Asker(channel=self._connect(k), me="", there=there, patience=patience, clock=self._clock)
        kind = m.Status if isinstance(message, m.StatusRequest) else m.Mean
        self._asked += 1
        message.request = number = self._asked
        try:
            return self._askers[k].ask(
                message,
                kind=kind,
                what="an answer",
                limit_s=ANSWER_S,
                accept=lambda answer: answer.request == number,
                again=None,
            )
        except TorchQuorumError:
            return None

    def attend(self) -> None:
        """Does nothing: the asking thread reads the answers itself."""

    def close(self) -> None:
        """Closes the connections."""
        for asker in self._askers.values():
            asker.channel.close()


class Asks:
    """What the summaries ask the ps tasks.

    Args:
        way: How they are asked.
        num_ps: How many there are.
        clock: Tells the time.
    """

    def __init__(self, way: AskPs, num_ps: int, clock: Clock = SYSTEM) -> None:
        self._way, self._num_ps, self._clock = way, num_ps, clock
        self.attend, self.close = way.attend, way.close
        self._newest_mean = -1

    def status(self) -> dict[str, Any]:
        """Returns ps task 0's status, or nothing if it does not answer in time."""
        answer = self._way.ask(0, m.StatusRequest())
        return answer[0].body if answer is not None else {}

    def mean_gradient(self, wait_s: float = MEAN_S) -> tuple[int, dict[str, np.ndarray]]:
        """Returns the mean gradient of an update since the last time it was asked for, and the version it made.

        A sliced variable is put together from its shards, whose answers may be of neighbouring versions. If there has been
        no update since, nor within `wait_s`, the version is -1 and nothing is returned.
        """
        parts: dict[str, list[tuple[int, np.ndarray]]] = {}
        newest = -1
        for shard in range(self._num_ps):
            found = self._mean_of(shard, wait_s)
            if found is None:
                return -1, {}
            newest = max(newest, found[0].version)
            numbers, at = np.frombuffer(found[1], dtype=np.float32), 0
            for piece in found[0].pieces:
                parts.setdefault(piece.name, []).append((piece.start, numbers[at : at + piece.count]))
                at += piece.count
        self._newest_mean = newest
        joined = {
            name: np.concatenate([values for _, values in sorted(found, key=lambda part: part[0])])
            for name, found in parts.items()
        }
        return newest, joined

    def _mean_of(self, shard: int, wait_s: float) -> tuple[m.Mean, Frame] | None:
        """Asks until the shard has a mean that is newer than the last: it keeps one only when it was asked."""
        deadline = self._clock.now() + wait_s
        while True:
            answer = self._way.ask(shard, m.MeanRequest())
            if answer is not None and answer[0].version > self._newest_mean and answer[1]:
                return answer[0], answer[1][0]
            if answer is None or self._clock.now() > deadline:
                return None
            self._clock.sleep(AGAIN_S)
