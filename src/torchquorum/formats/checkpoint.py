"""A checkpoint on disk, as readers see it: the folder `model.ckpt-N`, its manifest and its tensors.

Asked by `session` when a run begins, by ps tasks for their shards and by the commands that list and export;
`checkpoint_write` makes what is read here. What always holds: N is the global step inside; every tensor is named by its
variable and stored as slices of its flattened form that cover it exactly, so any number of ps tasks can read it; nothing
in a manifest is believed before it is checked, no pickle is read, and only the elements asked for are read.
"""

from __future__ import annotations

import hashlib
import tempfile
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
    by_tensor,
    load_manifest,
    title,
    torch_dtype,
)
from torchquorum.formats.storage import Location, RemotePath

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "FileInfo",
    "Kind",
    "Manifest",
    "Reader",
    "Spec",
    "Stored",
    "list_checkpoints",
    "load_manifest",
    "newest_good",
    "verify",
]


class CheckpointInfo(msgspec.Struct, frozen=True):
    """One line of a list of checkpoints; `problem` says why it cannot be restored, as far as that is known."""

    step: int
    path: Location
    created_at: float
    size_bytes: int
    problem: str | None = None


def list_checkpoints(folder: Location) -> list[CheckpointInfo]:
    """Returns the checkpoints of a run's folder by step, with the problems that show without reading the tensors.

    In a remote folder, where the manifest is put last, what has none is no checkpoint: it is being written, or was left.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot list the checkpoints in {folder}: {error.strerror}; name a run's folder"
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
        with suppress(OSError):  # no folder, or going away while we look
            created_at = _made_at(path)
            size_bytes = sum(file.stat().st_size for file in path.iterdir())
        return CheckpointInfo(step, path, created_at, size_bytes, str(error))
    return CheckpointInfo(step, path, manifest.created_at, sum(f.size_bytes for f in manifest.files.values()))


def _made_at(path: Location) -> float:
    """Returns when a checkpoint with a problem was made: what its manifest says, if that can be read, or its file's time.

    Raises:
        OSError: There is no such checkpoint.
    """
    try:
        return msgspec.json.decode((path / MANIFEST).read_bytes(), type=_Made).created_at
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return (path / MANIFEST if isinstance(path, RemotePath) else path).stat().st_mtime


class _Made(msgspec.Struct):
    created_at: float


def age_order(info: CheckpointInfo) -> tuple[float, int]:
    """Sorts checkpoints by when they were made: a run that began anew in a used folder is newer at smaller steps."""
    return info.created_at, info.step


def newest_good(folder: Location) -> tuple[tuple[Location, Manifest] | None, list[CheckpointInfo]]:
    """Finds the newest checkpoint whose every byte is as it was written.

    Returns:
        Its path and manifest, or None where there is none; and the newer ones that were skipped, newest first, each with
        its problem.
    """
    skipped: list[CheckpointInfo] = []
    for info in sorted(list_checkpoints(folder), key=age_order, reverse=True):
        problem = info.problem or verify(info.path)
        if problem is None:
            return (info.path, load_manifest(info.path)), skipped
        skipped.append(msgspec.structs.replace(info, problem=problem))
    return None, skipped


def verify(path: Location) -> str | None:
    """Reads a whole checkpoint and returns what is wrong with it, naming the file, or None."""
    try:
        manifest = load_manifest(path)
        with Reader(path, manifest) as reader:
            for name, info in manifest.files.items():
                with reader.file(name).open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != info.sha256:
                        return f"{path / name} is damaged: its checksum is not the one in {MANIFEST}"
            for piece in manifest.stored:
                reader.open_slice(piece)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be read: {error}"
    return None


class Reader:
    """Reads ranges of tensors from a checkpoint, from as many files as they lie in; for one thread.

    The files of a remote checkpoint are fetched, each when it is first needed, into a temporary folder of this host.
    """

    def __init__(self, path: Location, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = load_manifest(path) if manifest is None else manifest
        self._tensors = by_tensor(self.manifest)
        self._files: dict[str, Any] = {}
        self._copies: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the files; they are opened again when needed."""
        while self._files:
            self._files.popitem()[1].__exit__(None, None, None)
        if self._copies is not None:
            self._copies.cleanup()
            self._copies = None

    def file(self, name: str) -> Path:
        """Returns where a file of the checkpoint lies on this host, fetching it if need be.

        Raises:
            OSError: It cannot be fetched.
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
        """Returns what each variable is."""
        return {name: p[0].spec for (kind, name, _), p in self._tensors.items() if kind == "variable"}

    def averages(self) -> dict[str, Spec]:
        """Returns what each moving average is, by variable."""
        return {name: p[0].spec for (kind, name, _), p in self._tensors.items() if kind == "average"}

    def buffers(self, owner: str = "") -> dict[str, Spec]:
        """Returns what each of the model's buffers is; with an owner, such as "worker 1", those that are its own."""
        return {name: p[0].spec for (kind, name, s), p in self._tensors.items() if (kind, s) == ("buffer", owner)}

    def states(self, variable: str) -> dict[str, Spec]:
        """Returns what each state of the variable's optimizer is."""
        return {s: p[0].spec for (kind, name, s), p in self._tensors.items() if (kind, name) == ("optimizer", variable)}

    def read(
        self,
        kind: Kind,
        variable: str,
        state: str = "",
        start: int = 0,
        stop: int | None = None,
        *,
        expect: Spec | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Reads the elements [start, stop) of a flattened tensor.

        Args:
            kind: Variable, optimizer, average or buffer.
            variable: The variable's or the buffer's name.
            state: The state's name, for kind optimizer; the owner, for a worker's own buffer.
            start: The first element.
            stop: The element after the last; None for the tensor's end.
            expect: What the whole tensor has to be; None takes it as it is.
            out: Where to, of one dimension and the right dtype; None makes a new tensor.

        Returns:
            A tensor of one dimension, with memory of its own or `out`.

        Raises:
            CheckpointError: There is no such tensor or element, it is not what was expected, or a file is damaged.
        """
        pieces, what = self._tensors.get((kind, variable, state)), title(kind, variable, state)
        if pieces is None:
            raise CheckpointError(f"{self.path} holds no {what}; was it saved from another model or optimizer?")
        spec = pieces[0].spec
        if expect is not None and spec != expect:
            raise CheckpointError(f"{what} is {spec} in {self.path} and {expect} here: another model was saved there")
        stop = spec.numel if stop is None else stop
        if not 0 <= start <= stop <= spec.numel:
            raise CheckpointError(f"{what} has {spec.numel} elements in {self.path}; [{start}, {stop}) was asked for")
        if out is None:
            out = torch.empty(stop - start, dtype=torch_dtype(spec.dtype))
        assert out.shape == (stop - start,) and out.dtype == torch_dtype(spec.dtype), (out.shape, out.dtype)
        reached = start
        for piece in pieces:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                if first != reached:
                    break
                values = self.open_slice(piece)[first - piece.start : last - piece.start]
                out[first - start : last - start].copy_(values)
                reached = last
        if reached != stop:
            raise CheckpointError(f"{what}: element {reached} of {spec.numel} is missing in {self.path}")
        return out

    def state_dict(self, *, averages: bool = False) -> dict[str, torch.Tensor]:
        """Returns every variable and every buffer of the model, whole and in its shape, under each of its names.

        The moving average stands in a variable's place where that is asked for and it is kept.
        """
        averaged = self.averages() if averages else {}
        if averages and not averaged:
            raise CheckpointError(f"{self.path} holds no moving averages; leave them out, or train with them")
        found = {
            name: self.read("average" if name in averaged else "variable", name).view(spec.shape)
            for name, spec in self.variables().items()
        }
        tied = self.manifest.plan.get("tied", {})
        for name, first in tied.items() if isinstance(tied, dict) else ():
            if isinstance(first, str) and first in found and name not in found:
                found[name] = found[first].clone()  # a file of safetensors holds no tensor twice
        for name, spec in self.buffers().items():
            found[name] = self.read("buffer", name).view(spec.shape)
        return found

    def open_slice(self, piece: Stored) -> Any:
        """Returns safetensors' lazy slice of a stored piece, of which nothing has been read yet."""
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
