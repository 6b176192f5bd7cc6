"""What a process holds: children, threads, descriptors, shared memory, files in the folder for temporary ones.

`tests/conftest.py` compares two `Holdings` around every test. What always holds: only what belongs to this pytest process
counts, whoever else runs tests on the machine; processes are told apart by their parent and by a mark in their
environment, segments in /dev/shm by who holds them or by the owner in their name, temporary files by a folder of this
process's own.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.process.zygote import zygote_pid, zygote_socket

SHM = Path("/dev/shm")
PROC = Path("/proc")

# Children inherit it, so an orphan whose parent was killed is still known as ours.
MARK = "TORCHQUORUM_TEST_OWNER"

# Folders in memory, which nobody holds open, and what is lost on purpose: their name says whose they are, see `owner`.
NAMED = re.compile(r"(?:fuzz|tq-lost)-(\d+)-")

# Python's own servants, which live until the interpreter ends; those that a Ray of several tests keeps ready, without an actor.
SERVANTS = (
    b"multiprocessing.resource_tracker",
    b"multiprocessing.forkserver",
    b"ray::IDLE",
    b"ray/_private/workers/default_worker.py",
)
THREADS_IGNORED = ("pytest_timeout",)
THREADS_OURS = ("torchquorum", "tq-")
# Descriptors that libraries open once and keep: of files of the system, and of event loops.
# What torch keeps in the folder for temporary files, for every process to find.
FILES_IGNORED = ("torchinductor_",)
FDS_IGNORED = re.compile(r"/dev/(null|urandom|random|tty|pts|nvidia)|/proc/|/sys/|anon_inode:|/usr/|/etc/")


@dataclass(frozen=True)
class Holdings:
    """What a process holds at a moment, each thing by a text that names it."""

    processes: dict[int, str]
    threads: set[threading.Thread]
    descriptors: Counter[str]
    maps: Counter[str]
    segments: set[str]
    files: set[str]
    uses_cuda: bool

    @classmethod
    def look(cls) -> Holdings:
        """Returns what this process holds now."""
        parts = find_processes(), find_threads(), find_descriptors(), find_maps(), find_segments(), find_files()
        return cls(*parts, uses_cuda())

    def since(self, before: Holdings) -> list[str]:
        """Returns what is held now and was not held before, in words."""
        return sorted(
            [
                *(f"process {pid}: {what}" for pid, what in self.processes.items() if pid not in before.processes),
                *(f"thread {thread.name}" for thread in self.threads - before.threads),
                *(
                    f"descriptor of {what}"
                    for what in self.descriptors - before.descriptors
                    if not self._is_cudas(what, before)
                ),
                *(f"mapping of {what}" for what in self.maps - before.maps),
                *(f"segment {SHM / n}" for n in self.segments - before.segments if not is_held_by_others(n)),
                *(f"temporary file {name}" for name in self.files - before.files),
            ]
        )

    def _is_cudas(self, what: str, before: Holdings) -> bool:
        """Tells whether CUDA opened a pipe for itself: it does so at its first use in a process, and keeps it."""
        return what.startswith("pipe:") and self.uses_cuda and not before.uses_cuda


# Processes that were found to be none of ours, so that a look reads only what is new on the machine.
_foreign: set[int] = set()


def find_processes() -> dict[int, str]:
    """Returns the command lines of the living processes that this one started, directly or not."""
    there = {int(name) for name in os.listdir(PROC) if name.isdigit()}
    _foreign.intersection_update(there)
    parents: dict[int, int] = {}
    for pid in there - _foreign:
        # The name, in parentheses, may hold anything; after the last one come the state and the parent.
        status = _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()[:2]
        if len(status) == 2 and status[0] not in "ZX":
            parents[pid] = int(status[1])
    ours = {pid for pid in parents if pid != os.getpid() and _is_ours(pid, parents)}
    _foreign.update(parents.keys() - ours)
    commands = {pid: _read(pid, "cmdline") for pid in ours if pid != zygote_pid()}
    return {
        pid: command.replace(b"\0", b" ").decode(errors="replace").strip()
        for pid, command in commands.items()
        if not any(servant in command for servant in SERVANTS)
    }


def find_threads() -> set[threading.Thread]:
    """Returns the threads that must not outlive a test: those that keep the process alive, and torchquorum's own."""
    return {
        thread
        for thread in threading.enumerate()
        if not thread.name.startswith(THREADS_IGNORED)
        and (not thread.daemon or thread.name.lower().startswith(THREADS_OURS))
    }


def find_descriptors() -> Counter[str]:
    """Returns what this process has open: sockets, pipes, memory and files, by what the kernel calls them."""
    found: Counter[str] = Counter()
    for entry in (PROC / "self" / "fd").iterdir():
        try:
            what = os.readlink(entry)
        except OSError:  # the one that reads the folder
            continue
        if not FDS_IGNORED.match(what) and int(entry.name) != zygote_socket():
            found[what] += 1
    return found


def find_maps() -> Counter[str]:
    """Returns the shared memory that is mapped, whether its descriptor is open or not."""
    lines = (PROC / "self" / "maps").read_text(errors="replace").splitlines()
    inodes = {
        (line.split()[4], line.split(maxsplit=5)[5]) for line in lines if "/memfd:" in line or "/dev/shm/" in line
    }
    return Counter(f"{path} (inode {inode})" for inode, path in inodes)


def find_segments() -> set[str]:
    """Returns the names of this user's segments in /dev/shm; Python's semaphores, of whatever program, are none."""
    try:
        found = {entry.name for entry in os.scandir(SHM) if entry.stat(follow_symlinks=False).st_uid == os.getuid()}
    except OSError:  # no such folder, or a segment went while we looked
        found = {entry.name for entry in os.scandir(SHM)} if SHM.is_dir() else set()
    return {name for name in found if not name.startswith("sem.")}


def find_files() -> set[str]:
    """Returns what lies in the folder for temporary files, which conftest.py makes for this process alone."""
    folder = Path(tempfile.gettempdir())
    return {str(path) for path in folder.iterdir() if not path.name.startswith(FILES_IGNORED)}


def uses_cuda() -> bool:
    """Tells whether this process has used CUDA, without loading torch."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def owner() -> int:
    """Returns the pytest process to which this one belongs; itself, if that is none."""
    return int(os.environ.get(MARK) or os.getpid())


def is_held_by_others(segment: str) -> bool:
    """Tells whether the segment is named after others, or a living process that is not ours has it open or mapped."""
    if (named := NAMED.match(segment)) is not None:
        return int(named[1]) != os.getpid()
    path, ours = str(SHM / segment), {os.getpid(), *find_processes()}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) not in ours:
            try:
                if path in (entry / "maps").read_text(errors="replace"):
                    return True
                if any(os.readlink(fd).startswith(path) for fd in (entry / "fd").iterdir()):
                    return True
            except OSError:  # gone meanwhile, or another user's
                continue
    return False


def _is_ours(pid: int, parents: dict[int, int]) -> bool:
    """Tells whether a process descends from this one, or from an orphan that carries the mark."""
    seen = pid
    while seen in parents:
        if parents[seen] == os.getpid():
            return True
        seen = parents[seen]
    return _carries_mark(pid)


def _carries_mark(pid: int) -> bool:
    return f"{MARK}={os.getpid()}".encode() in _read(pid, "environ").split(b"\0")


def _read(pid: int, name: str) -> bytes:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""
