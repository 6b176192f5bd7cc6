"""Files that a checkpoint has in common with the one before it: hard links, so that each is whole by itself and is removed by itself.

Called by the shard whose files they are. What always holds: either all of the files are in the new folder, or none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torchquorum.formats.checkpoint_manifest import FileInfo
from torchquorum.formats.checkpoint_names import HIDDEN, owned
from torchquorum.formats.storage import Location


def share_files(base: Location, written_in: str, partial: Location, files: Mapping[str, FileInfo]) -> bool:
    """Puts files of a published checkpoint into one that is being written.

    Args:
        base: The published one.
        written_in: The folder in which it was written, whose name its files may have in theirs.
        partial: The one that is being written.
        files: Which.

    Returns:
        Whether they are there: not on an object store, nor where the file system has no hard links.
    """
    match = HIDDEN.fullmatch(Path(written_in).name)
    if not isinstance(base, Path) or not isinstance(partial, Path) or match is None:
        return False
    made: list[Path] = []
    try:
        for name, info in files.items():
            source = base / name if (base / name).exists() else base / owned(name, match[6])
            if source.stat().st_size != info.size_bytes:
                raise OSError(f"{source} has changed")
            os.link(source, partial / name)
            made.append(partial / name)
    except OSError:
        for path in made:
            with suppress(OSError):
                path.unlink()
        return False
    return True
