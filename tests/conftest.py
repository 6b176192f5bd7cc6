"""What holds for every test: it leaves nothing behind.

The fixture compares what exists before and after a test: processes that descend from this one or carry its mark,
threads, and segments in /dev/shm. What is on its way out gets a moment to go. Several pytest processes may run beside
each other (xdist): processes and threads are told apart by their parent and by the mark, segments by who holds them.
"""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported: one thread per operation, in every thread of a test and in the processes that it starts, so
# that sums are always made in the same order and the cores are not fought over.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

GRACE_S = 2.0
POLL_S = 0.02
SHM = Path("/dev/shm")
PROC = Path("/proc")

# Children inherit it, so an orphan whose parent was killed is still known as ours.
MARK = "TORCHQUORUM_TEST_OWNER"

# Python's own servants, which live until the interpreter ends.
SERVANTS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
THREADS_IGNORED = ("pytest_timeout",)
THREADS_OURS = ("torchquorum", "tq-")


def pytest_configure() -> None:
    os.environ[MARK] = str(os.getpid())


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaks a child process, a thread or a segment in /dev/shm."""
    processes, threads, segments = find_processes(), set(threading.enumerate()), find_segments()
    yield
    deadline = time.monotonic() + GRACE_S
    while leaks := [
        *(f"process {pid}: {what}" for pid, what in find_processes().items() if pid not in processes),
        *(f"thread {thread.name}" for thread in find_threads() - threads),
        *(f"segment {SHM / name}" for name in find_segments() - segments if not is_held_by_others(name)),
    ]:
        if time.monotonic() > deadline:
            pytest.fail("the test left behind " + "; ".join(sorted(leaks)), pytrace=False)
        time.sleep(POLL_S)


def find_processes() -> dict[int, str]:
    """Return the command lines of the living processes that this one started, directly or not."""
    parents: dict[int, int] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                # The name, in parentheses, may hold anything; after the last one come the state and the parent.
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            except OSError:  # gone meanwhile
                continue
            if state not in "ZX":
                parents[int(entry.name)] = int(parent)
    ours = {pid for pid in parents if pid != os.getpid() and (_descends(pid, parents) or _carries_mark(pid))}
    commands = {pid: _read(pid, "cmdline") for pid in ours}
    return {
        pid: command.replace(b"\0", b" ").decode(errors="replace").strip()
        for pid, command in commands.items()
        if not any(servant in command for servant in SERVANTS)
    }


def find_threads() -> set[threading.Thread]:
    """Return the threads that must not outlive a test: those that keep the process alive, and torchquorum's own."""
    return {
        thread
        for thread in threading.enumerate()
        if not thread.name.startswith(THREADS_IGNORED)
        and (not thread.daemon or thread.name.lower().startswith(THREADS_OURS))
    }


def find_segments() -> set[str]:
    """Return the names of this user's segments in /dev/shm; Python's semaphores, of whatever program, are none."""
    try:
        found = {entry.name for entry in os.scandir(SHM) if entry.stat(follow_symlinks=False).st_uid == os.getuid()}
    except OSError:  # no such folder, or a segment went while we looked
        found = {entry.name for entry in os.scandir(SHM)} if SHM.is_dir() else set()
    return {name for name in found if not name.startswith("sem.")}


def is_held_by_others(segment: str) -> bool:
    """Tell whether a living process that is not ours has the segment open or mapped: then it is that one's."""
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


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False


def _carries_mark(pid: int) -> bool:
    return f"{MARK}={os.getpid()}".encode() in _read(pid, "environ").split(b"\0")


def _read(pid: int, name: str) -> bytes:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""
