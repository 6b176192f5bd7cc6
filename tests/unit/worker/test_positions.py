"""Where a worker stood: captured once per version, sent when it is wanted."""

from __future__ import annotations

from typing import Any

import torchquorum.wire.messages as m
from tests.unit.worker.ps_by_hand import PsTasks
from torchquorum.worker.local_buffers import CapturedBuffers
from torchquorum.worker.positions import REMEMBERED, Positions
from torchquorum.worker.ps_channels import PsChannels


class Captured:
    """A position without buffers; with a scheduler, if it has one, as `asked` says how often it was asked."""

    def __init__(self, number: int, asked: list[int] | None = None) -> None:
        self.number = number
        self.buffers: CapturedBuffers | None = None
        self._asked, self._captured = asked, -1

    @property
    def is_late(self) -> bool:
        return self._asked is not None

    def capture_late(self) -> None:
        assert self._asked is not None
        self._captured = self._asked[0]

    def save_beside(self, version: int) -> None:
        pass

    def encode(self) -> dict[str, Any]:
        return {"number": self.number} if self._asked is None else {"asked": self._captured}


def test_what_is_late_is_sent_again_when_the_next_push_begins() -> None:
    ps, asked = PsTasks(), [0]
    positions = Positions(PsChannels(ps.end))
    positions.begin(lambda: Captured(0, asked), 2)
    positions.send(2)  # inside of a step: a checkpoint of version 2 is made
    asked[0] = 1
    positions.before_push()
    positions.before_push()
    assert ps.sent() == [m.Position(1, 7, 2, {"asked": 0}, False), m.Position(1, 7, 2, {"asked": 1}, True)]


def test_what_was_not_wanted_is_captured_and_not_sent() -> None:
    ps, asked = PsTasks(), [0]
    positions = Positions(PsChannels(ps.end))
    positions.begin(lambda: Captured(0, asked), 2)
    asked[0] = 1
    positions.before_push()
    asked[0] = 2
    positions.note(3)
    positions.send(2)  # of the version before
    positions.send(3, final=True)  # as the worker leaves
    assert ps.sent() == [m.Position(1, 7, 2, {"asked": 1}, True), m.Position(1, 7, 3, {"asked": 2}, True)]


def test_nothing_is_captured_or_sent_before_it_begins() -> None:
    ps = PsTasks()
    positions = Positions(PsChannels(ps.end))
    positions.note(3)
    positions.send(3)
    assert ps.sent() == []


def test_the_newest_position_that_is_no_newer_than_wanted_is_sent() -> None:
    ps = PsTasks()
    captured = 0

    def capture() -> Captured:
        nonlocal captured
        captured += 1
        return Captured(captured)

    positions = Positions(PsChannels(ps.end))
    positions.begin(capture, 2)
    positions.note(2)
    positions.note(5)
    positions.note(5)
    assert captured == 2  # once per version
    for wanted in (1, -1, 2, 4, 9):
        positions.send(wanted)
    assert ps.sent() == [
        m.Position(1, 7, 2, {"number": 1}),
        m.Position(1, 7, 2, {"number": 1}),
        m.Position(1, 7, 5, {"number": 2}),
    ]


def test_only_the_last_few_are_kept() -> None:
    ps = PsTasks()
    positions = Positions(PsChannels(ps.end))
    positions.begin(lambda: Captured(0), 0)
    for version in range(1, REMEMBERED + 1):
        positions.note(version)
    positions.send(0)
    assert ps.sent() == []
    positions.send(1)
    assert len(ps.sent()) == 1
