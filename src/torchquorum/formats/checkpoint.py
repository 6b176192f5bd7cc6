"""Reads checkpoints: the folder `model.ckpt-N`, its manifest and its tensors.

Called by `session` when a run begins, by ps tasks for their shards and by the commands that list and export;
`checkpoint_write` writes them. What always holds: N is the global step; every tensor is named by its variable and stored as
slices of its flattened form that cover it exactly, so any number of ps tasks can read it; a manifest is checked before it is
used; no pickle is read; only the requested elements are read.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from torchquorum.formats.checkpoint_manifest import (
    DTYPES,
    FOLDER,
    MANIFEST,
    CheckpointError,
    FileInfo,
    Kind,
    Manifest,
    Spec,
    Stored,
    UnreadableError,
    by_tensor,
    load_manifest,
    reading_failed,
    torch_dtype,
)
from torchquorum.formats.row_file import KEYS, VALUES, read_rows
from torchquorum.formats.storage import Location, RemotePath
from torchquorum.formats.stored_tensors import StoredTensors

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointReader",
    "FileInfo",
    "Kind",
    "Manifest",
    "Spec",
    "Stored",
    "UnreadableError",
    "damage",
    "list_checkpoints",
    "load_manifest",
    "newest_good",
    "next_created_at",
    "verify",
]


class CheckpointInfo(msgspec.Struct, frozen=True):
    """A checkpoint in a list; `problem` says why it cannot be restored, as far as known; `nonfinite` what holds NaN or infinity."""

    step: int
    path: Location
    created_at: float
    size_bytes: int
    problem: str | None = None
    in_reach: bool = True  # otherwise it cannot be read now, and may be whole
    nonfinite: list[str] = []


def list_checkpoints(folder: Location) -> list[CheckpointInfo]:
    """Returns the checkpoints of a run's folder by step, with the problems that are found without reading the tensors.

    In a remote folder the manifest is written last: a folder without one is incomplete or abandoned, and is not listed.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot list the checkpoints in {folder}: {error.strerror}; give a run's folder"
        ) from error
    found = [(int(match[1]), folder / name) for name in names if (match := FOLDER.fullmatch(name))]
    if isinstance(folder, RemotePath):
        found = [(step, path) for step, path in found if _has_manifest(path)]
    return [_inspect(step, path) for step, path in sorted(found)]


def _has_manifest(path: Location) -> bool:
    try:
        return (path / MANIFEST).is_file()
    except OSError as error:
        raise CheckpointError(f"cannot list the checkpoints in {path.parent}: {error.strerror}") from error


def _inspect(step: int, path: Location) -> CheckpointInfo:
    try:
        manifest = load_manifest(path)
    except CheckpointError as error:
        created_at, size_bytes = 0.0, 0
        with suppress(OSError):  # no folder, or removed meanwhile
            created_at = _made_at(path)
            size_bytes = sum(file.stat().st_size for file in path.iterdir())
        return CheckpointInfo(step, path, created_at, size_bytes, str(error), not isinstance(error, UnreadableError))
    size_bytes = sum(f.size_bytes for f in manifest.files.values())
    return CheckpointInfo(step, path, manifest.created_at, size_bytes, nonfinite=manifest.nonfinite)


def _made_at(path: Location) -> float:
    """Returns when a checkpoint with a problem was created: from its manifest if that can be read, else from its file.

    Where the manifest is missing, its removal has changed the folder's time: the newest of the other files tells.

    Raises:
        OSError: There is no such checkpoint.
    """
    try:
        return msgspec.json.decode((path / MANIFEST).read_bytes(), type=_Made).created_at
    except FileNotFoundError:
        return max((file.stat().st_mtime for file in path.iterdir()), default=path.stat().st_mtime)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return (path / MANIFEST if isinstance(path, RemotePath) else path).stat().st_mtime


class _Made(msgspec.Struct):
    created_at: float


def age_order(info: CheckpointInfo) -> tuple[float, int]:
    """Sort key by creation time: a run that starts again in a used folder is newer at smaller steps."""
    return info.created_at, info.step


def next_created_at(folder: Location, wall: float) -> float:
    """Returns when a checkpoint that is made now counts as created: after all others in its folder, even if the clock went back."""
    return max([wall, *(info.created_at + 0.001 for info in list_checkpoints(folder))])


def newest_good(folder: Location) -> tuple[tuple[Location, Manifest] | None, list[CheckpointInfo]]:
    """Finds the newest checkpoint whose checksums are all right.

    Returns:
        Its path and manifest, or None if there is none; and the newer ones that were skipped because they are damaged,
        newest first, each with its problem.

    Raises:
        UnreadableError: A newer one cannot be read now, and may be whole.
    """
    skipped: list[CheckpointInfo] = []
    for info in sorted(list_checkpoints(folder), key=age_order, reverse=True):
        problem = info.problem or damage(info.path)
        if not info.in_reach:
            raise UnreadableError(f"{problem}; it may be whole")
        if problem is None:
            return (info.path, load_manifest(info.path)), skipped
        skipped.append(msgspec.structs.replace(info, problem=problem))
    return None, skipped


def verify(path: Location) -> str | None:
    """Reads a whole checkpoint; returns its problem, with the file's name, or None."""
    try:
        return damage(path)
    except UnreadableError as error:
        return str(error)


def damage(path: Location) -> str | None:
    """Reads a whole checkpoint; returns what is damaged or missing, with the file's name, or None.

    Raises:
        UnreadableError: It cannot be read now, and may be whole.
    """
    try:
        manifest = load_manifest(path)
        with CheckpointReader(path, manifest) as reader:
            for name, info in manifest.files.items():
                with reader.file(name).open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != info.sha256:
                        return f"{path / name} is damaged: its checksum differs from the one in {MANIFEST}"
            for piece in manifest.stored:
                reader.open_slice(piece)
    except UnreadableError:
        raise
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        failed = reading_failed(path, error)
        if isinstance(failed, UnreadableError):
            raise failed from error
        return str(failed)
    return None


class CheckpointReader(StoredTensors):
    """Reads ranges of tensors from a checkpoint, across its files; for one thread.

    The files of a remote checkpoint are copied to a temporary folder of this host when they are first needed.
    """

    def __init__(self, path: Location, manifest: Manifest | None = None) -> None:
        self.path = self.where = path
        self.manifest = load_manifest(path) if manifest is None else manifest
        self.tensors = by_tensor(self.manifest.stored)
        self._files: dict[str, Any] = {}
        self._copies: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; they are opened again when needed."""
        while self._files:
            self._files.popitem()[1].__exit__(None, None, None)
        if self._copies is not None:
            self._copies.cleanup()
            self._copies = None

    def file(self, name: str) -> Path:
        """Returns the path of a file of the checkpoint on this host, copying it if needed.

        Raises:
            OSError: It cannot be copied.
        """
        if not isinstance(self.path, RemotePath):
            return self.path / name
        if self._copies is None:
            self._copies = tempfile.TemporaryDirectory(prefix="torchquorum-checkpoint-")
        copy = Path(self._copies.name) / name
        if not copy.exists():
            draft = copy.with_name(f".{name}.partial")
            (self.path / name).get(draft)
            draft.replace(copy)
        return copy

    def variables(self) -> dict[str, Spec]:
        """Returns the spec of each variable."""
        return {name: p[0].spec for (kind, name, _), p in self.tensors.items() if kind == "variable"}

    def buffers(self, owner: str = "") -> dict[str, Spec]:
        """Returns the spec of each buffer of the model; with an owner, such as "worker 1", of that worker's own buffers."""
        return {name: p[0].spec for (kind, name, s), p in self.tensors.items() if (kind, s) == ("buffer", owner)}

    def state_dict(self, *, averages: bool = False) -> dict[str, torch.Tensor]:
        """Returns every variable and buffer of the model, in its shape, under each of its names.

        With `averages`, a variable's moving average replaces it where there is one.
        """
        averaged = self.averages() if averages else {}
        if averages and not averaged:
            raise CheckpointError(f"{self.path} holds no moving averages; export the variables, or train with averages")
        found = {
            name: self.read("average" if name in averaged else "variable", name).view(spec.shape)
            for name, spec in self.variables().items()
        }
        found |= self._whole_tables()
        tied = self.manifest.plan.get("tied", {})
        for name, first in tied.items() if isinstance(tied, dict) else ():
            if isinstance(first, str) and first in found and name not in found:
                found[name] = found[first].clone()  # safetensors refuses tensors that share memory
        for name, spec in self.buffers().items():
            found[name] = self.read("buffer", name).view(spec.shape)
        return found

    def _whole_tables(self) -> dict[str, torch.Tensor]:
        """Returns the tables that were whole parameters before the run, as those."""
        found: dict[str, torch.Tensor] = {}
        plans = [self.manifest.plan, *self.manifest.plan.get("more", [])]
        sizes = {s["name"]: s["rows"] for of in plans for s in of.get("tables", []) if s["is_fixed"]}
        for stored in self.manifest.tables:
            if stored.name in sizes:
                shape = (sizes[stored.name], stored.dim)
                whole = found.setdefault(stored.name, torch.zeros(shape, dtype=torch_dtype(stored.dtype)))
                for name in stored.files:
                    for chunk in self.rows(name, stored.name):
                        whole[chunk[KEYS]] = chunk[VALUES]
        return found

    def rows(self, file: str, table: str) -> Iterator[dict[str, torch.Tensor]]:
        """Yields a table's rows of a file some at a time, by column."""
        return read_rows(self.file(file), table)

    def open_slice(self, piece: Stored) -> Any:
        """Returns safetensors' lazy slice of a stored piece, before any element is read."""
        try:
            if piece.file not in self._files:
                self._files[piece.file] = safe_open(self.file(piece.file), framework="pt").__enter__()
            found = self._files[piece.file].get_slice(piece.key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / piece.file} is damaged: {piece} cannot be read: {error}") from error
        came, due = (found.get_dtype(), found.get_shape()), (DTYPES[piece.dtype], [piece.stop - piece.start])
        if came != due:
            raise CheckpointError(f"{self.path / piece.file} is damaged: {piece} is {came} there, not {due}")
        return found
