"""Where runs lie: a folder of this host, or an address that fsspec knows, such as s3://bucket/run1.

`locate` turns what a user gave into a `Location`: a `pathlib.Path`, or a `RemotePath` with as much of Path's ways as runs need.
Everything that reads or writes a run's folder goes through it. What always holds: an object of a remote place appears
whole or not at all, because it is put in one piece; nothing there is renamed or appended to; listings are never remembered;
whatever goes wrong is an OSError with an errno and a text.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from torchquorum.errors import ConfigError

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
_LOCAL = ("file", "local")
# What to install for the addresses that people use most; fsspec itself comes with torch.
EXTRAS = {"s3": "torchquorum[s3]", "s3a": "torchquorum[s3]", "gs": "torchquorum[gs]", "gcs": "torchquorum[gs]"}


class RemotePath:
    """A place on a file system of fsspec. Its text is its address.

    Args:
        fs: The file system.
        path: The place in its own words, such as bucket/run1.
        scheme: What the address begins with, such as s3.
    """

    __slots__ = ("_fs", "_path", "_scheme")

    def __init__(self, fs: Any, path: str, scheme: str) -> None:
        self._fs, self._path, self._scheme = fs, path.rstrip("/"), scheme

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
        return RemotePath(self._fs, f"{self._path}/{name}", self._scheme)

    @property
    def name(self) -> str:
        """Returns the last part."""
        return self._path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Returns the ending of the name, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """Returns the place that this one lies in."""
        return RemotePath(self._fs, self._path.rpartition("/")[0], self._scheme)

    def with_name(self, name: str) -> RemotePath:
        """Returns a place beside this one."""
        return self.parent / name

    def exists(self) -> bool:
        """Whether there is an object, or anything below."""
        with self._speaking():
            return bool(self._fs.exists(self._path))

    def is_dir(self) -> bool:
        """Whether there is anything below."""
        with self._speaking():
            return bool(self._fs.isdir(self._path))

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        with self._speaking():
            return bool(self._fs.isfile(self._path))

    def iterdir(self) -> Iterator[RemotePath]:
        """Returns what lies here, folders and objects.

        Raises:
            FileNotFoundError: Nothing does.
        """
        with self._speaking():
            found = self._fs.ls(self._path, detail=False)
        names = {str(entry).rstrip("/").rpartition("/")[2] for entry in found if str(entry).rstrip("/") != self._path}
        return iter([self / name for name in sorted(names)])

    def stat(self) -> os.stat_result:
        """Returns the kind, the size and the time of the last change, as os.stat does; the rest is 0."""
        with self._speaking():
            info = self._fs.info(self._path)
        mode = stat.S_IFDIR if info.get("type") == "directory" else stat.S_IFREG
        size, at = int(info.get("size") or 0), _changed_at(info)
        return os.stat_result((mode, 0, 0, 0, 0, 0, size, int(at), int(at), int(at), at, at, at))

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: what lies somewhere makes the folders above it."""

    def read_bytes(self) -> bytes:
        """Returns an object."""
        with self._speaking():
            return bytes(self._fs.cat_file(self._path))

    def read_text(self) -> str:
        """Returns an object as text."""
        return self.read_bytes().decode()

    def write_bytes(self, data: bytes) -> int:
        """Puts an object, whole, in the place of the one that was there."""
        with self._speaking():
            self._fs.pipe_file(self._path, data)
        return len(data)

    def put(self, file: Path) -> None:
        """Puts a file of this host here, whole."""
        with self._speaking():
            self._fs.put_file(str(file), self._path)

    def get(self, file: Path) -> None:
        """Fetches the object into a file of this host."""
        with self._speaking():
            self._fs.get_file(self._path, str(file))

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Removes an object."""
        with self._speaking(), suppress(*([FileNotFoundError] if missing_ok else [])):
            self._fs.rm_file(self._path)

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """Makes an OSError with a number and a text of whatever a file system says."""
        try:
            yield
        except FileNotFoundError as error:
            text = str(error) if "bucket" in str(error) and " " in str(error) else "there is no such object"
            raise FileNotFoundError(errno.ENOENT, text, str(self)) from error
        except PermissionError as error:
            raise PermissionError(errno.EACCES, _text(error), str(self)) from error
        except OSError as error:
            raise OSError(error.errno or errno.EIO, _text(error), str(self)) from error
        except Exception as error:  # every driver has errors of its own: no connection, no credentials
            raise OSError(errno.EIO, _text(error), str(self)) from error


Location = Path | RemotePath


def _text(error: BaseException) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {strerror or error}"


def _changed_at(info: dict[str, Any]) -> float:
    for name in ("LastModified", "mtime", "updated", "modified", "created"):
        value = info.get(name)
        if hasattr(value, "timestamp"):
            return float(value.timestamp())  # type: ignore[union-attr]
        if isinstance(value, int | float):
            return float(value)
    return time.time()  # unknown: then it is never taken for old


def is_there(folder: Location) -> bool:
    """Whether a folder exists.

    Raises:
        ConfigError: That cannot be told.
    """
    try:
        return folder.is_dir()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}; are address and credentials right?") from None


def is_remote(address: str | os.PathLike[str]) -> bool:
    """Whether a text is an address beyond this host's own files."""
    match = _ADDRESS.fullmatch(_mend(address))
    return match is not None and match["scheme"].lower() not in _LOCAL


def is_memory(address: str | os.PathLike[str]) -> bool:
    """Whether an address lies in the memory of one process."""
    return _mend(address).lower().startswith("memory://")


def locate(address: str | os.PathLike[str] | RemotePath) -> Location:
    """Returns the place that an address names: a local path, file://..., s3://..., gs://..., memory://...

    Raises:
        ConfigError: Nobody here knows such addresses; the message says what to install.
    """
    if isinstance(address, RemotePath):
        return address
    text = _mend(address)
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
            f"{text}: {scheme}:// needs a package that is not here ({error}); pip install '{install}'"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{text}: no such kind of address ({error}); use a path, file://, s3:// or gs://") from None
    return RemotePath(fs, str(path), scheme)


def absolute(address: str | os.PathLike[str]) -> str:
    """Returns an address that means the same in every folder: a path from the root, or the address as it is."""
    found = locate(address)
    return str(found.absolute()) if isinstance(found, Path) else str(found)


def _mend(address: str | os.PathLike[str]) -> str:
    text = os.fspath(address)
    if not isinstance(address, str):  # Path("s3://bucket/run") has lost a slash
        return re.sub(r"^([A-Za-z][A-Za-z0-9+.-]+):/(?=[^/])", r"\1://", text)
    return text


def sync_path(path: Path) -> None:
    """Waits until the disk has a file, or the names in a folder."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(target: Location, text: str) -> None:
    """Writes a text that readers see whole or not at all.

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
    """Tries whether a remote place can be written to, so that a run does not find out with its first checkpoint.

    Raises:
        ConfigError: It cannot.
    """
    if not isinstance(folder, RemotePath):
        return
    trial = folder / f".torchquorum-{secrets.token_hex(6)}"
    try:
        trial.write_bytes(b"")
        with suppress(OSError):
            trial.unlink()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to: {error.strerror}; is the bucket there, are the credentials set, and is "
            "AWS_ENDPOINT_URL right if it is set?"
        ) from None


def fetch(folder: RemotePath, into: Path, wanted: Callable[[str], bool]) -> None:
    """Copies the objects directly in a remote folder whose names are wanted into a local one, where they are newer or larger."""
    for entry in folder.iterdir():
        if wanted(entry.name) and entry.is_file():
            local = into / entry.name
            if not local.exists() or local.stat().st_size != entry.stat().st_size:
                draft = local.with_name(f".{local.name}.partial")
                entry.get(draft)
                draft.replace(local)
