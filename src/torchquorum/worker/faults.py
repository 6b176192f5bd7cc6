"""What a ps refused, as an error of the worker."""

from __future__ import annotations

from torchquorum.errors import ConfigError, LostCreationError, LostPlaceError, RefusedError
from torchquorum.transport.memory import SegmentError
from torchquorum.transport.messages import Fault


def error_of(fault: Fault) -> Exception:
    """Returns the error that a Fault stands for."""
    kinds: dict[str, type[Exception]] = {
        "ConfigError": ConfigError,
        "SegmentError": SegmentError,
        "LostPlaceError": LostPlaceError,
        "LostCreationError": LostCreationError,
    }
    return kinds.get(fault.kind, RefusedError)(fault.text)
