"""Every task of a durable run is killed or frozen at random instants: each batch is in the variables exactly once, and all end well."""

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.process.tasks import Started, by_hand
from tests.process.test_elastic import PROGRAM, used

ROWS, EPOCHS = 120, 2
LAST = ROWS * EPOCHS - 20  # batches from here on wait until the storm is over, so that nobody comes too late
BLOWS = 6


@pytest.mark.parametrize("rule", ["sync", "async", "bounded:2"])
def test_whoever_is_killed_or_frozen_whenever_no_batch_is_lost_or_doubled(rule: str, tmp_path: Path) -> None:
    seed = time.time_ns()
    draw, go, folder = random.Random(seed), tmp_path / "go", tmp_path / "run"
    num_ps = draw.choice([1, 2, 3])  # there is one variable: some have none
    flags = [
        f"--rule={rule}",
        f"--transport={draw.choice(['auto', 'tcp'])}",
        f"--logdir={folder}",
        f"--rows={ROWS}",
        f"--epochs={EPOCHS}",
    ]
    flags += ["--durable=write", f"--save-steps={draw.choice([20, 1000])}", "--pause=0.02"]
    flags += [f"--hold={LAST}", f"--go={go}", *draw.choice([[], ["--min_workers=1"]])]
    with by_hand(ps=num_ps, workers=2, program=PROGRAM) as cluster:

        def start(job: str, index: int) -> Started:
            return cluster.start(job, index, *(flags if job == "worker" else ()))

        tasks = {(job, i): start(job, i) for job, count in (("ps", num_ps), ("worker", 2)) for i in range(count)}
        lives = list(tasks.values())
        tasks["worker", 0].until("pid ")
        for _ in range(BLOWS):
            time.sleep(draw.uniform(0.0, 0.5))
            who = draw.choice(list(tasks))
            if draw.random() < 0.3:
                tasks[who].process.send_signal(signal.SIGSTOP)
                time.sleep(draw.choice([0.1, 1.0, 3.0]))  # of which the last is longer than the run is patient
                tasks[who].process.send_signal(signal.SIGCONT)
            else:
                tasks[who].kill()
                tasks[who].wait()
                time.sleep(draw.choice([0.0, 0.05, 0.3]))
                tasks[who] = start(*who)
                lives.append(tasks[who])
        go.touch()
        codes = {who: task.wait() for who, task in tasks.items()}
        assert set(codes.values()) == {0}, f"seed {seed}: {codes}\n" + "\n".join(t.tail() for t in tasks.values())
    said = "\n".join(line for task in lives for line in task.lines)
    assert f"uses {EPOCHS} to {EPOCHS}" in said, f"seed {seed}\n" + "\n".join(t.tail() for t in lives)
    assert used(folder) == Counter(range(ROWS * EPOCHS)), f"seed {seed}"
