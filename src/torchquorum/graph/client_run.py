"""What a compute task knows of its client's run: its batches, their results, and the lease. No sockets, threads or clock.

Owned by the inbox (`torchquorum.graph.inbox`), under its lock. The lease: a client gives a task's batches to others only after
`liveness_s` without an answer of the task. Every Ask carries the stamp of an answer that the client has seen; for half of
`liveness_s` after that stamp the task's batches are surely its own. What always holds: no batch is begun without a lease.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from torchquorum.graph import graph_messages as g
from torchquorum.wire.channel import Peer

REMEMBERED_RESULTS = 64


@dataclass(slots=True)
class ClientRun:
    """The run that the task is part of; with its defaults, none.

    Attributes:
        terms: Graph, plan and options, encoded: a restarted client that brings the same may go on with the run.
        client: The client, for people.
        peer: Where results go.
        heard_at: When the client was last heard.
        lease_s: How long a lease lasts.
        lease_at: When the newest lease began.
        pending: The batches that have arrived and have no result.
        results: The newest results, encoded, to be sent again.
        fetching: The questions of the client that are being answered.
    """

    terms: bytes = b""
    client: str = ""
    peer: Peer = b""
    heard_at: float = 0.0
    lease_s: float = 0.0
    lease_at: float = 0.0
    pending: set[int] = field(default_factory=set)
    results: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    fetching: set[int] = field(default_factory=set)

    def is_leased(self, now: float) -> bool:
        """Whether the task's batches are surely its own."""
        return now - self.lease_at < self.lease_s

    def knows(self, number: int) -> bool:
        """Whether a batch has arrived."""
        return number in self.pending or number in self.results

    def renew(self, ask: g.Ask, doing: int, now: float) -> set[int] | None:
        """Renews the lease, unless the Ask lay in a socket while this process was stopped.

        Returns:
            If the lease had run out, the only batches that are still the task's: those that the client awaits, and the one that
            is being computed. None if all of them are.
        """
        self.heard_at = now
        if now - ask.stamp >= self.lease_s:
            return None
        had_lease = self.is_leased(now)
        self.lease_at = min(ask.stamp, now)
        if had_lease:
            return None
        kept = {*ask.awaiting, doing}
        self.pending &= kept
        return kept

    def remember(self, number: int, result: bytes | None) -> None:
        """A batch is finished; None if the client may give it to this task again."""
        self.pending.discard(number)
        if result is not None:
            self.results[number] = result
        while len(self.results) > REMEMBERED_RESULTS:
            self.results.popitem(last=False)
