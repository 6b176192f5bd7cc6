"""How a worker goes over from the entry to a faster transport that a ps task offers.

Called by the worker's link when it joins, on the worker's thread. What always holds: the channel that is returned has been
answered on, or it is the one that was given; the other one is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchquorum.clock import SYSTEM, Clock
from torchquorum.wire import transports
from torchquorum.wire.channel import Channel
from torchquorum.wire.messages import Way

NO_ANSWER = "nobody answers there"


@dataclass(frozen=True, kw_only=True)
class Target:
    """The ps task to reach.

    Attributes:
        task: Its name, for people.
        host: The host of its address.
        local: Whether this worker shares memory with it.
        greeting: The encoded Hello with which a connection begins.
        answer_s: How long to wait for the answer to it.
    """

    task: str
    host: str
    local: bool
    greeting: bytes
    answer_s: float


def upgrade(
    channel: Channel, ways: Sequence[Way], target: Target, *, say: Callable[[str], None], clock: Clock = SYSTEM
) -> Channel:
    """Returns a channel over the first way that answers, instead of `channel`; `channel`, settled, if none does.

    Args:
        channel: The channel in use.
        ways: What the ps task's Welcome offers, best first.
        target: Whom to reach.
        say: Prints a line for people.
        clock: Tells the time.
    """
    failed: list[str] = []
    for way in ways:
        transport = transports.find(way.kind)
        if transport is None or (transport.same_host and not target.local):
            continue
        try:
            better = transport.connect(target.host, way.where, clock)
        except (OSError, ValueError) as error:
            failed.append(f"{way.kind}: {getattr(error, 'strerror', None) or error}")
            continue
        if _is_answered(better, target, clock):
            channel.close()
            return better
        better.close()
        failed.append(f"{way.kind}: {NO_ANSWER}")
    if failed:
        say(f"no direct connection to {target.task} ({'; '.join(failed)}); TCP does it, slower")
    return channel.settled()


def _is_answered(channel: Channel, target: Target, clock: Clock) -> bool:
    """Sends the greeting; False if nobody answers, as when the ps has no file descriptor left and closes the connection."""
    channel.send([target.greeting])
    deadline = clock.now() + target.answer_s
    while (left_s := deadline - clock.now()) > 0 and not channel.closed:
        if channel.receive(left_s) is not None:
            return True
    return False
