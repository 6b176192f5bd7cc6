"""Cuts a schedule that breaks something down to what is needed for that, and tells it as a time line.

What always holds: the shortest schedule that is returned has been played, and breaks the same invariant.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from tests.hunt.run import Result, play
from tests.hunt.schedule import Schedule
from tests.hunt.world import BEGINNING

MOST_PLAYS = 120
LINE_CHARACTERS = 220
LAST_LINES = 80
NUMBERS = re.compile(r"\d+( s$)?|\(life \)")


def invariant_of(broken: str | None) -> str:
    """Returns which invariant a finding is about."""
    return (broken or "").partition(":")[0]


def shrink(found: Result, play_one: Callable[[Schedule], Result] = play) -> Result:
    """Returns the same finding with as few faults, and as short, as it was found to need."""
    best, plays, name = found, 0, invariant_of(found.broken)

    def better(schedule: Schedule) -> bool:
        nonlocal best, plays
        if plays >= MOST_PLAYS:
            return False
        plays += 1
        result = play_one(schedule)
        if invariant_of(result.broken) != name:
            return False
        best = result
        return True

    # Faults: leave out halves, then quarters, then single ones.
    size = max(1, len(best.schedule.faults) // 2)
    while size >= 1 and best.schedule.faults:
        start, count = 0, len(best.schedule.faults)
        while start < len(best.schedule.faults):
            kept = [k for k in range(len(best.schedule.faults)) if not start <= k < start + size]
            if not better(best.schedule.only(kept)):
                start += size
        if size == 1 and count == len(best.schedule.faults):
            break
        size = max(1, size // 2)
    for change in ({"workers": 1}, {"workers": 2}, {"ps": 1}, {"ps": 2}, {"steps": 20}, {"steps": 50}):
        config = best.schedule.config
        if all(getattr(config, name) > value for name, value in change.items()):
            named = {
                f"{job}/{i}"
                for job in ("ps", "worker")
                for i in range(change.get({"ps": "ps", "worker": "workers"}[job], 99))
            }
            if all(fault.task in named | {"disk"} and fault.other in named | {""} for fault in best.schedule.faults):
                better(replace(best.schedule, config=replace(config, **change)))
    return best


def _without_repeats(lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Leaves out lines that differ from one shortly before in numbers only, such as those of a task that waits."""
    found: list[tuple[float, str]] = []
    recent: deque[str] = deque(maxlen=6)
    for at, text in lines:
        form = NUMBERS.sub("", text)
        if not ("waiting for" in text or "ends with" in text) or form not in recent:
            found.append((at, text))
        recent.append(form)
    return found


def tell(result: Result) -> str:
    """Returns a finding as a time line."""
    schedule = result.schedule
    lines = [f"seed {schedule.config.seed}: {schedule.config}", f"broken: {result.broken}", "faults:"]
    lines += [f"  {fault.at:8.3f} s  {fault}" for fault in schedule.faults] or ["  none"]
    lines.append("what happened:")
    told = _without_repeats(result.lines)
    shown = told[-LAST_LINES:]
    if len(shown) < len(told):
        lines.append(f"  ({len(told) - len(shown)} lines before these)")
    for at, text in shown:
        for part in text.splitlines():
            lines.append(f"  {at - BEGINNING:8.3f} s  {part[:LINE_CHARACTERS]}")
    return "\n".join(lines)
