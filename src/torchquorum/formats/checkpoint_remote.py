"""Checkpoints on an object store, which has no rename: first the parts, under unique names, then the manifest.

Called by `checkpoint_write` where the run's folder is remote. A part is written directly to `model.ckpt-N/`, with its writer's
name in its own; the manifest names the parts. What always holds: a checkpoint exists from the moment its manifest does, which
is one put; a second checkpoint of the same step has other parts, and replaces the manifest; removal begins with the manifest; a
part that no manifest names is removed once its writer is dead or has been silent for an hour.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchquorum.clock import SYSTEM, Clock
from torchquorum.formats.checkpoint import damage
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
from torchquorum.formats.checkpoint_names import (
    HIDDEN,
    OWNED,
    encode_manifest,
    free_name,
    is_abandoned,
    owned,
    with_owner,
)
from torchquorum.formats.scratch import scratch_folder
from torchquorum.formats.storage import RemotePath


def put_file(partial: RemotePath, name: str, save: Callable[[Path], FileInfo]) -> FileInfo:
    """Uploads a file of tensors; `save` first writes it to a temporary file on this host.

    Raises:
        OSError: It cannot be uploaded.
    """
    target, writer = _target(partial)
    with scratch_folder() as folder:
        file = folder / name
        info = save(file)
        (target / owned(name, writer)).put(file)
    return info


def publish_parts(partial: RemotePath, manifest: Manifest) -> None:
    """Publishes the uploaded parts as a checkpoint by uploading their manifest.

    Raises:
        CheckpointError: Parts are missing.
        OSError: The manifest cannot be uploaded.
    """
    target, writer = _target(partial)
    moved = with_owner(manifest, writer)
    check_files(target, moved)
    if (target / MANIFEST).is_file() and damage(target):
        move_checkpoint(target, free_name(target), writer=writer)
    (target / MANIFEST).write_bytes(encode_manifest(moved))


def abandon_parts(partial: RemotePath) -> None:
    """Removes, as far as possible, the parts of a checkpoint that is given up."""
    target, writer = _target(partial)
    with suppress(OSError):
        for entry in target.iterdir():
            match = OWNED.fullmatch(entry.name)
            if match and match[1] == writer:
                entry.unlink(missing_ok=True)


def remove_checkpoint(path: RemotePath) -> None:
    """Removes a checkpoint, the manifest first, so that no reader sees half of it.

    Raises:
        OSError: Something cannot be removed.
    """
    (path / MANIFEST).unlink(missing_ok=True)
    for entry in path.iterdir():
        entry.unlink(missing_ok=True)


def move_checkpoint(path: RemotePath, aside: RemotePath, *, writer: str = "") -> None:
    """Moves a checkpoint's objects to another folder, the manifest first; the parts of `writer` stay.

    Raises:
        OSError: Something cannot be moved; nothing is lost.
    """
    with suppress(FileNotFoundError):
        (path / MANIFEST).move_to(aside / MANIFEST)
    for entry in path.iterdir():
        match = OWNED.fullmatch(entry.name)
        if not (writer and match and match[1] == writer):
            entry.move_to(aside / entry.name)


def left_behind(folder: RemotePath, clock: Clock = SYSTEM) -> list[RemotePath]:
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
                continue  # damaged, but a checkpoint: pruned by age
            named = set[str]()
        for entry, match in parts:
            # A part may be removed meanwhile.
            with suppress(FileNotFoundError):
                if entry.name not in named and is_abandoned(match[2], int(match[3]), entry.stat().st_mtime, clock):
                    found.append(entry)
    return found


def _target(partial: RemotePath) -> tuple[RemotePath, str]:
    """Returns the folder of the checkpoint that is being written, and its writer's name."""
    match = HIDDEN.fullmatch(partial.name)
    assert match is not None, partial
    return partial.with_name(f"{PREFIX}{match[1]}"), match[3]
