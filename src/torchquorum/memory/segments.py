"""Shared memory between tasks of one host, without names: nothing is left behind, even by kill -9.

A segment is an anonymous file (memfd) that lives as long as a process has it open. Another task of the same user opens it
through /proc/PID/fd/FD. Only its owner can open it, and the size of /dev/shm does not limit it. See docs/adr/0003. A segment is
sealed: no process can shrink it, so reading what another task has shared never ends in a bus error.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from pathlib import Path

import torch

from torchquorum.errors import SegmentError
from torchquorum.wire.messages import MemoryRef

PAGE_BYTES = 4096


def host_id() -> str:
    """Returns a name for 'this host': tasks with the same one can share memory. Empty where that is not supported."""
    if not hasattr(os, "memfd_create"):  # pragma: no cover (other systems than Linux)
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = "/".join(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid", "ipc"))
    except OSError:
        return ""
    return f"{socket.gethostname()}/{boot}/{spaces}/{os.getuid()}"


class Segment:
    """A mapped piece of shared memory, as a flat tensor of bytes."""

    def __init__(self, mapped: mmap.mmap, fd: int | None) -> None:
        self._mapped, self._fd = mapped, fd
        self.size_bytes = len(mapped)
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)

    @classmethod
    def create(cls, name: str, size_bytes: int) -> Segment:
        """Makes a segment; memory is used only as it is touched."""
        size_bytes = max(PAGE_BYTES, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES)
        fd = -1
        try:
            fd = os.memfd_create(f"torchquorum-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(mmap.mmap(fd, size_bytes), fd)
        except (OSError, MemoryError) as error:
            if fd >= 0:
                os.close(fd)
            why = error.strerror if isinstance(error, OSError) else "out of memory"
            raise SegmentError(
                f"no shared memory of {size_bytes} bytes for {name} ({why}); see ulimit -n and -v, and the memory that this "
                "process may use"
            ) from None

    @classmethod
    def open(cls, ref: MemoryRef, *, read_only: bool = False) -> Segment:
        """Opens a segment of another process on this host; with `read_only` it cannot be written to from here.

        Raises:
            SegmentError: There is none, it is another user's, smaller than it was said to be, or could still shrink.
        """
        try:
            access = os.O_RDONLY if read_only else os.O_RDWR
            fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", access | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                _refuse_unsealed(fd, ref.pid)
                if os.fstat(fd).st_size < ref.size_bytes or ref.size_bytes <= 0:
                    raise SegmentError(
                        f"shared memory of process {ref.pid}: smaller than the {ref.size_bytes} bytes it was said to have"
                    )
                kind = mmap.ACCESS_READ if read_only else mmap.ACCESS_DEFAULT
                return cls(mmap.mmap(fd, ref.size_bytes, access=kind), None)
            finally:
                os.close(fd)
        except OSError as error:
            raise SegmentError(f"shared memory of process {ref.pid} cannot be opened: {error.strerror}") from None

    def ref(self, num_slots: int) -> MemoryRef:
        """Returns how another process of this host can open the segment."""
        assert self._fd is not None, "only the owner of a segment hands it out"
        return MemoryRef(os.getpid(), self._fd, self.size_bytes, num_slots)

    def close(self) -> None:
        """Closes the file; the mapping goes with the last tensor on it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _refuse_unsealed(fd: int, pid: int) -> None:
    """Raises SegmentError unless `create` made it: no other kind of file, none of another user, none that can shrink."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        sealed = 0
    if not sealed or os.fstat(fd).st_uid != os.getuid():
        raise SegmentError(f"shared memory of process {pid}: not a sealed segment of this user, so it is not used")
