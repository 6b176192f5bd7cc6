"""Sync runs that are stopped somewhere, by real signals, and started again: the same bits at the end."""

import re
import signal
from pathlib import Path

import pytest

from tests.process.tasks import FORKING, Started, by_hand

PROGRAM = Path(__file__).parent / "learns.py"


def launch(folder: Path, *arguments: str, ps: int = 1) -> Started:
    command = [*FORKING, "run", f"--ps={ps}", "--workers=2", str(PROGRAM), f"--logdir={folder}", *arguments]
    return Started(command, forked=True)


def digests(run: Started) -> set[str]:
    assert run.wait() == 0, run.tail()
    found = set(re.findall(r"digest (\w+)", "\n".join(run.lines)))
    assert found, run.tail()
    return found


@pytest.mark.parametrize(("how", "ps", "ps_again"), [(signal.SIGKILL, 1, 2), (signal.SIGINT, 2, 1)])
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    how: signal.Signals, ps: int, ps_again: int, tmp_path: Path
) -> None:
    tasks: list[Started] = []
    try:
        tasks.append(launch(tmp_path / "whole"))
        whole = digests(tasks[-1])
        tasks.append(launch(tmp_path / "cut", "--hold-at=24", f"--hold-until={tmp_path / 'never'}", ps=ps))
        tasks[-1].until("global 24 ")  # where it holds; the checkpoint may come before or after
        if not any(": saved" in line for line in tasks[-1].lines):
            tasks[-1].until("[ps 0] /job:ps/task:0: saved")
        tasks[-1].process.send_signal(how)
        tasks[-1].wait()
        tasks.append(launch(tmp_path / "cut", ps=ps_again))
        resumed = digests(tasks[-1])
        began = {int(n) for n in re.findall(r"started at (\d+)", "\n".join(tasks[-1].lines))}
        assert len(began) == 1 and 7 <= min(began) < 60
    finally:
        for task in tasks:
            task.end()
    assert resumed == whole and len(whole) == 1


def test_a_ps_that_dies_while_workers_only_pull_is_found_again(tmp_path: Path) -> None:
    with by_hand(workers=1, program=PROGRAM) as cluster:
        ps = cluster.start("ps", 0)
        chief = cluster.start("worker", 0, f"--logdir={tmp_path}", "--pull-for-ever-at=20")
        ps.until("saved")
        chief.until("pulling")
        ps.kill()
        ps.wait()
        again = cluster.start("ps", 0)
        assert 7 <= int(chief.until("rolled back to").split()[-1]) <= 20
        again.until("saved")
        assert chief.wait() == 0, chief.tail()
        assert again.wait() == 0, again.tail()


def test_a_ps_that_dies_between_the_last_step_and_the_last_checkpoint_is_an_error_and_the_next_start_goes_on(
    tmp_path: Path,
) -> None:
    with by_hand(workers=1, program=PROGRAM) as cluster:
        ps = cluster.start("ps", 0)
        chief = cluster.start("worker", 0, f"--logdir={tmp_path}", "--steps=12", "--wait-at-end")
        ps.until("model.ckpt-7")
        chief.until("ending")
        ps.kill()
        ps.wait()
        again = cluster.start("ps", 0)
        (tmp_path / "go-on").touch()
        assert chief.wait() == 1, chief.tail()
        assert "the run is back at global step 7 of 12. Start the program again" in chief.tail()
        assert "Traceback" not in chief.tail()
        assert again.wait() == 1, again.tail()
        ps, chief = cluster.start("ps", 0), cluster.start("worker", 0, f"--logdir={tmp_path}", "--steps=12")
        assert chief.until("started at") == "started at 7"
        assert chief.wait() == 0 and ps.wait() == 0, chief.tail()
