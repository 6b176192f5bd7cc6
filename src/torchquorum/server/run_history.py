"""What has happened in a run: written to the ledger, counted for reports, and kept a while for tasks that ask.

Owned by the leader. What always holds: every decision on a gradient is recorded once in all three; a run without a ledger is
counted all the same.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from torchquorum.formats.journal import Record
from torchquorum.formats.ledger import Entry, Event, name_life
from torchquorum.formats.ledger_write import LedgerWriter
from torchquorum.rules.latest_norms import LatestNorms
from torchquorum.rules.quorum import Accepted, Key, Quorum, Reason, Refused
from torchquorum.server.arrivals import Arrival
from torchquorum.server.tally import Tally
from torchquorum.wire.messages import Contribution, Fate, Plan
from torchquorum.wire.plan import OptimizerPlan

REMEMBERED_FATES = 4096


class RunHistory:
    """The record of one run.

    Args:
        quorum: Decides.
        tally: The counts.
        ledger: The ledger, if the run has a folder.
        names: What the optimizers are called; the only one has no name.

    Attributes:
        tally: The counts, which go on over several creations of the variables.
        wall: The time of what happened last, for events.
    """

    def __init__(
        self, quorum: Quorum, tally: Tally, ledger: LedgerWriter | None = None, names: Sequence[str] = ("",)
    ) -> None:
        self._quorum, self.tally, self._ledger = quorum, tally, ledger
        self.wall = 0.0
        self._fates: OrderedDict[Key, Fate] = OrderedDict()
        self._names, self._norms = names, [LatestNorms() for _ in names]

    def begin(self, plan: Plan) -> None:
        """The variables exist, new or restored: the ledger gets the run's configuration."""
        if self._ledger is not None:
            config = _configuration_of(plan)
            if plan.more:
                config["more"] = [_configuration_of(spec) for spec in plan.more]
                config["versions"] = {n: t.version for n, t in zip(plan.names, self._quorum.tracks, strict=True)}
            self.note("began", values=config)
            self._ledger.flush()

    def restore(self, replayed: list[Record]) -> None:
        """The journal's updates were made again: their gradients count as accepted for those who ask.

        The ledger gets those that it does not have: of what workers wrote to the journal the ps heard later, or never.
        """
        for record in replayed[-REMEMBERED_FATES:]:
            for key in record.keys:
                self._keep_fate(Fate(*key, "accepted", Reason.WITHIN_BOUND.value, record.version - 1))
        if self._ledger is None:
            return
        for record in replayed:
            if record.given:
                self._ledger.restore([_entry_of(record, k) for k in range(len(record.keys))])

    def decided(
        self,
        action: Accepted | Refused,
        push: Arrival,
        wall: float,
        batches: dict[str, list[int]],
        rates: Sequence[float] = (),
    ) -> None:
        """A gradient was accepted or refused; `batches` are those it was computed from, `rates` those of an update that it made full."""
        loss, norm, track, of_local = push.loss, push.norm, push.track, push.of
        optimizer = self._names[track]
        accepted = isinstance(action, Accepted)
        key, reason, staleness = action.key, action.reason.value, action.met - action.version
        counts = self.tally.worker(key.worker)
        counts.decided(accepted=accepted, reason=reason, staleness=staleness, loss=loss, at=wall)
        carries = counts.gave(track, of_local, accepted=accepted, kept=action.reason is not Reason.NOT_FINITE)
        if optimizer:
            of = self.tally.optimizer(optimizer)
            of.count(accepted=accepted, reason=reason, staleness=staleness, loss=loss)
        self._keep_fate(Fate(*key, "accepted" if accepted else "refused", reason, action.met, loss))
        finite = norm is not None and math.isfinite(norm)
        if accepted and norm is not None and finite:
            self._norms[track].note(norm, key.worker, key.local_step, action.met)
        if self._ledger is None:
            return
        self._ledger.write(
            Entry(
                worker=key.worker,
                incarnation=name_life(key.incarnation),
                local_step=key.local_step,
                version=action.version,
                met=action.met,
                staleness=staleness,
                accepted=accepted,
                reason=reason,
                arrived_at=wall,
                loss=loss,
                took_s=round(wall - counts.released_at, 6) if counts.released_at is not None else None,
                batches=batches or msgspec.UNSET,
                lr=list(rates) or msgspec.UNSET,
                optimizer=optimizer or msgspec.UNSET,
                track=track or msgspec.UNSET,
                **_made_of(of_local, carries),
                norm=msgspec.UNSET if norm is None else float(f"{norm:.6g}") if finite else None,
            )
        )

    def pace_s(self, alive: Iterable[int], track: int) -> float:
        """Returns how long the fastest live worker takes for a local step; 0 if that is not known."""
        paces = [self.tally.worker(worker).paces.get(track, 0.0) for worker in alive]
        return min((pace for pace in paces if pace > 0), default=0.0)

    def largest(self) -> str | None:
        """Returns a line about the latest accepted gradient that was far larger than the others of its optimizer, if there is one; once."""
        found = [(norms.take_largest(), name) for name, norms in zip(self._names, self._norms, strict=True)]
        known = [(large, name) for large, name in found if large is not None]
        if not known:
            return None
        large, name = max(known, key=lambda each: each[0].norm / (each[0].usual or each[0].norm))
        of = f" of {name}" if name else ""
        return f"what is not finite now may come of an earlier gradient{of}: {large}"

    def note(self, event: str, worker: int = -1, text: str = "", values: dict[str, Any] | None = None) -> None:
        """Writes to the ledger what is no gradient."""
        if self._ledger is not None:
            self._ledger.write(Event(event, self.wall, self._quorum.version, worker, text, values or {}))

    def fate(self, key: Key) -> Fate | None:
        """Returns what became of a gradient, if that is known."""
        return self._fates.get(key)

    def _keep_fate(self, fate: Fate) -> None:
        self._fates[Key(fate.worker, fate.incarnation, fate.local_step)] = fate
        while len(self._fates) > REMEMBERED_FATES:
            self._fates.popitem(last=False)

    def flush(self) -> None:
        """Hands what the ledger has to the operating system."""
        if self._ledger is not None:
            self._ledger.flush()

    @property
    def losses(self) -> int:
        """Returns how often the ledger was found removed, replaced or cut."""
        return self._ledger.losses if self._ledger is not None else 0

    @property
    def taken_by(self) -> str:
        """Returns which other run writes to the folder now; empty if none does."""
        return self._ledger.taken_by if self._ledger is not None else ""

    def check(self) -> None:
        """A checkpoint is about to be published: the ledger knows all of its updates, or says in a gap which it does not."""
        if self._ledger is not None:
            self._ledger.check()

    def sync(self) -> None:
        """Waits until the disk has the ledger."""
        if self._ledger is not None:
            self._ledger.sync()

    def close(self) -> None:
        """Closes the ledger."""
        if self._ledger is not None:
            self._ledger.close()


def _entry_of(record: Record, k: int) -> Entry:
    """Returns what the ledger has of a gradient that a record of the journal tells of."""
    (worker, incarnation, local_step), given, met = record.keys[k], record.given[k], record.version - 1
    fresh = given.computed_at == met
    return Entry(
        worker=worker,
        incarnation=name_life(incarnation),
        local_step=local_step,
        version=given.computed_at,
        met=met,
        staleness=met - given.computed_at,
        accepted=True,
        reason=(Reason.FRESH if fresh else Reason.WITHIN_BOUND).value,
        arrived_at=given.wall,
        loss=given.loss,
        lr=given.rates or msgspec.UNSET,
        norm=msgspec.UNSET if given.norm is None else float(f"{given.norm:.6g}"),
    )


def _made_of(of: Contribution | None, carries: int) -> dict[str, Any]:
    """Returns what the ledger has of what a gradient was made of."""
    if of is None:
        return {}
    found: dict[str, Any] = {"weight": of.weight} if of.weight else {}
    if of.inner_step >= 0:
        found |= {"inner_step": of.inner_step, "steps": of.steps}
    return found | ({"carries": carries} if carries else {})


def _configuration_of(plan: OptimizerPlan) -> dict[str, Any]:
    """Returns what the ledger has of a plan: its variables are counted."""
    body: dict[str, Any] = msgspec.to_builtins(plan)
    values = sum(math.prod(v.shape) for v in plan.variables)
    config = {name: value for name, value in body.items() if name not in ("variables", "rule", "logdir", "more")}
    return config | {"rule": str(plan.rule), "variables": len(plan.variables), "values": values}
