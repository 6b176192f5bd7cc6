"""What users see of the worker: an optimizer whose step pushes gradients and pulls variables.

It is a torch.optim optimizer and wraps one, which says what the ps tasks run and is never run here; both have the same parameter groups.
What the program of the chief writes into them goes with its next push. Attached by `tq.Session`.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch

from torchquorum.compress.compressor import read_compressor
from torchquorum.errors import ConfigError, LostPlaceError, TaskLostError
from torchquorum.rules import Rule, Sync
from torchquorum.update.constraints import read_after_update
from torchquorum.update.optimizers import check_groups, is_own, name_of
from torchquorum.update.schedules import check_name
from torchquorum.wire.messages import AverageSpec, OptimizerSpec, ScheduleSpec
from torchquorum.wire.settings import RATE, Settings, changed, changes, describe, encode
from torchquorum.worker.accumulation import check_accumulation
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.link import Link
from torchquorum.worker.loaded_state import LoadedState, begun_state
from torchquorum.worker.local_steps import LocalSteps, outer_spec
from torchquorum.worker.nonfinite import Nonfinite
from torchquorum.worker.optimizer_state import OptimizerState
from torchquorum.worker.program_settings import ProgramSettings
from torchquorum.worker.run_view import TrackView
from torchquorum.worker.step import Step
from torchquorum.worker.track_member import LaterLoss, TrackMember

Schedule = ScheduleSpec
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

    def recover(self, error: Exception) -> Step:
        """A ps task was lost in the middle of a step: finds it again, or raises."""
        ...

    def surviving(self, ask: Callable[[], _Answer]) -> _Answer:
        """Asks the ps tasks for something; if one is lost meanwhile, recovers and asks once more."""
        ...

    def assign(self, loaded: LoadedState | None = None, track: int = 0) -> bool:
        """Makes what the chief has loaded for an optimizer the next version, for all workers; returns whether it came from this one."""
        ...


def schedule(name: str | type[Any], **arguments: Any) -> Schedule:
    """Names a learning-rate schedule that the ps tasks evaluate by global step.

    Args:
        name: A class of torch.optim.lr_scheduler, or its name.
        **arguments: The class's arguments, without the optimizer.

    Returns:
        What `tq.Optimizer(..., schedule=)` takes.
    """
    called = name if isinstance(name, str) else name.__name__
    check_name(called)
    for key, value in arguments.items():
        if callable(value) and not isinstance(value, ScheduleSpec):
            raise ConfigError(f"{called}({key}=...): a function cannot travel to a ps; use a schedule without one")
    return ScheduleSpec(called, {k: _travels(v) for k, v in arguments.items()})


def ExponentialDecay(*, decay_steps: float, decay_rate: float, staircase: bool = False) -> Schedule:
    """As tf.train.exponential_decay: lr * decay_rate ** (global_step / decay_steps), the exponent floored if staircase."""
    if decay_steps <= 0:
        raise ConfigError(f"ExponentialDecay(decay_steps={decay_steps}): must be more than 0")
    return ScheduleSpec(
        "ExponentialDecay", {"decay_steps": decay_steps, "decay_rate": decay_rate, "staircase": staircase}
    )


def ExponentialMovingAverage(decay: float, *, num_updates: bool = True) -> AverageSpec:
    """Names moving averages of the variables, kept on the ps tasks, as tf.train.ExponentialMovingAverage.

    Args:
        decay: How much of the old average stays at each update, such as 0.99.
        num_updates: Decay less at the start: min(decay, (1 + step) / (10 + step)).
    """
    if not 0.0 <= decay <= 1.0:
        raise ConfigError(f"ExponentialMovingAverage({decay}): must be between 0 and 1, such as 0.99")
    return AverageSpec(float(decay), num_updates)


def _travels(value: Any) -> Any:
    if isinstance(value, ScheduleSpec):
        return {"name": value.name, "arguments": value.arguments}
    return [_travels(v) for v in value] if isinstance(value, list | tuple) else encode(value)


def _as_schedule(given: Any) -> Schedule | None:
    if given is None or isinstance(given, ScheduleSpec):
        return given
    if isinstance(given, functools.partial) and not given.args:
        return schedule(given.func, **given.keywords)  # pyright: ignore[reportArgumentType]
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        return schedule(given[0], **given[1])
    raise ConfigError(
        f"schedule={given!r}: give tq.schedule('StepLR', step_size=30), tq.ExponentialDecay(...), or "
        "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=30); a scheduler object belongs to one process"
    )


class Optimizer(torch.optim.Optimizer):
    """A torch.optim optimizer that runs on the ps tasks.

    What the chief's program writes into `param_groups`, by hand or with a scheduler object of torch.optim.lr_scheduler, counts from
    the update on that its next `step` belongs to.

    Args:
        optimizer: Any optimizer of torch.optim over the model's parameters; its class and arguments are what counts.
        rule: When gradients become an update: `tq.Sync()` (the default), `tq.Async()`, `tq.Bounded(s)`, `tq.Buffered(k)`,
            `tq.Local(h)`.
        schedule: A learning-rate schedule by global step, see `tq.schedule` and `tq.ExponentialDecay`; instead of a scheduler object.
        placement: How variables are placed on ps tasks: `round_robin` or `greedy`.
        slice_bytes: A variable of more bytes is sliced over all ps tasks.
        average: Moving averages of the variables, see `tq.ExponentialMovingAverage`; evaluate with `session.averaged()`.
        compress: Sends gradients in fewer bytes and keeps what that loses for the next one: `int8`, `int4`, `bfloat16`, `topk:64/4096`,
            `topk:64/4096+2bit`; see docs/slow-networks.md.
        after_update: What is done to the variables after every update, where that is made: `tq.Clamp`, `tq.MaxNorm`, `tq.UnitNorm`.
        allow_nonfinite: Apply gradients with NaN or infinity, as plain PyTorch does; by default they are refused.
        name: What it is called in a session of several, in reports and messages; opt0, opt1 and so on by default.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule | None = None,
        *,
        schedule: Any = None,
        placement: str = "round_robin",
        slice_bytes: int | None = None,
        average: AverageSpec | None = None,
        after_update: Any = None,
        compress: str | None = None,
        allow_nonfinite: bool = False,
        name: str = "",
    ) -> None:
        if isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            raise ConfigError(
                f"tq.Optimizer({type(optimizer).__name__}): wrap the torch.optim optimizer before accelerator.prepare() or fabric.setup(): "
                "optimizer = accelerator.prepare(tq.Optimizer(...))"
            )
        if isinstance(optimizer, Optimizer):
            raise ConfigError("tq.Optimizer of a tq.Optimizer: wrap the torch.optim optimizer once")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"tq.Optimizer({type(optimizer).__name__}): give it a torch.optim optimizer")
        if rule is not None and not isinstance(rule, Rule):
            raise ConfigError(
                f"rule={rule!r}: give tq.Sync(), tq.Async(), tq.Bounded(s) or tq.Buffered(k), with parentheses"
            )
        self._local = LocalSteps(optimizer, rule.local_steps) if rule is not None and rule.local_steps else None
        if rule is not None and self._local is not None:
            outer_spec(rule, 1)
        if self._local is None:
            name_of(type(optimizer))
            check_groups(optimizer)
        if compress is not None:
            read_compressor(compress)
            if allow_nonfinite:
                raise ConfigError(
                    "compress= and allow_nonfinite=True: NaN and infinity cannot be compressed; leave one of them out"
                )
        if not isinstance(name, str):
            raise ConfigError(f"name={name!r}: must be a text, such as 'generator'")
        self._link: Link | None = None
        self.track, self.name, self.called = 0, name, ""
        self._observer: StepObserver | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer that is wrapped has said it
            super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner = optimizer
        self.rule = rule if rule is not None else Sync()
        self.schedule = _as_schedule(schedule)
        self.placement, self.slice_bytes, self.average = placement, slice_bytes, average
        self.after_update = read_after_update(after_update)
        self.compress, self.allow_nonfinite = compress or "", allow_nonfinite
        self._nonfinite = Nonfinite()
        self._last: Step | None = None
        self._last_lr = self._given_rates()
        self._program: ProgramSettings | None = ProgramSettings(optimizer)
        self._spec: OptimizerSpec | None = None
        self._begins: LoadedState | None = None
        self._apart, self._had_session = 0, False
        self._at_push: Settings = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Returns the parameter groups, which the wrapped optimizer has too."""
        return self.inner.param_groups if "inner" in self.__dict__ else self._own_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if "inner" in self.__dict__:
            self.inner.param_groups = groups
        else:
            self._own_groups = groups  # while torch.optim.Optimizer begins

    @property
    def state(self) -> Mapping[Any, Any]:
        """Returns the state by parameter: inside a session a copy, gathered from the ps tasks as for `state_dict`; before one, its own."""
        if "inner" not in self.__dict__:
            return {}
        if self._link is None or self._local is not None:
            return self.inner.state
        numbered = self.state_dict()["state"]
        parameters = [p for group in self.param_groups for p in group["params"]]
        return MappingProxyType({parameters[i]: MappingProxyType(state) for i, state in numbered.items()})

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if "inner" not in self.__dict__:
            return  # while torch.optim.Optimizer begins
        if self._link is not None and self._local is None:
            raise ConfigError(
                "optimizer.state = ... inside a session: the state lives on the ps tasks; use load_state_dict()"
            )
        self.inner.state = state  # pyright: ignore[reportAttributeAccessIssue]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A state dict is loaded, or a copy is made.

        Raises:
            ConfigError: It is a copy.
        """
        if "inner" not in self.__dict__:
            raise ConfigError(
                "a tq.Optimizer cannot be copied or pickled, as it stands for the optimizer of a run: copy or save optimizer.state_dict()"
            )
        self.inner.__setstate__(state)

    def _given_rates(self) -> list[float]:
        for number, group in enumerate(self.param_groups):
            if group.get(RATE, 0.0) is None:
                raise ConfigError(f"param_groups[{number}]: lr=None; give the optimizer a number, such as lr=0.01")
        return [float(group.get(RATE, 0.0)) for group in self.param_groups]

    @property
    def last(self) -> Step:
        """Returns what became of the last `step`.

        Raises:
            ConfigError: There was none yet.
        """
        if self._last is None:
            raise ConfigError("optimizer.last: no step has been made yet")
        return self._last

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, before a session begins.

        Raises:
            ConfigError: A session runs: its variables are what they were when it began.
        """
        if self._link is not None:
            raise ConfigError(
                "add_param_group() inside `with tq.Session(...)`: the ps tasks hold the variables that the run began with; add the "
                "group before, or end the session and begin another"
            )
        super().add_param_group(param_group)

    @property
    def version(self) -> int:
        """Returns the version that its parameters hold: how many updates of it were made; of the first, the global step."""
        return self._view.version if self._view is not None else 0

    @property
    def lr(self) -> list[float]:
        """Returns the learning rate of each parameter group for the next update, as the ps tasks have it."""
        return self._view.lr if self._view is not None else self._last_lr

    @property
    def used_lr(self) -> list[float]:
        """Returns the learning rate of each parameter group in the last update that this worker knows of."""
        return self._view.used_lr if self._view is not None else self._last_lr

    def spec(self, num_workers: int = 1) -> OptimizerSpec:
        """Returns the optimizer as it travels to the ps tasks, for a run of so many workers: as it was when the session began."""
        if self._spec is None and self._local is not None:
            self._program = None
            self._spec = outer_spec(self.rule, len(self.param_groups), num_workers)
        if self._spec is None:
            name = name_of(type(self.inner))
            program = self._program = ProgramSettings(self.inner, more=is_own(name))
            self._spec = OptimizerSpec(name, program.now)
            self._begins = begun_state(name, self.inner.state, program.now)
            if self.schedule is not None:
                self._check_scheduler_object()
                self._last_lr = self._given_rates()
                program.begin(without=(RATE,))
        return self._spec

    @property
    def has_scheduler(self) -> bool:
        """Whether a scheduler object of torch.optim.lr_scheduler was made for this optimizer, or for the one that it wraps."""
        return any(hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in (self, self.inner))

    def look_at_settings(self) -> Settings:
        """Returns what stands in the parameter groups now, as it travels."""
        return self._program.look() if self._program is not None else []

    def _check_scheduler_object(self) -> None:
        if self.has_scheduler:
            raise ConfigError(
                "schedule= and a scheduler object of torch.optim.lr_scheduler: both would set the learning rate. Leave one of them out; "
                "schedule= follows the global step, a scheduler object the chief's own calls of scheduler.step()"
            )

    @property
    def _view(self) -> TrackView | None:
        """Returns what this worker knows of its variables, while a session runs."""
        return self._link.tracks[self.track] if self._link is not None else None

    @property
    def _member(self) -> TrackMember | None:
        joined = self._link.joined if self._link is not None else None
        return joined.tracks[self.track] if joined is not None else None

    def attach(self, link: Link | None, observer: StepObserver | None = None, track: int = 0) -> None:
        """Connects the optimizer to the ps tasks, as that of a track, or cuts it off; the session calls this and watches every step."""
        if link is None:
            self._last_lr = self.lr
            self._spec = self._begins = None
        self._link, self._observer, self.track = link, observer, track
        if link is not None:
            self._had_session = True
        if self._local is not None:
            self._local.attach(link, track)
        elif link is not None:
            self._let_go()

    def _let_go(self) -> None:
        """From now on the state is the ps tasks'."""
        self.inner.state = defaultdict(dict)

    def begun_state(self) -> LoadedState | None:
        """Returns the state that a run begins with, if steps were made or a state was loaded before the session."""
        return self._begins

    def take_settings(self, settings: Settings) -> None:
        """Writes the run's settings into the parameter groups; only what the program changes afterwards counts."""
        if self._program is not None and settings:
            self._program.write(settings)
            self._at_push = self._program.now

    @property
    def link(self) -> Link | None:
        """Returns the link to the ps tasks while a session runs."""
        return self._link

    @property
    def flat(self) -> FlatParameters | None:
        """Returns the parameters as they lie in memory while a session runs."""
        return self._member.flat if self._member is not None else None

    def say(self, line: str) -> None:
        """Prints a line for people, with the worker's name."""
        if self._link is not None:
            self._link.say(line)

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None) -> Any:
        """Pushes the gradients and pulls the variables; what became of them is in `last`.

        Args:
            closure: Computes loss and gradients, as in torch.optim; not needed in an ordinary loop.
            loss: The loss, if it should appear in progress, ledger and report.

        Returns:
            What the closure returned; None without one, as in torch.optim.
        """
        self.check()
        if self._local is not None:
            return self._local_step(self._local, closure, loss)
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = loss = closure()
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()
        self.push(float(loss) if loss is not None else None)
        return found

    def _local_step(self, local: LocalSteps, closure: Callable[[], Any] | None, loss: Any) -> Any:
        """Makes an inner step, and the outer one if it is due; observers follow the outer ones."""
        assert self._link is not None
        self._link.positions.before_push()  # the program has asked its schedulers, and no step has been made of this version
        found = local.step(
            closure, float(loss.detach() if isinstance(loss, torch.Tensor) else loss) if loss is not None else None
        )
        if local.is_due:
            local.push(lambda: self.push(local.loss))
        else:
            if self._observer is not None:
                self._observer.before_run()
            self._last = Step(
                self.version, self._link.local_step, None, "inner", 0, self.lr[0], self._link.stopped, self.called
            )
        return found

    @property
    def local(self) -> LocalSteps | None:
        """Returns the local steps under `tq.Local`."""
        return self._local

    @property
    def inner_step(self) -> int:
        """Returns how many steps this worker's own optimizer has made, under `tq.Local`; else how many gradients it has computed."""
        if self._local is not None:
            return self._local.inner_step
        return self._link.local_step if self._link is not None else 0

    def check(self) -> None:
        """Raises ConfigError if there is no session, or the program sets learning rates beside a schedule, or a state where none counts."""
        if self._link is None:
            raise ConfigError(
                "optimizer.step() outside of `with tq.Session(task, model, optimizer)`: there is no ps to push to"
            )
        check_accumulation()
        if self.inner.state and self._local is None:
            raise ConfigError(
                "the optimizer that tq.Optimizer wraps was given a state inside the session, by its own step() or load_state_dict(), and "
                "it runs on the ps tasks: call those of the tq.Optimizer"
            )
        if self.schedule is not None and self._program is not None and self._given_rates() != self._last_lr:
            self._check_scheduler_object()
            raise ConfigError(
                "the learning rate was changed in param_groups, and schedule= sets it on the ps tasks: leave schedule= out, or the change"
            )

    def push(self, loss: float | LaterLoss | None) -> Step:
        """Pushes the gradients and pulls the variables, as `step` does.

        Args:
            loss: The loss; or a function that returns it, called when the gradients have been computed.
        """
        assert self._link is not None
        if self._observer is None:
            return self._pushed(loss)
        self._observer.before_run()
        started = time.perf_counter()
        try:
            self._pushed(loss)
        except (LostPlaceError, TaskLostError) as error:
            self._last = self._observer.recover(error)
            self._keep_unused(self._link)
        self._observer.after_run(
            self.last, loss() if callable(loss) else loss, time.perf_counter() - started, self.track
        )
        return self.last

    def _pushed(self, loss: float | LaterLoss | None) -> Step:
        """Pushes the gradients, with the settings of the program if this worker leads."""
        link, own = self._link, self._program.look() if self._program is not None else None
        assert link is not None
        self._at_push = own or []
        leads = link.leads()
        self._last = link.push(loss, own if leads else None, allow_nonfinite=self.allow_nonfinite, track=self.track)
        self.inner._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # for scheduler objects of the one that is wrapped
        self._nonfinite.follow(self.last, link, self.track)
        self._keep_unused(link)
        if own is not None and not leads and self.last.accepted and self.rule.once_per_round:
            self._compare(own, link)
        return self.last

    def _keep_unused(self, link: Link) -> None:
        """What was pushed and will not be used stays with this worker; of a plain gradient, what had been kept before."""
        residuals = link.residuals_of(self.track)
        if residuals is not None and self.last.accepted is False and not self.last.stop:
            residuals.undo()
            if self._local is not None and self.flat is not None and self.last.reason != "not finite":
                residuals.add_gradients(self.flat)
                self._local.capture()

    def _compare(self, own: Settings, link: Link) -> None:
        """Says once that this worker's settings differ from the run's, when they have in several rounds running."""
        settings = link.tracks[self.track].settings
        change = changes(settings, own) if own is not settings else []
        self._apart = self._apart + 1 if change and self._apart >= 0 else min(self._apart, 0)
        if self._apart == MOST_APART:
            self._apart = -1
            used = [{name: settings[k].get(name) for name in group} for k, group in enumerate(change)]
            link.say(
                f"its settings differ from the chief's, which count: {describe(change)} here, {describe(used)} there. Do all "
                "workers run the same lines?"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state as torch.optim has it, gathered from the ps tasks; a plain optimizer of the same class loads it.

        Any worker may call it, inside the session; before one it is what the run would begin with. The model's parameters take the
        version that the state belongs to.

        Raises:
            ConfigError: The session is over, so the state is not to be had.
        """
        first, flat = self._link, self.flat
        if self._local is not None:
            return super().state_dict()
        if first is None or flat is None:
            if self._had_session or self._spec is not None:
                raise ConfigError(
                    "optimizer.state_dict() outside of `with tq.Session(...)`: the optimizer's state lives on the ps tasks; call it inside"
                )
            return super().state_dict()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)

        def ask() -> tuple[Link, OptimizerState]:
            now = self._link or first  # another one, if a ps task was lost meanwhile
            return now, now.member.pull_state(self.track)

        link, found = self._observer.surviving(ask) if self._observer is not None else ask()
        view = link.tracks[self.track]
        settings = changed(view.settings, self._written_since())
        state_dict = found.in_torchs_layout(self.param_groups, flat.parameters, settings, view.lr)
        for hook in self._optimizer_state_dict_post_hooks.values():
            made = hook(self, state_dict)
            state_dict = state_dict if made is None else made
        return state_dict

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes the state and the options of a state dict, from here or from a plain torch.optim optimizer of the same class.

        Before a session the run begins with it, unless it goes on from a checkpoint. Inside one all workers call this at the same place:
        what the chief has loaded becomes the next version, with what it has written to the parameters before, as in `session.assign()`;
        the others wait for it and take it over.

        Raises:
            ConfigError: It is the state of another optimizer or of another model.
            ValueError: It has other parameter groups, as in torch.optim.
        """
        if self._link is None or self._local is not None:
            if self._spec is not None and self._local is None:
                raise ConfigError(
                    "optimizer.load_state_dict() in a tq.graph session: load the state before the session begins"
                )
            self._take_state_dict(state_dict)
            return
        loaded = self._take_state_dict(state_dict)
        self._let_go()
        assert loaded is not None
        self._assign(loaded)

    def _take_state_dict(self, state_dict: Any) -> LoadedState | None:
        """Lets torch.optim load a state dict; if that fails, all is as it was. Inside a session returns what is to be sent."""
        before, rates = (self.inner.param_groups, self.inner.state), [group.get(RATE) for group in self.param_groups]
        try:
            super().load_state_dict(state_dict)
            return self._read_loaded(rates) if self._link is not None and self._local is None else None
        except BaseException as error:
            self.inner.param_groups, self.inner.state = before
            if isinstance(error, KeyError | AttributeError | TypeError):
                raise ConfigError(
                    f"optimizer.load_state_dict(): torch.optim.{type(self.inner).__name__} cannot load this ({type(error).__name__}: "
                    f"{error}): is it the state of another optimizer? Nothing was loaded"
                ) from error
            raise

    def _written_since(self) -> Settings:
        """Returns what the program has written into the groups since its last push, as a scheduler object does after a step."""
        return changes(self._at_push, self._program.look()) if self._program is not None and self._at_push else []

    def _read_loaded(self, rates: list[Any]) -> LoadedState:
        """Returns what torch.optim has just loaded, if the run can go on from it."""
        link, flat, program = self._link, self.flat, self._program
        assert link is not None and flat is not None and program is not None and self._spec is not None
        if self.schedule is not None:  # which sets the rates
            for group, rate in zip(self.param_groups, rates, strict=True):
                group[RATE] = rate
        settings = [
            {name: encode(group[name]) for name in known if name in group}
            for group, known in zip(self.param_groups, program.now, strict=True)
        ]
        loaded = LoadedState(self._spec.name, dict(self.inner.state), settings)
        loaded.check(flat.layout, flat.parameters, program.now)
        return loaded

    def _assign(self, loaded: LoadedState) -> None:
        """The chief's state becomes the run's."""
        assert self._observer is not None
        came_from_here = self._observer.assign(loaded, self.track)
        link = self._link  # another one, if a ps task was lost meanwhile
        assert link is not None
        self.take_settings(link.tracks[self.track].settings)
        if not came_from_here:
            link.say(
                f"optimizer.load_state_dict(): the chief's state and options are taken over, at global step {link.version}"
            )
