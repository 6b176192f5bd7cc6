"""Two sessions of one program, one after the other: the ps tasks stay for the second, and end when the programs have ended."""

import signal
import time
from pathlib import Path

import pytest

from tests.process.tasks import by_hand

PROGRAM = Path(__file__).parent / "two_sessions.py"


@pytest.mark.parametrize(("ps", "pause_s"), [(1, "1.5"), (2, "0")])
def test_another_session_works_in_a_cluster_and_all_end_by_themselves(ps: int, pause_s: str) -> None:
    with by_hand(ps=ps, workers=2, program=PROGRAM) as cluster:
        servers = [cluster.start("ps", i) for i in range(ps)]
        workers = [cluster.start("worker", i, pause_s, "2") for i in range(2)]
        for task in (*workers, *servers):
            assert task.wait() == 0, task.tail()
        for worker in workers:
            assert [line for line in worker.lines if line.startswith("session ")] == [
                "session 0 ended at 5",
                "session 1 ended at 6",
            ]


def test_a_ps_that_stays_ends_when_the_last_program_is_killed_or_at_a_signal() -> None:
    with by_hand(ps=1, workers=2, program=PROGRAM) as cluster:
        server = cluster.start("ps", 0)
        chief, other = (cluster.start("worker", i, "100", "1") for i in range(2))
        for worker in (chief, other):
            worker.until("session 0 ended")
        chief.process.send_signal(signal.SIGKILL)
        time.sleep(1.0)
        assert server.process.poll() is None, "a program goes on that may begin another session"
        other.process.send_signal(signal.SIGKILL)
        assert server.wait() == 0, server.tail()
