"""Forked tasks, each test in a process of its own."""

from __future__ import annotations

from pathlib import Path

from tests.unit.launcher.programs import run_program

A_TERMINALS = """
from torchquorum.launcher.fork import fork

os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT))  # as Ctrl-C reaches all of a terminal
if fork() == 0:
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        time.sleep(60)
    except KeyboardInterrupt:
        os._exit(7)
print("child", os.waitstatus_to_exitcode(os.wait()[1]), "parent", signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def test_ctrl_c_that_reaches_a_child_inside_its_parents_code_waits_until_the_child_can_be_ended(tmp_path: Path) -> None:
    out, errors = run_program(A_TERMINALS, tmp_path)
    assert out == "child 7 parent set()", errors
