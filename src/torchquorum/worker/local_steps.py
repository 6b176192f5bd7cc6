"""Local steps: the worker's own optimizer runs here, and what it has changed is what the worker gives.

Owned by `tq.Optimizer` of a `tq.Local` rule, on the worker's thread; it stands in the place of the watch for writes, since here the
program and its optimizer may write to the parameters as they like. With x the version that the parameters were given and y what they
hold `h` inner steps later, x - y is pushed as the gradient (Douillard et al. 2023, DiLoCo). What always holds: `anchor` is the version
that the parameters were given last; whatever the worker has changed since is pushed, kept in the residual, or still in the parameters.

What was pushed may be on its way while the worker goes on (`send`, `receive`): when its version comes, the parameters become
mix * own + (1 - mix) * version, and what this differs from the version by is part of the next push (Douillard et al. 2025, Streaming
DiLoCo).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchquorum.errors import ConfigError
from torchquorum.placement.layout import CONSTANT
from torchquorum.rules import Rule
from torchquorum.update.optimizers import build, step_without_hooks
from torchquorum.wire.messages import Contribution, OptimizerSpec
from torchquorum.wire.settings import encode
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.link import Link
from torchquorum.worker.local_state import LocalState, LocalStates, read_restored
from torchquorum.worker.residuals import Residuals

SHORTER = 8  # with equal time, the first round has this part of the steps: then workers know how fast they are


@dataclass(frozen=True)
class RecordedStates:
    """What a worker whose run is recorded goes on with is kept; a replay takes it from `logdir`, the folder of the recorded run."""

    logdir: str = ""


class LocalSteps:
    """The local steps of one worker.

    Args:
        inner: The optimizer that makes them.
        h: How many of them are one outer step.
        mix: How much of its own the worker keeps when a version comes that it went on meanwhile.
        equal_time: Whether a slower worker makes fewer steps than `h`, in the time of the fastest.

    Attributes:
        inner_step: How many inner steps this worker has made.
        on_its_way: Whether what was pushed last has not been answered.
    """

    def __init__(self, inner: torch.optim.Optimizer, h: int, mix: float = 0.0, *, equal_time: bool = False) -> None:
        self.inner, self.h, self._mix, self._equal_time = inner, h, mix, equal_time
        self.inner_step = self._since = 0
        self._given, self._began_at = 0, 0.0
        self._examples, self._pace_s = 0.0, 0.0
        self._steps = max(1, h // SHORTER) if equal_time else h
        self.on_its_way = False
        self._own: list[
            torch.Tensor
        ] = []  # what the parameters held when the version came; empty where that does not count
        self._losses: list[float] = []
        self._link: Link | None = None
        self._track = 0
        self._flat: FlatParameters | None = None
        self._states: LocalStates | None = None
        self._areas: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # parameters, anchor, change
        self._changes: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def attach(self, link: Link | None, track: int = 0) -> None:
        """The parameters hold a version, and from now on the changes to it are looked at; None: the session is over."""
        self._link, self._track = link, track
        joined = link.joined.tracks[track] if link is not None and link.joined is not None else None
        if joined is None:
            self._flat, self._areas, self._changes, self._states = None, [], [], None
            self._own, self.on_its_way = [], False
            return
        if joined.flat is not self._flat:
            self._flat = joined.flat
            self._lay_out(joined.flat)
        if joined.watch is not self:  # else it has been told, and its state may have been restored since
            joined.watch = self
            self.note()

    def _lay_out(self, flat: FlatParameters) -> None:
        """Makes room for the anchor and the changes, laid out as the parameters are."""
        self._areas, self._changes, self._own, self.on_its_way = [], [], [], False
        for memory, members in flat.memory():
            change = torch.zeros_like(memory)
            self._areas.append((memory, memory.clone(), change))
            for variable, offset, _ in members:
                parameter = flat.parameters[variable]
                view = change.as_strided(parameter.shape, parameter.stride(), offset)
                self._changes.append((parameter, view))

    # -- what is kept between runs of the program ---------------------------------------------------------------------

    def open_states(self, logdir: str | None, keep: int, of: str = "") -> None:
        """The run has a folder: the state of this worker is kept beside its checkpoints; `of` several optimizers, which one it is."""
        link = self._link
        if self._states is None and logdir is not None and link is not None:
            name = f"worker-{link.end.index}" + (f"-{of}" if of else "")
            self._states = LocalStates(logdir, name, keep, link.say, link.end.clock)

    def capture(self) -> None:
        """Nothing has been computed yet since this place of the run was reached: this worker's state belongs to it.

        Where other optimizers have made versions meanwhile, local steps may have been made of this one: then the parameters belong to it.
        """
        if self._states is not None and self._link is not None:
            kept = self._link.residuals_of(self._track)
            residuals = kept.by_variable() if kept is not None else {}
            own = self._values() if self._since else {}
            state = LocalState(self.inner.state_dict(), self.inner_step, residuals, self._since, own, sum(self._losses))
            self._states.capture(self._link.place, state)

    def _values(self) -> dict[str, torch.Tensor]:
        assert self._flat is not None
        named = zip(self._flat.layout.variables, self._flat.parameters, strict=True)
        return {variable.name: p.detach() for variable, p in named if variable.group != CONSTANT}

    def save(self, place: int) -> None:
        """Saves this worker's state at a place of the run, if it has been captured."""
        if self._states is not None:
            self._states.write(place)

    def restore(self, place: int, recorded: RecordedStates | None = None) -> None:
        """The run goes on at a place: so does this worker's state, where it was saved; else it begins anew, and that is said."""
        if self._states is None or self._link is None:
            return
        self._states.forget()
        with torch.no_grad():
            for memory, anchor, _ in self._areas:
                memory.copy_(anchor)  # what was worked on before the run went back does not count
        self._since, self._losses = 0, []
        found = self._find(place, recorded) if place > 0 else None
        if found is None and place > 0:
            self._link.say(
                f"no inner optimizer's state of step {place} or before is in {self._states.folder}: it begins empty"
            )
        if found is not None:
            self.inner.load_state_dict(found.inner)
            self.inner_step = found.inner_step
            with torch.no_grad():
                for name, value in self._values().items() if found.since else ():
                    if name in found.own:
                        value.copy_(found.own[name])
            self._given = found.inner_step - found.since
            self._since, self._losses = found.since, [found.losses] if found.since else []
        if (kept := self._link.residuals_of(self._track)) is not None:
            kept.load(found.residuals if found is not None else {})

    def _find(self, place: int, recorded: RecordedStates | None) -> LocalState | None:
        """Returns the state of a place; of a life that is replayed, the one that it had."""
        link, states = self._link, self._states
        assert link is not None and states is not None
        life = f"{link.incarnation:016x}-{link.generation}"
        if recorded is not None and recorded.logdir:
            return read_restored(recorded.logdir, states.name, life)
        found = states.read(place)
        if recorded is not None and found is not None:
            states.keep_restored(life, found)
        return found

    # -- in the place of the watch for writes -------------------------------------------------------------------------

    def note(self) -> None:
        """The parameters hold a version; what was worked on while it was on its way is mixed in."""
        self._since = 1 if self._own else 0
        self._losses = []
        self._set_pace()
        with torch.no_grad():
            for memory, anchor, _ in self._areas:
                anchor.copy_(memory)
            for (memory, _, _), own in zip(self._areas, self._own, strict=False):
                memory.lerp_(own, self._mix)
        self._own, self.on_its_way = [], False

    def _set_pace(self) -> None:
        """A round begins: this worker makes as many steps as it can while the fastest makes all of them."""
        link = self._link
        if link is None:
            return
        self._began_at = link.end.clock.now()
        fastest = link.tracks[self._track].pace_s if self._track < len(link.tracks) else 0.0
        if self._equal_time and fastest > 0 and self._pace_s > 0:
            self._steps = min(self.h, max(1, round(self.h * fastest / self._pace_s)))

    def before_take(self) -> None:
        """A version is waited for, which may be written into the parameters while it comes: what they hold is kept."""
        if self.on_its_way and self._mix and not self._own:
            self._own = [memory.clone() for memory, _, _ in self._areas]

    def look(self) -> None:
        """A push begins: the program may write to the parameters, which is a local step of its own."""

    def confirm(self) -> None:
        """There is nothing to confirm."""

    def before_pull(self) -> None:
        """Another version is about to come into the parameters: what has been changed is kept for the next push."""
        residuals = self._link.residuals_of(self._track) if self._link is not None else None
        if self._since and self._flat is not None and residuals is not None:
            with self._as_gradients():
                residuals.add_gradients(self._flat)
            self._since = 0

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None, loss: float | None, examples: float | None = None) -> Any:
        """Makes an inner step; returns what the closure returned."""
        found = step_without_hooks(self.inner, *([closure] if closure is not None else []))
        self.count(found if closure is not None else loss, examples)
        return found

    def count(self, loss: Any, examples: float | None = None) -> None:
        """An inner step has been made, of so many examples."""
        self._examples += examples or 0.0
        self.inner_step += 1
        self._since += 1
        if loss is not None:
            self._losses.append(float(loss))

    @property
    def is_due(self) -> bool:
        """Whether the next thing to do is an outer step."""
        return self._since >= self._steps

    @property
    def contribution(self) -> Contribution:
        """Returns what is given now is made of; the next one begins."""
        steps = self.inner_step - self._given
        if self._equal_time and self._link is not None:
            self._pace_s = (self._link.end.clock.now() - self._began_at) / max(1, self._since)
        weight = self._examples or (float(steps) if self._equal_time else 0.0)
        self._given, self._examples = self.inner_step, 0.0
        return Contribution(weight, self.inner_step, steps, self._pace_s)

    @property
    def loss(self) -> float | None:
        """Returns the mean loss of the inner steps since the last outer one, where the program gave any."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    def push(self, push: Callable[[], Any]) -> Any:
        """Calls what pushes the gradients, with the changes in their place."""
        with self._as_gradients():
            return push()

    def send(self, send: Callable[[], Any]) -> Any:
        """Calls what sends the gradients and does not wait, with the changes in their place."""
        with self._as_gradients():
            self.on_its_way = True
            return send()

    def receive(self, receive: Callable[[], Any]) -> Any:
        """Calls what takes the answer to what was sent, with what that was in the place of the gradients."""
        with self._in_place():
            return receive()

    def keep_refused(self, residuals: Residuals) -> None:
        """What was pushed, and stands in the place of the gradients, is not used: it is part of the next push.

        As much of it as was mixed into the parameters is so already.
        """
        assert self._flat is not None
        share = 1.0 - self._mix if self._since else 1.0
        residuals.add_gradients(self._flat, share)
        self.capture()

    @contextmanager
    def _as_gradients(self) -> Iterator[None]:
        """Inside this block the parameters' gradients are what has been changed, with the opposite sign."""
        assert self._flat is not None
        self._flat.take_back()  # a program may have given a parameter other memory
        with torch.no_grad():
            for memory, anchor, change in self._areas:
                torch.sub(anchor, memory, out=change)
        with self._in_place():
            yield

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        gradients = [parameter.grad for parameter, _ in self._changes]
        for parameter, change in self._changes:
            parameter.grad = change
        try:
            yield
        finally:
            for (parameter, _), gradient in zip(self._changes, gradients, strict=True):
                parameter.grad = gradient


def outer_spec(rule: Rule, groups: int, num_workers: int = 1) -> OptimizerSpec:
    """Returns the outer optimizer of a rule as it travels; each of the inner one's groups has its options.

    Where less than a round of all workers makes an update, whatever its staleness, momentum is applied once in a round.

    Raises:
        ConfigError: A ps cannot run it.
    """
    assert rule.outer is not None, "a rule with local steps has an outer optimizer"
    options = dict(rule.outer.options)
    try:
        build(rule.outer.name, [{"params": [torch.nn.Parameter(torch.zeros(1))], **options}])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Local(outer={rule.outer}): {error}") from None
    every, name = round(num_workers / rule.needed(num_workers)), rule.outer.name
    if name == "SGD" and options.get("momentum") and rule.max_staleness is None and every > 1:
        name, kept = "DelayedNesterov", ("lr", "momentum", "nesterov")
        refused = [k for k in ("weight_decay", "dampening", "maximize") if options.get(k)]
        if refused:
            raise ConfigError(
                f"Local(outer={rule.outer}, rule=...): {', '.join(refused)} cannot be had with momentum where less than a round makes "
                "an update; leave one of them out"
            )
        options = {"nesterov": False, **{k: v for k, v in options.items() if k in kept}, "every": every}
    return OptimizerSpec(name, [{k: encode(value) for k, value in options.items()} for _ in range(groups)])
