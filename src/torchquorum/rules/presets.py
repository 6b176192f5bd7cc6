"""The options of the one rule, and the presets that users name.

Owned by nobody and shared by all: a `Rule` is a frozen value that travels from the chief to the ps tasks. The quorum
(`torchquorum.rules.quorum`) is the only reader of its meaning.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from torchquorum.errors import ConfigError


@dataclass(frozen=True)
class Outer:
    """The optimizer that the ps tasks run on what workers have gained by their local steps: its class and its options."""

    name: str
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.options)})"


# Douillard et al. 2023, DiLoCo, table 5: the best outer optimizer and its options.
DILOCO = Outer("SGD", (("lr", 0.7), ("momentum", 0.9), ("nesterov", True)))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When gradients become an update.

    Attributes:
        name: The preset it came from; only shown to people.
        aggregate: How many gradients make one update; None means as many as the cluster has workers, and "auto" that the number
            is chosen from the workers' times while the run goes on (`torchquorum.rules.backup`).
        max_staleness: A gradient older than this many versions is refused; None means no bound. With a bound each live
            worker counts once per round and waits for the round to close.
        max_lead: A worker more local steps than this ahead of the slowest live worker waits; None means no bound.
        pipeline: A worker does not wait for its own push before it goes on: staleness grows by one, latency is hidden.
        floor: With "auto", the least number that is chosen; None means half of the workers, rounded up.
        noise: With "auto", how many gradients it takes until the mean of more of them helps little; None means that every
            gradient helps as much as every other.
        grace: How many seconds a round that has enough gradients stays open for those of other live workers; "auto" chooses by the times
            of their steps (`torchquorum.rules.grace`); None closes it at once.
        local_steps: How many steps a worker makes with its own optimizer before it gives what they have changed, which is then what
            "gradient" means above; None means that it gives every gradient.
        outer: With local steps, the optimizer that makes the updates from what workers give.
        equal_time: With local steps, a slower worker makes fewer of them, in about the time in which the fastest makes all.
        fragments: With local steps, into how many parts the model is cut, each with rounds of its own, given at different inner steps.
        overlap: With fragments, how many inner steps a worker goes on while one is on its way.
        mix: With fragments, how much of its own values a worker keeps when a version comes: mix * own + (1 - mix) * version.
    """

    name: str = "Rule"
    aggregate: int | Literal["auto"] | None = 1
    max_staleness: int | None = None
    max_lead: int | None = None
    pipeline: bool = False
    floor: int | None = None
    noise: float | None = None
    grace: float | Literal["auto"] | None = None
    local_steps: int | None = None
    outer: Outer | None = None
    equal_time: bool = False
    fragments: int = 1
    overlap: int = 0
    mix: float = 0.0

    def __post_init__(self) -> None:
        if self.auto:
            self._check_auto()
        else:
            _check("aggregate", self.aggregate, 1, "leave it out for all workers")
            if self.floor is not None or self.noise is not None:
                raise ConfigError(
                    f"floor={self.floor}, noise={self.noise}: only aggregate='auto' chooses a number; leave them out"
                )
        _check("max_staleness", self.max_staleness, 0, "leave it out for no bound")
        _check("max_lead", self.max_lead, 0, "leave it out for no bound")
        _check("local_steps", self.local_steps, 1, "leave it out to give every gradient")
        self._check_fragments()
        if self.grace is not None:
            self._check_grace()
        if self.pipeline and self.max_staleness is not None:
            raise ConfigError(
                f"pipeline=True with max_staleness={self.max_staleness}: a pipelined gradient is always one version older; "
                "use Async(pipeline=True), or leave pipeline out"
            )

    def _check_fragments(self) -> None:
        _check_number("fragments", self.fragments, 1, "1 gives the whole model at once")
        _check_number("overlap", self.overlap, 0, "0 waits for each round")
        if not isinstance(self.mix, int | float) or not 0 <= self.mix < 1:
            raise ConfigError(f"mix={self.mix!r}: must be a number from 0 to below 1; 0 takes the version as it is")
        if self.fragments == 1 and not self.overlap and not self.mix:
            return
        if self.local_steps is None or self.fragments > self.local_steps:
            raise ConfigError(
                f"fragments={self.fragments}: at most one a local step, and only with local steps: tq.Local(30, fragments=4)"
            )
        if self.equal_time:
            raise ConfigError("h='auto' with fragments: each is given at a step of its own; give h as a number")
        between = self.local_steps // self.fragments
        if self.overlap >= between:
            raise ConfigError(
                f"overlap={self.overlap}: with {self.fragments} fragments in {self.local_steps} local steps one is given every {between} "
                f"steps, and has to be back before the next; at most {between - 1}"
            )
        if self.mix and not self.overlap:
            raise ConfigError(
                f"mix={self.mix} without overlap: nothing of a worker's own is newer than the version; leave it out"
            )

    def _check_auto(self) -> None:
        _check("floor", self.floor, 1, "leave it out for half of the workers")
        if self.max_staleness != 0 or self.max_lead is not None:
            raise ConfigError("aggregate='auto' chooses for rounds of one version: use Sync(aggregate='auto')")
        noise = self.noise
        if noise is not None and (isinstance(noise, bool) or not 0 <= noise < math.inf):
            raise ConfigError(
                f"noise={noise}: must be a number of gradients, 0 or more; leave it out if it is not known"
            )

    def _check_grace(self) -> None:
        grace, number = self.grace, isinstance(self.grace, int | float) and not isinstance(self.grace, bool)
        if grace != "auto" and not (number and 0 <= float(grace or 0) < math.inf):
            raise ConfigError(
                f"grace={grace!r}: must be a number of seconds, 0 or more, or 'auto'; leave it out for none"
            )
        if not isinstance(self.aggregate, int) or not self.once_per_round:
            raise ConfigError(
                f"grace={grace!r}: keeps a round open that has enough gradients, for those of other workers: give a number of gradients, "
                "as Sync(2, grace='auto')"
            )

    def needed(self, num_workers: int) -> int:
        """Returns how many gradients make one update in a cluster of `num_workers` workers; with "auto", at the beginning."""
        if isinstance(self.aggregate, int):
            return self.aggregate
        return max(1, num_workers, self.least(num_workers) if self.auto else 1)

    def least(self, num_workers: int) -> int:
        """Returns how many gradients make one update at least."""
        if not self.auto:
            return self.needed(num_workers)
        return self.floor if self.floor is not None else max(1, (num_workers + 1) // 2)

    @property
    def auto(self) -> bool:
        """Whether the number of gradients is chosen while the run goes on."""
        return self.aggregate == "auto"

    @property
    def once_per_round(self) -> bool:
        """Whether each live worker counts once per round; true wherever staleness is bounded."""
        return self.max_staleness is not None

    @property
    def text(self) -> str:
        """Returns a preset in the notation of the command line, such as sync:2; `noise` is not part of it."""
        match self.name:
            case "Local":
                steps = f"auto{self.local_steps}" if self.equal_time else str(self.local_steps)
                parts = f"/{self.fragments}" if self.fragments > 1 else ""
                return f"local:{steps}{parts}" + ("" if (among := self._among()) == Sync() else f":{among.text}")
            case "Async":
                return "async:pipeline" if self.pipeline else "async"
            case "Sync":
                floor = f":{self.floor}" if self.floor is not None else ""
                grace = f"+{self.grace}" if self.grace is not None else ""
                return "sync" if self.aggregate is None else f"sync:{self.aggregate}{floor}{grace}"
            case "Bounded":
                return f"bounded:{self.max_lead}"
            case "Buffered":
                return f"buffered:{self.aggregate}"
        return str(self)

    def _among(self) -> Rule:
        """Returns the preset that decides on what workers give after their local steps."""
        plain = replace(self, local_steps=None, outer=None, equal_time=False, fragments=1, overlap=0, mix=0.0)
        aggregate = self.aggregate if isinstance(self.aggregate, int) else 1
        presets = [Async(), Sync(self.aggregate, grace=self.grace), Buffered(aggregate), Bounded(self.max_lead or 0)]
        return next((p for p in presets if replace(plain, name=p.name) == p), replace(plain, name="Rule"))

    def __str__(self) -> str:
        match self.name:
            case "Local":
                among = self._among()
                how = ", h='auto'" if self.equal_time else ""
                if self.fragments > 1 or self.overlap:
                    how = f", fragments={self.fragments}, overlap={self.overlap}, mix={self.mix!r}"
                return (
                    f"Local({self.local_steps}, outer={self.outer}{how}"
                    + ("" if among == Sync() else f", rule={among}")
                    + ")"
                )
            case "Async":
                return "Async(pipeline=True)" if self.pipeline else "Async()"
            case "Sync":
                given = {"aggregate": self.aggregate, "floor": self.floor, "noise": self.noise, "grace": self.grace}
                return f"Sync({', '.join(f'{name}={value!r}' for name, value in given.items() if value is not None)})"
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


def Sync(
    aggregate: int | Literal["auto"] | None = None,
    *,
    floor: int | None = None,
    noise: float | None = None,
    grace: float | Literal["auto"] | None = None,
) -> Rule:
    """One update per round: the mean of `aggregate` gradients, all computed at the same version.

    With `aggregate` below the number of workers the slowest are not waited for: backup workers (Chen et al. 2016,
    Revisiting Distributed Synchronous SGD).

    With `aggregate="auto"` the ps chooses the number from the times it sees, again and again: the one with the most progress per
    second, after Xu, Neglia and Sebastianelli 2020, Dynamic backup workers for parallel machine learning. Progress is what an
    update is worth, k / (k + noise), over the expected time of a round; see `torchquorum.rules.backup`.

    Args:
        aggregate: How many gradients make an update; None for all workers, "auto" to choose while the run goes on.
        floor: With "auto", the least number; None for half of the workers, rounded up. Workers that are always too slow for it
            contribute nothing, so a low floor can leave out their data.
        noise: With "auto", how many gradients it takes until the mean of more of them helps little: the gradient noise scale of
            McCandlish et al. 2018, in gradients. 0 makes as many updates as possible; None (not known) uses as many gradients
            as possible.
        grace: With a number of gradients, how many seconds more a round stays open for the other live workers; "auto" chooses by the
            times of their steps.
    """
    return Rule(name="Sync", aggregate=aggregate, max_staleness=0, floor=floor, noise=noise, grace=grace)


def Bounded(max_lead: int) -> Rule:
    """Async, but no worker runs more than `max_lead` local steps ahead: stale synchronous parallel (Ho et al. 2013)."""
    _check_number("max_lead", max_lead, 0, "for no bound use Async()")
    return Rule(name="Bounded", aggregate=1, max_lead=max_lead)


def Buffered(aggregate: int) -> Rule:
    """Async in batches: the mean of every `aggregate` gradients, from any workers, is an update (FedBuff, 2021)."""
    _check_number("aggregate", aggregate, 1, "for an update per gradient use Async()")
    return Rule(name="Buffered", aggregate=aggregate)


def Local(
    h: int | Literal["auto"],
    outer: Any = None,
    *,
    most: int | None = None,
    fragments: int = 1,
    overlap: int | None = None,
    mix: float | None = None,
    rule: Rule | None = None,
    aggregate: int | None = None,
    max_staleness: int | None = 0,
    max_lead: int | None = None,
    grace: float | Literal["auto"] | None = None,
) -> Rule:
    """Local steps: every worker makes `h` steps with its own optimizer, then gives what they have changed, as one gradient.

    With x_v the variables of version v and y a worker's parameters h steps later, it gives x_v - y; the quorum decides on it like on
    any gradient, and the outer optimizer, on the ps tasks, makes an update of the mean (Douillard et al. 2023, DiLoCo). The optimizer in
    `tq.Optimizer(...)` is the inner one: it runs in the worker, and its settings and state are the worker's own. `global_step` and
    `last_step` count outer steps, `session.inner_step` the others. What is not used, because it came too late, is part of what the
    worker gives next.

    Args:
        h: How many inner steps are one outer step. "auto" for equal time instead of equal steps: the fastest worker makes `most`, a
            slower one as many as it can in that time; what workers give then counts by its steps, or by its examples (`step(examples=)`).
        most: With h="auto", how many steps the fastest worker makes; 50 by default.
        fragments: Into how many parts the model is cut, each with rounds of its own and given at a step of its own: a line is used
            evenly, and while the worker computes (Douillard et al. 2025, Streaming DiLoCo).
        overlap: How many inner steps a worker goes on while what it gave is on its way; by default half of those between two fragments.
        mix: How much of its own a worker keeps when the version comes: mix * own + (1 - mix) * version; by default 0.5 with an overlap.
        outer: The optimizer on the ps tasks: one of torch.optim over the model's parameters, of which class and options count, or
            functools.partial(torch.optim.SGD, lr=0.7); None for SGD with lr=0.7, momentum=0.9 and Nesterov, as in DiLoCo.
        rule: Which rule holds for outer steps: `tq.Sync()` (the default), `tq.Sync(k)`, `tq.Async()`, `tq.Bounded(s)`,
            `tq.Buffered(k)`; instead of the three that follow.
        aggregate: How many workers' changes make one update; None for all.
        max_staleness: Older ones are not used now, but given again; None for no bound.
        max_lead: How many outer steps a worker may be ahead of the slowest.
        grace: With `aggregate`, how many seconds more a round stays open for the other live workers; "auto" chooses.
    """
    if h != "auto" and most is not None:
        raise ConfigError(f"Local({h!r}, most={most}): only h='auto' chooses; leave most out")
    steps = (50 if most is None else most) if h == "auto" else h
    _check_number("most" if h == "auto" else "h", steps, 1, "1 gives every step")
    _check_number("fragments", fragments, 1, "1 gives the whole model at once")
    if rule is not None and (aggregate, max_staleness, max_lead, grace) != (None, 0, None, None):
        raise ConfigError(
            "Local(rule=...) says when an outer step is made; leave out aggregate, max_staleness, max_lead and grace"
        )
    if rule is not None and (not isinstance(rule, Rule) or rule.local_steps is not None or rule.pipeline):
        raise ConfigError(f"Local(rule={rule}): give tq.Sync(), tq.Async(), tq.Bounded(s) or tq.Buffered(k)")
    among = rule or Rule(aggregate=aggregate, max_staleness=max_staleness, max_lead=max_lead, grace=grace)
    between = steps // fragments
    ahead = (between // 2 if fragments > 1 else 0) if overlap is None else overlap
    return replace(
        among,
        name="Local",
        local_steps=steps,
        outer=_read_outer(outer),
        equal_time=h == "auto",
        fragments=fragments,
        overlap=ahead,
        mix=(0.5 if ahead else 0.0) if mix is None else mix,
    )


def _read_outer(given: Any) -> Outer:
    """Reads an outer optimizer: an object of torch.optim, or a functools.partial of a class."""
    if given is None:
        return DILOCO
    if isinstance(given, Outer):
        return given
    kind, options = getattr(given, "func", None), getattr(given, "keywords", None)
    if isinstance(kind, type) and isinstance(options, dict) and not getattr(given, "args", ()):
        return Outer(kind.__name__, tuple(options.items()))
    defaults, groups = getattr(given, "defaults", None), getattr(given, "param_groups", None)
    if not isinstance(defaults, dict) or not isinstance(groups, list):
        raise ConfigError(
            f"Local(outer={given!r}): give an optimizer of torch.optim over the model's parameters, or "
            "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)"
        )
    options = {name: groups[0].get(name, value) for name, value in defaults.items()}
    options = {name: value for name, value in options.items() if value is not None}
    if any(group.get(name, value) != value for group in groups for name, value in options.items()):
        raise ConfigError(
            "Local(outer=...): an outer optimizer has the same options for all parameters; give it one group"
        )
    return Outer(type(given).__name__, tuple(options.items()))


_NUMBERS = {"bounded": 3, "buffered": 2, "local": 50}
_FORMS = (
    "async, async:pipeline, sync, sync:K, sync:KofN, sync:K+GRACE, sync:auto, sync:auto:FLOOR, bounded:S, buffered:K, local:H, "
    "local:H/FRAGMENTS, local:auto, local:H:RULE"
)


def parse_rule(text: str, num_workers: int | None = None) -> Rule:
    """Reads a rule in the notation of the command line.

    Args:
        text: One of async, async:pipeline, sync, sync:2, sync:2of3, sync:auto, sync:auto:2, sync:2+1.5s, bounded:3, buffered:4, local:50,
            local:50:async (case and spaces do not matter).
        num_workers: How many workers there are, where that is known; then sync:2of3 is for three of them.

    Raises:
        ConfigError: The text is none of these; the message suggests the nearest.
    """
    name, _, argument = text.strip().strip("'\"").lower().replace(" ", "").partition(":")
    workers = argument.partition("of")[2].partition("+")[0]
    if name == "sync" and num_workers is not None and workers.isdigit() and int(workers) != num_workers:
        raise ConfigError(
            f"rule {text!r}: is for {workers} workers, and there are {num_workers}; give as many workers, or another rule"
        )
    if name == "async" and argument in ("", "pipeline"):
        return Async(pipeline=argument == "pipeline")
    if name == "sync" and argument.partition(":")[0] == "auto":
        floor = argument.partition(":")[2]
        return Sync("auto", floor=_number(text, floor) if ":" in argument else None)
    if name == "sync":
        number, plus, grace = argument.partition("+")
        return Sync(_backup(text, number) if argument else None, grace=_grace(text, grace) if plus else None)
    if name == "bounded" and argument:
        return Bounded(_number(text, argument))
    if name == "buffered" and argument:
        return Buffered(_number(text, argument))
    if name == "local" and argument:
        return _parse_local(text, argument, num_workers)
    near = difflib.get_close_matches(name, ["async", "sync", "bounded", "buffered", "local"], 1)
    hint = f"; did you mean {near[0]}?" if near and near[0] != name else ""
    if name in _NUMBERS:
        hint = f"; it needs a number, such as {name}:{_NUMBERS[name]}"
    raise ConfigError(f"rule {text!r}: allowed are {_FORMS}{hint}")


def _parse_local(text: str, argument: str, num_workers: int | None) -> Rule:
    """Reads H, H/FRAGMENTS, auto or autoMOST, and after a colon the rule of outer steps."""
    first, _, among = argument.partition(":")
    steps, slash, fragments = first.partition("/")
    rule = parse_rule(among, num_workers) if among else None
    if steps.startswith("auto"):
        most = steps.removeprefix("auto")
        return Local("auto", most=_number(text, most) if most else None, rule=rule)
    return Local(_number(text, steps), fragments=_number(text, fragments) if slash else 1, rule=rule)


def _backup(text: str, argument: str) -> int:
    """Reads K or KofN; N is only checked against the number of workers."""
    aggregate, of, workers = argument.partition("of")
    needed = _number(text, aggregate)
    if of and needed > _number(text, workers):
        raise ConfigError(f"rule {text!r}: {needed} of {workers} is more than all; allowed are {_FORMS}")
    return needed


def _grace(text: str, given: str) -> float | Literal["auto"]:
    """Reads a grace: auto, or seconds, such as 1.5 or 1.5s."""
    try:
        return "auto" if given == "auto" else float(given.removesuffix("s"))
    except ValueError:
        raise ConfigError(f"rule {text!r}: {given!r} is no number of seconds, nor auto; allowed are {_FORMS}") from None


def _number(text: str, digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ConfigError(f"rule {text!r}: {digits!r} is not a whole number; allowed are {_FORMS}") from None


_SHOWN = re.compile(r"(Async|Sync|Bounded|Buffered)\((.*)\)")
_SHOWN_LOCAL = re.compile(
    r"Local\((\d+), outer=(\w+)\(([^()]*)\)(, h='auto')?(?:, (fragments=[^,]*, overlap=[^,]*, mix=[^,]*))?(?:, rule=(.*))?\)"
)


def read_rule(shown: str) -> Rule:
    """Reads a rule as `str` shows it, such as Sync(aggregate=2): what a run's ledger has.

    Raises:
        ConfigError: It is not a preset.
    """
    if local := _SHOWN_LOCAL.fullmatch(shown):
        steps, kind, options, auto, streamed, among = local.groups()
        outer, rule = Outer(kind, tuple(_read_values(options).items())), read_rule(among) if among else None
        if auto:
            return Local("auto", outer, most=int(steps), rule=rule)
        given: dict[str, Any] = _read_values(streamed or "")
        return Local(int(steps), outer, rule=rule, **given)
    match = _SHOWN.fullmatch(shown)
    if match is None:
        raise ConfigError(f"rule {shown!r}: is no preset; name a rule, such as {_FORMS}")
    values = _read_values(match[2])
    first = values.pop("", None)
    presets: dict[str, Any] = {"Async": Async, "Sync": Sync, "Bounded": Bounded, "Buffered": Buffered}
    return presets[match[1]](*([] if first is None else [first]), **values)


def _read_values(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, value = part.rpartition("=")
        values[name] = _read_value(value)
    return values


def _read_value(text: str) -> object:
    if text in ("True", "False", "None"):
        return None if text == "None" else text == "True"
    return text.strip("'\"") if text[:1] in "'\"" else float(text) if "." in text or "e" in text else int(text)
