"""Recorded runs are made again, bit for bit: every rule, several ps tasks, deaths and restarts."""

import random
import time
from pathlib import Path

import pytest

from tests.process.replays import PROGRAM, record, replay
from tests.process.tasks import Started, by_hand


@pytest.mark.parametrize("rule", ["async", "sync", "async:pipeline"])
def test_a_recorded_run_is_made_again_bit_for_bit(rule: str, tmp_path: Path) -> None:
    record(tmp_path, f"--rule={rule}", "--load=6" if rule == "async" else "--load=-1")
    replay(tmp_path)


@pytest.mark.parametrize(
    ("rule", "ps", "who", "flags"),
    [
        ("bounded:2", 1, "worker", ["--shared"]),
        ("async", 2, "any", ["--durable=write"]),
    ],
)
def test_a_run_whose_tasks_are_killed_whenever_is_made_again_bit_for_bit(
    rule: str, ps: int, who: str, flags: list[str], tmp_path: Path
) -> None:
    seed = time.time_ns()
    draw, folder = random.Random(seed), tmp_path / "run"
    flags = [f"--rule={rule}", "--steps=60", f"--logdir={folder}", "--record", "--pause=0.02", *flags]
    with by_hand(ps=ps, workers=2, program=PROGRAM) as cluster:

        def start(job: str, index: int) -> Started:
            return cluster.start(job, index, *(flags if job == "worker" else ()))

        tasks = {(job, i): start(job, i) for job, count in (("ps", ps), ("worker", 2)) for i in range(count)}
        tasks["worker", 0].until("begins at")
        for _ in range(2):
            time.sleep(draw.uniform(0.0, 0.4))
            victim = draw.choice([task for task in tasks if who in ("any", task[0])])
            if tasks[victim].process.poll() is None:
                tasks[victim].kill()
                tasks[victim].wait()
                tasks[victim] = start(*victim)
        codes = {victim: task.wait() for victim, task in tasks.items()}
        assert set(codes.values()) == {0}, f"seed {seed}: {codes}\n" + "\n".join(t.tail() for t in tasks.values())
    try:
        replay(folder)
    except BaseException:
        print(f"seed {seed}")
        raise
