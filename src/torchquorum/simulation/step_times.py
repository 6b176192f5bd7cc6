"""How long steps take: the distributions that a simulation draws from.

Called by `simulate` and by the command line. What always holds: a worker's draws depend on the seed and on its index only, so
every rule of a sweep meets the same workers; a time is positive and finite.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torchquorum.errors import ConfigError

_FORMS = "0.1, exponential:0.1, exponential:0.1:0.05, lognormal:0.1:0.5, pareto:0.1:2.5, trace:FILE"


class DrawnTimes(Protocol):
    """Where the times of steps come from."""

    def draws(self, worker: int, seed: int) -> Iterator[float]:
        """Yields the seconds of each step of one worker, without end."""
        ...


def random_of(seed: int, worker: int) -> random.Random:
    """Returns the source of everything random about one worker."""
    return random.Random(f"{seed}/{worker}")


@dataclass(frozen=True)
class Constant:
    """Every step takes `seconds`."""

    seconds: float

    def draws(self, worker: int, seed: int) -> Iterator[float]:
        """Yields the seconds of each step of one worker, without end."""
        del worker, seed
        return itertools.repeat(self.seconds)


@dataclass(frozen=True)
class Exponential:
    """`least` seconds, and an exponential part with the mean `mean`: the usual model of a straggler (Lee et al. 2018)."""

    mean: float
    least: float = 0.0

    def draws(self, worker: int, seed: int) -> Iterator[float]:
        """Yields the seconds of each step of one worker, without end."""
        source, rate = random_of(seed, worker), 1.0 / self.mean
        while True:
            yield self.least + source.expovariate(rate)


@dataclass(frozen=True)
class Lognormal:
    """A lognormal time with this median; `sigma` is the standard deviation of its logarithm."""

    median: float
    sigma: float

    def draws(self, worker: int, seed: int) -> Iterator[float]:
        """Yields the seconds of each step of one worker, without end."""
        source, mu = random_of(seed, worker), math.log(self.median)
        while True:
            yield source.lognormvariate(mu, self.sigma)


@dataclass(frozen=True)
class Pareto:
    """At least `least` seconds, and a heavy tail: P(time > t) = (least / t) ** shape."""

    least: float
    shape: float

    def draws(self, worker: int, seed: int) -> Iterator[float]:
        """Yields the seconds of each step of one worker, without end."""
        source = random_of(seed, worker)
        while True:
            yield self.least * source.paretovariate(self.shape)


@dataclass(frozen=True)
class RecordedTimes:
    """Recorded times, drawn at random: every worker draws from all of them."""

    seconds: tuple[float, ...]

    def draws(self, worker: int, seed: int) -> Iterator[float]:
        """Yields the seconds of each step of one worker, without end."""
        source = random_of(seed, worker)
        while True:
            yield source.choice(self.seconds)


@dataclass(frozen=True)
class Recorded:
    """Recorded times of each worker, in their order and from the beginning again: what slowed all workers at once still does.

    A worker beyond those recorded takes the times of one of them, from another place on.
    """

    by_worker: Mapping[int, Sequence[float]]

    def draws(self, worker: int, seed: int) -> Iterator[float]:
        """Yields the seconds of each step of one worker, without end."""
        if worker in self.by_worker:
            return itertools.cycle(self.by_worker[worker])
        known = sorted(self.by_worker)
        own = self.by_worker[known[worker % len(known)]]
        start = random_of(seed, worker).randrange(len(own))
        return itertools.cycle([*own[start:], *own[:start]])


def parse_times(text: str) -> DrawnTimes:
    """Reads a distribution of step times in the notation of the command line.

    Args:
        text: `0.1` or `100ms` for a constant; `exponential:MEAN` or `exponential:MEAN:LEAST`; `lognormal:MEDIAN:SIGMA`;
            `pareto:LEAST:SHAPE`; `trace:FILE`, a file with one time per line, or with `worker,seconds` on each line.

    Raises:
        ConfigError: It is none of these.
    """
    clean = text.strip().strip("'\"")
    name, _, rest = clean.partition(":")
    if name.lower() == "trace":
        return read_trace(Path(rest))
    parts = [p.strip() for p in clean.lower().split(":")]
    match parts:
        case [seconds] | ["constant", seconds]:
            return Constant(_seconds(text, seconds))
        case ["exponential", mean]:
            return Exponential(_seconds(text, mean))
        case ["exponential", mean, least]:
            return Exponential(_seconds(text, mean), _seconds(text, least))
        case ["lognormal", median, sigma]:
            return Lognormal(_seconds(text, median), _number(text, sigma))
        case ["pareto", least, shape]:
            return Pareto(_seconds(text, least), _number(text, shape))
    raise ConfigError(f"times {text!r}: allowed are {_FORMS}")


def parse_seconds(text: str) -> float:
    """Reads a duration: `0.1`, `0.1s`, `100ms`, `5m` or `2h`, as seconds.

    Raises:
        ConfigError: It is no positive duration.
    """
    for unit, factor in (("ms", 1e-3), ("us", 1e-6), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("", 1.0)):
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit)) * factor
            except ValueError:
                break
            if value > 0 and math.isfinite(value):
                return value
            break
    raise ConfigError(f"{text!r}: must be a duration above 0, such as 0.1, 100ms, 5m or 2h")


def _seconds(text: str, part: str) -> float:
    try:
        return parse_seconds(part)
    except ConfigError as error:
        raise ConfigError(f"times {text!r}: {error}; allowed are {_FORMS}") from None


def _number(text: str, part: str) -> float:
    try:
        value = float(part)
    except ValueError:
        value = -1.0
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"times {text!r}: {part!r} must be a number above 0; allowed are {_FORMS}")
    return value


def read_trace(path: Path) -> RecordedTimes | Recorded:
    """Reads a file of times: one per line, or `worker,seconds` on each line; lines that begin with # are left out.

    Raises:
        ConfigError: There is no such file, or a line of it is something else.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"times trace:{path}: cannot be read ({error}); give a file with one time per line") from None
    alone: list[float] = []
    by_worker: dict[int, list[float]] = {}
    for number, line in enumerate(lines, 1):
        fields = line.replace(",", " ").split()
        if not fields or fields[0].startswith("#"):
            continue
        try:
            seconds = parse_seconds(fields[-1])
            (alone if len(fields) == 1 else by_worker.setdefault(int(fields[0]), [])).append(seconds)
        except (ConfigError, ValueError):
            raise ConfigError(f"{path}, line {number}: {line!r}: must be a time, or worker,seconds") from None
    if alone and by_worker:
        raise ConfigError(f"{path}: some lines name a worker and some do not; write all lines in one form")
    if not alone and not by_worker:
        raise ConfigError(f"{path}: has no times; write one time per line, in seconds")
    return Recorded(by_worker) if by_worker else RecordedTimes(tuple(alone))
