"""What ZeroMQ tells of the connections of a socket: its monitor, as a socket that can be polled.

Used by the channel, to learn why it is refused, and by the listener's access control. What always holds: ZeroMQ's own
thread never waits for the reader of these events.
"""

from __future__ import annotations

import secrets
import struct
from typing import Any

import zmq

_EVENT = struct.Struct("=HI")


def watch(watched: zmq.Socket[Any], events: int) -> zmq.Socket[Any]:
    """Returns a socket on which ZeroMQ tells what happens to another; `unwatch` it before that is closed."""
    name = f"inproc://torchquorum-watch-{secrets.token_hex(8)}"
    watched.monitor(name, events)
    try:
        told = watched.context.socket(zmq.PAIR)
    except zmq.ZMQError:
        unwatch(watched)
        raise
    told.setsockopt(zmq.RCVHWM, 0)  # or ZeroMQ's own thread would wait for a reader that is busy
    told.connect(name)
    return told


def unwatch(watched: zmq.Socket[Any]) -> None:
    """Ends what `watch` began; the socket that it returned is the caller's to close."""
    watched.monitor(None, 0)


def read_event(told: zmq.Socket[Any]) -> tuple[int, int] | None:
    """Returns the next event and its value from a socket that `watch` returned, or None."""
    try:
        event, value = _EVENT.unpack(told.recv_multipart(zmq.NOBLOCK)[0])
    except zmq.Again:
        return None
    return event, value
