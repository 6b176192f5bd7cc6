"""`make hunt`: plays runs with faults from seed after seed until the time is over, and prints what came of them.

    python -m tests.hunt --minutes 10              so long
    python -m tests.hunt --seed 4711               this run, in words
    python -m tests.hunt --seed 4711 --runs 200    so many runs from this seed on

Ends with 1 if something was broken: the first finding is cut down to its shortest schedule and told as a time line.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.hunt.run import Result, play
from tests.hunt.schedule import FULL_STEPS, draw
from tests.hunt.shrink import shrink, tell
from torchquorum.lines import write_line


@dataclass
class Hunt:
    """What came of many runs."""

    runs: int = 0
    events: int = 0
    steps: int = 0
    seconds: float = 0.0
    checks: Counter[str] = field(default_factory=Counter)
    met: Counter[tuple[str, str]] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    found: Result | None = None

    def add(self, result: Result) -> None:
        """Counts a run."""
        self.runs += 1
        self.events += result.events
        self.steps += result.steps
        self.checks += result.checks
        self.met += result.met
        self.messages += result.messages
        self.found = self.found or (result if result.broken else None)


def hunt(
    first: int,
    *,
    seconds: float,
    runs: int = 1 << 60,
    steps: int = FULL_STEPS,
    clock: Callable[[], float] = time.monotonic,
) -> Hunt:
    """Plays runs from a seed on until the time is over by a clock, so many were played, or something was found."""
    so_far, begun, used = Hunt(), clock(), time.process_time()
    gc.freeze()  # what is there already is not looked through after each run
    try:
        while so_far.runs < runs and clock() - begun < seconds and so_far.found is None:
            so_far.add(play(draw(first + so_far.runs, steps=steps)))
    finally:
        gc.unfreeze()
    so_far.seconds = time.process_time() - used
    return so_far


def report(so_far: Hunt) -> str:
    """Returns the figures as a page."""
    rate = so_far.runs / so_far.seconds if so_far.seconds else 0.0
    lines = [
        f"{so_far.runs} runs, {so_far.steps} steps, {so_far.events} events in {so_far.seconds:.0f} s of processor time: "
        f"{rate:.1f} runs per second, {60 * rate:.0f} a minute",
        "messages: " + ", ".join(f"{count} {what}" for what, count in sorted(so_far.messages.items())),
        "",
        "invariant                              checks",
        *(f"{name:<38} {count}" for name, count in sorted(so_far.checks.items())),
        "",
        *_coverage(so_far.met),
    ]
    return "\n".join(lines)


def _coverage(met: Counter[tuple[str, str]]) -> list[str]:
    """Returns a table of faults by the state that they met."""
    kinds, states = sorted({kind for kind, _ in met}), sorted({state for _, state in met})
    lines = [f"{'state':<24}" + "".join(f"{kind:>10}" for kind in kinds)]
    for state in states:
        lines.append(f"{state:<24}" + "".join(f"{met[kind, state] or '.':>10}" for kind in kinds))
    cells = sum(1 for count in met.values() if count)
    return [*lines, f"{cells} of {len(kinds) * len(states)} pairs of fault and state were met"]


def main() -> int:
    """Reads the flags and hunts."""
    parser = argparse.ArgumentParser(prog="python -m tests.hunt")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="the first seed; alone: play this one and tell it")
    parser.add_argument("--runs", type=int, help="how many runs")
    given = parser.parse_args()
    if given.seed is not None and given.runs is None:
        result = play(draw(given.seed))
        if result.broken:
            write_line(f"seed {given.seed} breaks; the shortest schedule that does:")
            result = shrink(result)
        write_line(tell(result))
        return int(result.broken is not None)
    first = given.seed if given.seed is not None else int(time.time()) * 1000
    write_line(f"hunting from seed {first} on, for {given.minutes:g} minutes")
    so_far = hunt(first, seconds=60 * given.minutes, runs=given.runs or 1 << 60)
    write_line(report(so_far))
    if so_far.found is None:
        write_line("nothing was broken")
        return 0
    seed = so_far.found.schedule.config.seed
    write_line(f"\nBROKEN at seed {seed}; repeat it with: make hunt SEED={seed}\n")
    write_line(tell(shrink(so_far.found)))
    return 1


if __name__ == "__main__":
    sys.exit(main())
