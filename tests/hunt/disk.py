"""The run's folder as a disk that fills, frees up again, loses what was not synced and flips bits.

Files are real, in a folder of this run; what the product does to them goes through functions of `os` and `io` that are replaced for the
block. Nothing is really synced: a sync notes what would survive. What always holds: a dead process changes nothing; each change is a
moment at which its process may die; listings are sorted, so that a seed makes the same run on every file system.
"""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tests.hunt.world import Process, World

_REAL: dict[str, Any] = {
    name: getattr(os, name)
    for name in (
        "open", "close", "write", "writev", "ftruncate", "fsync", "fdatasync", "mkdir", "rename", "replace", "unlink", "rmdir",
        "listdir", "scandir",
    )
}  # fmt: skip
_open_file = io.open


class _Sorted:
    """What os.scandir returns, in order of names."""

    def __init__(self, found: Any) -> None:
        with found:
            self._entries = iter(sorted(found, key=lambda entry: entry.name))

    def __enter__(self) -> _Sorted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self._entries

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)

    def close(self) -> None:
        pass


class _File(io.FileIO):
    """A file that is written through the disk."""

    def __init__(self, disk: Disk, path: str, mode: str) -> None:
        self._disk, self._process = disk, disk.world.process
        disk.change(f"opening {os.path.basename(path)}")
        super().__init__(path, mode)
        disk.adopt(self.fileno(), path, self._process)
        if "w" in mode:
            disk.truncated(self.fileno())

    def write(self, data: Any, /) -> int:
        if self._process is not None and not self._process.alive:
            return len(data)  # what a dead process had not handed over is gone
        self._disk.change("writing")
        return super().write(self._disk.as_much_as_fits(memoryview(data).cast("B"), data)) or 0

    def close(self) -> None:
        if not self.closed:
            self._disk.forget(self.fileno())
        super().close()


class Disk:
    """The disk under one folder.

    Attributes:
        full_until: Until when nothing more can be written.
        changes: How many changes were made.
    """

    def __init__(self, world: World, folder: str) -> None:
        self.world, self.folder = world, folder
        world.folder = folder
        self.full_until, self.free_bytes = 0.0, 0
        self.changes = 0
        self._fds: dict[int, tuple[str, Process | None]] = {}
        self._ghosts: list[int] = []
        self._sizes: dict[int, int] = {}  # of files, by inode: how much of them was synced
        self._names: dict[int, dict[str, int]] = {}  # of folders, by inode: the names that were synced
        self._removed: dict[int, str] = {}  # files that are gone, but whose going was not synced: where they are kept
        self._null = _REAL["open"](os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._kept = f"{folder}.kept"
        os.makedirs(self._kept)

    # -- what the product does ----------------------------------------------------------------------------------------

    def change(self, what: str) -> None:
        """Something is about to be changed on disk, by the process that runs."""
        process = self.world.process
        if process is not None:
            process.effect(what)
        self.changes += 1

    def as_much_as_fits(self, view: memoryview, data: Any) -> Any:
        """Returns what of some bytes still fits.

        Raises:
            OSError: Nothing does.
        """
        if self.world.now >= self.full_until:
            return data
        if self.free_bytes <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fits = view[: self.free_bytes]
        self.free_bytes -= len(fits)
        return fits

    def _room(self) -> None:
        if self.world.now < self.full_until and self.free_bytes <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def adopt(self, fd: int, path: str, process: Process | None, *, owned: bool = False) -> None:
        """A descriptor of a file or folder was opened; it is closed when its process dies. `owned`: nothing else closes it then."""
        self._fds[fd] = path, process
        if process is not None:
            process.at_death.append(lambda: self._bury(fd, process, owned=owned))

    def forget(self, fd: int) -> None:
        """A descriptor is closed."""
        self._fds.pop(fd, None)

    def _bury(self, fd: int, process: Process, *, owned: bool) -> None:
        """Does what the system does for a dead process; the number stays taken, so that a late close harms nobody."""
        known = self._fds.get(fd)
        if known is not None and known[1] is process:
            del self._fds[fd]
            os.dup2(self._null, fd, inheritable=False)
            if owned:
                self._ghosts.append(fd)

    def truncated(self, fd: int) -> None:
        """A file begins anew."""
        self._sizes[os.fstat(fd).st_ino] = 0

    def synced(self, fd: int) -> None:
        """What a file holds, or the names in a folder, survive from now on."""
        self.change("syncing")
        about = os.fstat(fd)
        path = self._fds[fd][0]
        if os.path.isdir(path):
            self._names[about.st_ino] = self._names_in(path)
        else:
            self._sizes[about.st_ino] = about.st_size

    def _names_in(self, path: str) -> dict[str, int]:
        return {name: os.lstat(os.path.join(path, name)).st_ino for name in sorted(_REAL["listdir"](path))}

    def _inside(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)

    # -- what befalls it ----------------------------------------------------------------------------------------------

    def lose_power(self, seed: int) -> None:
        """Goes back to what was synced, and some of what was not."""
        r = random.Random(seed)
        for path, folders, files in sorted(os.walk(self.folder, topdown=False)):
            del folders
            for name in sorted(files):
                self._tear(os.path.join(path, name), r)
        synced = self._names.get(os.stat(self.folder).st_ino)
        if synced is not None and r.random() < 0.5:
            self._rename_back(synced)
        self._removed.clear()

    def _tear(self, path: str, r: random.Random) -> None:
        about = os.stat(path)
        kept = min(self._sizes.get(about.st_ino, 0), about.st_size)
        if kept < about.st_size and r.random() < 0.7:
            os.truncate(path, r.randint(kept, about.st_size) if r.random() < 0.5 else kept)

    def _rename_back(self, synced: Mapping[str, int]) -> None:
        """The names in the run's folder are as they were synced; what has none is gone."""
        now = {inode: name for name, inode in self._names_in(self.folder).items()}
        for name, inode in synced.items():
            target = os.path.join(self.folder, name)
            if now.get(inode) == name:
                continue
            if inode in now:
                aside = os.path.join(self._kept, f"{inode}.moved")
                _REAL["rename"](os.path.join(self.folder, now.pop(inode)), aside)
                if os.path.lexists(target):
                    self._remove(target)
                _REAL["rename"](aside, target)
            elif inode in self._removed and not os.path.lexists(target):
                _REAL["rename"](self._removed[inode], target)
        for name in _REAL["listdir"](self.folder):
            if name not in synced:
                self._remove(os.path.join(self.folder, name))

    @staticmethod
    def _remove(path: str) -> None:
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            _REAL["unlink"](path)

    def flip(self, seed: int) -> str:
        """Flips a bit in one of the files; returns in which."""
        r = random.Random(seed)
        found = sorted(str(path) for path in Path(self.folder).rglob("*") if path.is_file() and path.stat().st_size)
        if not found:
            return "no file yet"
        path = r.choice(found)
        at = r.randrange(os.path.getsize(path))
        fd = _REAL["open"](path, os.O_RDWR | os.O_CLOEXEC)
        byte = os.pread(fd, 1, at)[0] ^ (1 << r.randrange(8))
        os.pwrite(fd, bytes([byte]), at)
        _REAL["close"](fd)
        return os.path.relpath(path, self.folder)

    # -- what replaces functions of os and io -------------------------------------------------------------------------

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None or not self._inside(path):
            return _REAL["open"](path, flags, mode, dir_fd=dir_fd)
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if writes:
            self.change(f"opening {os.path.basename(path)}")
            self._room()
        fd = _REAL["open"](path, flags, mode)
        self.adopt(fd, os.fspath(path), self.world.process, owned=bool(writes))
        if flags & os.O_TRUNC:
            self.truncated(fd)
        return fd

    def _os_close(self, fd: int) -> None:
        self.forget(fd)
        if fd in self._ghosts:
            self._ghosts.remove(fd)
        _REAL["close"](fd)

    def _os_write(self, fd: int, data: Any) -> int:
        if fd not in self._fds:
            return _REAL["write"](fd, data)
        self.change("writing")
        return _REAL["write"](fd, self.as_much_as_fits(memoryview(data).cast("B"), data))

    def _os_writev(self, fd: int, pieces: Sequence[Any]) -> int:
        if fd not in self._fds:
            return _REAL["writev"](fd, pieces)
        return self._os_write(fd, b"".join(bytes(piece) for piece in pieces))

    def _os_ftruncate(self, fd: int, length: int) -> None:
        if fd in self._fds:
            self.change("truncating")
            inode = os.fstat(fd).st_ino
            self._sizes[inode] = min(self._sizes.get(inode, 0), length)
        _REAL["ftruncate"](fd, length)

    def _os_sync(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            if fd in self._fds:
                self.synced(fd)
            else:
                real(fd)

        return sync

    def _os_change(self, name: str) -> Callable[..., Any]:
        real = _REAL[name]

        def change(path: Any, *args: Any, **options: Any) -> Any:
            if self._inside(path) or options.get("dir_fd") in self._fds:
                self.change(f"{name} {os.path.basename(path)}")
                if name == "mkdir":
                    self._room()
                elif name == "unlink" and self._inside(path):
                    self._keep(os.fspath(path))
            return real(path, *args, **options)

        return change

    def _keep(self, path: str) -> None:
        """A file in the run's folder is removed: it may be there again after a loss of power."""
        if os.path.dirname(path) == self.folder and os.path.isfile(path):
            inode = os.stat(path).st_ino
            self._removed[inode] = kept = os.path.join(self._kept, str(inode))
            if not os.path.exists(kept):
                os.link(path, kept)

    def _io_open(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        if "b" not in mode or not (set(mode) & set("wa+x")) or not self._inside(file):
            return _open_file(file, mode, buffering, *args, **options)
        self._room_for(mode)
        raw = _File(self, os.fspath(file), mode.replace("b", ""))
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        return io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)

    def _room_for(self, mode: str) -> None:
        if "w" in mode or "x" in mode:
            self._room()

    def _save_file(self, tensors: Mapping[str, torch.Tensor], path: Any, metadata: Any = None) -> None:
        with io.open(path, "wb") as file:  # noqa: UP020 (the one that is replaced)
            file.write(safetensors.torch.save(dict(tensors), metadata))

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """The product's files are on this disk, for a block."""
        from tests.hunt.observe import replaced
        from torchquorum.formats import checkpoint_names, checkpoint_write, in_use

        changed = {name: self._os_change(name) for name in ("mkdir", "rename", "replace", "unlink", "rmdir")}
        changed |= {"open": self._os_open, "close": self._os_close, "write": self._os_write, "writev": self._os_writev}
        changed |= {"ftruncate": self._os_ftruncate, "fsync": self._os_sync(_REAL["fsync"])}
        changed |= {"fdatasync": self._os_sync(_REAL["fdatasync"])}
        changed["listdir"] = lambda path=".": sorted(_REAL["listdir"](path))
        changed["scandir"] = lambda path=".": _Sorted(_REAL["scandir"](path))
        tokens = random.Random(self.folder and 1)
        with ExitStack() as stack:
            for name, function in changed.items():
                stack.enter_context(replaced(os, name, function))
            stack.enter_context(replaced(io, "open", self._io_open))
            stack.enter_context(replaced(in_use, "_held", {}))  # the dead give nothing up when they are collected
            stack.enter_context(replaced(checkpoint_write, "save_file", self._save_file))
            stack.enter_context(replaced(checkpoint_names, "secrets", _Tokens(tokens)))
            yield

    def close(self) -> None:
        """Gives the descriptors of the dead up, and removes the files."""
        for fd in self._ghosts:
            _REAL["close"](fd)
        self._ghosts.clear()
        _REAL["close"](self._null)
        shutil.rmtree(self._kept, ignore_errors=True)


class _Tokens:
    """Stands for `secrets` where names of files are made."""

    def __init__(self, r: random.Random) -> None:
        self._random = r

    def token_hex(self, count: int) -> str:
        return f"{self._random.getrandbits(8 * count):0{2 * count}x}"
