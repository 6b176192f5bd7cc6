"""A listening socket that is polled, and what happens when its process may open no more file descriptors.

Used by stream listeners. Without a free descriptor `accept` fails, and the system goes on to report the connection: a task that
polls would never sleep again. So one descriptor is kept in reserve; with it a new connection is accepted and closed, and its owner
uses another transport. If even that fails, the socket is not polled for a moment.

What always holds: `accept` never blocks and never raises; when file descriptors run out, new connections are refused and
existing ones keep working.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from torchquorum.clock import SYSTEM, Clock
from torchquorum.wire.descriptors import Reserve

REST_S = 0.5


class Acceptor:
    """One listening socket, polled from now on.

    Args:
        listening: The socket; the acceptor owns it.
        watch: Called with its descriptor and True when it is to be polled, False when not.
        reserve: The descriptor with which a connection is accepted and closed when no other is left.
        rest_s: How long it is not polled when there is no descriptor at all.
        clock: Tells the time.
    """

    def __init__(
        self,
        listening: socket.socket,
        watch: Callable[[int, bool], None],
        *,
        reserve: Reserve | None = None,
        rest_s: float = REST_S,
        clock: Clock = SYSTEM,
    ) -> None:
        self._socket, self._watch, self._rest_s, self._clock = listening, watch, rest_s, clock
        self._reserve = Reserve() if reserve is None else reserve
        self._rests_until: float | None = None
        self.refused = 0
        listening.setblocking(False)
        watch(listening.fileno(), True)

    def fileno(self) -> int:
        """Returns the descriptor that is polled."""
        return self._socket.fileno()

    def accept(self) -> socket.socket | None:
        """Returns a new connection; None if there is none any more, or no descriptor for it."""
        try:
            return self._socket.accept()[0]
        except (BlockingIOError, InterruptedError, ConnectionError):
            return None  # it has gone in the meantime
        except OSError:
            self._refuse()
            return None

    def resume(self) -> None:
        """Polls the socket again when it has rested; to be called now and then."""
        if self._rests_until is not None and self._clock.now() >= self._rests_until:
            self._rests_until = None
            self._reserve.take()
            self._watch(self._socket.fileno(), True)

    def close(self) -> None:
        """Closes it."""
        if self._rests_until is None:
            self._watch(self._socket.fileno(), False)
        self._socket.close()
        self._reserve.give()

    def _refuse(self) -> None:
        if self._reserve.held:
            self._reserve.give()
            with suppress(OSError):
                self._socket.accept()[0].close()
                self.refused += 1
            self._reserve.take()
        if not self._reserve.held:  # another thread was quicker, or there never was one
            self._rests_until = self._clock.now() + self._rest_s
            self._watch(self._socket.fileno(), False)
