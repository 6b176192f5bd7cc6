"""How a ps task's replies leave: at once, or, in a run that is to survive a loss of power, once the disk has what they say.

Owned by `serve`; used by the thread that is in the service. What always holds: replies leave in the order in which they were
made; only the ps thread sends to shard 0.
"""

from __future__ import annotations

import threading
from collections import deque

from torchquorum.server.reply import LEADER, Reply
from torchquorum.server.service import Service
from torchquorum.wire import codec
from torchquorum.wire.channel import Channel, Listener
from torchquorum.wire.codec import Frame


class Outbox:
    """The replies on their way out.

    Args:
        service: What the replies come from; it commits the journal.
        listener: Where the replies to workers and shards go.
        leader: Where those to shard 0 go; None on shard 0.
    """

    def __init__(self, service: Service, listener: Listener, leader: Channel | None) -> None:
        self._service, self._listener, self._leader = service, listener, leader
        self._owner = threading.get_ident()
        self._uncommitted: list[Reply] = []
        self._for_leader: deque[list[Frame]] = deque()
        self._answers = 1

    def begin(self) -> None:
        """The calling thread is the ps thread."""
        self._owner = threading.get_ident()

    @property
    def waiting(self) -> bool:
        """Whether there is something that only the ps thread sends."""
        return bool(self._uncommitted or self._for_leader)

    def send(self, replies: list[Reply]) -> None:
        """Sends replies, or keeps them until `commit`."""
        if self._uncommitted or self._service.uncommitted:
            self._uncommitted += replies
            for reply in replies:
                if reply.delivery is not None:
                    reply.delivery.waits = True  # whoever asks again before the disk has it need not get it twice
        else:
            self._send_now(replies)

    def commit(self) -> None:
        """Sends what waits for the disk: one wait serves everything that was handled since the last."""
        if self._uncommitted:
            self._service.commit()
            replies, self._uncommitted = self._uncommitted, []
            self._send_now(replies)

    def send_to_leader(self) -> None:
        """Sends what is for shard 0. Called by the ps thread."""
        while self._for_leader and self._leader is not None:
            self._leader.send(self._for_leader.popleft())

    def _send_now(self, replies: list[Reply]) -> None:
        for reply in replies:
            frames = [codec.encode(reply.message), *reply.frames]
            if reply.peer == LEADER:
                self._for_leader.append(frames)
                if threading.get_ident() == self._owner:
                    self.send_to_leader()
                continue
            if reply.track >= self._answers:
                self._answers = reply.track + 1
                self._listener.expect(self._answers)
            sent = self._listener.send(reply.peer, frames)
            if reply.delivery is not None:
                reply.delivery.waits, reply.delivery.sent = False, sent
            run = self._service.run
            if sent is not None and reply.slot is not None and run is not None:
                run.shard.tracks[reply.track].variables.versions.sending(reply.slot, sent)
