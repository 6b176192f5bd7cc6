"""Tasks started by hand, one process each: in any order, late, killed, wrong."""

import json
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.process.tasks import ByHand, Started, by_hand
from torchquorum.formats.ledger import read_ledger


def ends_well(*tasks: Started) -> None:
    for task in tasks:
        assert task.wait() == 0, task.tail()


@pytest.mark.parametrize(
    ("order", "transport", "over"),
    [
        ([("ps", 0), ("worker", 0), ("worker", 1)], "auto", "shm"),
        ([("worker", 1), ("worker", 0), ("ps", 0)], "tcp", "tcp"),
        ([("worker", 0), ("ps", 0), ("worker", 1)], "shm", "shm"),
    ],
)
def test_tasks_come_in_any_order_and_all_end_by_themselves(order: list, transport: str, over: str) -> None:
    with by_hand() as cluster:
        tasks = {}
        for job, index in order:
            task = tasks[job, index] = cluster.start(job, index, "--steps=40", f"--transport={transport}")
            # What it says once it is at its place; a worker that found a ps has nobody to wait for it but the others.
            if job == "ps":
                task.until("serving on")
            elif ("ps", 0) not in tasks:
                task.until("waiting for")
        ends_well(*tasks.values())
        for index in (0, 1):
            assert f"over {over}" in "\n".join(tasks["worker", index].lines)
            assert "done at 40" in tasks["worker", index].lines[-1]
            assert tasks["worker", index].lines[-1].endswith(": 40")


def test_two_ps_tasks_and_three_workers_agree_on_every_version() -> None:
    with by_hand(ps=2, workers=3) as cluster:
        tasks = [cluster.start("ps", i) for i in (0, 1)]
        tasks += [cluster.start("worker", i, "--steps=60", "--rule=async") for i in range(3)]
        ends_well(*tasks)
        assert all(task.lines[-1].endswith(": 60") for task in tasks[2:])


def test_a_worker_that_comes_late_joins_the_running_job() -> None:
    with by_hand() as cluster:
        ps, chief = cluster.start("ps", 0), cluster.start("worker", 0, "--steps=1000000", "--pause=0.02")
        chief.until("local 20 global 10 ")  # alone it gives both gradients of an update
        late = cluster.start("worker", 1, "--steps=1000000", "--pause=0.02")
        assert int(late.until("started at").split()[2]) > 0
        late.until("local 5 ")
        chief.process.send_signal(signal.SIGINT)  # the chief ends the run for everybody
        ends_well(ps, late)
        assert chief.wait() == 130, chief.tail()


def test_a_worker_waits_visibly_for_the_chief() -> None:
    with by_hand() as cluster:
        ps, early = cluster.start("ps", 0), cluster.start("worker", 1, "--steps=10")
        line = early.until("waiting for the chief to create the variables")
        assert "/job:worker/task:0 (localhost:" in line
        chief = cluster.start("worker", 0, "--steps=10")
        ends_well(ps, chief, early)


def test_tf_config_says_who_a_task_is() -> None:
    ports = free_ports(3)
    cluster = {"ps": [f"localhost:{ports[0]}"], "worker": [f"localhost:{p}" for p in ports[1:]]}
    tasks = []
    try:
        for job, index in (("ps", 0), ("worker", 0), ("worker", 1)):
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            tasks.append(
                Started([sys.executable, str(ByHand().program), "--steps=20"], {"TF_CONFIG": config}, forked=True)
            )
        ends_well(*tasks)
        assert all(task.lines[-1].endswith(": 20") for task in tasks[1:])
    finally:
        for task in tasks:
            task.end()


def test_a_program_without_a_cluster_trains_alone() -> None:
    task = Started([sys.executable, str(ByHand().program), "--steps=20"])
    try:
        assert task.wait() == 0, task.tail()
        assert "training alone" in task.lines[0]
        assert task.lines[-1] == "done at 20 after 20 local steps: 20"
    finally:
        task.end()


@pytest.mark.parametrize("rule", ["sync", "async", "bounded:2"])
def test_a_killed_worker_is_noticed_and_the_others_go_on(rule: str, tmp_path: Path) -> None:
    noticed = tmp_path / "noticed"
    with by_hand() as cluster:
        options = ("--steps=150", f"--hold={noticed}", f"--rule={rule}", "--pause=0.01")
        ps = cluster.start("ps", 0)
        chief, victim = cluster.start("worker", 0, *options), cluster.start("worker", 1, *options)
        victim.until("local 5 ")
        victim.kill()
        ps.until("/job:worker/task:1 counts as dead (its process ended)")
        noticed.touch()
        ends_well(ps, chief)
        assert chief.lines[-1].endswith(": 150")


def test_a_killed_chief_is_survived(tmp_path: Path) -> None:
    noticed = tmp_path / "noticed"
    with by_hand(workers=3) as cluster:
        options = ("--steps=200", f"--hold={noticed}", "--pause=0.01")
        ps = cluster.start("ps", 0)
        chief, *others = (cluster.start("worker", i, *options) for i in range(3))
        for task in (chief, *others):
            task.until("local 5 ")
        chief.kill()
        ps.until("/job:worker/task:0 counts as dead (its process ended)")
        noticed.touch()
        ends_well(ps, *others)
        assert all(task.lines[-1].endswith(": 200") for task in others)


def test_a_frozen_worker_counts_as_dead_and_is_welcomed_back(tmp_path: Path) -> None:
    noticed = tmp_path / "noticed"
    with by_hand() as cluster:
        options = ("--steps=700", f"--hold={noticed}", "--pause=0.01", "--liveness=1")
        ps = cluster.start("ps", 0)
        chief, frozen = cluster.start("worker", 0, *options), cluster.start("worker", 1, *options)
        frozen.until("local 5 ")
        frozen.process.send_signal(signal.SIGSTOP)
        ps.until("/job:worker/task:1 counts as dead (not heard of for")
        chief.until("accepted True")
        frozen.process.send_signal(signal.SIGCONT)
        noticed.touch()
        ends_well(ps, chief, frozen)
        assert frozen.lines[-1].endswith(": 700")


def test_a_killed_second_ps_is_named_and_the_others_end() -> None:
    with by_hand(ps=2, workers=1) as cluster:
        options = ("--steps=100000", "--pause=0.01", "--silence=2", "--start=6")
        first, second = cluster.start("ps", 0), cluster.start("ps", 1)
        chief = cluster.start("worker", 0, *options)
        chief.until("local 5 ")
        second.kill()
        assert chief.wait() == 1
        named = [line for line in chief.lines if "/job:ps/task:1 (localhost:" in line]
        assert any("has closed the connection" in line or "has not answered" in line for line in named), chief.tail()
        assert first.wait() == 1


def test_a_killed_worker_comes_back_as_a_new_incarnation() -> None:
    with by_hand() as cluster:
        options = ("--steps=1000000", "--pause=0.01")
        ps = cluster.start("ps", 0)
        chief, victim = cluster.start("worker", 0, *options), cluster.start("worker", 1, *options)
        victim.until("local 5 ")
        victim.kill()
        back = cluster.start("worker", 1, *options)
        ps.until("/job:worker/task:1 came back")
        assert int(back.until("started at").split()[2]) > 0
        back.until("local 5 ")
        chief.until("local ")
        chief.process.send_signal(signal.SIGINT)  # the chief ends the run for everybody
        ends_well(ps, back)
        assert chief.wait() == 130, chief.tail()
        stopped = back.lines[-1].split(" after ")[0].removeprefix("done at ")
        assert f"stopped at global step {stopped}" in chief.lines[-1], (back.lines[-1], chief.lines[-1])


def test_a_killed_worker_over_tcp_is_noticed_within_the_liveness_timeout() -> None:
    with by_hand() as cluster:
        options = ("--steps=100000", "--pause=0.01", "--transport=tcp", "--liveness=1.5")
        ps = cluster.start("ps", 0)
        chief, victim = cluster.start("worker", 0, *options), cluster.start("worker", 1, *options)
        victim.until("local 5 ")
        victim.kill()
        assert ps.until("/job:worker/task:1 counts as dead")
        assert chief.until("accepted True")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_dead_ps_is_named_at_once_and_given_up_within_the_deadline(transport: str) -> None:
    with by_hand() as cluster:
        options = ("--steps=100000", "--pause=0.01", "--silence=2", "--start=6", f"--transport={transport}")
        ps, chief = cluster.start("ps", 0), cluster.start("worker", 0, *options)
        chief.until("local 5 ")
        ps.kill()
        line = chief.until("/job:ps/task:0 (localhost:")
        # Over TCP the socket that carries the tensors may close before the silence is long enough to be noticed.
        assert "has closed the connection" in line or (transport == "tcp" and "has not answered for 2 s" in line)
        assert chief.wait() == 1
        assert "waiting for /job:ps/task:0 (localhost:" in chief.tail()
        assert any("and gave up. Check that the task runs" in line for line in chief.lines), chief.tail()
        assert not any("Traceback" in line for line in chief.lines)


def test_a_failing_program_ends_its_worker_and_the_job_says_so() -> None:
    with by_hand(workers=1) as cluster:
        ps, chief = cluster.start("ps", 0), cluster.start("worker", 0, "--steps=1000", "--fail-at=5")
        assert chief.wait() == 1
        assert "told to fail" in chief.tail()
        assert ps.wait() == 1
        assert any("/job:worker/task:0 failed and did not come back" in line for line in ps.lines)


def test_a_worker_with_another_model_is_refused_with_the_difference() -> None:
    with by_hand() as cluster:
        ps = cluster.start("ps", 0)
        chief = cluster.start("worker", 0, "--steps=1000000", "--pause=0.02")
        other = cluster.start("worker", 1, "--steps=1000000", "--size=7")
        assert other.wait() == 1
        shown = "\n".join(other.lines)
        assert (
            "- the ps tasks hold count [1000] float32" in shown
            and "+ /job:worker/task:1 has count [7] float32" in shown
        )
        chief.until("started at")  # from then on it ends well by a signal
        chief.process.send_signal(signal.SIGINT)
        assert chief.wait() == 130 and ps.wait() == 0


def test_a_port_in_use_is_named_with_its_holder() -> None:
    with by_hand() as cluster, socket.socket() as holder:
        holder.bind(("127.0.0.1", int(cluster.ps_hosts.split(":")[1])))
        holder.listen()
        ps = cluster.start("ps", 0)
        assert ps.wait() == 1
        shown = ps.tail()
        assert f"cannot listen on {cluster.ps_hosts}: the port is in use, held by process" in shown
        assert "serving on" not in shown
        assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--job_nam=ps"], "did you mean --job_name"),
        (["--job_name=pss", "--task_id=0", "--ps_hosts=a:1", "--worker_hosts=b:2"], "pss"),
        (["--job_name=worker", "--task_id=5", "--ps_hosts=a:1", "--worker_hosts=b:2"], "5"),
        (["--job_name=worker", "--task_id=0", "--ps_hosts=a", "--worker_hosts=b:2"], "port"),
    ],
)
def test_wrong_flags_end_at_once_with_a_message(arguments: list[str], expected: str) -> None:
    task = Started([sys.executable, str(ByHand().program), *arguments], forked=True)
    try:
        assert task.wait() == 1
        assert expected in task.tail() and "Traceback" not in task.tail()
    finally:
        task.end()


def test_the_ledger_holds_every_gradient(tmp_path: object) -> None:
    with by_hand() as cluster:
        options = ("--steps=60", "--rule=async", f"--logdir={tmp_path}")
        tasks = [cluster.start("ps", 0), *(cluster.start("worker", i, *options) for i in (0, 1))]
        ends_well(*tasks)
        entries = list(read_ledger(tmp_path))  # type: ignore[arg-type]
        assert sum(e.accepted for e in entries) == 60
        assert all(e.staleness == e.met - e.version >= 0 for e in entries)
        assert [e.met for e in entries if e.accepted] == list(range(60))
        local = sum(int(t.lines[-1].split()[4]) for t in tasks[1:])
        assert len(entries) == local
        report = json.loads((tmp_path / "report.json").read_text())  # type: ignore[operator]
        assert report["updates"] == 60 and report["batches"] == len(entries)
