"""Where versions come from: what a reader asks of its source, be it ps tasks or a folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from torchquorum.memory.key_index import Keys
from torchquorum.reader.freshness import Freshness
from torchquorum.reader.read_copy import ReadCopy


class AwayError(Exception):
    """The run cannot be read now: a ps task does not answer, or holds no variables. Says why; is tried again."""


@dataclass(kw_only=True)
class WantedParts:
    """What is to be taken.

    Attributes:
        averages: The moving averages, too.
        tables: Names of tables whose rows are kept here.
        since: With nothing here yet: only what has changed since these versions.
        generation: Whose versions these are; 0 for those of the run as it is.
    """

    averages: bool = False
    tables: frozenset[str] = frozenset()
    since: tuple[int, ...] = ()
    generation: int = 0


class Source(Protocol):
    """A run that is read.

    Attributes:
        replica: What was taken.
        freshness: How old that was.
        over: Whether the run makes no more versions.
        way: How versions come.
    """

    replica: ReadCopy
    freshness: Freshness
    over: bool
    way: str

    @property
    def where(self) -> str:
        """Returns what it reads from, for lines."""
        ...

    @property
    def generation(self) -> int:
        """Returns the creation of the variables that was met last."""
        ...

    @property
    def received_bytes(self) -> int:
        """Returns how many bytes have come by message."""
        ...

    def take(self, wanted: WantedParts) -> None:
        """Takes the newest version.

        Raises:
            AwayError: The run cannot be read now; what is here stays.
            TorchQuorumError: It cannot be read at all.
        """
        ...

    def rows(self, asked: dict[str, Keys]) -> tuple[dict[str, torch.Tensor], list[int], float]:
        """Returns rows of tables, all of one version, with that version and how old it is; raises as `take` does."""
        ...

    def lost(self) -> None:
        """The run could not be read: it is looked for anew."""
        ...

    def close(self) -> None:
        """Closes it."""
        ...
