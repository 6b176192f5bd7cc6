"""`make flake`: runs the tests N times in random order with other load on the machine, and stops at the first failure.

    python tools/flake.py --times 20 --seed 1 -- -n 4 tests/unit

Two rounds run beside each other, and are each other's load: whole suites that share the cores, the memory, the ports and the
folders of one machine. With `--disturb` each of their processes is late now and then, too (tools/disturb). What follows `--`
goes to pytest. At the end, and when a round fails or is interrupted, a table says how every round went; a failure prints the
seed of its round and the command that repeats it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

DISTURB = Path(__file__).resolve().parent / "disturb"


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


class Rounds:
    """The rounds of a series, some of them beside each other; the first that fails ends them all.

    Args:
        times: How many.
        seed: That of the first round; the next ones count up.
        beside: How many at a time.
        arguments: Those of pytest.
        disturb: Whether to make every process late now and then.
    """

    def __init__(self, times: int, seed: int, beside: int, arguments: list[str], *, disturb: bool = False) -> None:
        self.times, self.seed, self.beside, self.arguments = times, seed, beside, arguments
        self._python = ["env", f"PYTHONPATH={DISTURB}", sys.executable] if disturb else [sys.executable]
        self.done: list[Round] = []
        self.code = 0
        self._numbers = iter(range(1, times + 1))
        self._running: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        """Runs them all, or up to the first that fails."""
        lanes = [threading.Thread(target=self._run_lane) for _ in range(min(self.beside, self.times))]
        for lane in lanes:
            lane.start()
        try:
            for lane in lanes:
                lane.join()
        except KeyboardInterrupt:
            self._stop(130)
            for lane in lanes:
                lane.join()
            raise

    def _stop(self, code: int) -> None:
        with self._lock:
            self.code = self.code or code
            for tests in self._running:
                tests.send_signal(signal.SIGINT)

    def _run_lane(self) -> None:
        while True:
            with self._lock:
                number = next(self._numbers, None) if not self.code else None
                if number is None:
                    return
                seed = self.seed + number - 1
                order = ["--random-order-bucket=module", f"--random-order-seed={seed}"]
                command = [*self._python, "-m", "pytest", "-q", "-x", *order, *self.arguments]
                tests = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                self._running.append(tests)
            self._follow(number, seed, command, tests)

    def _follow(self, number: int, seed: int, command: list[str], tests: subprocess.Popen[str]) -> None:
        begun, last = time.monotonic(), ""
        assert tests.stdout is not None
        with tests:
            for line in tests.stdout:
                print(f"[{number}] {line}" if self.beside > 1 else line, end="", flush=True)
                last = line if re.search(r"\d+ (passed|failed|error)", line) else last
        with self._lock:
            self._running.remove(tests)
            stopped = self.code != 0
        counts = re.sub(r"^=+ | in [\d.]+s.*$", "", last.strip()) or "no tests"
        result = "passed" if tests.returncode == 0 else "ended" if stopped else "FAILED"
        went = Round(number, seed, result, counts, time.monotonic() - begun)
        self.done.append(went)
        if result == "FAILED":
            print(f"round {number} of {self.times} failed with seed {seed}; it is repeated by")
            print(f"    {shlex.join(command)}", flush=True)
            self._stop(tests.returncode)
        else:
            print(f"round {number} of {self.times} {result} after {went.took_s:.0f} s", flush=True)


def show(rounds: list[Round]) -> None:
    """Prints the table."""
    print(f"\n{'round':>5}  {'seed':>6}  {'result':<6}  {'seconds':>7}  tests")
    for each in sorted(rounds, key=lambda r: r.number):
        print(f"{each.number:>5}  {each.seed:>6}  {each.result:<6}  {each.took_s:>7.0f}  {each.counts}")


def main() -> int:
    """Runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next ones count up")
    parser.add_argument("--beside", type=int, default=2, help="how many rounds at a time, each other's load")
    parser.add_argument("--load", type=int, default=0, help="processes that keep the cores busy meanwhile, too")
    parser.add_argument("--disturb", action="store_true", help="make every process late now and then")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    args = parser.parse_args()
    rounds = Rounds(args.times, args.seed, args.beside, args.pytest, disturb=args.disturb)
    try:
        with load(args.load):
            rounds.run()
    except KeyboardInterrupt:
        return 130
    finally:
        show(rounds.done)
    return rounds.code


if __name__ == "__main__":
    sys.exit(main())
