"""Growing files on an object store, which cannot append: a sequence of segments that are read in order.

The ledger and the measures of a run on an object store are such sequences. A segment is uploaded again every few seconds while
it is small, then the next one begins. What always holds: readers see complete lines only; uploaded segments survive when the
writer is killed; a writer waits for the network only in `close`; a segment that cannot be uploaded is tried again, and its lines
are kept meanwhile, up to `MOST_BYTES`.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable
from pathlib import Path

from torchquorum.clock import SYSTEM, Clock
from torchquorum.formats.storage import RemotePath, fetch

PUT_EVERY_S = 5.0
SEGMENT_BYTES = 4 << 20
MOST_BYTES = 16 << 20
CLOSE_S = 60.0
LAST_TRIES_S = 20.0
GIVE_UP_S = 2.0


def segment_name(name: str, clock: Clock = SYSTEM) -> str:
    """Returns a name for a new segment of `ledger.jsonl`; names sort by start time."""
    stem, dot, ending = name.rpartition(".")
    return f"{stem}-{int(clock.wall() * 1e9):020d}-{secrets.token_hex(4)}{dot}{ending}"


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


def read_last_segment(folder: RemotePath, name: str) -> bytes:
    """Returns the newest segment, or nothing if there is none or it cannot be read."""
    try:
        names = sorted(entry.name for entry in folder.iterdir() if is_segment(entry.name, name))
        return (folder / names[-1]).read_bytes() if names else b""
    except OSError:
        return b""


class SegmentWriter:
    """Appends, as a file does, to a row of objects. One thread calls it; another puts the segments.

    Args:
        folder: Where the objects go.
        name: The name that the file would have.
        clock: Tells the time.
    """

    def __init__(self, folder: RemotePath, name: str, clock: Clock = SYSTEM) -> None:
        self._folder, self._name, self._clock = folder, name, clock
        self._target = folder / segment_name(name, clock)
        self._lock = threading.Lock()
        self._lines = bytearray()
        self._put_bytes = 0
        self._error: OSError | None = None
        self._ending = threading.Event()
        self.closed = self._given_up = False
        self._thread = threading.Thread(target=self._run, name="torchquorum-segments", daemon=True)
        self._thread.start()

    def write(self, data: bytes | bytearray) -> None:
        """Appends whole lines.

        Raises:
            OSError: Segments cannot be put, and as many lines as are kept wait already.
        """
        with self._lock:
            if self._error is not None and len(self._lines) + len(data) > MOST_BYTES:
                raise self._error
            self._lines += data

    def flush(self) -> None:
        """Does nothing but say what failed: segments are put by themselves, every few seconds.

        Raises:
            OSError: The last segment could not be put; it is tried again.
        """
        error = self._error
        if error is not None:
            raise error

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

    def give_up(self) -> None:
        """Ends the thread, without what it has not put yet."""
        self.closed = self._given_up = True
        self._ending.set()
        self._thread.join(GIVE_UP_S)

    def _run(self) -> None:
        while not self._clock.wait(self._ending, PUT_EVERY_S):
            self._put()
        if self._given_up:
            return
        deadline = self._clock.now() + LAST_TRIES_S
        self._put()
        while self._error is not None and self._clock.now() < deadline:
            self._clock.sleep(1.0)
            self._put()

    def _put(self) -> None:
        """On the thread: uploads the segment if it has grown, and begins the next one if it is large."""
        with self._lock:
            data = bytes(self._lines)
        if len(data) == self._put_bytes:
            return
        try:
            self._target.write_bytes(data)
        except OSError as error:
            self._error = error
            return
        self._error, self._put_bytes = None, len(data)
        if len(data) >= SEGMENT_BYTES:
            with self._lock:
                del self._lines[: len(data)]
            self._target, self._put_bytes = self._folder / segment_name(self._name, self._clock), 0


def fetch_run(folder: RemotePath, into: Path, names: Iterable[str]) -> None:
    """Copies a remote run's small files, without its checkpoints, to a local folder; joins each sequence of segments.

    Args:
        folder: The run.
        into: The local folder; existing files stay.
        names: The files that are sequences of segments.

    Raises:
        OSError: They cannot be read.
    """
    fetch(folder, into, lambda _: True)
    for name in names:
        parts = sorted(entry for entry in into.iterdir() if is_segment(entry.name, name))
        if parts:
            (into / name).write_bytes(b"".join(part.read_bytes() for part in parts))
