"""Writes checkpoints: parts into a hidden folder, then one rename; removes old ones; exports.

On an object store `checkpoint_remote` does the same with a manifest that is written last.

One task calls `begin`, every ps task `write_part` in that folder, the first task `publish` and `prune`; `torchquorum export`
calls `export`. What always holds: a folder `model.ckpt-N` is complete from the moment it exists, whenever the writer or the
machine dies; no older checkpoint is touched before a newer one is complete; what a dead writer left has a hidden name and is
removed later; a checkpoint that is known to be damaged is moved aside, never removed or written over. Tensors are only read;
callers must not change them meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import ConfigError
from torchquorum.formats.checkpoint import CheckpointReader, age_order, damage, list_checkpoints, verify
from torchquorum.formats.checkpoint_manifest import (
    MANIFEST,
    PREFIX,
    CheckpointError,
    FileInfo,
    Kind,
    Manifest,
    check_files,
    check_manifest,
)
from torchquorum.formats.checkpoint_names import (
    HIDDEN,
    encode_manifest,
    free_name,
    hidden,
    is_abandoned,
    owned,
    with_owner,
)
from torchquorum.formats.checkpoint_remote import (
    abandon_parts,
    left_behind,
    move_checkpoint,
    publish_parts,
    put_file,
    remove_checkpoint,
)
from torchquorum.formats.storage import Location, RemotePath, sync_path

_L = TypeVar("_L", bound=Location)

KEEP = 5
BUFFERS = "buffers.safetensors"
SAFE = " Older checkpoints are untouched."
EXPORTS = (".safetensors", ".pt")
_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space there or use another folder",
    errno.EDQUOT: "the quota is used up: free some space there or use another folder",
    errno.EFBIG: "files may not be that large there: raise the limit (ulimit -f) or use another folder",
    errno.EROFS: "the file system is read-only: make it writable or use another folder",
    errno.EACCES: "this user may not write there: change the permissions or use another folder",
    errno.EPERM: "this user may not write there: change the permissions or use another folder",
    errno.ENOENT: "it does not exist: was it removed, and do all ps tasks see the same folder?",
}


def part_name(shard: int, num_shards: int) -> str:
    """Returns the name of a shard's file."""
    return f"part-{shard:05d}-of-{num_shards:05d}.safetensors"


def tensor_key(kind: Kind, variable: str, state: str = "", start: int = 0) -> str:
    """Returns the key of a tensor in a file, unique in a checkpoint."""
    return "/".join((kind, variable, state, str(start)))


def begin(folder: _L, step: int) -> _L:
    """Creates the hidden folder in which a checkpoint of the run in `folder` is written.

    Raises:
        CheckpointError: It cannot be created.
    """
    assert step >= 0, step
    partial = hidden(folder, step, "partial")
    with _reporting(f"beginning the checkpoint of step {step} in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    return partial


def write_part(partial: Location, shard: int, num_shards: int, tensors: Mapping[str, torch.Tensor]) -> FileInfo:
    """Writes one shard's tensors, flattened, and waits until they are on disk.

    safetensors writes without copying and releases the GIL; the checksum is that of the written file. May run on any
    thread, if the tensors do not change meanwhile.

    Args:
        partial: The folder that `begin` returned, here or in another task.
        shard: The ps task's index.
        num_shards: The number of ps tasks.
        tensors: By key; contiguous, or they are copied.

    Returns:
        The manifest's entry for the file `part_name(shard, num_shards)`.

    Raises:
        CheckpointError: It cannot be written; the unfinished checkpoint is removed.
    """
    return write_tensors(partial, part_name(shard, num_shards), tensors)


def write_tensors(partial: Location, name: str, tensors: Mapping[str, torch.Tensor]) -> FileInfo:
    """Writes a file of tensors, as `write_part` does, with a given name."""
    # Scalars may share one tensor under several keys, which safetensors refuses.
    flat = {k: t.detach().reshape(-1) if t.dim() else t.detach().reshape(1).clone() for k, t in tensors.items()}
    with _reporting(f"writing {name} of the checkpoint in {partial}", partial):
        if isinstance(partial, RemotePath):
            return put_file(partial, name, lambda file: _save(flat, file))
        path = partial / name
        info = _save(flat, path)
        path.chmod(partial.stat().st_mode & 0o666)  # safetensors creates files that only the owner can read
        sync_path(path)
        return info


def write_file(partial: Location, name: str, write: Callable[[Path], None]) -> FileInfo:
    """Writes a file of a checkpoint by a function that is given its path; returns the manifest's entry for it.

    Raises:
        CheckpointError: It cannot be written; the unfinished checkpoint is removed.
    """
    with _reporting(f"writing {partial / name}", partial):
        if isinstance(partial, RemotePath):
            return put_file(partial, name, lambda file: _written(write, file))
        path = partial / name
        info = _written(write, path)
        sync_path(path)
        return info


def _written(write: Callable[[Path], None], path: Path) -> FileInfo:
    write(path)
    return _digest(path)


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> FileInfo:
    save_file(dict(tensors), path)
    return _digest(path)


def _digest(path: Path) -> FileInfo:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileInfo(os.fstat(file.fileno()).st_size, digest)


def publish(partial: _L, manifest: Manifest) -> _L:
    """Publishes the written parts as a checkpoint; when it returns, the checkpoint survives a power loss.

    An existing checkpoint of the same step is replaced without a moment in which neither can be read: the new parts are
    moved beside the old ones under other names, then the manifest is replaced.

    Raises:
        CheckpointError: It cannot be written, or parts are missing; the unfinished checkpoint is removed.
    """
    match = HIDDEN.fullmatch(partial.name)
    assert match and int(match[1]) == manifest.step, (partial.name, manifest.step)
    target = cast(_L, partial.with_name(f"{PREFIX}{manifest.step}"))
    with _reporting(f"publishing {target}", partial):
        try:
            check_manifest(manifest)
        except ValueError as error:
            raise CheckpointError(f"publishing {target}: the parts are not complete: {error}") from error
        if isinstance(partial, RemotePath):
            publish_parts(partial, manifest)
            return target
        assert isinstance(partial, Path) and isinstance(target, Path)
        check_files(partial, manifest)
        _write_manifest(partial, manifest)
        try:
            partial.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if damage(target) is None:
                _replace(partial, target, manifest, token=match[6])
            else:
                set_aside(target)
                partial.rename(target)
        sync_path(target.parent)
    return target


def _replace(partial: Path, target: Path, manifest: Manifest, *, token: str) -> None:
    moved = with_owner(manifest, token)
    _write_manifest(partial, moved)
    for name in manifest.files:
        (partial / name).rename(target / owned(name, token))
    sync_path(target)
    (partial / MANIFEST).replace(target / MANIFEST)
    sync_path(target)
    abandon(partial)
    for file in target.iterdir():
        if file.name != MANIFEST and file.name not in moved.files:
            with suppress(OSError):  # readers ignore it, and it is removed with the checkpoint
                file.unlink()


def set_aside(path: _L) -> _L:
    """Moves a damaged checkpoint out of the way, to a name that is no checkpoint's; returns where it is now.

    Raises:
        OSError: It cannot be moved.
    """
    aside = free_name(path)
    if isinstance(path, RemotePath):
        assert isinstance(aside, RemotePath)
        move_checkpoint(path, aside)
    else:
        path.rename(str(aside))
    return aside


def abandon(partial: Location) -> None:
    """Removes, as far as possible, a checkpoint that will not be published."""
    assert HIDDEN.fullmatch(partial.name), partial
    if isinstance(partial, RemotePath):
        abandon_parts(partial)
        return
    shutil.rmtree(partial, ignore_errors=True)


def prune(folder: Location, keep: int = KEEP, *, clock: Clock = SYSTEM) -> list[Location]:
    """Removes old checkpoints, and what writers that died left behind.

    Keeps the newest `keep` that can be restored, and everything newer than the oldest of these; damaged ones do not count, and
    older ones that are known to be damaged are moved aside. If all that are kept hold NaN or infinity, the newest that does not is
    kept too.
    An unfinished one is removed when its writer is dead, or when nothing in it has changed for an hour.

    Returns:
        The removed paths.

    Raises:
        CheckpointError: Something cannot be removed.
    """
    if keep < 1:
        raise ConfigError(f"keep={keep}: must be 1 or more, otherwise nothing could be restored")
    infos = sorted(list_checkpoints(folder), key=age_order)
    good = [age_order(info) for info in infos if info.problem is None]
    older = [info for info in infos if len(good) >= keep and age_order(info) < good[-keep]]
    kept = next((info for info in reversed(infos) if info.problem is None and not info.nonfinite), None)
    old = [info.path for info in older if info.problem is None and info is not kept]
    with _reporting(f"removing old checkpoints in {folder}", note=""):
        for info in older:
            if info.problem is not None and info.in_reach:
                set_aside(info.path)
        if isinstance(folder, RemotePath):
            return _prune_remote(folder, [path for path in old if isinstance(path, RemotePath)], clock)
        for path in old:
            # Rename first: a half removed checkpoint must not have a name that readers look for.
            aside = hidden(folder, int(path.name.removeprefix(PREFIX)), "removed")
            assert isinstance(path, Path)
            path.rename(aside)
            _remove(aside)
        left = clear_left_behind(folder, clock=clock)
    return [*old, *left]


def clear_left_behind(folder: Path, *, clock: Clock = SYSTEM) -> list[Path]:
    """Removes the unfinished checkpoints of dead writers in a run's folder; returns their paths."""
    left = [path for path in folder.iterdir() if _is_left_behind(path, clock)] if folder.is_dir() else []
    for path in left:
        _remove(path)
    return left


def _prune_remote(folder: RemotePath, old: list[RemotePath], clock: Clock) -> list[Location]:
    for path in old:
        remove_checkpoint(path)
    left = left_behind(folder, clock)
    for part in left:
        part.unlink(missing_ok=True)
    return [*old, *left]


def export(path: Location, target: Location, *, averages: bool = False) -> Location:
    """Writes a checkpoint's variables and buffers as a plain state_dict, which loads without torchquorum.

    Args:
        path: The checkpoint; it is verified first.
        target: A file ending in .safetensors or .pt; an existing one is replaced.
        averages: Writes the moving averages instead of the variables.

    Raises:
        CheckpointError: The checkpoint is damaged or has no averages, or the file cannot be written.
    """
    if target.suffix not in EXPORTS:
        raise CheckpointError(f"{target}: the file must end in {' or '.join(EXPORTS)}")
    if problem := verify(path):
        raise CheckpointError(f"{problem}; export another checkpoint")
    with CheckpointReader(path) as reader:
        values = reader.state_dict(averages=averages)
    if isinstance(target, RemotePath):
        with _reporting(f"writing {target}", note=""), tempfile.TemporaryDirectory(prefix="torchquorum-") as folder:
            target.put(_export(values, Path(folder) / target.name))
        return target
    return _export(values, target)


def _export(values: dict[str, torch.Tensor], target: Path) -> Path:
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with _reporting(f"writing {target}", note=""):
            with draft.open("wb") as file:  # gives the file the user's default permissions
                if target.suffix == ".pt":
                    # For other programs, which load it with weights_only=True; torchquorum never reads it.
                    torch.save(values, file)  # noqa: TID251
            if target.suffix == ".safetensors":
                mode = draft.stat().st_mode
                save_file(values, draft, metadata={"format": "pt"})
                draft.chmod(mode)
            sync_path(draft)
            draft.replace(target)
            sync_path(target.parent)
    finally:
        draft.unlink(missing_ok=True)
    return target


@contextmanager
def _reporting(doing: str, partial: Location | None = None, *, note: str = SAFE) -> Iterator[None]:
    """Turns errors of the file system into CheckpointErrors with advice, and removes the partial folder on any failure."""
    try:
        yield
    except BaseException as error:
        if partial is not None:
            abandon(partial)
        if not isinstance(error, OSError | SafetensorError | RuntimeError):
            raise
        cause: BaseException = error
        while not isinstance(cause, OSError) and cause.__context__ is not None:  # torch.save raises its own error
            cause = cause.__context__
        told = re.search(r"\(os error (\d+)\)", str(cause))  # safetensors gives errno only in its text
        number = cause.errno if isinstance(cause, OSError) else int(told[1]) if told else None
        advice = _ADVICE.get(number or 0, "check that folder, or use another one")
        stop = "" if advice.endswith("?") else "."
        raise CheckpointError(f"{doing} failed: {cause}; {advice}{stop}{note}") from error


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    with (folder / MANIFEST).open("wb") as file:
        file.write(encode_manifest(manifest))
        file.flush()
        os.fsync(file.fileno())
    sync_path(folder)


def _is_left_behind(path: Path, clock: Clock) -> bool:
    match = HIDDEN.fullmatch(path.name)
    if not match:
        return False
    try:
        changed_at = max(p.lstat().st_mtime for p in (path, *path.iterdir()))
    except OSError:  # another task is removing it
        return False
    return is_abandoned(match[4], int(match[5]), changed_at, clock)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        with suppress(FileNotFoundError):  # another task has removed it
            shutil.rmtree(path)
