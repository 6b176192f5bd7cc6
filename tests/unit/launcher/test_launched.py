"""Ctrl-C while a cluster is started and watched, where Python would lose it. Each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.launcher.programs import run_program

BEGIN = """
from torchquorum.launcher.launched import LaunchOptions
from torchquorum.launcher.local import LocalCluster

class Garbage:
    def __del__(self):
        ctrl_c()

options = LaunchOptions(command=[sys.executable, "-c", "import time; time.sleep(600)"], ps=1, workers=1)
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
    def _handles_signals(self, running):
        return True  # so that the ps gets none: the chief tells it

    def say(self, line):
        super().say(line)
        ctrl_c()  # again, as soon as it says that it was interrupted

cluster = Deaf(options, lambda task, line: None, print)
cluster.start()
print("ended with", cluster.wait(ctrl_c))
print("left", sum(t.code is None for t in cluster.tasks), "ps", cluster.tasks[0].code)  # a worker may end by the first
"""

BETWEEN_START_AND_WAIT = """
cluster.start()
os.kill(os.getpid(), signal.SIGTERM)
print("ended with", cluster.wait())
print("left", sum(t.code is None for t in cluster.tasks), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""

SAID = "interrupted: saving and ending every task; Ctrl-C again kills them at once"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (AROUND_A_FORK, "interrupted after 1 True\nleft 0"),
        (IN_A_FINALIZER, f"{SAID}\nended with 130\nleft 0"),
        (TWICE, f"{SAID}\nended with 130\nleft 0 ps -9"),
        (BETWEEN_START_AND_WAIT, f"{SAID}\nended with 130\nleft 0 True"),
    ],
    ids=["around a fork", "in a finalizer", "twice", "between start and wait"],
)
def test_an_interrupt_is_never_lost(program: str, expected: str, tmp_path: Path) -> None:
    out, errors = run_program(BEGIN + program, tmp_path)
    assert out == expected, errors
