"""A `tq.Optimizer` while a session runs: what it pushes, what became of it, and its state, which the ps tasks hold.

Made by `tq.Optimizer.attach`, gone with the session; on the worker's thread. What always holds: after a recovery it is the same object with
another link; `last` is what became of the last push.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from torchquorum.errors import LostPlaceError, TaskLostError
from torchquorum.wire.messages import Contribution
from torchquorum.wire.settings import RATE, Settings, changed, changes, describe, encode
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.link import Link
from torchquorum.worker.loaded_state import LoadedState
from torchquorum.worker.local_steps import LocalSteps
from torchquorum.worker.nonfinite import Nonfinite
from torchquorum.worker.optimizer_options import OptimizerOptions
from torchquorum.worker.optimizer_state import OptimizerState
from torchquorum.worker.program_settings import ProgramSettings
from torchquorum.worker.run_view import TrackView
from torchquorum.worker.state_copy import GivenStates, StateCopy
from torchquorum.worker.step import Step
from torchquorum.worker.track_member import LaterLoss, TrackMember

_Answer = TypeVar("_Answer")
MOST_APART = 3  # rounds in which a worker's settings may differ from the run's before it says so


class StepObserver(Protocol):
    """Who is told of every step: the session."""

    def before_run(self) -> None:
        """A step is about to be pushed."""
        ...

    def after_run(self, step: Step, loss: float | None, seconds: float, track: int) -> None:
        """A step has been made, of the optimizer of this track."""
        ...

    def recover(self, error: Exception) -> Step | None:
        """A ps task was lost in the middle of a step: finds it again, or raises; returns what became of the gradient, if it lives."""
        ...

    def surviving(self, ask: Callable[[], _Answer]) -> _Answer:
        """Asks the ps tasks for something; if one is lost meanwhile, recovers and asks once more."""
        ...

    def assign(self, loaded: LoadedState | None = None, track: int = 0) -> bool:
        """Makes what the chief has loaded for an optimizer the next version, for all workers; returns whether it came from this one."""
        ...


@dataclass(eq=False, repr=False)
class AttachedOptimizer:
    """An optimizer in a session.

    Attributes:
        inner: The optimizer that `tq.Optimizer` wraps.
        options: The options beside it.
        local: Its local steps, under `tq.Local`.
        program: What the program has written into the parameter groups; None where this does not count.
        link: To the ps tasks; another one after a recovery.
        observer: Who is told of every step.
        track: Which optimizer of the run it is.
        called: Its name, where there are several.
        last: What became of the last step.
        given: What the program was given of the state.
    """

    inner: torch.optim.Optimizer
    options: OptimizerOptions
    local: LocalSteps | None
    program: ProgramSettings | None
    link: Link
    observer: StepObserver | None
    track: int
    called: str
    last: Step | None = None
    given: GivenStates = field(default_factory=GivenStates)
    _nonfinite: Nonfinite = field(default_factory=Nonfinite)
    _apart: int = 0  # rounds running in which the settings differed; -1 when it was said

    def follow(self, link: Link) -> None:
        """The session has a link, its first or another one, and the parameters hold a version."""
        self.link = link
        if self.local is not None:
            self.local.attach(link, self.track)
        else:
            self.let_go()

    def let_go(self) -> None:
        """From now on the state is the ps tasks'."""
        self.inner.state = defaultdict(dict)

    @property
    def view(self) -> TrackView:
        """Returns what this worker knows of the optimizer's variables."""
        return self.link.tracks[self.track]

    @property
    def _member(self) -> TrackMember | None:
        joined = self.link.joined
        return joined.tracks[self.track] if joined is not None else None

    @property
    def flat(self) -> FlatParameters | None:
        """Returns the parameters as they lie in memory, once this worker has joined."""
        return self._member.flat if self._member is not None else None

    # -- steps --------------------------------------------------------------------------------------------------------

    def local_step(
        self, local: LocalSteps, closure: Callable[[], Any] | None, loss: Any, examples: float | None = None
    ) -> Any:
        """Makes an inner step, and the outer one if it is due; observers follow the outer ones."""
        self.link.positions.before_push()  # the program has asked its schedulers, and no step has been made of this version
        found = local.step(
            closure,
            float(loss.detach() if isinstance(loss, torch.Tensor) else loss) if loss is not None else None,
            examples,
        )
        if local.is_due:
            local.push(lambda: self.push(local.loss, local.contribution))
        else:
            if self.observer is not None:
                self.observer.before_run()
            self.last = self._step(None, "inner")
        return found

    def push(self, loss: float | LaterLoss | None, of: Contribution | None = None) -> Step:
        """Pushes the gradients and pulls the variables; a ps task that is lost meanwhile is found again."""
        if self.observer is not None:
            self.observer.before_run()
        return self._surviving(lambda: self._pushed(loss, of), loss)

    def send(self, loss: float | None, of: Contribution) -> None:
        """Pushes the gradients and does not wait; `receive` takes the answer."""
        link = self.link
        link.push(loss, None, allow_nonfinite=self.options.allow_nonfinite, track=self.track, later=True, of=of)

    def receive(self, loss: float | None) -> Step:
        """Takes the answer to what was sent; a ps task that is lost meanwhile is found again."""
        return self._surviving(self._received, loss)

    def _received(self) -> Step:
        step = self.last = self.link.receive(self.track)
        self._nonfinite.follow(step, self.link, self.track)
        self._keep_unused(step)
        return step

    def _surviving(self, make: Callable[[], Step], loss: float | LaterLoss | None) -> Step:
        """Makes a step; a ps task that is lost meanwhile is found again."""
        if self.observer is None:
            return make()
        clock = self.link.end.clock
        started = clock.now()
        try:
            step = make()
        except (LostPlaceError, TaskLostError) as error:
            step = self.last = self.observer.recover(error) or self._step(False, "ps lost")
            self._keep_unused(step)
        self.observer.after_run(step, loss() if callable(loss) else loss, clock.now() - started, self.track)
        return step

    def _step(self, accepted: bool | None, reason: str) -> Step:
        """Returns a step of which no answer has come: as the parameters are now."""
        view, link = self.view, self.link
        return Step(view.version, link.local_step, accepted, reason, 0, view.lr[0], link.stopped, self.called)

    def _pushed(self, loss: float | LaterLoss | None, of: Contribution | None) -> Step:
        """Pushes the gradients, with the settings of the program if this worker leads."""
        link, program = self.link, self.program
        own = program.look_at_push() if program is not None else None
        leads = link.leads()
        step = self.last = link.push(
            loss, own if leads else None, allow_nonfinite=self.options.allow_nonfinite, track=self.track, of=of
        )
        self.inner._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # for scheduler objects of the one that is wrapped
        self._nonfinite.follow(step, link, self.track)
        self._keep_unused(step)
        if own is not None and not leads and step.accepted and self.options.rule.once_per_round:
            self._compare(own)
        return step

    def _keep_unused(self, step: Step) -> None:
        """What was pushed and will not be used stays with this worker; of a plain gradient, what had been kept before."""
        residuals = self.link.residuals_of(self.track)
        if residuals is not None and step.accepted is False and not step.stop:
            residuals.undo()
            if self.local is not None and self.flat is not None and step.reason != "not finite":
                self.local.keep_refused(residuals)

    def _compare(self, own: Settings) -> None:
        """Says once that this worker's settings differ from the run's, when they have in several rounds running."""
        settings = self.view.settings
        change = changes(settings, own) if own is not settings else []
        self._apart = self._apart + 1 if change and self._apart >= 0 else min(self._apart, 0)
        if self._apart == MOST_APART:
            self._apart = -1
            used = [{name: settings[k].get(name) for name in group} for k, group in enumerate(change)]
            self.link.say(
                f"its settings differ from the chief's, which count: {describe(change)} here, {describe(used)} there. Do all "
                "workers run the same lines?"
            )

    # -- the state, on the ps tasks -----------------------------------------------------------------------------------

    def pull_state(self, flat: FlatParameters) -> dict[str, Any]:
        """Returns the state as `state_dict()` of a plain optimizer has it."""

        def ask() -> OptimizerState:
            return self.link.member.pull_state(self.track)  # of another link, if a ps task was lost meanwhile

        found = self.observer.surviving(ask) if self.observer is not None else ask()
        written = self.program.written_since_push() if self.program is not None else []
        settings = changed(self.view.settings, written)
        return found.in_torchs_layout(self.inner.param_groups, flat.parameters, settings, self.view.lr)

    def read_state(self, flat: FlatParameters) -> StateCopy:
        """Returns the state by parameter, as of the version that the parameters hold: gathered once for each."""
        if (known := self.given.at(self._place)) is not None:
            return known
        numbered = self.pull_state(flat)["state"]
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        states = {parameters[i]: state for i, state in numbered.items()}
        names = {p: variable.name for p, variable in zip(flat.parameters, flat.layout.variables, strict=True)}
        return self.given.give(self._place, states, names)

    @property
    def _place(self) -> tuple[int, int, int]:
        """Returns which version of which creation the parameters hold, and how many gradients this worker has given."""
        return self.link.generation, self.view.version, self.link.local_step

    def read_loaded(self, name: str, rates: list[Any]) -> LoadedState:
        """Returns what torch.optim has just loaded into the wrapped optimizer, if the run can go on from it.

        Args:
            name: The class of the optimizer on the ps tasks.
            rates: The learning rates before that, which stay where a schedule sets them.
        """
        flat, program, groups = self.flat, self.program, self.inner.param_groups
        assert flat is not None and program is not None
        if self.options.schedule is not None:
            for group, rate in zip(groups, rates, strict=True):
                group[RATE] = rate
        settings = [
            {name: encode(group[name]) for name in known if name in group}
            for group, known in zip(groups, program.now, strict=True)
        ]
        loaded = LoadedState(name, dict(self.inner.state), settings)
        loaded.check(flat.layout, flat.parameters, program.now)
        return loaded

    def assign(self, loaded: LoadedState) -> None:
        """The chief's state becomes the run's."""
        self.let_go()
        assert self.observer is not None and self.program is not None
        came_from_here = self.observer.assign(loaded, self.track)
        self.program.take(self.view.settings)
        if not came_from_here:
            self.link.say(
                f"optimizer.load_state_dict(): the chief's state and options are taken over, at global step {self.link.version}"
            )
