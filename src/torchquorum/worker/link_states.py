"""The states of a worker's link and the steps between them: one enum, one table, one place that changes it."""

from __future__ import annotations

from enum import StrEnum


class LinkState(StrEnum):
    """Where a link stands."""

    NEW = "new"  # channels are made, nothing is known of the ps tasks
    GREETED = "greeted"  # every ps task has answered; the chief may create the variables
    AWAITING = "awaiting"  # a join, push or pull is sent and not yet answered by all ps tasks
    IDLE = "idle"  # joined; the parameters hold a whole version and nothing is asked
    CLOSED = "closed"  # channels and memory are given up


NEXT: dict[LinkState, frozenset[LinkState]] = {
    LinkState.NEW: frozenset({LinkState.GREETED, LinkState.CLOSED}),
    # To itself: the ps tasks still have the run of a session before, which is waited for.
    LinkState.GREETED: frozenset({LinkState.GREETED, LinkState.AWAITING, LinkState.CLOSED}),
    # To itself: shared memory could not be opened, and the worker joins again over TCP.
    LinkState.AWAITING: frozenset({LinkState.IDLE, LinkState.AWAITING, LinkState.CLOSED}),
    LinkState.IDLE: frozenset({LinkState.AWAITING, LinkState.CLOSED}),
    LinkState.CLOSED: frozenset({LinkState.CLOSED}),
}


class LinkStates:
    """The state of one link; shared by the parts of it that change the state."""

    def __init__(self) -> None:
        self.now = LinkState.NEW

    def set(self, then: LinkState) -> None:
        """Goes to another state: the only place where it changes."""
        assert then in NEXT[self.now], f"a link cannot go from {self.now} to {then}"
        self.now = then
