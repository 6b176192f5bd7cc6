"""A quorum whose workers push by hand, one call a gradient, and what to read from its answers."""

from __future__ import annotations

from torchquorum.rules import Async, Bounded, Buffered, Quorum, Rule, Sync
from torchquorum.rules.quorum import (
    Accepted,
    Action,
    Applied,
    Key,
    Reason,
    Refused,
    Released,
)

PRESETS = [Async(), Sync(), Sync(aggregate=2), Bounded(0), Bounded(2), Buffered(2), Buffered(3)]


class Run:
    """A quorum with workers 0..n-1 that have joined; each pushes its next gradient at the version it was released at."""

    def __init__(self, rule: Rule, num_workers: int, *, joined: int | None = None, version=0, last_step=None):
        self.quorum = Quorum(rule, num_workers, version=version, last_step=last_step)
        self.now = 0.0
        self.at: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.lives: dict[int, int] = {}
        for worker in range(num_workers if joined is None else joined):
            self.join(worker)

    def follow(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, Released):
                self.at[action.worker] = action.version
        return actions

    def join(self, worker: int) -> list[Action]:
        self.lives[worker] = self.lives.get(worker, 100 * worker) + 1
        self.steps[worker] = 0
        return self.follow(self.quorum.join(worker, self.lives[worker], self.now))

    def key(self, worker: int) -> Key:
        return Key(worker, self.lives[worker], self.steps[worker])

    def push(self, worker: int, *, finite: bool = True) -> list[Action]:
        self.steps[worker] += 1
        return self.follow(self.quorum.push(self.key(worker), self.at[worker], self.now, finite=finite))

    def seen(self, worker: int) -> None:
        self.quorum.seen(worker, self.lives[worker], self.now)

    def lost(self, worker: int) -> list[Action]:
        return self.follow(self.quorum.lost(worker, self.lives[worker], "its process ended"))

    def leave(self, worker: int) -> list[Action]:
        return self.follow(self.quorum.leave(worker, self.lives[worker]))

    def expire(self) -> list[Action]:
        return self.follow(self.quorum.expire(self.now))

    def computing(self) -> list[int]:
        return [i for i in self.quorum.alive if i not in self.quorum.held]


def verdict(actions: list[Action]) -> Reason | None:
    return next((a.reason for a in actions if isinstance(a, Accepted | Refused)), None)


def applied(actions: list[Action]) -> list[Applied]:
    return [a for a in actions if isinstance(a, Applied)]


def released(actions: list[Action]) -> list[int]:
    return [a.worker for a in actions if isinstance(a, Released)]
