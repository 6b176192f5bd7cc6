"""Where a worker stood: captured once per version, sent when it is wanted."""

from __future__ import annotations

from typing import Any

import torchquorum.wire.messages as m
from tests.unit.worker.ps_by_hand import PsTasks
from torchquorum.worker.local_buffers import CapturedBuffers
from torchquorum.worker.positions import REMEMBERED, Positions
from torchquorum.worker.ps_channels import PsChannels


class Captured:
    """A position without buffers."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.buffers: CapturedBuffers | None = None

    def encode(self) -> dict[str, Any]:
        return {"number": self.number}


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
