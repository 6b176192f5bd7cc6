"""Shared memory between tasks of one host, without names: nothing can be left behind, even by kill -9.

A segment is an anonymous file (memfd) that lives as long as a process has it open. Another task of the same user opens it
through /proc/PID/fd/FD. Owner-only by construction, and not bound by the size of /dev/shm. See docs/adr/0003. A segment is
sealed: nobody can make it smaller, so that reading what another task has shared never ends in a bus error.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import warnings
from pathlib import Path

import torch

from torchquorum.errors import TorchQuorumError
from torchquorum.transport.codec import Frame
from torchquorum.transport.messages import MemoryRef

PAGE_BYTES = 4096
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)


class SegmentError(TorchQuorumError):
    """A segment could not be made or opened."""


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
    def open(cls, ref: MemoryRef) -> Segment:
        """Opens a segment of another process on this host.

        Raises:
            SegmentError: There is none, it is another user's, smaller than it was said to be, or could still shrink.
        """
        try:
            fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                _refuse_unsealed(fd, ref.pid)
                if os.fstat(fd).st_size < ref.size_bytes or ref.size_bytes <= 0:
                    raise SegmentError(
                        f"shared memory of process {ref.pid}: smaller than the {ref.size_bytes} bytes it was said to have"
                    )
                return cls(mmap.mmap(fd, ref.size_bytes), None)
            finally:
                os.close(fd)
        except OSError as error:
            raise SegmentError(f"shared memory of process {ref.pid} cannot be opened: {error.strerror}") from None

    def ref(self, num_slots: int) -> MemoryRef:
        """Returns how another process of this host can open the segment."""
        assert self._fd is not None, "only the owner of a segment hands it out"
        return MemoryRef(os.getpid(), self._fd, self.size_bytes, num_slots)

    def close(self) -> None:
        """Gives the file up; the mapping goes when the last tensor on it does."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _refuse_unsealed(fd: int, pid: int) -> None:
    """Only what `create` makes is opened: no other kind of file, none of another user, none that can shrink under us."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        sealed = 0
    if not sealed or os.fstat(fd).st_uid != os.getuid():
        raise SegmentError(f"shared memory of process {pid}: not a sealed segment of this user, so it is not used")


def tensor_frame(data: torch.Tensor) -> memoryview:
    """Returns the bytes of a flat uint8 CPU tensor as a frame, without a copy."""
    return memoryview(data.numpy())  # pyright: ignore[reportArgumentType]


def frame_tensor(frame: Frame, size_bytes: int) -> torch.Tensor:
    """Returns a received frame as a flat uint8 tensor, without a copy where its alignment allows.

    Raises:
        ValueError: The frame has another size than expected.
    """
    if len(frame) != size_bytes:
        raise ValueError(f"tensor frame of {len(frame)} bytes, expected {size_bytes}")
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    tensor = torch.frombuffer(frame, dtype=torch.uint8)
    return tensor if tensor.data_ptr() % 8 == 0 else tensor.clone()  # no dtype is wider
