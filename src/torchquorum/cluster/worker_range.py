"""The number of workers of a run: fixed, or a range within which workers join and leave.

Used by the command line, the launchers and `tq.launch`. What always holds: 1 <= least <= most, so the chief, worker 0, is always
among the first `least` workers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchquorum.cluster.spec import strip_quotes
from torchquorum.errors import ConfigError

MOST_WORKERS = 10_000
_ALLOWED = "must be a number, such as 4, or a range MIN:MAX, such as 2:8"


@dataclass(frozen=True, slots=True)
class WorkerRange:
    """A range of worker counts.

    Attributes:
        least: How many workers the run needs to begin; the chief, worker 0, is one of them.
        most: How many workers the cluster can have.
    """

    least: int
    most: int

    @property
    def elastic(self) -> bool:
        """Whether workers may join and leave."""
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)

    @classmethod
    def read(cls, given: object, *, label: str = "--workers ") -> WorkerRange:
        """Reads a user's value: 4, "4", "2:8" or (2, 8).

        Args:
            given: A number, a text, a pair of numbers, or a range.
            label: Put in front of the value in a message.

        Raises:
            ConfigError: It is none of these, or out of range.
        """
        if isinstance(given, WorkerRange):
            return given
        shown = f"{label}{given if isinstance(given, str) else repr(given)}"
        if isinstance(given, str):
            least, most = _read_text(given, shown)
        elif isinstance(given, Sequence):
            if len(given) != 2 or not all(_is_number(each) for each in given):
                raise ConfigError(f"{shown}: {_ALLOWED}; in Python the pair (2, 8)")
            least, most = given
        elif _is_number(given):
            assert isinstance(given, int)
            least = most = given
        else:
            raise ConfigError(f"{shown}: {_ALLOWED}; in Python the pair (2, 8)")
        if least < 1:
            what = (
                "must be 1 or more" if least == most else "MIN must be 1 or more: the chief, worker 0, is one of them"
            )
            raise ConfigError(f"{shown}: {what}")
        if least > most:
            raise ConfigError(f"{shown}: MIN comes first, then MAX; write {most}:{least}")
        if most > MOST_WORKERS:
            raise ConfigError(f"{shown}: must be at most {MOST_WORKERS}")
        return cls(least, most)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_text(text: str, shown: str) -> tuple[int, int]:
    parts = [part.strip() for part in strip_quotes(text).split(":")]
    if len(parts) > 2 or not all(re.fullmatch(r"[+-]?[0-9]{1,9}", part) for part in parts):
        near = re.fullmatch(r"\s*([0-9]+)\s*(?:-|,|\.\.+|to)\s*([0-9]+)\s*", strip_quotes(text))
        hint = f"; write {near[1]}:{near[2]}" if near else ""
        if len(parts) == 2 and "" in parts:
            hint = "; give both numbers, before and after the colon"
        raise ConfigError(f"{shown}: {_ALLOWED}{hint}")
    return int(parts[0]), int(parts[-1])
