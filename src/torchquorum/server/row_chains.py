"""Checkpoints with changed rows only: which files of the one before a shard's rows go on from.

Owned by the shard. A checkpoint of changed rows has the files of those before it, too, by hard links, so each is whole by itself: it is
read, kept and removed like any other. What always holds: a chain goes on only from a checkpoint that was published, whose files are
where they were; it begins anew after `full_every` checkpoints, or sooner where it would have more changed rows than half of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchquorum.formats.checkpoint_manifest import FileInfo
from torchquorum.formats.row_file import part_file
from torchquorum.formats.shared_files import share_files
from torchquorum.formats.storage import locate
from torchquorum.wire.messages import Snapshot

REMEMBERED = 4  # snapshots: one is made at a time, and most are published


@dataclass
class RowChain:
    """The files of rows of one checkpoint, in their order.

    Attributes:
        versions: Of each optimizer, the version that they are of.
        name: The file that is written.
        files: Those before it.
        changed: How many rows those and this have beyond the first.
        nonfinite: The tables of which a row in them holds NaN or infinity.
    """

    versions: list[int]
    name: str
    files: dict[str, FileInfo] = field(default_factory=dict)
    changed: int = 0
    info: FileInfo | None = None  # once it is written
    nonfinite: set[str] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        """Returns all files."""
        return [*self.files, self.name]


class RowChains:
    """The chains of one shard's checkpoints.

    Args:
        index: Which shard.
        num_shards: How many there are.
        full_every: After how many checkpoints one has all rows again.
    """

    def __init__(self, index: int, num_shards: int, full_every: int) -> None:
        self._index, self._num_shards, self._full_every = index, num_shards, full_every
        self._of: dict[str, RowChain] = {}  # by the folder in which it was written

    def begin(self, entry: Snapshot, versions: Sequence[int], rows: int) -> tuple[RowChain, list[int]]:
        """Begins the chain of a checkpoint.

        Args:
            entry: The checkpoint.
            versions: Of each optimizer, the version now.
            rows: How many rows there are now.

        Returns:
            The chain, and of each optimizer the version after which rows have changed; -1 if all are to be written.
        """
        before = self._of.get(entry.base_partial)
        goes_on = before is not None and before.info is not None and len(before.names) < self._full_every
        if before is not None and before.info is not None and goes_on and before.changed <= rows // 2:
            files = {**before.files, before.name: before.info}
            if share_files(locate(entry.base), entry.base_partial, locate(entry.partial), files):
                name = part_file(self._index, self._num_shards, len(files))
                return self._remember(
                    entry, RowChain(list(versions), name, files, before.changed, nonfinite=before.nonfinite)
                ), before.versions
        self._of.clear()  # which keys went is forgotten with a whole one
        chain = RowChain(list(versions), part_file(self._index, self._num_shards))
        return self._remember(entry, chain), [-1] * len(versions)

    def _remember(self, entry: Snapshot, chain: RowChain) -> RowChain:
        self._of[entry.partial] = chain
        while len(self._of) > REMEMBERED:
            del self._of[next(iter(self._of))]
        return chain
