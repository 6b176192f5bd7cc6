"""Files that grow, where nothing can be appended to: a row of objects that are read one after another.

The ledger and the measures of a run on an object store are such rows. A segment is put anew, whole, every few seconds while
it is small, then the next one begins. What always holds: readers see whole lines only; what was put stays as it was when
the writer is killed; whoever writes never waits for the network but in `close`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from torchquorum.formats.storage import RemotePath, fetch

PUT_EVERY_S = 5.0
SEGMENT_BYTES = 4 << 20
CLOSE_S = 60.0


def segment_name(name: str) -> str:
    """Returns a name for a new segment of `ledger.jsonl`; they sort by the time when they were begun."""
    stem, dot, ending = name.rpartition(".")
    return f"{stem}-{time.time_ns():020d}-{secrets.token_hex(4)}{dot}{ending}"


def is_segment(entry: str, name: str) -> bool:
    """Whether an object's name is that of a segment."""
    stem, _, ending = name.rpartition(".")
    return entry.startswith(f"{stem}-") and entry.endswith(f".{ending}")


def put_lines(folder: RemotePath, name: str, lines: bytes) -> None:
    """Writes lines as a segment of their own.

    Raises:
        OSError: They cannot be written.
    """
    (folder / segment_name(name)).write_bytes(lines)


class SegmentWriter:
    """Appends, as a file does, to a row of objects. One thread calls it; another puts the segments.

    Args:
        folder: Where the objects go.
        name: The name that the file would have.
    """

    def __init__(self, folder: RemotePath, name: str) -> None:
        self._folder, self._name = folder, name
        self._target = folder / segment_name(name)
        self._lock = threading.Lock()
        self._lines = bytearray()
        self._put_bytes = 0
        self._error: OSError | None = None
        self._ending = threading.Event()
        self.closed = False
        self._thread = threading.Thread(target=self._run, name="torchquorum-segments", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> int:
        """Appends whole lines.

        Raises:
            OSError: An earlier segment could not be put.
        """
        if self._error is not None:
            raise self._error
        with self._lock:
            self._lines += data
        return len(data)

    def flush(self) -> None:
        """Does nothing but say what failed: segments are put by themselves, every few seconds."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Puts what is left and ends the thread.

        Raises:
            OSError: It could not be put.
        """
        if not self.closed:
            self.closed = True
            self._ending.set()
            self._thread.join(CLOSE_S)
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        while not self._ending.wait(PUT_EVERY_S):
            self._put()
        self._put()

    def _put(self) -> None:
        """On the thread: puts the segment if it has grown, and begins the next one if it is large."""
        with self._lock:
            data = bytes(self._lines)
        if len(data) == self._put_bytes or self._error is not None:
            return
        try:
            self._target.write_bytes(data)
        except OSError as error:
            self._error = error
            return
        self._put_bytes = len(data)
        if len(data) >= SEGMENT_BYTES:
            with self._lock:
                del self._lines[: len(data)]
            self._target, self._put_bytes = self._folder / segment_name(self._name), 0


def fetch_run(folder: RemotePath, into: Path, names: Iterable[str]) -> None:
    """Copies a remote run's small files, all but its checkpoints, into a local folder, each row of segments as one file.

    Args:
        folder: The run.
        into: Where to; what is there already is only added to.
        names: The files that are rows of segments.

    Raises:
        OSError: They cannot be read.
    """
    fetch(folder, into, lambda _: True)
    for name in names:
        parts = sorted(entry for entry in into.iterdir() if is_segment(entry.name, name))
        if parts:
            (into / name).write_bytes(b"".join(part.read_bytes() for part in parts))
