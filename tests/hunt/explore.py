"""`make explore`: follows the fast path in every order, with 2 and 3 workers, and prints how many states there are.

    python -m tests.hunt.explore                       all cases
    python -m tests.hunt.explore --workers 2 --steps 2 --only freeze

Ends with 1 if something was broken: the actions that lead to it are printed.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.hunt.explorer import RULES, explore
from tests.hunt.fastpath_model import Budget
from torchquorum.lines import write_line

FAULTS = {
    "nothing": Budget(),
    "a death": Budget(deaths=1),
    "a freeze": Budget(freezes=1),
    "a closing": Budget(closings=1),
    "a wait that is too long": Budget(timeouts=1),
    "all of these": Budget(deaths=1, freezes=1, closings=1, timeouts=1),
}
CASES = [(2, 1), (2, 2), (3, 1)]  # how many workers, and how many steps each of them takes


def main() -> int:
    """Reads the flags and explores."""
    parser = argparse.ArgumentParser(prog="python -m tests.hunt.explore")
    parser.add_argument("--workers", type=int, help="how many workers")
    parser.add_argument("--steps", type=int, default=1, help="how many steps each of them takes")
    parser.add_argument("--only", default="", help="only cases whose rule and fault have this in them")
    given = parser.parse_args()
    broken = 0
    write_line("workers  steps  rule   fault                       states      ends   runs   seconds of processor time")
    for workers, steps in CASES if given.workers is None else [(given.workers, given.steps)]:
        for rule, of in RULES.items():
            for fault, budget in FAULTS.items():
                if given.only not in f"{rule} {fault}" or (fault == "all of these" and (workers, steps) != CASES[0]):
                    continue
                used = time.process_time()
                found = explore(of, workers, steps, budget)
                seconds = time.process_time() - used
                write_line(
                    f"{workers:>7}  {steps:>5}  {rule:<5}  {fault:<24} {found.states:>9} {found.ends:>9} {found.runs:>6}  {seconds:>8.1f}"
                )
                if found.broken is not None:
                    broken += 1
                    write_line(f"BROKEN: {found.broken}")
                    write_line("\n".join(f"    {kind} {worker}" for kind, worker in found.path))
    write_line("something is broken" if broken else "every state was met, and nothing is broken")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
