"""Runs of several optimizers that are stopped at any moment by real signals, and started again: the same bits at the end."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.process.forked import Cluster
from tests.process.tasks import FORKING, Started

PROGRAM = Path(__file__).parent / "gan_program.py"


def launch(folder: Path, *arguments: str) -> Started:
    return Started([*FORKING, "run", "--workers=2", str(PROGRAM), f"--logdir={folder}", *arguments], forked=True)


def digests(run: Started) -> set[str]:
    found = set(re.findall(r"digest (\w+)", "\n".join(run.lines)))
    assert len(found) == 1, run.tail()
    return found


def run_with_stops(folder: Path, how: signal.Signals, stops: int, draw: random.Random, *arguments: str) -> set[str]:
    """Starts a run again and again until it ends; the first times it is stopped at an instant that nobody has chosen."""
    for _ in range(stops):
        run = launch(folder, *arguments)
        try:
            for _ in range(draw.randint(8, 20)):
                run.until("epoch ")
            time.sleep(draw.uniform(0.0, 0.05))
            run.process.send_signal(how)
            run.wait()
        finally:
            run.end()
    run = launch(folder, *arguments)
    try:
        assert run.wait() == 0, run.tail()
    finally:
        run.end()
    assert "started at [0, 0]" not in "\n".join(run.lines), run.tail()
    return digests(run)


LONG = pytest.mark.long
CASES = [
    (signal.SIGINT, 1, ("--order=dg", "--epochs=2")),
    (signal.SIGKILL, 1, ("--order=gdd", "--first=D", "--epochs=2")),
    pytest.param(signal.SIGINT, 3, ("--order=gdd", "--durable"), marks=LONG),
    pytest.param(signal.SIGKILL, 3, ("--order=dddg",), marks=LONG),
    pytest.param(signal.SIGINT, 3, ("--order=gd", "--first=D"), marks=LONG),
    pytest.param(signal.SIGTERM, 3, ("--order=dddg", "--first=D"), marks=LONG),
]


@pytest.mark.parametrize(("how", "stops", "arguments"), CASES, ids=str)
def test_a_run_that_is_stopped_at_any_moment_ends_with_the_bits_of_one_that_was_not(
    how: signal.Signals, stops: int, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    seed = time.time_ns()
    whole = launch(tmp_path / "whole", *arguments, "--pause=0")
    try:
        assert whole.wait() == 0, whole.tail()
        found = run_with_stops(tmp_path / "cut", how, stops, random.Random(seed), *arguments)
    finally:
        whole.end()
    assert found == digests(whole), f"seed {seed}"


KILLED = [
    (2, [("ps", 0), ("ps", 1)], ("--order=dg", "--durable", "--epochs=2")),
    pytest.param(1, [("worker", 0), ("worker", 1)], ("--order=gdd",), marks=LONG),
    pytest.param(1, [("ps", 0), ("worker", 1)], ("--order=dddg", "--first=D", "--durable"), marks=LONG),
    pytest.param(2, [("worker", 0), ("ps", 1)], ("--order=gd",), marks=LONG),
]


@pytest.mark.parametrize(("ps", "victims", "arguments"), KILLED, ids=str)
def test_a_run_goes_on_whoever_is_killed_at_any_moment_and_durable_ps_tasks_cost_no_bit(
    ps: int, victims: list[tuple[str, int]], arguments: tuple[str, ...], tmp_path: Path
) -> None:
    seed = time.time_ns()
    draw = random.Random(seed)
    cluster = Cluster(tmp_path / "killed", ps, *arguments, program=PROGRAM)

    def iterations() -> int:
        return sum(cluster.text(worker).count("epoch ") for worker in cluster.workers)

    try:
        for victim in [*victims, *victims]:
            before = iterations()
            cluster.wait("progress", lambda before=before: iterations() > before + 12 or cluster.ended())
            if cluster.ended():
                break
            time.sleep(draw.uniform(0.0, 0.05))
            cluster.kill(victim)
            cluster.start(victim)
        cluster.wait("the end", cluster.ended)
        told = "\n".join(cluster.text(task)[-1500:] for task in cluster.lives)
        assert cluster.codes() == [0] * (ps + 2), f"seed {seed}\n{told}"
    finally:
        cluster.close()
    found = set(re.findall(r"digest (\w+)", "".join(cluster.text(worker) for worker in cluster.workers)))
    assert len(found) == 1, f"seed {seed}\n{told}"
    if any(job == "worker" for job, _ in victims) or "--durable" not in arguments:
        return
    whole = launch(tmp_path / "whole", *arguments, "--pause=0")
    try:
        assert whole.wait() == 0, whole.tail()
    finally:
        whole.end()
    assert found == digests(whole), f"seed {seed}"
