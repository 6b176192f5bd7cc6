"""Workers that come and go, as real processes: every batch of the epochs is in the variables exactly once."""

import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.process.tasks import FORKING, Started, by_hand, run
from torchquorum.cluster.secret import OPEN
from torchquorum.formats.ledger import Event, read_records
from torchquorum.launcher.scaling import ask_to_scale

PROGRAM = Path(__file__).parent / "elastic_program.py"
HELD, ROWS, EPOCHS = 24, 60, 2


def wait_for_pids(task: Started, workers: set[int]) -> dict[int, int]:
    """Returns the processes of some workers, who may have said so before what else was waited for."""
    while True:
        said = [re.search(r"pid (\d+) of worker (\d+)", line) for line in task.lines]
        found = {int(words[2]): int(words[1]) for words in said if words is not None and int(words[2]) in workers}
        if found.keys() == workers:
            return found
        task.until("pid ")


def wait_for(task: Started, texts: set[str]) -> None:
    missing = {text for text in texts if not any(text in line for line in task.lines)}
    while missing:
        line = task.until("worker")
        missing = {text for text in missing if text not in line}


def used(folder: Path) -> Counter[int]:
    """How often each batch was used, as the ledger has it.

    A ps that is killed between an entry of the ledger and that of the journal loses the update, which nobody was told of; the
    ledger says from which version on the run was made again.
    """
    found: list[tuple[int, list[int]]] = []
    for record in read_records(folder):
        if isinstance(record, Event):
            found = [(met, numbers) for met, numbers in found if record.event != "began" or met < record.version]
        elif record.accepted:
            assert isinstance(record.batches, dict)
            found.append((record.met, record.batches["data"]))
    return Counter(number for _, numbers in found for number in numbers)


@pytest.mark.parametrize("rule", ["sync", "async"])
def test_workers_are_added_killed_frozen_and_sent_away_and_no_batch_is_lost_or_doubled(
    rule: str, tmp_path: Path
) -> None:
    go, folder = tmp_path / "go", tmp_path / "run"
    flags = [
        f"--rule={rule}",
        f"--hold={HELD}",
        f"--go={go}",
        f"--logdir={folder}",
        f"--epochs={EPOCHS}",
        f"--rows={ROWS}",
    ]
    task = Started([*FORKING, "run", "--workers=2:4", str(PROGRAM), *flags], forked=True)
    try:
        address = re.search(r"scale (\S+) N", task.until("starting with 2 workers of at most 4"))
        assert address is not None
        pids = wait_for_pids(task, {0, 1})
        wait_for(task, {"holds"})  # under sync the other may be waiting for this one, which may have said so already
        assert ask_to_scale(address[1], 4, OPEN, 30.0).leaving == []
        pids |= wait_for_pids(task, {2, 3})
        wait_for(task, {"worker 2 holds", "worker 3 holds"})
        os.kill(pids[2], signal.SIGKILL)  # it is started again, and gets other batches
        task.until("/job:worker/task:2 was ended by SIGKILL; restarting it")
        task.until("worker 2 holds")
        assert ask_to_scale(address[1], 3, OPEN, 30.0).leaving == [3]
        task.until("/job:worker/task:3: asked to leave the run")
        os.kill(pids[1], signal.SIGSTOP)  # its batches go to others, and what it computed counts for nothing
        task.until("/job:worker/task:1 counts as dead")
        os.kill(pids[1], signal.SIGCONT)
        go.touch()
        assert task.wait() == 0, task.tail()
    finally:
        task.end()
    lines = "\n".join(task.lines)
    assert ("under Sync() 4 gradients make one update" if rule == "sync" else "every gradient is an update") in lines
    assert f"uses {EPOCHS} to {EPOCHS}" in lines
    assert lines.count("worker 3 ends") == 1 and "starting /job:worker/task:3: 3 workers" not in lines
    assert rule == "sync" or re.search(r"worker 1: \d+ refused: expired", lines)
    assert used(folder) == Counter(range(ROWS * EPOCHS))


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("rule", ["sync", "async"])
def test_more_ps_tasks_than_variables_are_no_harm(rule: str, transport: str, tmp_path: Path) -> None:
    flags = (f"--rule={rule}", "--rows=10", f"--logdir={tmp_path}", f"--transport={transport}", "--durable=write")
    with by_hand(ps=3, workers=2, program=PROGRAM) as cluster:
        tasks = [*(cluster.start("ps", i) for i in range(3)), *(cluster.start("worker", i, *flags) for i in range(2))]
        assert [task.wait() for task in tasks] == [0] * 5, tasks[3].tail()
    assert "uses 2 to 2" in "\n".join(tasks[3].lines + tasks[4].lines)
    assert used(tmp_path) == Counter(range(20))


def test_on_hosts_a_worker_joins_and_leaves_in_mid_run_and_a_ps_that_dies_loses_no_batch(tmp_path: Path) -> None:
    rule, rows = "--rule=async", "--rows=600"
    flags = [rule, rows, f"--logdir={tmp_path}", "--durable=write", "--min_workers=1"]
    slowly = "--pause=0.1"  # two minutes of batches, in which the others must have started
    with by_hand(workers=3, program=PROGRAM) as cluster:
        ps = cluster.start("ps", 0)
        chief = cluster.start("worker", 0, *flags, slowly)  # it does not wait for workers that nobody starts
        chief.until("worker 0 at 10")
        late = cluster.start("worker", 2, *flags, slowly)
        late.until("worker 2 at")
        ps.kill()
        ps.wait()
        again = cluster.start("ps", 0)
        again.until("are back from the journal")
        again.until("the data goes on in epoch")
        late.until("worker 2 at")
        late.process.send_signal(signal.SIGINT)
        assert late.wait() == 130, late.tail()
        chief.process.send_signal(signal.SIGINT)  # the run is stopped in the middle of the epochs
        assert chief.wait() == 130, chief.tail()
        assert again.wait() == 0, again.tail()
        assert "waiting for" not in "\n".join(chief.lines)
        assert "1 of at least" not in "\n".join(ps.lines)
        before = used(tmp_path)
        assert len(before) < 1200
        last = [cluster.start("ps", 0), cluster.start("worker", 0, *flags)]
        assert [task.wait() for task in last] == [0, 0], last[1].tail()
        assert "uses 2 to 2" in "\n".join(last[1].lines)
    assert used(tmp_path) == Counter(range(1200))


def test_the_command_says_what_it_does_and_what_it_cannot(tmp_path: Path) -> None:
    with by_hand(workers=2, program=PROGRAM) as cluster:
        ps = cluster.start("ps", 0)
        chief = cluster.start("worker", 0, "--hold=0", f"--go={tmp_path / 'go'}", "--min_workers=1")
        chief.until("holds")
        more = run("scale", cluster.ps_hosts, "2")
        assert more.returncode == 0 and "1 worker is alive, 2 wanted: the launcher starts 1 more" in more.stdout
        for wrong, text in (
            ("3", "this run has 1 to 2"),
            ("0", "this run has 1 to 2"),
            ("many", "not a valid integer"),
        ):
            refused = run("scale", cluster.ps_hosts, wrong)
            assert refused.returncode == 2 and text in refused.stderr
        (tmp_path / "go").touch()
        assert chief.wait() == 0 and ps.wait() == 0
