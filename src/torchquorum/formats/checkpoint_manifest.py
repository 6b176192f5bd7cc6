"""The manifest of a checkpoint, and every check that it must pass before it is used.

Read by `checkpoint`, written by `checkpoint_write`. What always holds: a loaded manifest names only plain files of its own
folder, which exist with the recorded sizes; its slices cover every tensor exactly and fit into those files; its step is the one
in the folder's name.
"""

from __future__ import annotations

import errno
import hashlib
import math
import re
import stat
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch

from torchquorum.clock import SYSTEM
from torchquorum.errors import TorchQuorumError
from torchquorum.formats.storage import Location

FORMAT = 1
PREFIX = "model.ckpt-"
MANIFEST = "manifest.json"
# The dtypes that may be stored, and their names in a safetensors file.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
MAX_MANIFEST_BYTES = 1 << 28
STEP = r"(0|[1-9][0-9]{0,17})"
FOLDER = re.compile(re.escape(PREFIX) + STEP)
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")

Kind = Literal["variable", "optimizer", "average", "buffer"]
Count = Annotated[int, msgspec.Meta(ge=0)]


class CheckpointError(TorchQuorumError):
    """A checkpoint cannot be written, or is damaged."""


class UnreadableError(CheckpointError):
    """A checkpoint cannot be read now, and may be whole: no permission, no connection, a newer format."""


def reading_failed(path: Location, error: OSError) -> CheckpointError:
    """Returns what a failure to read a file means: that it is missing or damaged, or only out of reach."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return CheckpointError(f"{path} is missing: {error.strerror}")
    if error.errno == errno.EIO and isinstance(path, Path):
        return CheckpointError(f"{path} is damaged: its disk cannot read it ({error.strerror})")
    return UnreadableError(f"{path} cannot be read: {error.strerror}")


def release() -> str:
    """Returns the release of torchquorum that is running."""
    try:
        return metadata.version("torchquorum")
    except metadata.PackageNotFoundError:
        return "unknown"


class Spec(NamedTuple):
    """The shape of a tensor, and its dtype as torch names it, without the prefix."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Where the elements [start, stop) of one flattened tensor are stored.

    Attributes:
        kind: Whether it is a variable, a state of its optimizer, its moving average, or a buffer of the model.
        variable: The variable's or the buffer's name.
        state: The optimizer's name of the state ("exp_avg", "step"); for a worker's own buffer, the worker ("worker 1");
            empty otherwise.
        file: The file's name in the checkpoint's folder.
        key: The tensor's name in that file, where it has one dimension.
        start: The first element; 0 for a scalar.
        stop: The element after the last; 1 for a scalar.
        shape: The shape of the whole tensor.
        dtype: Its dtype as torch names it, without the prefix.
    """

    kind: Kind
    variable: str
    state: str = ""
    file: str
    key: str
    start: Count
    stop: Count
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
    dtype: str

    @property
    def spec(self) -> Spec:
        """Returns the spec of the whole tensor."""
        return Spec(self.shape, self.dtype)

    def __str__(self) -> str:
        return title(self.kind, self.variable, self.state)


class StoredTable(msgspec.Struct, frozen=True, kw_only=True):
    """One shard's rows of a table.

    Attributes:
        name: The table's name.
        files: The files with its rows: the first has all that there were, each of the others what has changed since the one before.
        rows: How many rows the last of them has.
        dim: How wide a row is.
        dtype: Its dtype as torch names it, without the prefix.
        optimizer: The name of its row optimizer.
        scalars: What else there is of it, as JSON types.
    """

    name: str
    files: list[str]
    rows: Count
    dim: Count
    dtype: str
    optimizer: str
    scalars: dict[str, Any] = {}


class FileInfo(msgspec.Struct, frozen=True):
    """The size and checksum of a file."""

    size_bytes: Count
    sha256: str


class Manifest(msgspec.Struct, kw_only=True):
    """The contents of a checkpoint.

    Attributes:
        format: The number of the format.
        step: The global step.
        created_at: When it was created, in seconds since the epoch; the machine's time, unless the writer gives another.
        torchquorum: The release that wrote it.
        num_ps: The number of ps tasks that wrote it; any number can read it.
        generation: The creation of the variables that it belongs to; the journal's files name theirs.
        plan: Rule, optimizer, schedule, as JSON types.
        scalars: Optimizer and schedule state that is not a tensor, as JSON types.
        pieces: Where every tensor is stored, except the buffers and the tables.
        tables: Where each shard's rows are stored.
        buffers: Where the model's buffers are stored, and those of each worker that differ from them.
        workers: Each worker's position in its data and its random state, as JSON types.
        data: For each share of data: its description, and which batches are part of the variables.
        nonfinite: The variables and tables that hold NaN or infinity.
        files: Every file except the manifest.
        checksum: Of the manifest itself, with this field empty; empty also in one of a release that wrote none.
    """

    format: int = FORMAT
    step: Count
    created_at: float = msgspec.field(default_factory=SYSTEM.wall)
    torchquorum: str = msgspec.field(default_factory=release)
    num_ps: Count
    generation: Count = msgspec.field(default=0, name="reign")
    plan: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    pieces: list[Stored]
    tables: list[StoredTable] = []
    buffers: list[Stored] = []
    workers: dict[str, dict[str, Any]] = {}
    data: dict[str, dict[str, Any]] = {}
    nonfinite: list[str] = []
    files: dict[str, FileInfo]
    checksum: str = ""

    @property
    def stored(self) -> list[Stored]:
        """Returns every piece of every tensor."""
        return [*self.pieces, *self.buffers]

    @property
    def place(self) -> int:
        """Returns how many updates it has, of all optimizers: with one, that is the step."""
        return self.step + sum(saved["version"] for saved in self.scalars.get("more", []))


class _Head(msgspec.Struct):
    format: int
    checksum: str = ""


class _Unsealed(Manifest, forbid_unknown_fields=True):
    """A manifest without a checksum: a name that nobody knows is then a sign of damage."""


_head = msgspec.json.Decoder(_Head)
_decoder, _unsealed = msgspec.json.Decoder(Manifest), msgspec.json.Decoder(_Unsealed)


def seal(text: bytes) -> bytes:
    """Returns a manifest's text with its checksum in it; without one, a flipped bit could be another plan, or another position."""
    return _with_checksum(text, "", hashlib.sha256(text).hexdigest())


def _with_checksum(text: bytes, before: str, checksum: str) -> bytes:
    """Returns a text with another checksum; the field is the last one."""
    parts = text.rsplit(f'"checksum": "{before}"'.encode(), 1)
    return f'"checksum": "{checksum}"'.encode().join(parts)


def load_manifest(path: Location) -> Manifest:
    """Reads a checkpoint's manifest, checks it, and checks that its files exist with the right sizes.

    Raises:
        CheckpointError: The manifest or a file is missing or damaged, or the format is unknown.
    """
    file = path / MANIFEST
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{file} is damaged: {status.st_size} bytes, not a file of a checkpoint")
        text = file.read_bytes()
    except OSError as error:
        raise reading_failed(file, error) from error
    try:
        head = _head.decode(text)
        if head.format != FORMAT:
            raise UnreadableError(
                f"{file} has format {head.format}; torchquorum {release()} reads format {FORMAT}: "
                "use the release that wrote it, or a newer one"
            )
        if head.checksum and hashlib.sha256(_with_checksum(text, head.checksum, "")).hexdigest() != head.checksum:
            raise ValueError("its checksum differs from the one in it")
        manifest = (_decoder if head.checksum else _unsealed).decode(text)
        for name in ("plan", "scalars", "workers"):
            setattr(manifest, name, _unpack(getattr(manifest, name)))
        check_manifest(manifest)
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    match = FOLDER.fullmatch(path.name)
    if match and int(match[1]) != manifest.step:
        raise CheckpointError(f"{path} holds step {manifest.step}: the folder was renamed; rename it back")
    check_files(path, manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Raises ValueError unless a manifest is consistent: names, ranges and sizes."""
    for name, info in manifest.files.items():
        if not _FILE.fullmatch(name):
            raise ValueError(f"file name {name[:100]!r}: only plain names that end in .safetensors are allowed")
        if not re.fullmatch(r"[0-9a-f]{64}", info.sha256):
            raise ValueError(f"{name} has no checksum")
    if any(p.kind == "buffer" for p in manifest.pieces) or any(p.kind != "buffer" for p in manifest.buffers):
        raise ValueError("the list of buffers must hold all buffers and nothing else")
    for table in manifest.tables:
        missing = [file for file in table.files if file not in manifest.files]
        if missing or not table.files:
            raise ValueError(f"table {table.name[:100]} is in {missing[:1]}, which is not in the list of files")
    tensors = by_tensor(manifest.stored)
    for (kind, variable, state), pieces in tensors.items():
        name = title(kind, variable, state)
        spec = pieces[0].spec
        if kind != "buffer" and (kind == "optimizer") != bool(state):
            raise ValueError(f"{name}: only an optimizer state has a state name")
        if kind not in ("variable", "buffer") and ("variable", variable, "") not in tensors:
            raise ValueError(f"{name} belongs to no variable")
        if kind == "buffer" and ("variable", variable, "") in tensors:
            raise ValueError(f"{name} has the name of a variable")
        if spec.dtype not in DTYPES:
            raise ValueError(f"{name}: dtype {spec.dtype[:30]!r}; allowed are {', '.join(DTYPES)}")
        reached = 0
        for piece in pieces:
            if piece.spec != spec:
                raise ValueError(f"{name} is {spec} in one slice and {piece.spec} in another")
            if piece.start != reached or piece.stop < piece.start:
                raise ValueError(f"{name}: a slice [{piece.start}, {piece.stop}) where element {reached} is next")
            reached = piece.stop
        if reached != spec.numel or (len(pieces) > 1 and any(p.start == p.stop for p in pieces)):
            raise ValueError(f"{name}: its slices end at element {reached} of {spec.numel}")
    room = {name: info.size_bytes for name, info in manifest.files.items()}
    keys = set[tuple[str, str]]()
    for piece in manifest.stored:
        if piece.file not in room:
            raise ValueError(f"{piece} is in {piece.file[:100]!r}, which is not in the list of files")
        if (piece.file, piece.key) in keys:
            raise ValueError(f"{piece} shares {piece.key[:100]!r} of {piece.file} with another tensor")
        keys.add((piece.file, piece.key))
        room[piece.file] -= (piece.stop - piece.start) * torch_dtype(piece.dtype).itemsize
        if room[piece.file] < 0:
            raise ValueError(f"{piece.file} is too small for its tensors, such as {piece}")


def check_files(path: Location, manifest: Manifest) -> None:
    """Raises CheckpointError unless the manifest's files are in the folder, with the right sizes."""
    for name, info in manifest.files.items():
        try:
            status = (path / name).stat()
        except OSError as error:
            raise reading_failed(path / name, error) from error
        if not stat.S_ISREG(status.st_mode) or status.st_size != info.size_bytes:
            raise CheckpointError(f"{path / name} has {status.st_size} bytes; {info.size_bytes} were written")


def pack(value: Any) -> Any:
    """Encodes infinities and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {k: pack(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [pack(v) for v in value]
    return {"~float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _unpack(value: Any) -> Any:
    if isinstance(value, dict):
        return float(value["~float"]) if value.keys() == {"~float"} else {k: _unpack(v) for k, v in value.items()}
    return [_unpack(v) for v in value] if isinstance(value, list) else value


def by_tensor(stored: Iterable[Stored]) -> dict[tuple[Kind, str, str], list[Stored]]:
    """Returns the pieces of each tensor, by kind, variable and state, in order."""
    found: dict[tuple[Kind, str, str], list[Stored]] = {}
    for piece in stored:
        found.setdefault((piece.kind, piece.variable, piece.state), []).append(piece)
    for pieces in found.values():
        pieces.sort(key=lambda piece: (piece.start, piece.stop))
    return found


def torch_dtype(name: str) -> torch.dtype:
    """Returns torch's dtype of that name."""
    return getattr(torch, name)


def title(kind: str, variable: str, state: str) -> str:
    """Returns the name of a tensor for messages."""
    titles = {"variable": "variable", "average": "moving average of", "optimizer": f"optimizer state {state[:100]} of"}
    titles["buffer"] = f"{state[:100]}'s buffer" if state else "buffer"
    return f"{titles[kind]} {variable[:100]}"
