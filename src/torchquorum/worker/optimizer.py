"""What users see of the worker: an optimizer whose step pushes gradients and pulls variables.

It is a torch.optim optimizer and wraps one, which says what the ps tasks run and is never run here; both have the same parameter groups.
What the program of the chief writes into them goes with its next push. Attached by `tq.Session`; `AttachedOptimizer` is what it does there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torchquorum.errors import ConfigError
from torchquorum.rules import Rule, Sync
from torchquorum.update.constraints import read_after_update
from torchquorum.update.optimizers import check_groups, is_own, name_of
from torchquorum.wire.messages import AverageSpec, Contribution, OptimizerSpec
from torchquorum.wire.settings import RATE, Settings
from torchquorum.worker.accumulation import check_accumulation
from torchquorum.worker.attached import AttachedOptimizer, StepObserver
from torchquorum.worker.flat import FlatParameters, is_in_a_session
from torchquorum.worker.fragments import Fragments, cut
from torchquorum.worker.link import Link
from torchquorum.worker.loaded_state import LoadedState, begun_state
from torchquorum.worker.local_steps import LocalSteps, outer_spec
from torchquorum.worker.optimizer_options import OptimizerOptions
from torchquorum.worker.program_settings import ProgramSettings
from torchquorum.worker.schedule_spec import check_schedule, read_schedule
from torchquorum.worker.state_copy import StateElsewhere
from torchquorum.worker.step import Step
from torchquorum.worker.track_member import LaterLoss

_UNTRACED: list[Any] = []
# Those of every optimizer there is: register_optimizer_step_pre_hook and its like fill them.
_HOOKS_OF_ALL = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
MOST_EXAMPLES = 1e12
_NO_COPY = "a tq.Optimizer cannot be copied or pickled, as it stands for the optimizer of a run: copy or save optimizer.state_dict()"


def _untraced() -> Any:
    """Returns what makes a step that torch.compile leaves alone, in a program that may compile its training step: it is no arithmetic."""
    if not _UNTRACED:
        disable: Any = sys.modules["torch._dynamo"].disable
        _UNTRACED.append(disable(Optimizer._step_as_watched))
    return _UNTRACED[0]


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
        self.options = OptimizerOptions(
            rule=rule if rule is not None else Sync(),
            schedule=read_schedule(schedule),
            placement=placement,
            slice_bytes=slice_bytes,
            average=average,
            after_update=read_after_update(after_update),
            compress=compress,
            allow_nonfinite=allow_nonfinite,
            name=name,
        )
        self._local: LocalSteps | None = None
        if self.rule.local_steps:
            outer_spec(self.rule, 1)
            self._local = LocalSteps(optimizer, self.rule.local_steps, self.rule.mix, equal_time=self.rule.equal_time)
        else:
            name_of(type(optimizer))
            check_groups(optimizer)
        self.called = ""
        self._fragments: Fragments[Optimizer] | None = None
        self._whole: Optimizer | None = None
        self._attached: AttachedOptimizer | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer that is wrapped has said it
            super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner = optimizer
        self._take_hooks(optimizer)
        self._last: Step | None = None
        self._last_lr = self._given_rates()
        if self._local is None:
            check_schedule(self.options.schedule, optimizer)
        self._program: ProgramSettings | None = ProgramSettings(optimizer)
        self._spec: OptimizerSpec | None = None
        self._begins: LoadedState | None = None
        self._had_session = False

    def _take_hooks(self, inner: torch.optim.Optimizer) -> None:
        """Hooks of the optimizer that is wrapped are this one's, whichever they are given to."""
        for what in ("step", "state_dict", "load_state_dict"):
            for when in ("pre", "post"):
                name = f"_optimizer_{what}_{when}_hooks"
                setattr(self, name, getattr(inner, name))

    @property
    def rule(self) -> Rule:
        """Returns when gradients become an update."""
        return self.options.rule

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
        """Returns the state by parameter: inside a session a copy, gathered from the ps tasks as for `state_dict`; before one, its own.

        What is written to a copy is an error at the next step.
        """
        if "inner" not in self.__dict__:
            return {}
        if self._attached is None or self._local is not None:
            elsewhere = self._local is None and (self._had_session or self._spec is not None)
            return StateElsewhere() if elsewhere and not self.inner.state else self.inner.state
        assert self.flat is not None, "a session runs"
        return self._attached.read_state(self.flat)

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if "inner" not in self.__dict__:
            return  # while torch.optim.Optimizer begins
        if self._attached is not None and self._local is None:
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
            raise ConfigError(_NO_COPY)
        self.inner.__setstate__(state)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is made, or a file is written.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(_NO_COPY)

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
        last = self._attached.last if self._attached is not None else self._last
        if self._fragments is not None:
            last = self._fragments.last or last
        if last is None:
            raise ConfigError("optimizer.last: no step has been made yet")
        return last

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, before a session begins.

        Raises:
            ConfigError: A session runs: its variables are what they were when it began.
        """
        if self._attached is not None:
            raise ConfigError(
                "add_param_group() inside `with tq.Session(...)`: the ps tasks hold the variables that the run began with; add the "
                "group before, or end the session and begin another"
            )
        super().add_param_group(param_group)

    @property
    def version(self) -> int:
        """Returns the version that its parameters hold: how many updates of it were made; of the first, the global step."""
        return self._attached.view.version if self._attached is not None else 0

    @property
    def lr(self) -> list[float]:
        """Returns the learning rate of each parameter group for the next update, as the ps tasks have it."""
        return self._attached.view.lr if self._attached is not None else self._last_lr

    @property
    def used_lr(self) -> list[float]:
        """Returns the learning rate of each parameter group in the last update that this worker knows of."""
        return self._attached.view.used_lr if self._attached is not None else self._last_lr

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
            if self.options.schedule is not None:
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

    def attach(self, link: Link | None, observer: StepObserver | None = None, track: int = 0) -> None:
        """Connects the optimizer to the ps tasks, as that of a track, or cuts it off; the session calls this and watches every step."""
        if link is None:
            self._last_lr = self.lr
            self._spec = self._begins = None
            if self._attached is not None:
                self._last, self._attached = self._attached.last, None
            if self._whole is not None:
                self._whole._last, self._whole._attached = self._whole.last, None
            if self._local is not None:
                self._local.attach(None)
            return
        if self._attached is None:
            self._had_session = True
            self._attached = AttachedOptimizer(
                self.inner, self.options, self._local, self._program, link, observer, track, self.called, self._last
            )
        self._attached.follow(link)
        if self._whole is not None:
            self._whole._attached = self._attached

    def split(self) -> list[Optimizer]:
        """Returns what the run has of it: itself, or an optimizer for each fragment of the model."""
        rule = self.rule
        if rule.fragments == 1 and not rule.overlap:
            return [self]
        if self._fragments is None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            parts = [Optimizer(torch.optim.SGD(own, lr=0.0), rule) for own in cut(parameters, rule.fragments)]
            for k, part in enumerate(parts):
                name = f"fragment{k}"
                part.options = replace(self.options, name=f"{self.called}-{name}" if self.called else name)
            parts[0]._whole = self
            parts[0]._local = LocalSteps(self.inner, rule.local_steps or 1, rule.mix)
            self._fragments = Fragments(self.inner, parts, rule)
        self._fragments.begin()
        return self._fragments.parts

    @property
    def attached(self) -> AttachedOptimizer | None:
        """Returns what it does in the session that runs."""
        return self._attached

    @property
    def left_its_state(self) -> bool:
        """Whether a run begins without the state that this optimizer had in a session before."""
        keeps = type(self.inner) is not torch.optim.SGD or any(group.get("momentum") for group in self.param_groups)
        return self._had_session and self._attached is None and self._local is None and self._begins is None and keeps

    def begun_state(self) -> LoadedState | None:
        """Returns the state that a run begins with, if steps were made or a state was loaded before the session."""
        return self._begins

    def take_settings(self, settings: Settings) -> None:
        """Writes the run's settings into the parameter groups; only what the program changes afterwards counts."""
        if self._program is not None:
            self._program.take(settings)

    @property
    def link(self) -> Link | None:
        """Returns the link to the ps tasks while a session runs."""
        return self._attached.link if self._attached is not None else None

    @property
    def flat(self) -> FlatParameters | None:
        """Returns the parameters as they lie in memory while a session runs."""
        return self._attached.flat if self._attached is not None else None

    def say(self, line: str) -> None:
        """Prints a line for people, with the worker's name."""
        if self._attached is not None:
            self._attached.link.say(line)

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None, examples: float | None = None) -> Any:
        """Pushes the gradients and pulls the variables; what became of them is in `last`.

        Args:
            closure: Computes loss and gradients, as in torch.optim; not needed in an ordinary loop.
            loss: The loss, if it should appear in progress, ledger and report.
            examples: Of how many examples, or tokens, the gradients are the mean: in a round they count by that, so batches of different
                sizes make the update of the joined batch. All workers give it, or none.

        Returns:
            What the closure returned; None without one, as in torch.optim.
        """
        if "torch._dynamo" in sys.modules:
            return _untraced()(self, closure, loss, examples)
        return self._step_as_watched(closure, loss, examples)

    # What torch.optim puts around every step, for hooks and the profiler, costs more than the rest of it: only for who looks.
    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def _step_as_watched(self, closure: Callable[[], Any] | None, loss: Any, examples: float | None) -> Any:
        return (self._watched_step if self._is_watched() else self._step)(closure, loss=loss, examples=examples)

    def _is_watched(self) -> bool:
        hooks = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks, *_HOOKS_OF_ALL
        return any(hooks) or torch.autograd._profiler_enabled()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients, as in torch.optim."""
        if not set_to_none or torch.autograd._profiler_enabled():
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _step(
        self, closure: Callable[[], Any] | None = None, *, loss: Any = None, examples: float | None = None
    ) -> Any:
        attached = self._ready()
        if examples is not None:
            self._check_examples(examples)
        if self._fragments is not None:
            known = loss.detach() if isinstance(loss, torch.Tensor) else loss
            return self._fragments.step(closure, float(known) if known is not None else None, examples)
        if self._local is not None:
            return attached.local_step(self._local, closure, loss, examples)
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = loss = closure()
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ConfigError(f"loss: a tensor of {loss.numel()} elements; give its mean, or leave it out")
            loss = loss.detach()
        attached.push(
            float(loss) if loss is not None else None, Contribution(float(examples)) if examples is not None else None
        )
        return found

    def _check_examples(self, examples: float) -> None:
        """Raises ConfigError if a number of examples has no effect, or is none."""
        if isinstance(examples, bool) or not isinstance(examples, int | float) or not 0 < examples < MOST_EXAMPLES:
            raise ConfigError(f"examples={examples!r}: must be a number above 0, such as len(x)")
        if self.rule.aggregate == 1 and self.rule.grace is None:
            raise ConfigError(
                f"examples={examples} with rule={self.rule}: each gradient is an update by itself; leave it out"
            )
        if self.flat is not None and self.flat.tables:
            raise ConfigError(f"examples={examples} with tables of rows: their rows are not weighted; leave it out")

    _watched_step = torch.optim.Optimizer.profile_hook_step(_step)

    @property
    def local(self) -> LocalSteps | None:
        """Returns the local steps under `tq.Local`."""
        return self._local

    @property
    def inner_step(self) -> int:
        """Returns how many steps this worker's own optimizer has made, under `tq.Local`; else how many gradients it has computed."""
        if self._local is not None:
            return self._local.inner_step
        return self._attached.link.local_step if self._attached is not None else 0

    def check(self) -> None:
        """Raises ConfigError if there is no session, or the program sets learning rates beside a schedule, or a state where none counts."""
        self._ready()

    def tell_of_state(self) -> None:
        """The loop is over: says what the program has written to the copy of its state, which no step has found."""
        if self._attached is not None and (written := self._attached.given.written()):
            self.say(f"{written} in optimizer.state: written to after this worker's last step, which has no effect")

    def _ready(self) -> AttachedOptimizer:
        """Returns what it does in the session, if all is well."""
        if self._attached is None:
            if any(is_in_a_session(p) for group in self.param_groups for p in group["params"]):
                raise ConfigError(
                    "optimizer.step(): the session that runs was begun with another optimizer for these parameters. To change the "
                    "optimizer, end that session and begin another with this one, from the values that the parameters have then"
                )
            raise ConfigError(
                "optimizer.step() outside of `with tq.Session(task, model, optimizer)`: there is no ps to push to"
            )
        check_accumulation()
        self._attached.given.look()
        if self.inner.state and self._local is None:
            raise ConfigError(
                "the optimizer that tq.Optimizer wraps was given a state inside the session, by its own step() or load_state_dict(), and "
                "it runs on the ps tasks: call those of the tq.Optimizer"
            )
        if self.options.schedule is not None and self._program is not None and self._given_rates() != self._last_lr:
            self._check_scheduler_object()
            raise ConfigError(
                "the learning rate was changed in param_groups, and schedule= sets it on the ps tasks: leave schedule= out, or the change"
            )
        return self._attached

    def push(self, loss: float | LaterLoss | None) -> Step:
        """Pushes the gradients and pulls the variables, as `step` does.

        Args:
            loss: The loss; or a function that returns it, called when the gradients have been computed.
        """
        assert self._attached is not None, "checked before"
        return self._attached.push(loss)

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state as torch.optim has it, gathered from the ps tasks; a plain optimizer of the same class loads it.

        Any worker may call it, inside the session; before one it is what the run would begin with. The model's parameters take the
        version that the state belongs to.

        Raises:
            ConfigError: The session is over, so the state is not to be had.
        """
        if self._local is not None:
            return super().state_dict()
        attached, flat = self._attached, self.flat
        if attached is None or flat is None:
            if self._had_session or self._spec is not None:
                raise ConfigError(
                    "optimizer.state_dict() outside of `with tq.Session(...)`: the optimizer's state lives on the ps tasks; call it inside"
                )
            return super().state_dict()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state_dict = attached.pull_state(flat)
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
        if self._local is None and self._attached is None and self._spec is not None:
            raise ConfigError(
                "optimizer.load_state_dict() in a tq.graph session: load the state before the session begins"
            )
        attached = self._attached if self._local is None else None
        loaded = self._take_state_dict(state_dict, attached)
        if attached is not None and loaded is not None:
            attached.assign(loaded)

    def _take_state_dict(self, state_dict: Any, attached: AttachedOptimizer | None) -> LoadedState | None:
        """Lets torch.optim load a state dict; if that fails, all is as it was. Inside a session returns what is to be sent."""
        before, rates = (self.inner.param_groups, self.inner.state), [group.get(RATE) for group in self.param_groups]
        try:
            super().load_state_dict(state_dict)
            return attached.read_loaded(self.spec().name, rates) if attached is not None else None
        except BaseException as error:
            self.inner.param_groups, self.inner.state = before
            if isinstance(error, KeyError | AttributeError | TypeError):
                raise ConfigError(
                    f"optimizer.load_state_dict(): torch.optim.{type(self.inner).__name__} cannot load this ({type(error).__name__}: "
                    f"{error}): is it the state of another optimizer? Nothing was loaded"
                ) from error
            raise
