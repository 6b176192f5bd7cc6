"""In-graph training as it is started by hand: a ps, compute tasks that only join, and a client; with real deaths."""

import json
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.process.tasks import ByHand, Started, by_hand

ROOT = Path(__file__).parents[2]
CLIENT = Path(__file__).parent / "graph_client.py"
SLOW_S = 150.0  # a machine that is busy with other tests
JOIN = [sys.executable, "-m", "torchquorum.cli.main", "join"]


def join(cluster: ByHand, job: str, index: int) -> Started:
    """Starts a task that has no program of its own."""
    flags = cluster.command(job, index)[2:]
    task = Started([*JOIN, *flags], forked=True)
    cluster.started.append(task)
    return task


def client(cluster: ByHand, *arguments: str, program: Path = CLIENT) -> Started:
    hosts = [f"--ps_hosts={cluster.ps_hosts}", f"--worker_hosts={cluster.worker_hosts}"]
    task = Started([sys.executable, str(program), *hosts, *arguments], forked=True)
    cluster.started.append(task)
    return task


def ends_well(*tasks: Started) -> None:
    for task in tasks:
        assert task.wait(SLOW_S) == 0, task.tail()


def counts(run: Started) -> tuple[int, int, int]:
    """Returns how many results a client got, how many were accepted, and the last global step."""
    found = re.fullmatch(r"done: (\d+) results, each once: True, (\d+) accepted, global step (\d+)", run.lines[-1])
    assert found is not None, run.tail()
    return int(found[1]), int(found[2]), int(found[3])


def accepted_in_ledger(logdir: Path) -> int:
    return sum(json.loads(line).get("accepted", False) for line in (logdir / "ledger.jsonl").read_text().splitlines())


@pytest.mark.timeout(400)
def test_the_example_trains_on_tasks_that_only_joined_and_everything_ends() -> None:
    with by_hand() as cluster:
        tasks = [join(cluster, "ps", 0), join(cluster, "worker", 0), join(cluster, "worker", 1)]
        example = client(cluster, "--steps=120", program=ROOT / "examples" / "in_graph" / "train.py")
        ends_well(example, *tasks)
        accuracy = float(example.lines[-1].rpartition(" ")[2])
        assert accuracy > 0.7, example.tail()
        assert all("computing Sequential" in "\n".join(task.lines) for task in tasks[1:])


@pytest.mark.timeout(400)
def test_a_killed_task_loses_no_batch_and_one_that_comes_late_gets_work(tmp_path: Path) -> None:
    logdir, enough = tmp_path / "run", tmp_path / "enough"
    with by_hand() as cluster:
        ps, victim = join(cluster, "ps", 0), join(cluster, "worker", 1)
        run = client(cluster, "--width=400", f"--logdir={logdir}", f"--until={enough}")
        run.until("batch 5 ", SLOW_S)
        late = join(cluster, "worker", 0)
        run.until("on /job:worker/task:0/", SLOW_S)
        victim.kill()
        named = f"/job:worker/task:1 ({cluster.worker_hosts.split(',')[1]})"
        run.until(f"{named} is lost: its process has ended", SLOW_S)
        back = join(cluster, "worker", 1)
        run.until(f"{named} is ready", SLOW_S)  # until then a result may be of the victim's, which ps task 0 knew
        run.until("on /job:worker/task:1/", SLOW_S)
        enough.touch()
        ends_well(run, late, back, ps)
        results, accepted, step = counts(run)
        assert results == accepted == step == accepted_in_ledger(logdir)  # none lost, none applied twice
        assert (logdir / f"model.ckpt-{step}").is_dir()


@pytest.mark.timeout(400)
def test_a_frozen_task_is_given_up_and_what_it_does_afterwards_changes_nothing(tmp_path: Path) -> None:
    logdir, enough = tmp_path / "run", tmp_path / "enough"
    with by_hand() as cluster:
        ps, steady, frozen = (join(cluster, *task) for task in (("ps", 0), ("worker", 0), ("worker", 1)))
        options = ("--wait=2", "--rule=sync", f"--logdir={logdir}", f"--until={enough}")
        run = client(cluster, *options)
        run.until("batch 5 ", SLOW_S)
        frozen.process.send_signal(signal.SIGSTOP)
        try:
            run.until("is lost: not heard of for", SLOW_S)
            run.until("on /job:worker/task:0/", SLOW_S)
        finally:
            frozen.process.send_signal(signal.SIGCONT)
        run.until("on /job:worker/task:1/", SLOW_S)  # it is welcome again
        enough.touch()
        ends_well(run, steady, frozen, ps)
        _, accepted, step = counts(run)
        # Two make an update; one may wait in a round that never fills.
        assert 2 * step <= accepted <= accepted_in_ledger(logdir) <= 2 * step + 1


@pytest.mark.timeout(400)
def test_a_ps_that_comes_back_is_restored_and_the_client_goes_on(tmp_path: Path) -> None:
    logdir, enough = tmp_path / "run", tmp_path / "enough"
    with by_hand() as cluster:
        ps, *tasks = (join(cluster, *task) for task in (("ps", 0), ("worker", 0), ("worker", 1)))
        run = client(cluster, "--wait=2", "--save-steps=5", f"--logdir={logdir}", f"--until={enough}")
        ps.until("saved ", SLOW_S)
        ps.kill()
        back = join(cluster, "ps", 0)
        back.until("/job:worker/task:0 joined", SLOW_S)
        run.until("batch ", SLOW_S)
        back.until("saved ", SLOW_S)
        enough.touch()
        ends_well(run, *tasks, back)
        results, accepted, step = counts(run)
        assert results - 2 <= accepted and step <= accepted  # what was in flight, and since the checkpoint, is lost


@pytest.mark.timeout(400)
def test_join_says_what_is_wrong_with_its_flags_or_its_port() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        flags = ["--job_name=worker", "--task_id=0", "--ps_hosts=localhost:1", f"--worker_hosts=localhost:{port}"]
        for arguments, says in [
            (["--job_nam=worker"], "did you mean --job_name?"),
            ([], "no task is named"),
            ([*flags, "--steps=3"], "takes only the flags that name the task"),
            ([*flags, "--device=cuda:7"], "was put on /job:worker/task:0/device:CUDA:7, but there is no such device"),
            (flags, "the port is in use"),
        ]:
            task = Started([*JOIN, *arguments], forked=bool(arguments))
            try:
                assert task.wait(SLOW_S) == 2 and says in task.tail(), task.tail()
            finally:
                task.end()
