"""Which run writes to an object store, which has no locks: the object `owner.json` there, with a beat.

Written by the ledger's writer on ps task 0, on a thread of its own; read by a chief before it begins. What always holds: a run that
lives changes its object every few seconds; nobody takes a folder over whose object has changed within `SILENT_S`; of two runs that
took it all the same, after a pause of the first or in the same instant, the one that is named in the object writes on, and the other
knows with its next beat.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

from torchquorum.clock import SYSTEM, Clock
from torchquorum.formats.checkpoint_names import this_host
from torchquorum.formats.scratch import is_alive
from torchquorum.formats.storage import RemotePath

NAME = "owner.json"
BEAT_S = 5.0
SILENT_S = 30.0
LEAVE_S = 5.0


class Owner(msgspec.Struct, frozen=True):
    """Who writes to a folder.

    Attributes:
        run: A new random name for each process that takes the folder.
        beat: How often it has said so.
        host: The scope of its process's number, as in the names of unfinished checkpoints.
        machine: The host's name, for people.
        process: Its process.
    """

    run: str
    beat: int
    host: str
    machine: str
    process: int

    def __str__(self) -> str:
        return f"process {self.process} on {self.machine}"

    @property
    def is_dead(self) -> bool:
        """Whether it is a process of this host that has ended."""
        return self.host == this_host() and not is_alive(self.process)


def read_owner(folder: RemotePath) -> Owner | None:
    """Returns who has written to a folder last; None if nobody has, or it has left in good order.

    Raises:
        OSError: The store does not answer.
    """
    try:
        return msgspec.json.decode((folder / NAME).read_bytes(), type=Owner)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


class OwnerWatch:
    """Finds out whether the run that is named in a folder's object is alive: it is if its beat goes on.

    Args:
        folder: The folder.
        clock: Tells the time.
    """

    def __init__(self, folder: RemotePath, clock: Clock = SYSTEM) -> None:
        self._folder, self._clock = folder, clock
        self._seen: Owner | None = None
        self._since = 0.0
        self.alive = False

    def user(self) -> Owner | None:
        """Returns who uses the folder; None if nobody does any more. `alive` says whether its beat has gone on meanwhile.

        Raises:
            OSError: The store does not answer.
        """
        found, now = read_owner(self._folder), self._clock.now()
        if found is None or found.is_dead:
            return None
        if found != self._seen:
            self.alive = self._seen is not None
            self._seen, self._since = found, now
        return found if now - self._since < SILENT_S else None


class OwnerBeat:
    """Says in a folder that this process writes there, until it is released.

    Args:
        folder: The folder.
        clock: Tells the time.

    Attributes:
        taken_by: Who has taken the folder over, in words; empty while nobody has.
    """

    def __init__(self, folder: RemotePath, clock: Clock = SYSTEM) -> None:
        self._folder, self._clock = folder, clock
        self._owner = Owner(secrets.token_hex(8), 0, this_host(), socket.gethostname(), os.getpid())
        self.taken_by, self._removed = "", False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchquorum-owner", daemon=True)
        self._thread.start()

    def was_removed(self) -> bool:
        """Whether somebody has removed the object since the last call, and with it perhaps the whole folder."""
        removed, self._removed = self._removed, False
        return removed

    def release(self) -> None:
        """The run is over: the folder is free."""
        if not self._ending.is_set():
            self._ending.set()
            self._thread.join(LEAVE_S)

    def _run(self) -> None:
        self._guarded(self._put)
        while not self._clock.wait(self._ending, BEAT_S):
            self._guarded(self._beat)
        self._guarded(self._leave)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Does something with the store; when that is away, the next beat tries again."""
        with suppress(OSError):
            act()

    def _put(self) -> None:
        self._owner = msgspec.structs.replace(self._owner, beat=self._owner.beat + 1)
        (self._folder / NAME).write_bytes(msgspec.json.encode(self._owner))

    def _beat(self) -> None:
        found = read_owner(self._folder)
        if found is not None and found.run != self._owner.run:
            self.taken_by = str(found)
            self._ending.set()
            return
        self._removed |= found is None
        self._put()

    def _leave(self) -> None:
        found = read_owner(self._folder)
        if found is not None and found.run == self._owner.run:
            (self._folder / NAME).unlink(missing_ok=True)
