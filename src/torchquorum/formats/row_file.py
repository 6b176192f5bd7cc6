"""Files of rows: the tables of one shard in safetensors, written and read some rows at a time.

Written by the saver, read by shards that are restored, by exports and commands. What always holds: a file needs no more memory than
some rows of one table, in either direction; it is an ordinary safetensors file, whose tensors are named `TABLE/COLUMN`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from torchquorum.formats.checkpoint_manifest import DTYPES

Chunk = Mapping[str, npt.NDArray[Any]]
KEYS, STAMPS, VALUES = "keys", "versions", "rows"
SIGHTED, TIMES, REMOVED = "sighted", "times", "removed"
READ_ROWS = 1 << 16


class RowSource(Protocol):
    """A table as it is to be written."""

    @property
    def name(self) -> str:
        """Returns the table's name."""
        ...

    def columns(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Returns the dtype and shape of each column; the first dimension of those that `chunks` yields is the number of rows."""
        ...

    def chunks(self) -> Iterator[Chunk]:
        """Yields some rows of the columns at a time; the others with the first."""
        ...


def part_file(shard: int, num_shards: int, changes: int = 0) -> str:
    """Returns the name of a shard's file of rows: all of them, or the nth with changes."""
    nth = f"-changes-{changes:03d}" if changes else ""
    return f"rows-{shard:05d}-of-{num_shards:05d}{nth}.safetensors"


def write_rows(path: Path, sources: Sequence[RowSource]) -> None:
    """Writes tables into a file."""
    header, places, offset = dict[str, Any](), dict[str, int](), 0
    for source in sources:
        for column, (dtype, shape) in source.columns().items():
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            key = f"{source.name}/{column}"
            header[key] = {"dtype": DTYPES[dtype.name], "shape": list(shape), "data_offsets": [offset, offset + size]}
            places[key], offset = offset, offset + size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(begin + offset)
        for source in sources:
            for chunk in source.chunks():
                for column, values in chunk.items():
                    key = f"{source.name}/{column}"
                    data = np.ascontiguousarray(values)
                    file.seek(begin + places[key])
                    file.write(data.reshape(-1).view(np.uint8).data)
                    places[key] += data.nbytes
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path, table: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yields a table's rows some at a time, by column; with the first also what there is beside rows."""
    with safe_open(path, framework="pt") as file:
        columns = [name.rpartition("/")[2] for name in file.keys() if name.rpartition("/")[0] == table]  # noqa: SIM118
        slices = {name: file.get_slice(f"{table}/{name}") for name in columns}
        count = slices[KEYS].get_shape()[0]
        beside = {name: slices.pop(name)[:] for name in (SIGHTED, TIMES, REMOVED) if name in slices}
        for start in range(0, max(count, 1), READ_ROWS):
            yield {**beside, **{name: found[start : start + READ_ROWS] for name, found in slices.items()}}
            beside = {}


def read_chain(files: Sequence[Path], table: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and the values of a table's rows: all of the first file, with the changes of the others in their order."""
    keys, rows = torch.empty(0, dtype=torch.int64), None
    for path in files:
        chunks = list(read_rows(path, table))
        changed = torch.cat([chunk[KEYS] for chunk in chunks])
        gone = torch.cat([changed, *(chunk[REMOVED] for chunk in chunks if REMOVED in chunk)])
        kept = ~torch.isin(keys, gone)
        keys = torch.cat([keys[kept], changed])
        rows = torch.cat([*([rows[kept]] if rows is not None else []), *(chunk[VALUES] for chunk in chunks)])
    assert rows is not None, "a table has a file"
    return keys, rows
