"""The data that shard 0 shares out by batch: the books of every share, as messages, ledger and checkpoints see them.

Owned by the leader. The decisions are `torchquorum.rules.batch_pool`'; here are the names of shares, what a worker is told that
means other data than the others, and what goes into a checkpoint. What always holds: what `state` returns belongs to the
version of the moment, so that a run that goes on from it computes every batch that is not in its variables, and no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

import torchquorum.wire.messages as m
from torchquorum.errors import ConfigError
from torchquorum.rules.batch_pool import Pool, WorkerLife
from torchquorum.rules.quorum import Key, Reason

MOST_STEPS = 1024
MOST_SHARES = 64
MOST_BATCHES = 1 << 40


class SharedData:
    """The pools of a run by name; `notes` are lines for people."""

    def __init__(self) -> None:
        self._pools: dict[str, tuple[m.ShareSpec, Pool]] = {}
        self._saved: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []

    # -- messages -----------------------------------------------------------------------------------------------------

    def take(self, message: m.TakeBatches, live: int, *, stopped: bool) -> m.LeasedBatches:
        """Answers a worker that asks for batches.

        Raises:
            ConfigError: It means other data than those before it.
        """
        steps = message.steps
        if len(steps) > MOST_STEPS or any(not 0 <= step < MOST_BATCHES for step in steps):
            raise ValueError(f"{len(steps)} steps: at most {MOST_STEPS}, from 0 on")
        pool = self._pool(message.share)
        life = WorkerLife(message.worker, message.incarnation)
        void = message.void if message.void >= 0 else None
        grant = pool.take(life, message.request, () if stopped else steps, live=live, void=void, idle=message.idle)
        return m.LeasedBatches(message.request, list(grant.numbers), grant.over or stopped, grant.void)

    def use(self, message: m.UseBatches) -> m.BatchesUsed:
        """Notes for which steps a worker's batches are."""
        if len(message.steps) > MOST_STEPS:
            raise ValueError(f"{len(message.steps)} batches: at most {MOST_STEPS}")
        found = self._pools.get(message.name)
        life = WorkerLife(message.worker, message.incarnation)
        ok = found is not None and found[1].assign(life, dict(message.steps))
        return m.BatchesUsed(message.request, ok)

    def _pool(self, spec: m.ShareSpec) -> Pool:
        if found := self._pools.get(spec.name):
            if _follows(found[0], spec):
                found[1].epochs = spec.epochs
                self._pools[spec.name] = spec, found[1]
            elif found[0] != spec:
                raise ConfigError(f"{_differs(found[0], spec)}. Give every worker the same data and arguments.")
            return found[1]
        if not (0 < spec.batches <= MOST_BATCHES and (spec.epochs is None or 0 < spec.epochs <= MOST_BATCHES)):
            raise ValueError(f"{spec.batches} batches, {spec.epochs} epochs: must be 1 or more")
        if len(self._pools) >= MOST_SHARES:
            raise ConfigError(f"share {spec.name!r}: a run has at most {MOST_SHARES}; use one again")
        pool = self._open(spec)
        self._pools[spec.name] = spec, pool
        return pool

    def _open(self, spec: m.ShareSpec) -> Pool:
        saved = self._saved.pop(spec.name, None)
        if saved is None:
            return Pool(spec.batches, spec.epochs)
        try:
            if "share" in saved:
                before = msgspec.structs.replace(msgspec.convert(saved["share"], m.ShareSpec), epochs=spec.epochs)
                if before != spec:
                    raise ConfigError(_differs(before, spec))
            low, done = msgspec.convert((saved["low"], saved["done"]), tuple[int, list[int]])
        except (ConfigError, msgspec.ValidationError, KeyError) as error:
            self.notes.append(f"the saved place in the epoch cannot be taken up, so the data starts anew: {error}")
            return Pool(spec.batches, spec.epochs)
        pool = Pool(spec.batches, spec.epochs, low, done)
        epoch = min(pool.used // spec.batches, (spec.epochs or pool.used) - 1) if not pool.over else spec.epochs or 0
        if pool.used:
            self.notes.append(
                f"the data goes on in epoch {epoch + (not pool.over)}: {pool.used} batches are in the variables"
            )
        return pool

    # -- what the leader hears ----------------------------------------------------------------------------------------

    def counts(self, key: Key) -> bool:
        """Whether a gradient's batches are still its worker's."""
        return all(pool.counts(key) for _, pool in self._pools.values())

    def decided(self, key: Key, reason: Reason, *, accepted: bool) -> dict[str, list[int]]:
        """A gradient was decided on; returns the batches it was computed from, by share."""
        spent = reason is Reason.NOT_FINITE  # computed again it would be no better
        found = {name: pool.decided(key, accepted=accepted, spent=spent) for name, (_, pool) in self._pools.items()}
        return {name: list(numbers) for name, numbers in found.items() if numbers}

    def applied(self, keys: Iterable[Key]) -> dict[str, list[int]]:
        """These gradients are in the variables; returns their batches, by share."""
        found = {name: pool.applied(keys) for name, (_, pool) in self._pools.items()}
        return {name: numbers for name, numbers in found.items() if numbers}

    def gone(self, worker: int, incarnation: int, *, for_good: bool) -> None:
        """A worker died, left or was replaced: others get its batches."""
        for _, pool in self._pools.values():
            pool.gone(WorkerLife(worker, incarnation), for_good=for_good)

    def is_void(self, worker: int, incarnation: int, local_step: int) -> bool:
        """Whether the next gradient of a worker, after this local step, is of batches that are not its own any more."""
        return any(pool.is_void(WorkerLife(worker, incarnation), local_step) for _, pool in self._pools.values())

    @property
    def over(self) -> bool:
        """Whether there is data that is shared out, and every batch of it is used."""
        return bool(self._pools) and all(pool.over for _, pool in self._pools.values())

    def __bool__(self) -> bool:
        return bool(self._pools)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Any]]:
        """Returns what a checkpoint of the current version holds."""
        found = {}
        for name, (spec, pool) in self._pools.items():
            low, done = pool.done
            found[name] = {"share": msgspec.to_builtins(spec), "low": low, "done": done}
        return {**self._saved, **found}

    def restore(self, state: dict[str, dict[str, Any]], journal: Iterable[dict[str, list[int]]] = ()) -> None:
        """Goes on from a checkpoint, and from the updates that the journal has after it."""
        self._saved = {name: dict(body) for name, body in state.items()}
        for batches in journal:
            for name, numbers in batches.items():
                body = self._saved.setdefault(name, {"low": 0, "done": []})
                body["done"] = [*body["done"], *numbers]

    def status(self) -> dict[str, Any]:
        """Returns how far the data is, for people and reports."""
        found = {}
        for name, (spec, pool) in self._pools.items():
            total = spec.batches * spec.epochs if spec.epochs is not None else None
            found[name] = {
                "epoch": pool.used // spec.batches,
                "epochs": spec.epochs,
                "used": pool.used,
                "of": total,
                "leased": pool.leased,
                "again": pool.again,
                "unusable": pool.unusable,
            }
        return found


def _follows(ours: m.ShareSpec, theirs: m.ShareSpec) -> bool:
    """Whether it is the same data in a later epoch, of a program that goes from epoch to epoch by itself."""
    if not theirs.by_epoch or ours.epochs is None or theirs.epochs is None or theirs.epochs <= ours.epochs:
        return False
    return msgspec.structs.replace(ours, epochs=theirs.epochs) == theirs


def _differs(ours: m.ShareSpec, theirs: m.ShareSpec) -> str:
    names = [name for name in m.ShareSpec.__struct_fields__ if getattr(ours, name) != getattr(theirs, name)]
    words = [f"{name}={getattr(theirs, name)!r}, which was {getattr(ours, name)!r}" for name in names]
    return f"share {theirs.name!r}: {'; '.join(words)}"
