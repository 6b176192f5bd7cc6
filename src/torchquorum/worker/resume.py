"""How a client comes in by a ps task's door or takes a lane to it, and how it takes up a push in whose middle the connection was lost.

Called by the client, on the worker's thread. What always holds: a gradient is pushed again under its own number, so it
counts once, whatever is still on its way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torchquorum.transport.messages as m
from torchquorum.transport import codec
from torchquorum.transport.codec import Frame
from torchquorum.transport.door import DoorChannel
from torchquorum.transport.lane import LaneChannel
from torchquorum.transport.memory import host_id
from torchquorum.transport.zmq_channel import largest_frame_bytes

if TYPE_CHECKING:
    from torchquorum.worker.client import Client, Step


def enter_door(client: Client, name: str) -> DoorChannel | None:
    """Goes in by a ps task's door; None if it lets nobody in, as when it has no file left: ZeroMQ serves as well."""
    try:
        channel = DoorChannel(name)
    except OSError:
        return None
    return channel if _greeted(client, channel) else None


def _greeted(client: Client, channel: DoorChannel | LaneChannel) -> bool:
    """Says who comes; False, and the channel is closed, if nobody answers: somebody who has no file left shows us out."""
    greeting = m.Hello(m.PROTOCOL, str(client.task), client.incarnation, host_id(), os.getpid(), m.PACKAGE)
    channel.send([codec.encode(greeting)])
    deadline = time.monotonic() + client.patience.silence_s
    while (left_s := deadline - time.monotonic()) > 0 and not channel.closed:
        if channel.receive(left_s) is not None:
            return True
    channel.close()
    return False


def take_lane(client: Client, k: int, name: str) -> LaneChannel | None:
    """Goes over to a lane, if it can be had; variables that were asked for then arrive in the parameters themselves."""
    ps = client.cluster.tasks("ps")[k]
    try:
        lane = LaneChannel(client.cluster.address(ps).rpartition(":")[0], name, largest_frame_bytes())
        why = "" if _greeted(client, lane) else "nobody answers there"
    except OSError as error:
        lane, why = None, error.strerror or str(error)
    if lane is None or why:
        client.say(f"no direct connection to port {name.partition('/')[0]} of {ps} ({why}); ZeroMQ does it, slower")
        return None
    exchange = client._moves()
    exchange.by_lane[k] = not client.pipeline

    def choose(header: Frame, sizes: Sequence[int]) -> Sequence[memoryview] | None:
        room = exchange.room(k) if client._open is not None else None
        if room is None or sizes[0] != sum(map(len, room)):
            return None
        message = codec.decode(header)
        return room if isinstance(message, m.Variables) and message.request == client._request else None

    lane.receive_into(choose)
    return lane


def take_up(client: Client, before: Client) -> Step | None:
    """Asks what became of the gradient that was being pushed; if nothing, pushes it again.

    Returns:
        What became of it; None if nothing was being pushed, or, pipelined, if the next one waits already.
    """
    from torchquorum.worker.client import Step

    push = before._open[0][0] if before._open else None
    if not isinstance(push, m.Push) or client.pipeline:
        return None
    question = m.FateOf(client.index, client.incarnation, push.local_step)
    fate = client.ask(0, question, [], m.Fate, client.patience.round_s, "word of a gradient")
    if fate.state in ("accepted", "refused"):
        staleness = max(0, fate.met - push.version)
        accepted = fate.state == "accepted"
        return Step(client.version, client.local_step, accepted, fate.reason, staleness, client.lr[0], client.stopped)
    client.local_step = push.local_step - 1
    version, client.version = client.version, push.version
    try:
        return client.push(push.loss)
    finally:
        client.version = max(version, client.version)
