"""`make flake`: runs the tests N times in random order with other load on the machine, and stops at the first failure.

    python tools/flake.py --times 20 --seed 1 -- -n 4 tests/unit

What follows `--` goes to pytest. At the end, and when a round fails or is interrupted, a table says how every round went; a
failure prints the seed of its round and the command that repeats it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event


@dataclass(frozen=True)
class Round:
    """How one run of the tests went; `counts` are pytest's own, such as `12 passed, 1 skipped`."""

    number: int
    seed: int
    result: str
    counts: str
    took_s: float


def burn(stop: Event) -> None:
    """Keeps a core busy, with pauses of no regular length."""
    turn = 1
    while not stop.is_set():
        until = time.monotonic() + 0.05 * (turn % 7)
        while time.monotonic() < until:
            pass
        time.sleep(0.01 * (turn % 5))
        turn += 1


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Within, so many processes keep the cores busy."""
    stop = multiprocessing.Event()
    burning = [multiprocessing.Process(target=burn, args=(stop,), daemon=True) for _ in range(processes)]
    for process in burning:
        process.start()
    try:
        yield
    finally:
        stop.set()
        for process in burning:
            process.join()


def run_once(number: int, seed: int, arguments: list[str]) -> tuple[Round, int, list[str]]:
    """Runs the tests in the order that belongs to a seed; returns how it went, pytest's exit code and its command."""
    order = ["--random-order-bucket=module", f"--random-order-seed={seed}"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *order, *arguments]
    begun, last = time.monotonic(), ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            last = line if re.search(r"\d+ (passed|failed|error)", line) else last
    counts = re.sub(r"^=+ | in [\d.]+s.*$", "", last.strip()) or "no tests"
    result = "passed" if tests.returncode == 0 else "FAILED"
    return Round(number, seed, result, counts, time.monotonic() - begun), tests.returncode, command


def show(rounds: list[Round]) -> None:
    """Prints the table."""
    print(f"\n{'round':>5}  {'seed':>6}  {'result':<6}  {'seconds':>7}  tests")
    for each in rounds:
        print(f"{each.number:>5}  {each.seed:>6}  {each.result:<6}  {each.took_s:>7.0f}  {each.counts}")


def main() -> int:
    """Runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next ones count up")
    parser.add_argument("--load", type=int, default=2, help="processes that keep the cores busy meanwhile")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    args = parser.parse_args()
    rounds: list[Round] = []
    try:
        with load(args.load):
            for number in range(1, args.times + 1):
                went, code, command = run_once(number, args.seed + number - 1, args.pytest)
                rounds.append(went)
                if code != 0:
                    print(f"round {number} of {args.times} failed with seed {went.seed}; it is repeated by")
                    print(f"    {shlex.join(command)}")
                    return code
                print(f"round {number} of {args.times} passed in {went.took_s:.0f} s", flush=True)
    finally:
        show(rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
