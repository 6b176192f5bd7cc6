"""How many workers a run has: a number, or, where they come and go, from the least to the most.

Read by the command line, the launchers and `tq.launch`. What always holds: 1 <= least <= most, so the chief, worker 0, is
always one of the least.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchquorum.cluster.spec import strip_quotes
from torchquorum.errors import ConfigError

MOST_WORKERS = 10_000
_ALLOWED = "must be a number, such as 4, or the least and the most that come and go, such as 2:8"


@dataclass(frozen=True, slots=True)
class WorkerRange:
    """From how many workers to how many.

    Attributes:
        least: So many must be there for the run to begin; worker 0, the chief, is one of them.
        most: So many places the cluster has.
    """

    least: int
    most: int

    @property
    def elastic(self) -> bool:
        """Whether workers may come and go."""
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)

    @classmethod
    def read(cls, given: object, *, label: str = "--workers ") -> WorkerRange:
        """Reads what a user gave: 4, "4", "2:8" or (2, 8).

        Args:
            given: A number, a text, a pair of numbers, or a range.
            label: What to put in front of the value in a message.

        Raises:
            ConfigError: It is none of these, or the numbers make no sense.
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
                "must be 1 or more"
                if least == most
                else "the least must be 1 or more: the chief, worker 0, is one of them"
            )
            raise ConfigError(f"{shown}: {what}")
        if least > most:
            raise ConfigError(f"{shown}: the least comes first and the most after it; write {most}:{least}")
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
