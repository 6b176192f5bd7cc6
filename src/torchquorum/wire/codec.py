"""Messages to bytes and back: one msgspec header frame, then raw tensor frames. Nothing on the wire is a pickle.

Used by everything that sends or receives. `decode` accepts anything an unknown peer may send and raises only WireError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from torchquorum.errors import TorchQuorumError
from torchquorum.wire import messages

MAX_HEADER_BYTES = 16 << 20
Frame = bytes | bytearray | memoryview
_Decoded = TypeVar("_Decoded")


class WireError(TorchQuorumError):
    """What came over the wire is not one of our messages."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(messages.AnyMessage)


def encode(message: messages.Message) -> bytes:
    """Returns the header frame of a message."""
    return _encoder.encode(message)


def decode(header: Frame) -> messages.AnyMessage:
    """Returns the message in a header frame.

    Raises:
        WireError: It is too large, is not msgpack, or is no message that we know.
    """
    return decode_as(_decoder, header)


def decode_as(decoder: msgspec.msgpack.Decoder[_Decoded], header: Frame) -> _Decoded:
    """Returns the message in a header frame, as one of those that a decoder knows."""
    size = len(header)
    if size > MAX_HEADER_BYTES:
        raise WireError(f"header of {size} bytes: at most {MAX_HEADER_BYTES} are allowed")
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, TypeError, RecursionError, UnicodeError) as error:
        raise WireError(f"not a torchquorum message: {error}") from None
    except TorchQuorumError as error:
        raise WireError(f"a message with values that are not allowed: {error}") from None


def split(frames: Sequence[Frame]) -> tuple[messages.AnyMessage, list[Frame]]:
    """Returns the message and the tensor frames of what was received."""
    if not frames:
        raise WireError("an empty message")
    return decode(frames[0]), list(frames[1:])
