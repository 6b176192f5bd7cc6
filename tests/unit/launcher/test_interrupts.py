"""Interrupts recorded and not raised, where Python would lose them. Each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.launcher.programs import run_program

BEGIN = "from torchquorum.launcher.interrupts import Interrupts\n"

IGNORED = """
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup and a shell's & have it
with Interrupts() as interrupts:
    ctrl_c()
print(interrupts.came, signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
"""

ENTERED_AGAIN = """
interrupts = Interrupts()
with interrupts:
    ctrl_c()
    with interrupts:
        ctrl_c()
    print(len(interrupts.came), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""

ON_A_THREAD = """
def other():
    with Interrupts():
        print("its own", signal.getsignal(signal.SIGINT) is signal.default_int_handler)

thread = threading.Thread(target=other)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    [(IGNORED, "[] True"), (ENTERED_AGAIN, "2 True\nTrue"), (ON_A_THREAD, "its own True")],
    ids=["ignored", "entered again", "on a thread"],
)
def test_an_interrupt_is_recorded_only_where_it_should_be(program: str, expected: str, tmp_path: Path) -> None:
    out, errors = run_program(BEGIN + program, tmp_path)
    assert out == expected, errors
