"""Where runs are stored: a folder of this host, or an address that fsspec supports, such as s3://bucket/run1.

`locate` turns a user's text into a `Location`: a `pathlib.Path`, or a `RemotePath` with the methods of Path that runs need. Every
access to a run's folder goes through it. What always holds: a remote object appears complete or not at all, because it is
uploaded in one piece; remote objects are never renamed or appended to; listings are not cached; every failure is an OSError
with an errno and a text.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import ConfigError

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
_LOCAL = ("file", "local")
# What to install for the most common addresses; fsspec itself comes with torch.
EXTRAS = {"s3": "torchquorum[s3]", "s3a": "torchquorum[s3]", "gs": "torchquorum[gs]", "gcs": "torchquorum[gs]"}


class RemotePath:
    """A path on a file system of fsspec; `str()` gives its address.

    Args:
        fs: The file system.
        path: The path there, such as bucket/run1.
        scheme: The scheme of the address, such as s3.
        clock: Used for objects whose time of change is unknown.
    """

    __slots__ = ("_clock", "_fs", "_path", "_scheme")

    def __init__(self, fs: Any, path: str, scheme: str, clock: Clock = SYSTEM) -> None:
        self._fs, self._path, self._scheme, self._clock = fs, path.rstrip("/"), scheme, clock

    def __str__(self) -> str:
        return f"{self._scheme}://{self._path.lstrip('/')}"

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: RemotePath) -> bool:
        return str(self) < str(other)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._fs, f"{self._path}/{name}", self._scheme, self._clock)

    @property
    def name(self) -> str:
        """Returns the last component."""
        return self._path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Returns the ending of the name, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """Returns the parent path."""
        return RemotePath(self._fs, self._path.rpartition("/")[0], self._scheme, self._clock)

    def with_name(self, name: str) -> RemotePath:
        """Returns a path beside this one."""
        return self.parent / name

    def exists(self) -> bool:
        """Whether there is an object, or anything below."""
        with self._translating_errors():
            return bool(self._fs.exists(self._path))

    def is_dir(self) -> bool:
        """Whether there is anything below."""
        with self._translating_errors():
            return bool(self._fs.isdir(self._path))

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        with self._translating_errors():
            return bool(self._fs.isfile(self._path))

    def iterdir(self) -> Iterator[RemotePath]:
        """Returns the folders and objects in this folder.

        Raises:
            FileNotFoundError: There are none.
        """
        with self._translating_errors():
            found = self._fs.ls(self._path, detail=False)
        names = {str(entry).rstrip("/").rpartition("/")[2] for entry in found if str(entry).rstrip("/") != self._path}
        return iter([self / name for name in sorted(names)])

    def stat(self) -> os.stat_result:
        """Returns the kind, the size and the time of the last change, as os.stat does; the rest is 0."""
        with self._translating_errors():
            info = self._fs.info(self._path)
        mode = stat.S_IFDIR if info.get("type") == "directory" else stat.S_IFREG
        size, at = int(info.get("size") or 0), _changed_at(info, self._clock)
        return os.stat_result((mode, 0, 0, 0, 0, 0, size, int(at), int(at), int(at), at, at, at))

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: an object store creates folders with their objects."""

    def read_bytes(self) -> bytes:
        """Returns the bytes of an object."""
        with self._translating_errors():
            return bytes(self._fs.cat_file(self._path))

    def read_text(self) -> str:
        """Returns an object as text."""
        return self.read_bytes().decode()

    def write_bytes(self, data: bytes) -> int:
        """Uploads an object in one piece, replacing an existing one."""
        with self._translating_errors():
            self._fs.pipe_file(self._path, data)
        return len(data)

    def put(self, file: Path) -> None:
        """Uploads a file of this host in one piece."""
        with self._translating_errors():
            self._fs.put_file(str(file), self._path)

    def get(self, file: Path) -> None:
        """Downloads the object to a file of this host."""
        with self._translating_errors():
            self._fs.get_file(self._path, str(file))

    def move_to(self, target: RemotePath) -> None:
        """Gives an object another name: copies it on the store, then removes it."""
        with self._translating_errors():
            self._fs.copy(self._path, target._path)
            self._fs.rm_file(self._path)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Removes an object."""
        with self._translating_errors(), suppress(*([FileNotFoundError] if missing_ok else [])):
            self._fs.rm_file(self._path)

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        """Turns every error of a file system into an OSError with an errno and a text."""
        try:
            yield
        except FileNotFoundError as error:
            text = str(error) if "bucket" in str(error) and " " in str(error) else "no such object"
            raise FileNotFoundError(errno.ENOENT, text, str(self)) from error
        except PermissionError as error:
            raise PermissionError(errno.EACCES, _text(error), str(self)) from error
        except OSError as error:
            raise OSError(error.errno or errno.EIO, _text(error), str(self)) from error
        except Exception as error:  # drivers raise their own errors: no connection, no credentials
            raise OSError(errno.EIO, _text(error), str(self)) from error


Location = Path | RemotePath


def _text(error: BaseException) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {strerror or error}"


def _changed_at(info: dict[str, Any], clock: Clock) -> float:
    for name in ("LastModified", "mtime", "updated", "modified", "created"):
        value = info.get(name)
        if hasattr(value, "timestamp"):
            return float(value.timestamp())  # type: ignore[union-attr]
        if isinstance(value, int | float):
            return float(value)
    return clock.wall()  # unknown: never treated as old


def is_there(folder: Location) -> bool:
    """Whether a folder exists.

    Raises:
        ConfigError: The folder cannot be read.
    """
    try:
        return folder.is_dir()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}; check the address and the credentials") from None


def is_remote(address: str | os.PathLike[str]) -> bool:
    """Whether a text is an address that is not a local path."""
    match = _ADDRESS.fullmatch(_restore_slash(address))
    return match is not None and match["scheme"].lower() not in _LOCAL


def is_memory(address: str | os.PathLike[str]) -> bool:
    """Whether an address is in the memory of one process."""
    return _restore_slash(address).lower().startswith("memory://")


def locate(address: str | os.PathLike[str] | RemotePath, clock: Clock = SYSTEM) -> Location:
    """Returns the place that an address names: a local path, file://..., s3://..., gs://..., memory://...

    Raises:
        ConfigError: The kind of address is not supported; the message says what to install.
    """
    if isinstance(address, RemotePath):
        return address
    text = _restore_slash(address)
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return Path(text)
    scheme = match["scheme"].lower()
    if scheme in _LOCAL:
        return Path(match["rest"])
    if not match["rest"].strip("/"):
        raise ConfigError(f"{text}: must name a folder, such as {scheme}://bucket/run1")
    try:
        import fsspec.core

        fs, path = fsspec.core.url_to_fs(f"{scheme}://{match['rest']}", use_listings_cache=False)
    except ImportError as error:
        install = EXTRAS.get(scheme, f"what fsspec needs for {scheme}://")
        raise ConfigError(
            f"{text}: {scheme}:// needs a package that is not installed ({error}); pip install '{install}'"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{text}: unknown kind of address ({error}); use a path, file://, s3:// or gs://") from None
    return RemotePath(fs, str(path), scheme, clock)


def absolute(address: str | os.PathLike[str]) -> str:
    """Returns an absolute path, or a remote address unchanged."""
    found = locate(address)
    return str(found.absolute()) if isinstance(found, Path) else str(found)


def _restore_slash(address: str | os.PathLike[str]) -> str:
    text = os.fspath(address)
    if not isinstance(address, str):  # Path("s3://bucket/run") has lost a slash
        return re.sub(r"^([A-Za-z][A-Za-z0-9+.-]+):/(?=[^/])", r"\1://", text)
    return text


def sync_path(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(target: Location, text: str) -> None:
    """Writes a text atomically.

    Raises:
        OSError: It cannot be written.
    """
    if isinstance(target, RemotePath):
        target.write_bytes(text.encode())
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def check_writable(folder: Location) -> None:
    """Checks that a folder can be written to, or created, before the first checkpoint. A full disk may have room again later.

    Raises:
        ConfigError: It cannot.
    """
    name = f".torchquorum-{secrets.token_hex(6)}"
    if not isinstance(folder, RemotePath):
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        try:
            (there / name).mkdir()
            (there / name).rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                below = "" if there == folder.absolute() else f" below {there}"
                raise ConfigError(
                    f"{folder} cannot be written to: {error.strerror}{below}; give a run folder that this user may write"
                ) from None
        return
    trial = folder / name
    try:
        trial.write_bytes(b"")
        with suppress(OSError):
            trial.unlink()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to: {error.strerror}; check that the bucket exists, the credentials are set, and "
            "AWS_ENDPOINT_URL is right if it is set"
        ) from None


def fetch(folder: RemotePath, into: Path, wanted: Callable[[str], bool]) -> None:
    """Copies the wanted objects of a remote folder to a local one, unless they are there with the same size."""
    for entry in folder.iterdir():
        if wanted(entry.name) and entry.is_file():
            local = into / entry.name
            if not local.exists() or local.stat().st_size != entry.stat().st_size:
                draft = local.with_name(f".{local.name}.partial")
                entry.get(draft)
                draft.replace(local)
