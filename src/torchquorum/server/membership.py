"""How many workers are wanted where they come and go, who is asked to leave, and whether enough are there.

Owned by the leader. What always holds: the chief is never asked to leave; a shortage is reported once, until it is over.
"""

from __future__ import annotations

from typing import Any

from torchquorum.errors import ConfigError
from torchquorum.rules.quorum import Quorum
from torchquorum.wire.messages import Plan, Scaled


class Membership:
    """How many workers are wanted, and which of them are asked to leave.

    Attributes:
        wanted: How many workers were asked for; None before the first request.
        number: How many requests there were, so that a launcher notices a new one.
    """

    def __init__(self, plan: Plan, quorum: Quorum) -> None:
        self._plan, self._quorum = plan, quorum
        self.wanted: int | None = None
        self.number = 0
        self._leaving: set[tuple[int, int]] = set()
        self._short = False

    def begin(self) -> str | None:
        """Returns what a run whose workers come and go says at its beginning."""
        plan = self._plan
        if not plan.elastic:
            return None
        needed = plan.rule.needed(plan.num_workers)
        if plan.rule.auto:
            least = plan.rule.least(plan.num_workers)
            return f"{plan.min_workers} to {needed} workers may come and go: an update takes at least {least} gradients"
        what = f"{needed} gradients make one update" if needed > 1 else "every gradient is an update"
        if needed > 1 and plan.rule.once_per_round:
            what += f"; while fewer than {needed} workers are alive, some give several"
        return f"{plan.min_workers} to {plan.num_workers} workers may come and go: under {plan.rule} {what}"

    def scale(self, workers: int) -> Scaled:
        """Changes the number of workers; those with the highest index leave first, the chief never.

        Raises:
            ConfigError: The cluster has a fixed number of workers, or that many are not allowed.
        """
        plan = self._plan
        if not plan.elastic:
            raise ConfigError(
                f"this run has {plan.num_workers} workers, neither more nor fewer; start it with --workers MIN:MAX to let "
                "them come and go"
            )
        if not plan.min_workers <= workers <= plan.num_workers:
            raise ConfigError(f"{workers} workers: this run has {plan.min_workers} to {plan.num_workers}")
        self.wanted, self.number = workers, self.number + 1
        return Scaled(workers, self._quorum.alive, self._ask_to_leave())

    def _ask_to_leave(self) -> list[int]:
        """Asks those that are too many; returns them."""
        assert self.wanted is not None
        alive = self._quorum.alive
        surplus = [i for i in alive if i != 0][self.wanted - (0 in alive) :]
        self._leaving = {(i, self._quorum.workers[i].incarnation) for i in surplus}
        return surplus

    def must_leave(self, worker: int, incarnation: int) -> bool:
        """Whether a worker is asked to leave."""
        return (worker, incarnation) in self._leaving

    def changed(self) -> str | None:
        """A worker came or left; returns a line for people, if there is news."""
        quorum, plan = self._quorum, self._plan
        if not plan.elastic or quorum.stopped:
            return None
        if self.wanted is not None:
            self._ask_to_leave()  # a worker may have joined after fewer were asked for
        live, short = len(quorum.alive), len(quorum.alive) < plan.min_workers
        news = short and not self._short and len(quorum.workers) >= plan.min_workers
        self._short = short and (news or self._short)
        if not news:
            return None
        return f"{live} of at least {plan.min_workers} workers {'is' if live == 1 else 'are'} alive; the run goes on"

    def status(self) -> dict[str, Any]:
        """Returns what a launcher and people ask for."""
        if not self._plan.elastic:
            return {}
        return {"min_workers": self._plan.min_workers, "wanted": self.wanted, "asked": self.number}
