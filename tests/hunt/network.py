"""Channels and listeners between simulated processes: in order and reliable, until a fault makes them otherwise.

What always holds: frames are copied when they are sent; a process that is dead neither sends nor receives; what a connection does about
the death of the other side is what a TCP stream does (it is closed), or, where the run says so, what a channel does that connects again
by itself, as one does that is not settled yet.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.hunt.world import Fiber, Process, World
from torchquorum.wire import codec
from torchquorum.wire.channel import FOREVER_S, UNKNOWN, Choose, Peer, Pieces, Pollable, Progress, whole
from torchquorum.wire.codec import Frame
from torchquorum.wire.messages import Way

CLOSED_NAP_S = 0.05


@dataclass
class Conditions:
    """How the wire between two tasks is, until when.

    Attributes:
        cut_until: Nothing passes; with `keeps`, it arrives after the end of the cut, as TCP sends it again.
        to_until: What the connecting side sends is lost: half open.
        from_until: What the listening side sends is lost.
        slow_until: Everything takes `slow_s` longer.
        noisy_until: Messages are dropped, come twice or overtake each other, each with chance `noise`.
    """

    cut_until: float = 0.0
    keeps: bool = False
    to_until: float = 0.0
    from_until: float = 0.0
    slow_until: float = 0.0
    slow_s: float = 0.0
    noisy_until: float = 0.0
    noise: float = 0.0


class Network:
    """All wires.

    Args:
        world: Where it is.
        seed: Of delays and noise.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.world, self._random = world, random.Random(seed)
        self.listeners: dict[str, SimListener] = {}
        self.names: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.on_answer: Callable[[bool, str], None] = lambda _holds, _what: None
        self._conditions: dict[tuple[str, str], Conditions] = {}

    def conditions(self, client: str, server: str) -> Conditions:
        """Returns how the wire between two tasks is."""
        return self._conditions.setdefault((client, server), Conditions())

    def listen(self, process: Process, address: str) -> SimListener:
        """Returns the listener of a process, which takes the address over."""
        self.names[address] = process.name
        self.listeners[address] = found = SimListener(self, process)
        return found

    def connect(self, process: Process, address: str, identity: bytes) -> SimChannel:
        """Returns a channel of a process to an address, which connects again by itself until it is settled."""
        return SimChannel(self, process, address, identity)

    def reset(self, client: str, server: str) -> None:
        """What stands between two tasks closes their connections; what the client has sent may still arrive."""
        for listener in self.listeners.values():
            if listener.process.name == server:
                for channel in list(listener.channels.values()):
                    if channel.process.name == client:
                        channel.hang_up()

    def refuses(self, address: str) -> bool:
        """Whether the host of an address would say that nobody listens there."""
        listener = self.listeners.get(address)
        return listener is None or ((listener.ended or not listener.process.alive) and not listener.vanished)

    def large_answer(self, channel: SimChannel, header: Frame, sent: SimSent) -> None:
        """A ps sends variables: not while the same answer is on its way, or a slow wire would never be done with them."""
        message = codec.decode(header)
        request = getattr(message, "request", -1)
        if getattr(message, "slot", -1) >= 0:
            return  # the variables lie in shared memory
        answer = id(channel.bound), getattr(message, "generation", 0), request
        key = *answer, getattr(message, "track", 0)  # where every optimizer is asked for, there is an answer for each
        before = channel.large.get(key)
        self.on_answer(before is None or not before.on_its_way, f"{channel.process} is sent answer {request} again")
        channel.large = {k: other for k, other in channel.large.items() if k[:-1] == answer} | {key: sent}

    def carry(self, channel: SimChannel, frames: list[Frame], *, outgoing: bool, sent: SimSent | None = None) -> None:
        """Takes a message to the other side, or not."""
        now, draw = self.world.now, self._random.random
        on = self.conditions(channel.process.name, self.names.get(channel.address, ""))
        self.counts["messages"] += 1
        lost = now < (on.to_until if outgoing else on.from_until) or (now < on.cut_until and not on.keeps)
        if lost:
            self.counts["lost"] += 1
            if sent is not None:
                sent.on_its_way = False
            return
        wait_s = 0.0003 + 0.001 * draw() + (on.slow_s if now < on.slow_until else 0.0)
        start = max(now, on.cut_until) if now < on.cut_until else now
        arrives, copies = start + wait_s, 1
        if now < on.noisy_until and draw() < on.noise:
            kind = int(draw() * 3)
            self.counts[("dropped", "doubled", "overtaken")[kind]] += 1
            copies = (0, 2, 1)[kind]
            if kind == 2:
                arrives += 0.5 * draw()
            elif kind == 1:
                self.world.at(0.3 * draw() + arrives - now, lambda: channel.arrive(frames, outgoing=outgoing))
                copies = 1
        if copies and not (now < on.noisy_until):
            arrives = channel.in_order(arrives, outgoing=outgoing)
        if copies:
            self.world.at(arrives - now, lambda: channel.arrive(frames, outgoing=outgoing, sent=sent))
        elif sent is not None:
            sent.on_its_way = False


class SimChannel:
    """The connecting end; used by one thread at a time."""

    def __init__(self, network: Network, process: Process, address: str, identity: bytes) -> None:
        self.network, self.process, self.address, self.identity = network, process, address, identity
        self.closed, self.reconnects = False, True
        self.bound: SimListener | None = None
        self.inbox: deque[list[Frame]] = deque()
        self.reader: Fiber | None = None
        self.large: dict[tuple[int, int, int, int], SimSent] = {}
        self._last = [0.0, 0.0]
        self._ended = False

    def fileno(self) -> int:
        return -1

    def may_wait_s(self) -> float:
        return 0.0 if self.inbox else FOREVER_S

    def in_order(self, arrives: float, *, outgoing: bool) -> float:
        """Returns when a message arrives that must not overtake the one before."""
        self._last[outgoing] = found = max(arrives, self._last[outgoing])
        return found

    def send(self, frames: Sequence[Frame | Pieces]) -> None:
        self.process.effect("sending a message")
        if not self.closed and not self._ended:
            self.network.carry(self, [bytes(f) for f in whole(frames)], outgoing=True)

    def arrive(self, frames: list[Frame], *, outgoing: bool, sent: SimSent | None = None) -> None:
        """A message has come to its end."""
        if sent is not None:
            sent.on_its_way = False
        if outgoing:
            self._arrive_there(frames)
        elif self.process.alive and not self._ended and not self.closed:
            self.inbox.append(frames)
            self.network.world.wake(self.reader)

    def _arrive_there(self, frames: list[Frame]) -> None:
        listener = self.network.listeners.get(self.address)
        if listener is None or not listener.process.alive or listener.ended:
            if self.bound is not None and not self.bound.vanished:
                self.hang_up()
            return
        if self.bound is not None and self.bound is not listener and not self.reconnects:
            self.hang_up()  # that process does not know this connection
            return
        self.bound = listener
        listener.take(self, frames)

    def hang_up(self) -> None:
        """The other side is known to have closed the connection."""
        if not self.reconnects:
            self.closed = True
            self.network.world.wake(self.reader)

    def receive(self, timeout_s: float) -> list[Frame] | None:
        world = self.network.world
        if not self.inbox and timeout_s > 0 and not self.closed:
            self.reader = world.fiber
            world.wait(timeout_s, lambda: self.inbox or self.closed)
        if self.inbox:
            return self.inbox.popleft()
        if self.closed:
            world.wait(min(timeout_s, CLOSED_NAP_S))
        return None

    def receive_into(self, choose: Choose, *, several: bool = False) -> None:
        pass

    def settled(self) -> SimChannel:
        self.reconnects = False
        gone = self.bound is not None and (self.bound.ended or not self.bound.process.alive)
        self.closed = gone and not (self.bound is not None and self.bound.vanished)
        return self

    def flush(self, timeout_s: float) -> bool:
        return True

    def progress(self) -> Progress:
        return UNKNOWN  # messages come whole

    def close(self) -> None:
        self._ended = True
        if self.bound is not None:
            self.bound.channels.pop(self.identity, None)


class SimSent:
    """A large answer: on its way until it has arrived, or is lost."""

    done = True

    def __init__(self) -> None:
        self.on_its_way = True


class SimListener:
    """A ps task's end of all connections to it."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network, self.process = network, process
        self.ways: list[Way] = []
        self.turned_away: dict[str, int] = {}
        self.channels: dict[Peer, SimChannel] = {}
        self.inbox: deque[tuple[Peer, list[Frame]]] = deque()
        self.reader: Fiber | None = None
        self.ended = self.vanished = self._woken = False
        process.at_death.append(self._die)

    def fileno(self) -> int:
        return -1

    def may_wait_s(self) -> float:
        return 0.0 if self.inbox else FOREVER_S

    def take(self, channel: SimChannel, frames: list[Frame]) -> None:
        """A message has come."""
        self.channels[channel.identity] = channel
        self.inbox.append((channel.identity, frames))
        self.network.world.wake(self.reader)

    def receive(self, timeout_s: float) -> tuple[Peer, list[Frame]] | None:
        self.wait([], timeout_s)
        return self.inbox.popleft() if self.inbox else None

    def wait(self, others: Sequence[Pollable], timeout_s: float) -> None:
        world, channels = self.network.world, [c for c in others if isinstance(c, SimChannel)]
        self.reader = world.fiber
        for channel in channels:
            channel.reader = world.fiber
        world.wait(timeout_s, lambda: self.inbox or self._woken or any(c.inbox for c in channels))
        self._woken = False

    def expect(self, answers: int) -> None:
        pass

    def send(self, peer: Peer, frames: Sequence[Frame]) -> SimSent | None:
        self.process.effect("sending an answer")
        channel = self.channels.get(peer)
        if channel is None:
            return None
        sent = SimSent() if len(frames) > 1 else None
        if sent is not None:
            self.network.large_answer(channel, frames[0], sent)
        self.network.carry(channel, [bytes(f) for f in frames], outgoing=False, sent=sent)
        return sent

    def wake(self) -> None:
        self._woken = True
        self.network.world.wake(self.reader)

    def moved_bytes(self, peer: Peer) -> int:
        return 0

    def hang_up(self, peer: Peer) -> None:
        channel = self.channels.pop(peer, None)
        if channel is not None:
            channel.hang_up()

    def close(self) -> None:
        self.ended = True
        self._hang_up_all()

    def _die(self) -> None:
        """The process is gone; its system closes the connections, unless the whole host is gone."""
        if not self.vanished:
            self._hang_up_all()

    def _hang_up_all(self) -> None:
        now = self.network.world.now
        for channel in list(self.channels.values()):
            on = self.network.conditions(channel.process.name, self.process.name)
            if now >= max(on.cut_until, on.from_until):  # after what is on its way
                self.network.world.at(channel.in_order(now + 0.002, outgoing=False) - now, channel.hang_up)
