"""A ps task that a test talks to by hand: with nobody in it, or with two workers in a sync run."""

from collections.abc import Iterator

import pytest

from tests.protocol.by_hand import Ps
from tests.protocol.saving import Make


@pytest.fixture
def ps() -> Iterator[Ps]:
    ps = Ps()
    yield ps
    ps.close()


@pytest.fixture
def running(ps: Ps) -> Ps:
    """Two workers have joined a sync run."""
    ps.create()
    ps.join(0)
    ps.join(1)
    return ps


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes ps tasks whose savers end with the test."""
    made: list[Ps] = []

    def build(*given: int, **more: int) -> Ps:
        made.append(Ps(*given, **more))
        return made[-1]

    yield build
    for ps in made:
        ps.service.life.saver.close()
        ps.close()
