"""What the quorum decides, as data: which gradients are accepted, refused, applied, and which workers go on.

Made by `torchquorum.rules.quorum`, read by whoever drives it. Plain values, which never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Reason(StrEnum):
    """Why a gradient was accepted or refused; the ledger records these words."""

    FRESH = "fresh"  # computed at the current version
    WITHIN_BOUND = "within bound"  # stale, and the rule allows that much
    STALE = "stale"  # older than max_staleness
    ALREADY_IN_ROUND = "already in round"  # this worker counts once per round, and was counted
    PAST_LAST_STEP = "past last step"  # the run has made its last update
    OLD_INCARNATION = "old incarnation"  # sent by a process that has been replaced
    EXPIRED = "expired"  # its worker was declared dead while it computed
    NOT_FINITE = "not finite"  # it contains NaN or infinity


class Key(NamedTuple):
    """Identifies one gradient: the worker that computed it, its incarnation and its local step."""

    worker: int
    incarnation: int
    local_step: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is decided of a gradient that was computed at `version`, when the version was `met`."""

    key: Key
    version: int
    met: int
    reason: Reason
    now: float


@dataclass(frozen=True, slots=True)
class Accepted(Verdict):
    """The gradient joined the round that was open at version `met`."""


@dataclass(frozen=True, slots=True)
class Refused(Verdict):
    """The gradient is not used; its worker is told."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """The gradient was decided on before: the same answer is sent again."""

    key: Key


@dataclass(frozen=True, slots=True)
class Applied:
    """The mean of these gradients is the update that makes a track's `version`; keys are in order of worker and local step."""

    keys: tuple[Key, ...]
    version: int
    track: int = 0


@dataclass(frozen=True, slots=True)
class Discarded:
    """Accepted gradients whose round never closed because the run ended."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """The worker may continue, from `version`; `stop` means that the run is over."""

    worker: int
    incarnation: int
    local_step: int
    version: int
    stop: bool


@dataclass(frozen=True, slots=True)
class Died:
    """The worker no longer counts as alive."""

    worker: int
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class Chose:
    """From here on an update takes `aggregate` gradients, of `live` workers, and a round is expected to take `round_s`."""

    aggregate: int
    live: int
    round_s: float
    now: float
    track: int = 0


@dataclass(frozen=True, slots=True)
class Stuck:
    """All live workers wait, and in different tracks: of each of these, which wait in its round. They run different programs."""

    waits: tuple[tuple[int, tuple[int, ...]], ...]


Action = Accepted | Refused | Repeated | Applied | Discarded | Released | Died | Chose | Stuck


@dataclass(frozen=True, slots=True)
class Wait:
    """What a held worker waits for, for status messages, and in which track."""

    what: str
    have: int
    need: int
    missing: tuple[int, ...]
    track: int = 0

    def to_dict(self) -> dict[str, object]:
        """Returns it for a status: at most eight missing workers, and their number."""
        few = list(self.missing[:8])
        return {"what": self.what, "have": self.have, "need": self.need, "missing": few, "count": len(self.missing)}
