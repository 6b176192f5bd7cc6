"""Deaths of ps, chief and worker with kill -9, and what comes back: as the table 'Ours' of the semantics says."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.process.tasks import FORKING, PROGRAM, TORCHQUORUM, Started, by_hand, last_step
from torchquorum.formats.checkpoint import list_checkpoints


def ends_well(*tasks: Started) -> None:
    for task in tasks:
        assert task.wait() == 0, task.tail()


@pytest.mark.parametrize(("rule", "transport"), [("sync", "auto"), ("async", "tcp")])
def test_a_ps_killed_and_restarted_goes_on_from_the_checkpoint(rule: str, transport: str, tmp_path: Path) -> None:
    logdir, enough = tmp_path / "run", tmp_path / "enough"
    with by_hand() as cluster:
        options = (f"--logdir={logdir}", f"--rule={rule}", f"--transport={transport}", "--silence=2")
        options += ("--steps=1000000", f"--until={enough}", "--save-steps=20", "--pause=0.01")
        ps = cluster.start("ps", 0)
        chief, other = (cluster.start("worker", i, *options) for i in (0, 1))
        ps.until("saved")
        chief.until("local 50 ")
        ps.kill()
        ps.wait()
        again = cluster.start("ps", 0)
        line = chief.until("going on at global step")
        found = re.search(r"going on at global step (\d+)(?:, (\d+) steps before where it was)?$", line)
        was = [int(version) for version in re.findall(r" global (\d+) ", "\n".join(chief.lines))][-1]
        assert found is not None
        at, back = int(found[1]), int(found[2] or 0)
        assert at + back == max(at, was)  # nothing is lost if the ps had just saved
        enough.touch()
        ends_well(again, chief, other)
        assert list_checkpoints(logdir)[-1].step == last_step(chief, other)


def test_a_second_ps_killed_and_restarted_takes_all_shards_back_together(tmp_path: Path) -> None:
    logdir, enough = tmp_path / "run", tmp_path / "enough"
    with by_hand(ps=2, workers=2) as cluster:
        options = (f"--logdir={logdir}", "--rule=async", "--steps=1000000", f"--until={enough}")
        options += ("--save-steps=20", "--pause=0.01")
        first, second = cluster.start("ps", 0), cluster.start("ps", 1)
        chief, other = (cluster.start("worker", i, *options) for i in (0, 1))
        first.until("saved")
        chief.until("local 30 ")
        second.kill()
        second.wait()
        again = cluster.start("ps", 1)
        chief.until("going on at global step")
        enough.touch()
        ends_well(first, again, chief, other)
        assert list_checkpoints(logdir)[-1].step == last_step(chief, other)


@pytest.mark.parametrize(("saves", "advice"), [(False, "Give the session a logdir"), (True, "Save sooner")])
def test_a_ps_restarted_without_a_checkpoint_is_an_error_that_says_so(saves: bool, advice: str, tmp_path: Path) -> None:
    options = ["--steps=100000", "--pause=0.01", *([f"--logdir={tmp_path}", "--save-steps=100000"] if saves else [])]
    with by_hand(workers=1) as cluster:
        ps, chief = cluster.start("ps", 0), cluster.start("worker", 0, *options)
        chief.until("local 5 ")
        ps.kill()
        ps.wait()
        cluster.start("ps", 0)
        assert chief.wait() == 1
        shown = chief.tail()
        assert "its variables are lost: there is no checkpoint" in shown and "start_afresh=True" in shown
        assert advice in shown
        assert "Traceback" not in shown


def test_a_ps_restarted_without_a_checkpoint_starts_afresh_if_asked_to(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    with by_hand(workers=1) as cluster:
        options = ("--steps=1000000", f"--until={enough}", "--pause=0.01", "--afresh")
        ps, chief = cluster.start("ps", 0), cluster.start("worker", 0, *options)
        chief.until("local 5 ")
        ps.kill()
        ps.wait()
        again = cluster.start("ps", 0)
        chief.until("going on at global step 0")
        chief.until("global 5 ")
        enough.touch()
        ends_well(again, chief)
        assert last_step(chief) >= 5


def test_a_restarted_chief_goes_on_with_the_live_variables(tmp_path: Path) -> None:
    with by_hand() as cluster:
        options = (f"--logdir={tmp_path}", "--steps=1000000", "--pause=0.02", "--save-steps=1000")
        ps = cluster.start("ps", 0)
        chief, other = (cluster.start("worker", i, *options) for i in (0, 1))
        chief.until("local ")
        other.until("local 10 ")
        chief.kill()
        chief.wait()
        ps.until("/job:worker/task:0 counts as dead")
        again = cluster.start("worker", 0, *options)
        again.until("hold live variables already; going on with them")
        assert int(again.until("started at").split()[2]) >= 5
        again.until("local 3 ")
        again.process.send_signal(signal.SIGINT)  # the chief ends the run for everybody
        ends_well(ps, other)
        assert again.wait() == 130, again.tail()


def test_a_dead_chief_that_stays_dead_costs_neither_the_last_checkpoint_nor_the_summaries(tmp_path: Path) -> None:
    logdir, noticed = tmp_path / "run", tmp_path / "noticed"
    with by_hand() as cluster:
        options = (f"--logdir={logdir}", "--steps=1000", f"--hurry={noticed}", "--pause=0.05", "--summaries")
        ps = cluster.start("ps", 0)
        chief, other = (cluster.start("worker", i, *options) for i in (0, 1))
        chief.until("local ")
        other.until("local 3 ")
        chief.kill()
        ps.until("(ps task 0 saves in its place)")
        other.until("/job:worker/task:1: the chief is dead; writing the summaries in its place")
        noticed.touch()
        ends_well(ps, other)
        assert list_checkpoints(logdir)[-1].step == 1000
    events = EventAccumulator(str(logdir), size_guidance={"scalars": 0})
    events.Reload()
    assert events.Scalars("learning_rate")[-1].step == 1000


def task_pid(launcher: int, job: str, index: int) -> int:
    """The process of a task, found by the environment that its launcher gave it."""
    text = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    for pid in map(int, text.split()):
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
        if f'"job":"{job}"' in environment.replace(" ", "") and f'"index":{index}' in environment.replace(" ", ""):
            return pid
    raise AssertionError(f"no {job} {index} among {text}")


def test_the_launcher_restarts_what_is_killed_and_the_run_ends_well(tmp_path: Path) -> None:
    logdir, enough = tmp_path / "run", tmp_path / "enough"
    options = ["--steps=1000000", f"--until={enough}", "--save-steps=20", "--pause=0.02", f"--logdir={logdir}"]
    started = Started([*TORCHQUORUM, "run", str(PROGRAM), *options])
    try:
        started.until("[ps 0] /job:ps/task:0: saved")
        for job, index in (("worker", 1), ("ps", 0), ("worker", 0)):
            os.kill(task_pid(started.process.pid, job, index), signal.SIGKILL)
            started.until(f"torchquorum: /job:{job}/task:{index} was ended by SIGKILL; restarting it (1 of 3)")
            started.until(f"[{job} {index}]" if job == "ps" else f"[worker {index}] started at")
            started.until("[worker 1] local")
        enough.touch()
        assert started.wait() == 0, started.tail()
        assert sum("] done at" in line for line in started.lines) == 2, started.tail()
        assert list_checkpoints(logdir)[-1].step == last_step(started)
    finally:
        started.end()


def test_ctrl_c_saves_and_ends_every_task_within_seconds(tmp_path: Path) -> None:
    command = [*FORKING, "run", str(PROGRAM), "--steps=100000", "--pause=0.01", f"--logdir={tmp_path}"]
    started = Started(command, forked=True)
    try:
        started.until("[worker 0] local 20 ")
        started.until("[worker 1] local ")
        started.process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        assert started.wait() == 130, started.tail()
        assert time.monotonic() - begun < 10
        [info] = list_checkpoints(tmp_path)
        assert info.step >= 10
    finally:
        started.end()
    with by_hand(workers=1) as cluster:
        ps, chief = (
            cluster.start("ps", 0),
            cluster.start("worker", 0, f"--steps={info.step + 5}", f"--logdir={tmp_path}"),
        )
        chief.until(f"started at {info.step} ")
        ends_well(ps, chief)


def test_ctrl_c_on_a_chief_started_by_hand_ends_the_whole_job(tmp_path: Path) -> None:
    with by_hand() as cluster:
        options = (f"--logdir={tmp_path}", "--steps=100000", "--pause=0.01")
        ps = cluster.start("ps", 0)
        chief, other = (cluster.start("worker", i, *options) for i in (0, 1))
        chief.until("local ")
        other.until("local 10 ")
        chief.process.send_signal(signal.SIGTERM)
        ends_well(other, ps)
        assert chief.wait() == 130, chief.tail()
        assert "which is saved; the next start goes on from there" in chief.lines[-1]
        assert list_checkpoints(tmp_path)[-1].problem is None
