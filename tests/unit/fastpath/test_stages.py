"""Stages run to their end, and wait where they wait."""

import ctypes

import pytest

from torchquorum.fastpath.stages import Sleep, Stage, Stages, run
from torchquorum.memory.lock import Signal, supported


@pytest.mark.skipif(not supported(), reason="this system has no locks between processes")
def test_stages_run_to_their_end_and_wait_where_they_wait() -> None:
    words = (ctypes.c_int64 * 2)()
    signal, done = Signal(ctypes.addressof(words)), []

    def stages() -> Stages[str]:
        yield Stage.SPIN
        yield Stage.LOCK
        done.append("before")
        yield Sleep(signal, 1, 60.0)  # the number is another: it ends at once
        done.append("after")
        return "result"

    assert run(stages()) == "result" and done == ["before", "after"]


def test_an_exception_between_two_stages_is_the_callers() -> None:
    def stages() -> Stages[None]:
        yield Stage.WRITE
        raise ValueError("a writer failed")

    with pytest.raises(ValueError, match="a writer failed"):
        run(stages())
