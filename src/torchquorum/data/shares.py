"""Which records of some files belong to which worker, and reading them in order.

Called by `record_stream`. Shares follow from numbers alone, so workers agree on them without a message. What always holds: over
all workers, and over all processes of each worker's DataLoader, every record comes exactly once per epoch.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchquorum.errors import ConfigError, DataError
from torchquorum.formats.tfrecord import RecordReader

PLACE_BITS = 48  # bits of the offset in a place; the file's number takes the rest
_LISTED = 8


@dataclass(frozen=True, slots=True)
class FileShare:
    """Every `stride`-th record, from the `offset`-th on, of a sequence of files; files by their number."""

    files: tuple[int, ...]
    stride: int = 1
    offset: int = 0

    def divide(self, index: int, count: int) -> FileShare:
        """Returns one of `count` parts of this share.

        By whole files if there are at least as many as parts, otherwise by record.
        """
        if self.stride == 1 and len(self.files) >= count:
            return FileShare(self.files[index::count])
        return FileShare(self.files, self.stride * count, self.offset + self.stride * index)


def check_share(share: Any) -> tuple[int, int]:
    """Returns (index, count) of a share.

    Raises:
        ConfigError: It is not such a pair, or out of range.
    """
    if share is None:
        return 0, 1
    if not (isinstance(share, Sequence) and len(share) == 2 and all(type(each) is int for each in share)):
        raise ConfigError(f"share={share!r}: must be (index, count), such as (task.index, task.num_workers)")
    index, count = share
    if count < 1 or not 0 <= index < count:
        raise ConfigError(f"share={share!r}: the index must be from 0 to count - 1, and the count 1 or more")
    return index, count


def find_files(files: Any) -> tuple[Path, ...]:
    """Returns the files of a path, a pattern such as `train-*`, or a list of these; those of a pattern in order.

    Raises:
        DataError: A file does not exist, or a pattern matches none.
        ConfigError: It is none of these.
    """
    if isinstance(files, str | Path):
        files = [files]
    if not isinstance(files, Sequence) or not all(isinstance(each, str | Path) for each in files):
        raise ConfigError(f"files={files!r}: must be a path, a pattern such as 'data/train-*', or a list of these")
    if not files:
        raise DataError("files=[]: no file to read; give at least one")
    found: list[Path] = []
    for each in files:
        path = Path(each).expanduser()
        if not path.exists() and glob.has_magic(str(path)):
            matches = sorted(match for match in glob.glob(str(path)) if Path(match).is_file())
            if not matches:
                raise DataError(f"{each}: no file matches; {_neighbours(path)}")
            found += map(Path, matches)
        elif path.is_dir():
            raise DataError(f"{each}: is a folder; give its files, for instance {path}/*")
        elif not path.exists():
            raise DataError(f"{each}: no such file; {_neighbours(path)}")
        else:
            found.append(path)
    return tuple(found)


def _neighbours(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{folder} holds {', '.join(names[:_LISTED]) or 'nothing'}{more}"


class ShareReader:
    """Reads the records of a share, once, in the order of its files. Owned by one thread."""

    def __init__(
        self, paths: Sequence[Path], share: FileShare, compression: str | None, *, verify: bool = True
    ) -> None:
        self._paths, self._compression, self._verify = paths, compression, verify
        self._left = list(share.files)
        self._stride, self._phase = share.stride, share.offset
        self._reader: RecordReader | None = None
        self._block: list[tuple[bytes, int]] = []
        self._given = 0  # how many of the block have been returned

    def read(self, most: int) -> list[tuple[bytes, int]]:
        """Returns the next records with their places: at most `most`, at least one unless none is left.

        Raises:
            DataError: A file cannot be read, or a record is damaged.
        """
        if self._given == len(self._block):
            self._block, self._given = self._read_block(), 0
        first, self._given = self._given, min(self._given + most, len(self._block))
        return self._block[first : self._given]

    def skip(self, count: int) -> int:
        """Skips records; returns how many were skipped."""
        left = max(0, count - (len(self._block) - self._given))
        self._given += min(count, len(self._block) - self._given)
        while left and (reader := self._open()) is not None:
            skipped = reader.skip(left)
            left -= skipped
            if left:
                self._next_file(reader)
        return count - left

    def close(self) -> None:
        """Closes the open file, if any; nothing more can be read."""
        self._left.clear()
        self._block, self._given = [], 0
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read_block(self) -> list[tuple[bytes, int]]:
        while (reader := self._open()) is not None:
            if block := reader.read():
                return block
            self._next_file(reader)
        return []

    def _open(self) -> RecordReader | None:
        if self._reader is None and self._left:
            number = self._left.pop(0)
            self._reader = RecordReader(
                self._paths[number],
                self._compression,
                verify=self._verify,
                place=number << PLACE_BITS,
                stride=self._stride,
                phase=self._phase,
            )
        return self._reader

    def _next_file(self, reader: RecordReader) -> None:
        self._phase = reader.phase
        reader.close()
        self._reader = None
