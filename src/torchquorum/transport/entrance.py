"""A listening socket that is polled, and what happens at it when its process may open no more files.

Used by doors and lanes. The system goes on saying that somebody waits, whom `accept` cannot let in: a task that polls would
never sleep again. So a file is kept in reserve; with it a newcomer is let in and shown out, and comes by another way. Where
even that fails, nobody looks at the socket for a moment.

What always holds: `accept` never blocks and never raises; a process without files costs its newcomers, not its guests.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

REST_S = 0.5


class Entrance:
    """One listening socket, watched from now on.

    Args:
        listening: The socket; the entrance owns it.
        watch: Called with its file and False when it shall be polled, None when not.
    """

    def __init__(self, listening: socket.socket, watch: Callable[[int, bool | None], None]) -> None:
        self._socket, self._watch = listening, watch
        self._spare: socket.socket | None = None
        self._rests_until: float | None = None
        self.shown_out = 0
        listening.setblocking(False)
        self._reserve()
        watch(listening.fileno(), False)

    def fileno(self) -> int:
        """Returns the file that is polled."""
        return self._socket.fileno()

    @property
    def port(self) -> int:
        """Returns the port, of an entrance that has one."""
        return int(self._socket.getsockname()[1])

    def accept(self) -> socket.socket | None:
        """Lets somebody in who waits; None if nobody does any more, or if no file is left for him."""
        try:
            return self._socket.accept()[0]
        except (BlockingIOError, InterruptedError, ConnectionError):
            return None  # he has gone in the meantime
        except OSError:
            self._show_out()
            return None

    def wake(self) -> None:
        """Looks at the socket again when it has rested; to be called now and then."""
        if self._rests_until is not None and time.monotonic() >= self._rests_until:
            self._rests_until = None
            self._reserve()
            self._watch(self._socket.fileno(), False)

    def close(self) -> None:
        """Closes it."""
        if self._rests_until is None:
            self._watch(self._socket.fileno(), None)
        self._socket.close()
        if self._spare is not None:
            self._spare.close()

    def _show_out(self) -> None:
        if self._spare is not None:
            self._spare.close()
            self._spare = None
            with suppress(OSError):
                self._socket.accept()[0].close()
                self.shown_out += 1
            self._reserve()
        if self._spare is None:  # another thread was quicker, or there never was one
            self._rests_until = time.monotonic() + REST_S
            self._watch(self._socket.fileno(), None)

    def _reserve(self) -> None:
        if self._spare is None:
            with suppress(OSError):
                self._spare = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
