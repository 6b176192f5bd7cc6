"""The options of the one rule, and the presets that users name.

Owned by nobody and shared by all: a `Rule` is a frozen value that travels from the chief to the ps tasks. The quorum
(`torchquorum.rules.quorum`) is the only reader of its meaning.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from torchquorum.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When gradients become an update.

    Attributes:
        name: The preset it came from; only shown to people.
        aggregate: How many gradients make one update; None means as many as the cluster has workers.
        max_staleness: A gradient older than this many versions is refused; None means no bound. With a bound each live
            worker counts once per round and waits for the round to close.
        max_lead: A worker more local steps than this ahead of the slowest live worker waits; None means no bound.
        pipeline: A worker does not wait for its own push before it goes on: staleness grows by one, latency is hidden.
    """

    name: str = "Rule"
    aggregate: int | None = 1
    max_staleness: int | None = None
    max_lead: int | None = None
    pipeline: bool = False

    def __post_init__(self) -> None:
        _check("aggregate", self.aggregate, 1, "leave it out for all workers")
        _check("max_staleness", self.max_staleness, 0, "leave it out for no bound")
        _check("max_lead", self.max_lead, 0, "leave it out for no bound")
        if self.pipeline and self.max_staleness is not None:
            raise ConfigError(
                f"pipeline=True with max_staleness={self.max_staleness}: a pipelined gradient is always one version older; "
                "use Async(pipeline=True), or leave pipeline out"
            )

    def needed(self, num_workers: int) -> int:
        """Returns how many gradients make one update in a cluster of `num_workers` workers."""
        return self.aggregate if self.aggregate is not None else max(1, num_workers)

    @property
    def once_per_round(self) -> bool:
        """Whether each live worker counts once per round; true wherever staleness is bounded."""
        return self.max_staleness is not None

    def __str__(self) -> str:
        match self.name:
            case "Async":
                return "Async(pipeline=True)" if self.pipeline else "Async()"
            case "Sync":
                return "Sync()" if self.aggregate is None else f"Sync(aggregate={self.aggregate})"
            case "Bounded":
                return f"Bounded({self.max_lead})"
            case "Buffered":
                return f"Buffered({self.aggregate})"
        return f"Rule(aggregate={self.aggregate}, max_staleness={self.max_staleness}, max_lead={self.max_lead})"


def _check(name: str, value: object, least: int, otherwise: str) -> None:
    if value is not None:
        _check_number(name, value, least, otherwise)


def _check_number(name: str, value: object, least: int, otherwise: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r}: must be a whole number, {least} or more; {otherwise}")
    if value < least:
        raise ConfigError(f"{name}={value}: must be {least} or more; {otherwise}")


def Async(*, pipeline: bool = False) -> Rule:
    """Every gradient is an update, applied as it comes, whatever its staleness (Dean et al. 2012, Downpour SGD)."""
    return Rule(name="Async", aggregate=1, pipeline=pipeline)


def Sync(aggregate: int | None = None) -> Rule:
    """One update per round: the mean of `aggregate` gradients, all computed at the same version.

    With `aggregate` below the number of workers the slowest are not waited for: backup workers (Chen et al. 2016,
    Revisiting Distributed Synchronous SGD).
    """
    return Rule(name="Sync", aggregate=aggregate, max_staleness=0)


def Bounded(max_lead: int) -> Rule:
    """Async, but no worker runs more than `max_lead` local steps ahead: stale synchronous parallel (Ho et al. 2013)."""
    _check_number("max_lead", max_lead, 0, "for no bound use Async()")
    return Rule(name="Bounded", aggregate=1, max_lead=max_lead)


def Buffered(aggregate: int) -> Rule:
    """Async in batches: the mean of every `aggregate` gradients, from any workers, is an update (FedBuff, 2021)."""
    _check_number("aggregate", aggregate, 1, "for an update per gradient use Async()")
    return Rule(name="Buffered", aggregate=aggregate)


_NUMBERS = {"bounded": 3, "buffered": 2}
_FORMS = "async, async:pipeline, sync, sync:K, sync:KofN, bounded:S, buffered:K"


def parse_rule(text: str, num_workers: int | None = None) -> Rule:
    """Reads a rule in the notation of the command line.

    Args:
        text: One of async, async:pipeline, sync, sync:2, sync:2of3, bounded:3, buffered:4 (case and spaces do not matter).
        num_workers: How many workers there are, where that is known; then sync:2of3 is for three of them.

    Raises:
        ConfigError: The text is none of these; the message suggests the nearest.
    """
    name, _, argument = text.strip().strip("'\"").lower().replace(" ", "").partition(":")
    workers = argument.partition("of")[2]
    if name == "sync" and num_workers is not None and workers.isdigit() and int(workers) != num_workers:
        raise ConfigError(
            f"rule {text!r}: is for {workers} workers, and there are {num_workers}; give as many workers, or another rule"
        )
    if name == "async" and argument in ("", "pipeline"):
        return Async(pipeline=argument == "pipeline")
    if name == "sync":
        return Sync(_backup(text, argument) if argument else None)
    if name == "bounded" and argument:
        return Bounded(_number(text, argument))
    if name == "buffered" and argument:
        return Buffered(_number(text, argument))
    near = difflib.get_close_matches(name, ["async", "sync", "bounded", "buffered"], 1)
    hint = f"; did you mean {near[0]}?" if near and near[0] != name else ""
    if name in _NUMBERS:
        hint = f"; it needs a number, such as {name}:{_NUMBERS[name]}"
    raise ConfigError(f"rule {text!r}: allowed are {_FORMS}{hint}")


def _backup(text: str, argument: str) -> int:
    """Reads K or KofN; N is only checked against the number of workers."""
    aggregate, of, workers = argument.partition("of")
    needed = _number(text, aggregate)
    if of and needed > _number(text, workers):
        raise ConfigError(f"rule {text!r}: {needed} of {workers} is more than all; allowed are {_FORMS}")
    return needed


def _number(text: str, digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ConfigError(f"rule {text!r}: {digits!r} is not a whole number; allowed are {_FORMS}") from None
