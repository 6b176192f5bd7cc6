"""A durable run on the fast path: whoever dies or freezes, and at whatever moment, no worker was told of an update that is lost.

The program compares its parameters with plain PyTorch's at every version, so what comes back has the right bits, optimizer state
included.
"""

import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.tasks import DEADLINE_S, Started, by_hand
from torchquorum.formats.ledger import Entry, read_records
from torchquorum.memory.lock import supported

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")
PROGRAM = Path(__file__).parent / "on_fastpath.py"
STEPS = 2000
FIRST = [("async", "torn"), ("sync", "written")]
CASES = [
    pytest.param(rule, moment, marks=() if (rule, moment) in FIRST else pytest.mark.long)
    for rule in ("async", "sync")
    for moment in ("record", "torn", "written", "counted")
]


def said(task: Started) -> str:
    """All that a task has said so far."""
    while not task._queue.empty():
        line = task._queue.get()
        if line is None:
            task._queue.put(None)
            break
        task.lines.append(line)
    return "\n".join(task.lines)


def wait(happened: Callable[[], object], *tasks: Started) -> None:
    """Waits until something has happened."""
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, "\n---\n".join(task.tail() for task in tasks)
        time.sleep(0.005)


def told(*workers: Started) -> int:
    """The latest version that a worker was told of."""
    for worker in workers:
        said(worker)
    found = [int(v) for worker in workers for v in re.findall(r"^.*told (\d+)", "\n".join(worker.lines), re.M)]
    return max(found, default=0)


def on_fastpath(*workers: Started) -> int:
    found = [int(n) for worker in workers for n in re.findall(r"(\d+) on the fast path", "\n".join(worker.lines))]
    return sum(found)


def check_ledger(folder: Path, last: int) -> None:
    """Every update is in the ledger; also those whose records the ps had no time to read."""
    versions = {record.met + 1 for record in read_records(folder) if isinstance(record, Entry) and record.accepted}
    assert sorted(set(range(1, last + 1)) - versions) == []


@pytest.mark.parametrize(
    ("rule", "optimizer", "mode"),
    [
        ("async", "adam", "write"),
        ("sync", "momentum", "fsync"),
        pytest.param("async", "momentum", "fsync", marks=pytest.mark.long),
        pytest.param("sync", "adam", "write", marks=pytest.mark.long),
    ],
)
def test_after_a_kill_of_everything_the_run_goes_on_from_the_last_update_that_a_worker_was_told_of(
    rule: str, optimizer: str, mode: str, tmp_path: Path
) -> None:
    folder, draw = tmp_path / "run", random.Random(time.time_ns())
    flags = [f"--rule={rule}", f"--steps={STEPS}", f"--optimizer={optimizer}", f"--logdir={folder}"]
    flags += [f"--durable={mode}", "--tell"]
    known = 0
    for _ in range(2):
        with by_hand(program=PROGRAM) as cluster:
            tasks = [cluster.start("ps", 0), *(cluster.start("worker", k, *flags) for k in range(2))]
            wait(lambda tasks=tasks, least=known + 40: told(*tasks) >= least, *tasks)
            time.sleep(draw.uniform(0.0, 0.05))
            draw.shuffle(tasks)
            for task in tasks:
                task.process.send_signal(signal.SIGKILL)
            for task in tasks:
                task.wait()
            known = told(*tasks)
    with by_hand(program=PROGRAM) as cluster:
        ps, *workers = [cluster.start("ps", 0), *(cluster.start("worker", k, *flags) for k in range(2))]
        assert [task.wait() for task in (*workers, ps)] == [0, 0, 0], workers[0].tail()
        begun = int(re.findall(r"started at (\d+)", "\n".join(workers[0].lines))[0])
        assert begun >= known, f"was told of {known}, goes on at {begun}"
        assert on_fastpath(*workers) > 0
    check_ledger(folder, STEPS)


@pytest.mark.parametrize(("rule", "moment"), CASES)
def test_a_worker_killed_while_it_writes_its_record_leaves_a_journal_that_can_be_read(
    rule: str, moment: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = [
        f"--rule={rule}",
        f"--steps={STEPS}",
        "--optimizer=momentum",
        f"--logdir={folder}",
        "--durable=write",
        "--tell",
    ]
    with by_hand(program=PROGRAM) as cluster:
        ps = cluster.start("ps", 0)
        chief = cluster.start("worker", 0, *flags, "--at=30", f"--moment={moment}")
        other = cluster.start("worker", 1, *flags, "--at=30", f"--moment={moment}")
        # In a round it is the one that is the last.
        wait(lambda: any(f"SIGKILL in {moment}" in said(task) for task in (chief, other)), chief, other)
        ps.until("counts as dead (its process ended)")
        for task in (ps, chief, other):
            task.kill()
            task.wait()
        known = told(chief, other)
    with by_hand(program=PROGRAM) as cluster:
        ps, *workers = [cluster.start("ps", 0), *(cluster.start("worker", k, *flags) for k in range(2))]
        assert [task.wait() for task in (*workers, ps)] == [0, 0, 0], workers[0].tail()
        assert int(re.findall(r"started at (\d+)", "\n".join(workers[0].lines))[0]) >= known
    check_ledger(folder, STEPS)


@pytest.mark.parametrize(("rule", "moment"), CASES)
def test_a_worker_frozen_while_it_writes_its_record_does_no_harm_when_it_goes_on_and_one_that_was_told_is_not_rolled_back(
    rule: str, moment: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = [
        f"--rule={rule}",
        "--steps=1000000000",
        "--optimizer=momentum",
        f"--logdir={folder}",
        "--durable=write",
        "--tell",
    ]
    with by_hand(program=PROGRAM) as cluster:
        ps = cluster.start("ps", 0)
        moments = ["--at=30", f"--moment={moment}", "--signal=SIGSTOP"]
        workers = [cluster.start("worker", k, *flags, *(moments if k == 1 else [])) for k in range(2)]
        chief, frozen = workers
        frozen.until(f"SIGSTOP in {moment}")
        ps.until("/job:worker/task:1 counts as dead")
        before = told(chief)
        wait(lambda: told(chief) > before + 20, chief)  # it goes on alone
        ps.kill()  # and another ps takes the run up, without the frozen worker
        ps.wait()
        known = told(*workers)
        ps = cluster.start("ps", 0)
        wait(lambda: "going on at global step" in said(chief), chief)
        frozen.process.send_signal(signal.SIGCONT)
        assert int(re.findall(r"going on at global step (\d+)", "\n".join(chief.lines))[0]) >= known
        after = told(*workers)
        wait(lambda: told(frozen) > after + 20, *workers)
        chief.process.send_signal(signal.SIGINT)
        for task, code in ((chief, 130), (frozen, 0), (ps, 0)):
            assert task.wait() == code, task.tail()
    check_ledger(folder, told(chief))
