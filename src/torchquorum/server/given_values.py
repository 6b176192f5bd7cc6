"""What a worker has given for an assignment, until the log says that it becomes the next version.

Owned by the shard. What always holds: of each worker the last is kept that it gave, as the log may still say that it counts, whatever
others have given since.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchquorum.server.given_state import GivenState

ByWhom = tuple[int, int, int]  # the worker, its incarnation, and which of its assignments


@dataclass(frozen=True, slots=True)
class Given:
    """What one worker has given.

    Attributes:
        variables: Those that have values, by index.
        values: The shard's memory with the values; empty where there are none.
        state: The optimizer's state, if that is assigned.
    """

    variables: list[int]
    values: torch.Tensor
    state: GivenState | None = None

    def is_of(self, variables: list[int], *, state: bool) -> bool:
        """Whether it has values of these variables, and the optimizer's state or not."""
        return self.variables == variables and (self.state is not None) is state


class GivenValues:
    """What is about to be assigned, and what was last."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[ByWhom, Given]] = {}  # by worker
        self._assigned: ByWhom = (-1, 0, 0)

    def keep(self, key: ByWhom, given: Given) -> None:
        """Keeps what is given for an assignment; what was kept of this worker before is dropped."""
        self._kept[key[0]] = key, given

    def has(self, key: ByWhom, variables: list[int], *, state: bool) -> bool:
        """Whether this is kept for an assignment, or it has been made with it."""
        if key == self._assigned:
            return True
        kept = self._kept.get(key[0])
        return kept is not None and kept[0] == key and kept[1].is_of(variables, state=state)

    def take(self, key: ByWhom) -> Given:
        """Returns what belongs to an assignment that is made now."""
        kept = self._kept.pop(key[0], None)
        assert kept is not None and kept[0] == key, f"no values were given for {key}"
        self._assigned = key
        return kept[1]
