"""Examples that set the learning rate, or have several optimizers: with one worker the bits of plain PyTorch, with two they learn."""

import re
import sys
from pathlib import Path

import pytest

from tests.process.tasks import FORKING, Started

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = {
    "gpt/train_gpt.py": ["--steps=12"],
    "annealing/train_annealing.py": ["--epochs=4"],
    "gan/train.py": ["--epochs=2", "--rows=400"],
    "muon/train.py": ["--steps=20"],
}
CASES = [pytest.param(program, marks=pytest.mark.long) if "muon" in program else program for program in PROGRAMS]
HIGHEST = {"gan/train.py": 4.0}  # of its discriminator, which makes half as many updates: it is no worse for that
LAST = re.compile(r"loss at last ([\d.]+), weights ([\d.]+)$")


def last_of(*command: str) -> tuple[float, float]:
    """Runs a program to its good end; returns the chief's last loss, and the sum of its weights."""
    started = Started([*command], forked=command[: len(FORKING)] == tuple(FORKING))
    try:
        assert started.wait() == 0, started.tail()
        [found] = [m for line in started.lines if "[worker 1]" not in line and (m := LAST.search(line))]
        return float(found[1]), float(found[2])
    finally:
        started.end()


@pytest.mark.parametrize("program", CASES)
def test_alone_it_has_the_bits_of_plain_pytorch_and_with_two_workers_it_learns(program: str) -> None:
    path, given = str(EXAMPLES / program), PROGRAMS[program]
    plain = last_of(sys.executable, path, *given, "--plain")
    assert last_of(sys.executable, path, *given) == plain
    two = last_of(*FORKING, "run", "--workers=2", path, *given)
    assert two[0] < HIGHEST.get(program, 1.25) * plain[0] and two != plain
