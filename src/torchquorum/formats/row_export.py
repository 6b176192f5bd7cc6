"""What a checkpoint's tables hold, in numbers; and their keys and rows as one safetensors file, which loads without torchquorum.

Called by `torchquorum tables`. What always holds: a file has `NAME/keys` (int64) and `NAME/rows` for each table, in the order of keys;
int8 rows come with `NAME/scales`, one for each row: row = scale * int8.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from torchquorum.errors import ConfigError
from torchquorum.formats.checkpoint import CheckpointReader
from torchquorum.formats.checkpoint_manifest import Manifest
from torchquorum.formats.row_file import read_chain
from torchquorum.formats.storage import Location


@dataclass
class TableSize:
    """A table of one checkpoint, all shards together."""

    name: str
    dim: int
    optimizer: str
    rows: int = 0
    size_bytes: int = 0
    pulled: int = 0
    found: int = 0
    evicted: int = 0


def sizes(manifest: Manifest) -> list[TableSize]:
    """Returns the tables of a checkpoint."""
    found: dict[str, TableSize] = {}
    for stored in manifest.tables:
        size = found.setdefault(stored.name, TableSize(stored.name, stored.dim, stored.optimizer))
        for name in ("rows", "size_bytes", "pulled", "found", "evicted"):
            setattr(size, name, getattr(size, name) + int(stored.scalars.get(name, 0)))
    return list(found.values())


def export_rows(path: Location, target: str, dtype: str, only: str | None = None) -> Path:
    """Writes a checkpoint's keys and rows into a file.

    Raises:
        ConfigError: It has no such table, or the file's name is of another kind.
    """
    if not target.endswith(".safetensors"):
        raise ConfigError(f"{target}: the file must end in .safetensors")
    tensors: dict[str, torch.Tensor] = {}
    with CheckpointReader(path) as reader:
        names = sorted({stored.name for stored in reader.manifest.tables})
        if not names or (only is not None and only not in names):
            raise ConfigError(f"{path} has no table {only or ''}; it has {', '.join(names) or 'none'}")
        for name in names if only is None else [only]:
            parts = [
                read_chain([reader.file(file) for file in stored.files], name)
                for stored in reader.manifest.tables
                if stored.name == name
            ]
            keys, order = torch.cat([keys for keys, _ in parts]).sort()
            rows = torch.cat([rows for _, rows in parts])[order]
            tensors[f"{name}/keys"] = keys
            if dtype == "int8":
                scales = rows.abs().amax(1).clamp(min=1e-12) / 127
                tensors[f"{name}/scales"] = scales.float()
                rows = (rows / scales.unsqueeze(1)).round()
            tensors[f"{name}/rows"] = rows.to(getattr(torch, dtype)).contiguous()
    save_file(tensors, target, metadata={"format": "pt"})
    return Path(target)
