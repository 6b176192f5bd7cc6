"""Workers that die or freeze at the worst moments of a step on the fast path: the others go on, and every update counts once."""

import re
import signal
from pathlib import Path

import pytest

from tests.process.tasks import Started, by_hand
from torchquorum.memory.lock import supported

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")
PROGRAM = Path(__file__).parent / "on_fastpath.py"
STEPS = 3000


def made_on_fastpath(worker: Started) -> int:
    assert worker.wait() == 0, worker.tail()
    found = re.findall(r"done at (\d+), (\d+) on the fast path", "\n".join(worker.lines))
    assert found and int(found[0][0]) == STEPS, worker.tail()
    return int(found[0][1])


@pytest.mark.parametrize(
    ("rule", "moment"), [("async", "turn"), ("async", "lock"), ("sync", "lock"), ("sync", "given"), ("sync", "part")]
)
def test_a_worker_killed_in_the_middle_of_a_step_on_the_board_harms_nobody(rule: str, moment: str) -> None:
    with by_hand(program=PROGRAM) as cluster:
        ps = cluster.start("ps", 0)
        chief = cluster.start("worker", 0, f"--rule={rule}", f"--steps={STEPS}")
        victim = cluster.start("worker", 1, f"--rule={rule}", f"--steps={STEPS}", f"--moment={moment}")
        victim.until(f"SIGKILL in {moment}")
        assert victim.wait() == -signal.SIGKILL
        assert made_on_fastpath(chief) > 0
        assert ps.wait() == 0
    assert "counts as dead (its process ended)" in "\n".join(ps.lines)


@pytest.mark.parametrize(
    "optimizer", ["momentum", "adam", *(pytest.param(name, marks=pytest.mark.long) for name in ("adagrad", "rmsprop"))]
)
@pytest.mark.parametrize(("rule", "moment"), [("async", "turn"), ("sync", "part")])
def test_a_worker_killed_while_it_writes_an_optimizers_state_leaves_what_was(
    rule: str, moment: str, optimizer: str
) -> None:
    with by_hand(program=PROGRAM) as cluster:
        ps = cluster.start("ps", 0)
        flags = [f"--rule={rule}", f"--steps={STEPS}", f"--optimizer={optimizer}"]
        chief = cluster.start("worker", 0, *flags)
        victim = cluster.start("worker", 1, *flags, f"--moment={moment}")
        victim.until(f"SIGKILL in {moment}")
        assert victim.wait() == -signal.SIGKILL
        assert made_on_fastpath(chief) > 0
        assert ps.wait() == 0


@pytest.mark.parametrize(("rule", "moment"), [("async", "turn"), ("async", "lock"), ("sync", "part")])
def test_a_worker_frozen_in_the_middle_of_a_step_on_the_board_is_not_waited_for_and_comes_back(
    rule: str, moment: str
) -> None:
    with by_hand(program=PROGRAM) as cluster:
        ps = cluster.start("ps", 0)
        steps = ["--steps=1000000000", f"--rule={rule}"]
        chief = cluster.start("worker", 0, *steps)
        victim = cluster.start("worker", 1, *steps, f"--moment={moment}", "--signal=SIGSTOP")
        victim.until(f"SIGSTOP in {moment}")
        ps.until("/job:worker/task:1 counts as dead")
        victim.process.send_signal(signal.SIGCONT)
        victim.until("refused expired")
        chief.until("started")
        chief.process.send_signal(signal.SIGINT)
        for task, code in ((chief, 130), (victim, 0), (ps, 0)):
            assert task.wait() == code, task.tail()


def test_a_worker_killed_before_others_have_opened_its_memory_harms_nobody() -> None:
    with by_hand(program=PROGRAM) as cluster:
        ps = cluster.start("ps", 0)
        flags = ["--rule=sync", f"--steps={STEPS}", "--at=0", "--signal=SIGSTOP"]
        chief = cluster.start("worker", 0, *flags, "--moment=round")
        victim = cluster.start("worker", 1, *flags, "--moment=given")
        chief.until("SIGSTOP in round")
        victim.until("SIGSTOP in given")
        ps.process.send_signal(signal.SIGSTOP)  # so that it does not close the fast path
        victim.kill()
        victim.wait()
        chief.process.send_signal(signal.SIGCONT)
        chief.until("beside the fast path")
        ps.process.send_signal(signal.SIGCONT)
        made_on_fastpath(chief)
        assert ps.wait() == 0
    assert "counts as dead (its process ended)" in "\n".join(ps.lines)
