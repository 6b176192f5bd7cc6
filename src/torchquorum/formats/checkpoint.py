"""A checkpoint on disk, as readers see it: the folder `model.ckpt-N`, its manifest and its tensors.

Asked by `session` when a run begins, by ps tasks for their shards and by the commands that list and export;
`checkpoint_write` makes what is read here. What always holds: N is the global step inside; every tensor is named by its
variable and stored as slices of its flattened form that cover it exactly, so any number of ps tasks can read it; nothing
in a manifest is believed before it is checked, no pickle is read, and only the elements asked for are read.
"""

from __future__ import annotations

import hashlib
import math
import re
import stat
import time
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open

import torchquorum
from torchquorum.errors import TorchQuorumError

FORMAT = 1
PREFIX = "model.ckpt-"
MANIFEST = "manifest.json"
# The dtypes that may be stored, and what a safetensors file calls them.
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
_FOLDER = re.compile(re.escape(PREFIX) + STEP)
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")

Kind = Literal["variable", "optimizer", "average"]
Count = Annotated[int, msgspec.Meta(ge=0)]


class CheckpointError(TorchQuorumError):
    """A checkpoint cannot be written, or is not what it has to be."""


class Spec(NamedTuple):
    """What a tensor is: its shape, and its dtype as torch names it, without the prefix."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Where the elements [start, stop) of one flattened tensor lie.

    Attributes:
        kind: Whether it is a variable, a state of its optimizer or its moving average.
        variable: The variable's name.
        state: What the optimizer calls the state ("exp_avg", "step"); empty for the other kinds.
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
        """Returns what the whole tensor is."""
        return Spec(self.shape, self.dtype)

    def __str__(self) -> str:
        return _title(self.kind, self.variable, self.state)


class FileInfo(msgspec.Struct, frozen=True):
    """What a file must be, to be the one that was written."""

    size_bytes: Count
    sha256: str


class Manifest(msgspec.Struct, kw_only=True):
    """What a checkpoint holds.

    Attributes:
        format: The format's number.
        step: The global step.
        created_at: When it was made, in seconds since the epoch.
        torchquorum: The release that wrote it.
        num_ps: The number of ps tasks that wrote it; readers need not care.
        plan: Rule, optimizer, schedule: as the caller gave it, in JSON's types.
        scalars: Optimizer and schedule state that is no tensor, in JSON's types.
        pieces: Where every tensor lies.
        workers: Each worker's position in its data and its random state, in JSON's types.
        files: Every file but the manifest.
    """

    format: int = FORMAT
    step: Count
    created_at: float = msgspec.field(default_factory=time.time)
    torchquorum: str = torchquorum.__version__
    num_ps: Count
    plan: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    pieces: list[Stored]
    workers: dict[str, dict[str, Any]] = {}
    files: dict[str, FileInfo]


class CheckpointInfo(msgspec.Struct, frozen=True):
    """One line of a list of checkpoints; `problem` says why it cannot be restored, as far as that is known."""

    step: int
    path: Path
    created_at: float
    size_bytes: int
    problem: str | None = None


class _Head(msgspec.Struct):
    format: int


_head = msgspec.json.Decoder(_Head)
_decoder = msgspec.json.Decoder(Manifest)


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """Returns the checkpoints of a run's folder by step, with the problems that show without reading the tensors."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot list the checkpoints in {folder}: {error.strerror}; name a run's folder"
        ) from error
    found = [(int(match[1]), folder / name) for name in names if (match := _FOLDER.fullmatch(name))]
    return [_inspect(step, path) for step, path in sorted(found)]


def _inspect(step: int, path: Path) -> CheckpointInfo:
    try:
        manifest = load_manifest(path)
    except CheckpointError as error:
        try:
            created_at = path.stat().st_mtime
            size_bytes = sum(file.lstat().st_size for file in path.iterdir())
        except OSError:  # no folder, or going away while we look
            created_at, size_bytes = 0.0, 0
        return CheckpointInfo(step, path, created_at, size_bytes, str(error))
    return CheckpointInfo(step, path, manifest.created_at, sum(f.size_bytes for f in manifest.files.values()))


def newest_good(folder: Path) -> tuple[tuple[Path, Manifest] | None, list[CheckpointInfo]]:
    """Finds the newest checkpoint whose every byte is as it was written.

    Returns:
        Its path and manifest, or None where there is none; and the newer ones that were skipped, newest first, each with
        its problem.
    """
    skipped: list[CheckpointInfo] = []
    for info in reversed(list_checkpoints(folder)):
        problem = info.problem or verify(info.path)
        if problem is None:
            return (info.path, load_manifest(info.path)), skipped
        skipped.append(msgspec.structs.replace(info, problem=problem))
    return None, skipped


def verify(path: Path) -> str | None:
    """Reads a whole checkpoint and returns what is wrong with it, naming the file, or None."""
    try:
        manifest = load_manifest(path)
        for name, info in manifest.files.items():
            with (path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != info.sha256:
                    return f"{path / name} is damaged: its checksum is not the one in {MANIFEST}"
        with Reader(path, manifest) as reader:
            for piece in manifest.pieces:
                reader.open_slice(piece)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be read: {error}"
    return None


def load_manifest(path: Path) -> Manifest:
    """Reads a checkpoint's manifest and checks it, and that its files are there with the right sizes.

    Raises:
        CheckpointError: The manifest or a file is missing or damaged, or the format is not known here.
    """
    file = path / MANIFEST
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{file} is damaged: {status.st_size} bytes, no file of a checkpoint")
        text = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    try:
        found = _head.decode(text).format
        if found != FORMAT:
            raise CheckpointError(
                f"{file} has format {found}; torchquorum {torchquorum.__version__} reads format {FORMAT}: "
                "use the release that wrote it, or a newer one"
            )
        manifest = _decoder.decode(text)
        for name in ("plan", "scalars", "workers"):
            setattr(manifest, name, _unpack(getattr(manifest, name)))
        check_manifest(manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    match = _FOLDER.fullmatch(path.name)
    if match and int(match[1]) != manifest.step:
        raise CheckpointError(f"{path} holds step {manifest.step}: somebody renamed it; rename it back")
    check_files(path, manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Raises ValueError unless a manifest is consistent in itself: names, ranges and sizes."""
    for name, info in manifest.files.items():
        if not _FILE.fullmatch(name):
            raise ValueError(f"file name {name[:100]!r}: only plain names that end in .safetensors are allowed")
        if not re.fullmatch(r"[0-9a-f]{64}", info.sha256):
            raise ValueError(f"{name} has no checksum")
    tensors = _by_tensor(manifest)
    for (kind, variable, state), pieces in tensors.items():
        title = _title(kind, variable, state)
        spec = pieces[0].spec
        if (kind == "optimizer") != bool(state):
            raise ValueError(f"{title}: only a state of the optimizer has a name of its own")
        if kind != "variable" and ("variable", variable, "") not in tensors:
            raise ValueError(f"{title} belongs to no variable")
        if spec.dtype not in DTYPES:
            raise ValueError(f"{title}: dtype {spec.dtype[:30]!r}; allowed are {', '.join(DTYPES)}")
        reached = 0
        for piece in pieces:
            if piece.spec != spec:
                raise ValueError(f"{title} is {spec} in one slice and {piece.spec} in another")
            if piece.start != reached or piece.stop < piece.start:
                raise ValueError(f"{title}: a slice [{piece.start}, {piece.stop}) where element {reached} is next")
            reached = piece.stop
        if reached != spec.numel or (len(pieces) > 1 and any(p.start == p.stop for p in pieces)):
            raise ValueError(f"{title}: its slices end at element {reached} of {spec.numel}")
    room = {name: info.size_bytes for name, info in manifest.files.items()}
    keys = set[tuple[str, str]]()
    for piece in manifest.pieces:
        if piece.file not in room:
            raise ValueError(f"{piece} lies in {piece.file[:100]!r}, which is not in the list of files")
        if (piece.file, piece.key) in keys:
            raise ValueError(f"{piece} shares {piece.key[:100]!r} of {piece.file} with another tensor")
        keys.add((piece.file, piece.key))
        room[piece.file] -= (piece.stop - piece.start) * _torch_dtype(piece.dtype).itemsize
        if room[piece.file] < 0:
            raise ValueError(f"{piece.file} is too small for its tensors, of which {piece} is one")


def check_files(path: Path, manifest: Manifest) -> None:
    """Raises CheckpointError unless the manifest's files are in the folder, with the right sizes."""
    for name, info in manifest.files.items():
        try:
            status = (path / name).stat()
        except OSError as error:
            raise CheckpointError(f"{path / name} is missing: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode) or status.st_size != info.size_bytes:
            raise CheckpointError(f"{path / name} has {status.st_size} bytes; {info.size_bytes} were written")


class Reader:
    """Reads ranges of tensors from a checkpoint, from as many files as they lie in; for one thread."""

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = load_manifest(path) if manifest is None else manifest
        self._tensors = _by_tensor(self.manifest)
        self._files: dict[str, Any] = {}

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

    def variables(self) -> dict[str, Spec]:
        """Returns what each variable is."""
        return {name: p[0].spec for (kind, name, _), p in self._tensors.items() if kind == "variable"}

    def averages(self) -> dict[str, Spec]:
        """Returns what each moving average is, by variable."""
        return {name: p[0].spec for (kind, name, _), p in self._tensors.items() if kind == "average"}

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
            kind: Variable, optimizer or average.
            variable: The variable's name.
            state: The state's name, for kind optimizer.
            start: The first element.
            stop: The element after the last; None for the tensor's end.
            expect: What the whole tensor has to be; None takes it as it is.
            out: Where to, of one dimension and the right dtype; None makes a new tensor.

        Returns:
            A tensor of one dimension, with memory of its own or `out`.

        Raises:
            CheckpointError: There is no such tensor or element, it is not what was expected, or a file is damaged.
        """
        pieces, title = self._tensors.get((kind, variable, state)), _title(kind, variable, state)
        if pieces is None:
            raise CheckpointError(f"{self.path} holds no {title}; was it saved from another model or optimizer?")
        spec = pieces[0].spec
        if expect is not None and spec != expect:
            raise CheckpointError(f"{title} is {spec} in {self.path} and {expect} here: another model was saved there")
        stop = spec.numel if stop is None else stop
        if not 0 <= start <= stop <= spec.numel:
            raise CheckpointError(f"{title} has {spec.numel} elements in {self.path}; [{start}, {stop}) was asked for")
        if out is None:
            out = torch.empty(stop - start, dtype=_torch_dtype(spec.dtype))
        assert out.shape == (stop - start,) and out.dtype == _torch_dtype(spec.dtype), (out.shape, out.dtype)
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
            raise CheckpointError(f"{title}: element {reached} of {spec.numel} is missing in {self.path}")
        return out

    def state_dict(self, *, averages: bool = False) -> dict[str, torch.Tensor]:
        """Returns every variable whole and in its shape, with the moving average in its place where asked and kept."""
        averaged = self.averages() if averages else {}
        if averages and not averaged:
            raise CheckpointError(f"{self.path} holds no moving averages; leave them out, or train with them")
        return {
            name: self.read("average" if name in averaged else "variable", name).view(spec.shape)
            for name, spec in self.variables().items()
        }

    def open_slice(self, piece: Stored) -> Any:
        """Returns safetensors' lazy slice of a stored piece, of which nothing has been read yet."""
        try:
            if piece.file not in self._files:
                self._files[piece.file] = safe_open(self.path / piece.file, framework="pt").__enter__()
            found = self._files[piece.file].get_slice(piece.key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / piece.file} is damaged: {piece} cannot be read: {error}") from error
        came, due = (found.get_dtype(), found.get_shape()), (DTYPES[piece.dtype], [piece.stop - piece.start])
        if came != due:
            raise CheckpointError(f"{self.path / piece.file} is damaged: {piece} is {came} there, not {due}")
        return found


def pack(value: Any) -> Any:
    """Makes infinities and NaN, which JSON does not know, something that it does."""
    if isinstance(value, dict):
        return {k: pack(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [pack(v) for v in value]
    return {"~float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _unpack(value: Any) -> Any:
    if isinstance(value, dict):
        return float(value["~float"]) if value.keys() == {"~float"} else {k: _unpack(v) for k, v in value.items()}
    return [_unpack(v) for v in value] if isinstance(value, list) else value


def _by_tensor(manifest: Manifest) -> dict[tuple[Kind, str, str], list[Stored]]:
    found: dict[tuple[Kind, str, str], list[Stored]] = {}
    for piece in manifest.pieces:
        found.setdefault((piece.kind, piece.variable, piece.state), []).append(piece)
    for pieces in found.values():
        pieces.sort(key=lambda piece: (piece.start, piece.stop))
    return found


def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _title(kind: str, variable: str, state: str) -> str:
    titles = {"variable": "variable", "average": "moving average of", "optimizer": f"optimizer state {state[:100]} of"}
    return f"{titles[kind]} {variable[:100]}"
