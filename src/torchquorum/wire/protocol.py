"""The number of the protocol between tasks, and the base of its messages."""

from __future__ import annotations

import msgspec

from torchquorum.version import __version__

PROTOCOL = 9
PACKAGE = __version__
STANDS_IN = "stands in"  # the reason of an answer to Assign that asks a worker for its own values
ALL = -1  # of tracks: the answer to a join, a pull or an assignment has every optimizer's variables
CREATION = "the chief to create the variables"  # what a join waits for at a ps that holds none


def refuse_protocol(who: str, protocol: int, package: str, us: str) -> str:
    """Returns what to tell a task that speaks another protocol than `us`."""
    said = f" (torchquorum {package[:40]})" if package else ""
    return (
        f"{who[:80]} speaks protocol {protocol}{said}, {us} speaks {PROTOCOL} (torchquorum {PACKAGE}); "
        "install the same torchquorum on both"
    )


class Message(msgspec.Struct, array_like=True, tag=True):
    """The base of all messages."""
