"""Ps tasks that die at random instants, also while others are being made anew: a sync run ends as one that was left alone."""

import random
import re
import time
from pathlib import Path

import pytest

from tests.process.tasks import Started, by_hand

PROGRAM = Path(__file__).parent / "learns.py"
KILLS = 3
STEPS = 60


def train(logdir: Path, num_ps: int, draw: random.Random | None = None) -> set[str]:
    """Trains, while ps tasks are killed and started again; returns the digests of what the workers hold at the end."""
    go_on = logdir.with_suffix(".go-on")
    options = (f"--logdir={logdir}", f"--steps={STEPS}")
    if draw is not None:  # it is not over before the last death
        options += ("--pause=0.02", f"--hold-at={STEPS - 10}", f"--hold-until={go_on}")
    with by_hand(ps=num_ps, program=PROGRAM) as cluster:
        ps = [cluster.start("ps", i) for i in range(num_ps)]
        workers = [cluster.start("worker", i, *options) for i in (0, 1)]
        ps[0].until("saved")
        for _ in range(KILLS if draw is not None else 0):
            assert draw is not None
            time.sleep(draw.uniform(0.0, 0.6))
            for victim in draw.sample(range(num_ps), draw.choice([1, 1, num_ps])):
                if ps[victim].process.poll() is None:
                    ps[victim].kill()
                    ps[victim].wait()
                    time.sleep(draw.choice([0.0, 0.05, 0.2]))
                    ps[victim] = cluster.start("ps", victim)
        go_on.touch()
        return {digest for worker in workers for digest in digests(worker)}


def digests(worker: Started) -> list[str]:
    assert worker.wait() == 0, worker.tail()
    return re.findall(r"digest (\w+)", "\n".join(worker.lines))


@pytest.mark.parametrize("num_ps", [2, 3])
def test_whenever_ps_tasks_die_a_sync_run_ends_as_one_that_was_left_alone(num_ps: int, tmp_path: Path) -> None:
    seed = time.time_ns()
    whole = train(tmp_path / "whole", num_ps)
    assert len(whole) == 1 and train(tmp_path / "killed", num_ps, random.Random(seed)) == whole, f"seed {seed}"
