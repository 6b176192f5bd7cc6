"""Checkpoints on an object store, which has no rename: parts first, under names of their own, and the manifest last.

Called by `checkpoint_write` where the run's folder is remote. A part goes straight to `model.ckpt-N/` with its writer's name
in its own; the manifest names the parts. What always holds: a checkpoint exists from the moment its manifest does, which is
one put; a second one of the same step has other parts, and the manifest is what changes over; removing begins with the
manifest; what no manifest names is nobody's, and goes when its writer is dead or has been silent for an hour.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchquorum.formats.checkpoint_manifest import (
    FOLDER,
    MANIFEST,
    PREFIX,
    CheckpointError,
    FileInfo,
    Manifest,
    check_files,
    load_manifest,
)
from torchquorum.formats.checkpoint_names import HIDDEN, OWNED, encode_manifest, is_abandoned, owned, with_owner
from torchquorum.formats.scratch import scratch_folder
from torchquorum.formats.storage import RemotePath


def put_file(partial: RemotePath, name: str, save: Callable[[Path], FileInfo]) -> FileInfo:
    """Puts a file of tensors; `save` writes it to a temporary file of this host first.

    Raises:
        OSError: It cannot be put.
    """
    target, writer = _target(partial)
    with scratch_folder() as folder:
        file = folder / name
        info = save(file)
        (target / owned(name, writer)).put(file)
    return info


def publish_parts(partial: RemotePath, manifest: Manifest) -> None:
    """Makes a checkpoint of the parts that were put, by putting their manifest.

    Raises:
        CheckpointError: Parts are missing.
        OSError: The manifest cannot be put.
    """
    target, writer = _target(partial)
    moved = with_owner(manifest, writer)
    check_files(target, moved)
    (target / MANIFEST).write_bytes(encode_manifest(moved))


def abandon_parts(partial: RemotePath) -> None:
    """Removes, as far as possible, the parts of a checkpoint that will not be."""
    target, writer = _target(partial)
    with suppress(OSError):
        for entry in target.iterdir():
            match = OWNED.fullmatch(entry.name)
            if match and match[1] == writer:
                entry.unlink(missing_ok=True)


def remove_checkpoint(path: RemotePath) -> None:
    """Removes a checkpoint, the manifest first, so that no reader meets half of it.

    Raises:
        OSError: Something cannot be removed.
    """
    (path / MANIFEST).unlink(missing_ok=True)
    for entry in path.iterdir():
        entry.unlink(missing_ok=True)


def left_behind(folder: RemotePath) -> list[RemotePath]:
    """Returns the parts that no manifest names and whose writers are gone.

    Raises:
        OSError: The folder cannot be listed.
    """
    found: list[RemotePath] = []
    for path in folder.iterdir():
        if FOLDER.fullmatch(path.name) is None:
            continue
        parts = [(entry, match) for entry in path.iterdir() if (match := OWNED.fullmatch(entry.name))]
        try:
            named = load_manifest(path).files.keys()
        except CheckpointError:
            if (path / MANIFEST).exists():
                continue  # damaged, but a checkpoint: it goes when its time has come
            named = set[str]()
        for entry, match in parts:
            # A part may go while we look; then it is no longer left behind.
            with suppress(FileNotFoundError):
                if entry.name not in named and is_abandoned(match[2], int(match[3]), entry.stat().st_mtime):
                    found.append(entry)
    return found


def _target(partial: RemotePath) -> tuple[RemotePath, str]:
    """Returns the folder of the checkpoint that is being made, and its writer's name."""
    match = HIDDEN.fullmatch(partial.name)
    assert match is not None, partial
    return partial.with_name(f"{PREFIX}{match[1]}"), match[3]
