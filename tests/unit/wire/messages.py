"""What is there to be received, for tests of channels."""

from __future__ import annotations

from torchquorum.wire.channel import Receiver


def drain(listener: Receiver) -> list[bytes]:
    """Returns the headers of the messages that are here."""
    found = []
    while (received := listener.receive(0.0)) is not None:
        found.append(bytes(received[1][0]))
    return found
