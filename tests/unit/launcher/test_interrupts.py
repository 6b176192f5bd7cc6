"""Ctrl-C where Python would swallow it: in what it calls around a fork, and in a finalizer. Each in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.process.zygote import run_python

BEGIN = """
import os, signal, sys, threading, time
from torchquorum.launcher.interrupts import Interrupts
from torchquorum.launcher.local import LocalCluster, Options

def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)  # Python looks for signals here, if not before

class Garbage:
    def __del__(self):
        ctrl_c()

options = Options(command=[sys.executable, "-c", "import time; time.sleep(600)"], ps=1, workers=1)
cluster = LocalCluster(options, lambda task, line: None, print)
"""

AROUND_A_FORK = """
os.register_at_fork(after_in_parent=ctrl_c)
try:
    cluster.start()
except KeyboardInterrupt:
    print("interrupted after", len(cluster.tasks), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
cluster.stop(signal.SIGTERM)
print("left", sum(t.code is None for t in cluster.tasks))
"""

IN_A_FINALIZER = """
cluster.start()
garbage = [Garbage()]
print("ended with", cluster.wait(garbage.clear))
print("left", sum(t.code is None for t in cluster.tasks))
"""

TWICE = """
class Deaf(LocalCluster):
    def _say(self, line):
        super()._say(line)
        ctrl_c()  # again, as soon as it says that it was interrupted

cluster = Deaf(options, lambda task, line: None, print)
cluster.start()
print("ended with", cluster.wait(ctrl_c))
print("left", sum(t.code is None for t in cluster.tasks), "ps", cluster.tasks[0].code)  # a worker may end by the first
"""

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

BETWEEN_START_AND_WAIT = """
cluster.start()
os.kill(os.getpid(), signal.SIGTERM)
print("ended with", cluster.wait())
print("left", sum(t.code is None for t in cluster.tasks), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
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
    [
        (AROUND_A_FORK, "interrupted after 1 True\nleft 0"),
        (
            IN_A_FINALIZER,
            "interrupted: saving and ending every task; once more ends them at once\nended with 130\nleft 0",
        ),
        (
            TWICE,
            "interrupted: saving and ending every task; once more ends them at once\nended with 130\nleft 0 ps -9",
        ),
        (IGNORED, "[] True"),
        (ENTERED_AGAIN, "2 True\nTrue"),
        (
            BETWEEN_START_AND_WAIT,
            "interrupted: saving and ending every task; once more ends them at once\nended with 130\nleft 0 True",
        ),
        (ON_A_THREAD, "its own True"),
    ],
    ids=[
        "around a fork",
        "in a finalizer",
        "twice",
        "ignored",
        "entered again",
        "between start and wait",
        "on a thread",
    ],
)
def test_an_interrupt_is_never_lost(program: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(BEGIN + program)
    ran = run_python([sys.executable, str(tmp_path / "program.py")], os.environ, timeout_s=100, cwd=tmp_path)
    assert ran.stdout.strip() == expected, ran.stderr


A_TERMINALS = """
from torchquorum.launcher.functions import fork

os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT))  # as Ctrl-C reaches all of a terminal
if fork() == 0:
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        time.sleep(60)
    except KeyboardInterrupt:
        os._exit(7)
print("child", os.waitstatus_to_exitcode(os.wait()[1]), "parent", signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def test_one_that_reaches_a_child_in_its_parents_code_waits_until_the_child_can_be_ended(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(BEGIN + A_TERMINALS)
    ran = run_python([sys.executable, str(tmp_path / "program.py")], os.environ, timeout_s=100, cwd=tmp_path)
    assert ran.stdout.strip() == "child 7 parent set()", ran.stderr
