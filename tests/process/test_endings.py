"""How runs end when a program raises or an update fails, with real processes: exit codes, checkpoints, what is said."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.process.tasks import FORKING, Started, by_hand
from torchquorum.formats.checkpoint import list_checkpoints

PROGRAM = Path(__file__).parent / "ending_program.py"


@pytest.mark.parametrize(("raises", "error"), [(0, "ValueError"), (1, "KeyboardInterrupt")])
def test_under_a_launcher_the_others_finish_and_save_and_the_run_fails(raises: int, error: str, tmp_path: Path) -> None:
    flags = [f"--logdir={tmp_path}", f"--raises={raises}", f"--error={error}"]
    run = Started([*FORKING, "run", str(PROGRAM), *flags], forked=True)
    try:
        assert run.wait() == 1, run.tail()
        text = "\n".join(run.lines)
        assert f"[worker {1 - raises}] finished at 60" in text
        assert f"/job:worker/task:{raises} counts as dead (its program failed: {error}: boom)" in text
        assert "restarting it" not in text
        assert list_checkpoints(tmp_path)[-1].step == 60
    finally:
        run.end()


def test_a_chief_that_raises_by_hand_is_saved_for_and_each_task_has_its_code(tmp_path: Path) -> None:
    with by_hand(program=PROGRAM) as cluster:
        flags = [f"--logdir={tmp_path}", "--raises=0"]
        ps, chief, other = (cluster.start(job, i, *flags) for job, i in (("ps", 0), ("worker", 0), ("worker", 1)))
        assert (chief.wait(), other.wait(), ps.wait()) == (1, 0, 1), ps.tail()
        assert list_checkpoints(tmp_path)[-1].step == 60


def test_a_failing_update_ends_every_task_with_it(tmp_path: Path) -> None:
    with by_hand(program=PROGRAM) as cluster:
        flags = [f"--logdir={tmp_path}", "--schedule-ends=30"]
        tasks = [cluster.start(job, i, *flags) for job, i in (("ps", 0), ("worker", 0), ("worker", 1))]
        assert [task.wait() for task in tasks] == [1, 1, 1], tasks[0].tail()
        for task in tasks:
            text = "\n".join(task.lines)
            assert "the update to version 31 failed (ValueError: " in text and "would fail again at step 31" in text
            assert "The last good checkpoint is " in text


def test_alone_a_failing_update_ends_the_program_with_it(tmp_path: Path) -> None:
    task = Started([sys.executable, str(PROGRAM), f"--logdir={tmp_path}", "--schedule-ends=30"])
    try:
        assert task.wait() == 1, task.tail()
        assert "the update to version 31 failed (ValueError: " in task.lines[-1], task.tail()
    finally:
        task.end()


WAITING = PROGRAM.with_name("waiting_program.py")


@pytest.mark.parametrize(
    ("where", "name"),
    [("sleep", signal.SIGTERM), pytest.param("loop", signal.SIGINT, marks=pytest.mark.long)],
)
def test_a_signal_ends_a_program_that_does_not_come_to_look_and_the_run_is_saved(
    where: str, name: signal.Signals, tmp_path: Path
) -> None:
    task = Started([sys.executable, str(WAITING), f"--logdir={tmp_path}", f"--where={where}"], forked=True)
    try:
        task.until("goes on")
        os.kill(task.process.pid, name)
        assert task.wait() == 130, task.tail()
        assert f"{name.name}: the run was stopped at global step" in task.lines[-1] and "is saved" in task.lines[-1]
        assert list_checkpoints(tmp_path)[-1].step >= 4
    finally:
        task.end()


@pytest.mark.long
def test_a_ps_task_that_is_told_to_end_does_not_wait_for_a_worker_that_does_not_leave(tmp_path: Path) -> None:
    with by_hand(program=WAITING) as cluster:
        flags = [f"--logdir={tmp_path}", "--where=sleep"]
        ps, chief = cluster.start("ps", 0, *flags), cluster.start("worker", 0, *flags)
        chief.until("goes on")
        os.kill(ps.process.pid, signal.SIGTERM)
        assert ps.wait() == 130, ps.tail()
        assert list_checkpoints(tmp_path)[-1].step == 2  # a lone worker of two fills a round with two gradients


def test_a_loop_that_goes_on_after_the_end_of_the_run_is_told_so_once() -> None:
    task = Started([sys.executable, str(WAITING), "--where=loop", "--last-step=3"], forked=True)
    try:
        task.until("its steps change nothing. Leave the loop when")
        task.until("goes on")
        assert sum("its steps change nothing" in line for line in task.lines) == 1
    finally:
        task.end()
