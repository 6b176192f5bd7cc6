"""`make flake`: runs the tests N times in random order with other load on the machine, and stops at the first failure.

    python tools/flake.py --times 20 --seed 1 -- -n 4 tests/unit

What follows `--` goes to pytest. A failure prints the seed of its round and the command that repeats it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import time


def burn(stop: multiprocessing.synchronize.Event) -> None:
    """Keeps a core busy, with pauses of no regular length."""
    turn = 1
    while not stop.is_set():
        until = time.monotonic() + 0.05 * (turn % 7)
        while time.monotonic() < until:
            pass
        time.sleep(0.01 * (turn % 5))
        turn += 1


def main() -> int:
    """Runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next ones count up")
    parser.add_argument("--load", type=int, default=2, help="processes that keep the cores busy meanwhile")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    args = parser.parse_args()
    stop = multiprocessing.Event()
    load = [multiprocessing.Process(target=burn, args=(stop,), daemon=True) for _ in range(args.load)]
    for process in load:
        process.start()
    try:
        for number in range(args.times):
            order = ["--random-order-bucket=module", f"--random-order-seed={args.seed + number}"]
            command = [sys.executable, "-m", "pytest", "-q", "-x", *order, *args.pytest]
            begun = time.monotonic()
            code = subprocess.run(command, check=False).returncode
            if code != 0:
                print(f"round {number + 1} of {args.times} failed; it is repeated by\n    {' '.join(command)}")
                return code
            print(f"round {number + 1} of {args.times} passed in {time.monotonic() - begun:.0f} s", flush=True)
    finally:
        stop.set()
        for process in load:
            process.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
