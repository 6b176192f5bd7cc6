"""A child of a worker never speaks for it, however it ends."""

import signal
from pathlib import Path

from tests.process.tasks import by_hand

PROGRAM = Path(__file__).parent / "forking_program.py"


def test_a_child_of_a_worker_makes_no_step_and_says_no_goodbye_at_every_way_out() -> None:
    with by_hand(program=PROGRAM) as cluster:
        ps = cluster.start("ps", 0)
        chief, forking = cluster.start("worker", 0), cluster.start("worker", 1)
        assert forking.wait() == 0, forking.tail()
        assert chief.wait() == 0 and ps.wait() == 0, ps.tail()
    lines, said = "\n".join(forking.lines), "\n".join(ps.lines)
    for how, code in (("raise", 1), ("exit", 0), ("exit 3", 3), ("kill", -signal.SIGTERM), ("pull", 1)):
        assert f"{how}: {code}" in lines, lines
    assert "is a fork of /job:worker/task:1" in lines and "spawned" in lines
    assert f"terminated: {-signal.SIGTERM}" in lines, lines
    assert forking.lines[-1] == "done at 40"
    assert "counts as dead" not in said and "came back" not in said and "failed" not in said, said
