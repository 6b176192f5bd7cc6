"""The values that a worker has given for an assignment, until the log says that they become the next version.

Owned by the shard. What always holds: those of one worker are kept, the last that were given.
"""

from __future__ import annotations

import torch

ByWhom = tuple[int, int, int]  # the worker, its incarnation, and which of its assignments


class GivenValues:
    """What is about to be assigned, and what was last."""

    def __init__(self) -> None:
        self._kept: tuple[ByWhom, list[int], torch.Tensor] | None = None
        self._assigned: ByWhom = (-1, 0, 0)

    def keep(self, key: ByWhom, variables: list[int], values: torch.Tensor) -> None:
        """Keeps values for an assignment; those that were kept before are dropped."""
        self._kept = key, variables, values

    def has(self, key: ByWhom, variables: list[int]) -> bool:
        """Whether values of these variables are kept for an assignment, or it has been made with them."""
        return key == self._assigned or (self._kept is not None and self._kept[:2] == (key, variables))

    def take(self, key: ByWhom) -> torch.Tensor:
        """Returns the values of an assignment that is made now."""
        assert self._kept is not None and self._kept[0] == key, f"no values were given for {key}"
        values = self._kept[2]
        self._kept, self._assigned = None, key
        return values
