"""The updates of a shard on the ps: the mean of the gradients, then a kernel or a real torch.optim optimizer over flat memory.

Owned by the ps thread. Variables that always get gradients together are one flat span (`torchquorum.update.spans`), so an update is a few
large vector operations, whatever the number of layers. A step in which some variables have no gradient splits their span for good, with its
optimizer state, and leaves the absent ones unchanged, as torch.optim does. What always holds: the result equals the same optimizer run over
the separate parameters, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Protocol

import torch

from torchquorum.placement.layout import Piece, Region, Variable
from torchquorum.update import optimizers
from torchquorum.update.kernel_state import KernelState
from torchquorum.update.kernels import Kernel, Moment, kernels_for, mean, states_of
from torchquorum.update.rates import Rates
from torchquorum.update.spans import Span, Spans
from torchquorum.wire.messages import OptimizerSpec, ScheduleSpec
from torchquorum.wire.settings import RATE, Settings, changed, changes, decode


class ReadState(Protocol):
    """Reads a saved optimizer's state from a checkpoint."""

    def states(self, variable: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shape and dtype of each state of a variable; of elementwise ones, the variable's shape."""
        ...

    def elements(self, variable: str, state: str, start: int, stop: int) -> torch.Tensor:
        """Returns the elements [start, stop) of a state, flat."""
        ...


def warm_up() -> None:
    """Makes torch.optim import what it imports at its first step, which takes a second, before a worker waits for it."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizers.step_without_hooks(torch.optim.SGD([parameter], lr=0.0))


class Updater:
    """The optimizer of one shard.

    Attributes:
        settings: The options of each parameter group, as they travel, for the next update; without the rates that a schedule sets.
        spans: What is updated together.
        rates: The learning rates.
    """

    def __init__(
        self,
        region: Region,
        variables: Sequence[Variable],
        optimizer: OptimizerSpec,
        schedule: ScheduleSpec | None,
        values: Sequence[torch.Tensor],
        state_slots: int | None = None,
    ) -> None:
        self._variables, self._spec, self._schedule_spec = variables, optimizer, schedule
        self.spans = Spans(region, variables, optimizer)
        for span in self.spans:
            span.parameter.data = span.view(values)
        groups = [
            {"params": [s.parameter for s in spans], **given}
            for spans, given in zip(self.spans.groups, optimizer.groups, strict=True)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a shard may hold no variable of some group
            self._optimizer = optimizers.build(optimizer.name, groups)
        for (
            group
        ) in self._optimizer.param_groups:  # torch's Adagrad begins with its own argument, whatever a group says
            for parameter in group["params"] if group.get("initial_accumulator_value") else ():
                self._optimizer.state[parameter]["sum"].fill_(group["initial_accumulator_value"])
        self._fitting = self._kernels = kernels = kernels_for(optimizer, schedule)
        names, initial = (states_of(kernels), kernels[0].initial) if kernels else ((), 0.0)
        self.state = KernelState(region, names, initial, state_slots if names else None)
        self._as_planned = True
        self._take_state()
        self.rates = Rates(self._optimizer, schedule)
        if kernels is not None:
            optimizers.step_without_hooks(
                self._optimizer
            )  # nothing has a gradient: only tells the schedule that steps are being made
        scheduled = (RATE,) if self.rates.scheduled else ()
        self.settings: Settings = [{k: v for k, v in g.items() if k not in scheduled} for g in optimizer.groups]
        self._scratch = [torch.empty_like(v) for v in values]

    def change(self, change: Settings) -> None:
        """Uses other options from the next update on: of each parameter group those that change; nothing for no change."""
        if not change:
            return
        self.settings = changed(self.settings, change)
        for group, options in zip(self._optimizer.param_groups, change, strict=True):
            group.update({name: decode(value) for name, value in options.items()} | optimizers.as_on_a_ps(options))
        if any(name != RATE for options in change for name in options):
            self._options_changed()
        self.rates.changed()

    def _options_changed(self) -> None:
        """Another option than a rate has changed: a kernel may not do any more, or do again."""
        self._show_state()
        spec = OptimizerSpec(self._spec.name, changed(self._spec.groups, self.settings))
        kernels = kernels_for(spec, self._schedule_spec)
        fits = kernels is not None and set(states_of(kernels)) <= set(self.state.names)
        self._fitting = self._kernels = kernels if fits else None
        self._as_planned = not any(name != RATE for group in changes(self._spec.groups, spec.groups) for name in group)
        if any(options.get("fused") for options in spec.groups):
            self._cut(lambda piece: piece.variable)
        self._take_state()

    @property
    def steps_by_group(self) -> list[int] | None:
        """Returns how many updates the state of each parameter group has seen, if workers may make the next ones.

        None if no kernel makes them, if the options are not those of the plan, which workers have, or if the variables of a group
        have seen different numbers of updates.
        """
        if self._kernels is None or not self._as_planned:
            return None
        found = []
        for kernel, spans in zip(self._kernels, self.spans.groups, strict=True):
            steps = {span.steps if kernel.counted else min(1, span.steps) for span in spans}
            if len(steps) > 1:
                return None
            found.append(max((span.steps for span in spans), default=0))
        return found

    def _take_state(self) -> None:
        """If a kernel makes the updates from now on, what torch.optim has of the state goes into the kernels' memory.

        State that the kernels have no place for, such as the momentum of an optimizer whose momentum is 0 just now, is kept: then
        torch.optim makes the updates.
        """
        self._kernels = self._fitting if not self._has_more_state() else None
        if self._kernels is None:
            return
        memory = dict(zip(self.state.names, self.state.of(self.state.current), strict=True))
        for kernel, spans in zip(self._kernels, self.spans.groups, strict=True):
            for span in spans:
                state: dict[str, Any] = self._optimizer.state.pop(span.parameter, {})
                here = [name for name in kernel.state if isinstance(state.get(name), torch.Tensor)]
                for name in here:
                    if (target := span.view(memory[name])).data_ptr() != state[name].data_ptr():
                        target.copy_(state[name])
                span.steps = int(state["step"]) if "step" in state else int(bool(here))

    def _has_more_state(self) -> bool:
        """Whether torch.optim has states of a variable that the kernel of its group does not know."""
        return any(
            not self._optimizer.state.get(span.parameter, {}).keys() <= {"step", *kernel.state}
            for kernel, spans in zip(self._fitting or (), self.spans.groups, strict=False)
            for span in spans
        )

    def _show_state(self) -> None:
        """Gives torch.optim's state the tensors that the kernels use, as views, for those who read it."""
        if self._kernels is None:
            return
        memory = dict(zip(self.state.names, self.state.of(self.state.current), strict=True))
        for kernel, spans in zip(self._kernels, self.spans.groups, strict=True):
            for span in spans:
                if kernel.state and (span.steps or kernel.eager):
                    state: dict[str, Any] = {"step": torch.tensor(float(span.steps))} if kernel.counted else {}
                    self._optimizer.state[span.parameter] = state | {n: span.view(memory[n]) for n in kernel.state}

    def made_elsewhere(self) -> None:
        """Workers have made an update and written the version, with its state: only the schedule advances."""
        for span in self.spans:
            span.steps += 1
        self.rates.advance()

    def pass_over(self) -> None:
        """The next version is no update: the schedule, which goes by version, advances, and nothing else."""
        self.rates.advance()

    def apply(
        self,
        old: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor],
        gradients: Sequence[Sequence[torch.Tensor]],
        absent: frozenset[int],
        weights: Sequence[float] = (),
    ) -> Sequence[torch.Tensor]:
        """Writes the next version into `new`.

        Args:
            old: The sections of the current version.
            new: The sections of the next one, to be written in full.
            gradients: The sections of each gradient, in order of worker and local step; absent variables are zero.
            absent: Variables (by index) that have no gradient in any of them.
            weights: How much each gradient counts; empty where all count alike.

        Returns:
            The sections of the mean gradient, until the next update.
        """
        step = gradients[0]
        if len(gradients) > 1:
            sections = zip(*gradients, strict=True)
            step = [mean(section, out, weights) for section, out in zip(sections, self._scratch, strict=True)]
        if absent:
            self._cut(lambda piece: piece.variable in absent)
        if self._kernels is not None:
            self._step_by_kernel(self._kernels, old, new, step, absent)
        else:
            self._step(old, new, step, absent)
        self.rates.advance()
        return step

    def _step(
        self,
        old: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor],
        mean: Sequence[torch.Tensor],
        absent: frozenset[int],
    ) -> None:
        """Any optimizer: the old version is copied and updated in place."""
        for source, target in zip(old, new, strict=True):
            target.copy_(source)
        for span in self.spans:
            span.parameter.data = span.view(new)
            skip = bool(absent) and span.pieces[0].variable in absent
            span.parameter.grad = None if skip else span.view(mean)
        with self.rates.in_groups(), optimizers.of_the_program():
            optimizers.step_without_hooks(self._optimizer)
        for span in self.spans:
            span.parameter.grad = None

    def _step_by_kernel(
        self,
        kernels: Sequence[Kernel],
        old: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor],
        mean: Sequence[torch.Tensor],
        absent: frozenset[int],
    ) -> None:
        """An optimizer that has a kernel: the next version and its state are written in one pass, with the bits of torch.optim."""
        values, step = (self.spans.views_of(old), self.spans.views_of(new)), self.spans.views_of(mean)
        target = self.state.next_slot()
        before = dict(zip(self.state.names, map(self.spans.views_of, self.state.of(self.state.current)), strict=True))
        after = dict(zip(self.state.names, map(self.spans.views_of, self.state.of(target)), strict=True))
        k = 0
        for kernel, spans, rate in zip(kernels, self.spans.groups, self.rates.now, strict=True):
            for span in spans:
                mine = [before[name][k] for name in kernel.state], [after[name][k] for name in kernel.state]
                if absent and span.pieces[0].variable in absent:
                    for source, place in zip([values[0][k], *mine[0]], [values[1][k], *mine[1]], strict=True):
                        if source is not place:
                            place.copy_(source)
                else:
                    kernel.write(Moment(rate, span.steps), values[0][k], step[k], values[1][k], *mine)
                    span.steps += 1
                k += 1
        self.state.current = target

    def _cut(self, kind_of: Callable[[Piece], Any]) -> None:
        """Cuts spans, with their state, so that all pieces of each are of one kind."""
        self._show_state()
        for group in self.spans.cut(kind_of, self._cut_state):
            self._optimizer.param_groups[group]["params"] = [s.parameter for s in self.spans.groups[group]]
        self._take_state()

    def _cut_state(self, span: Span, parts: list[Span]) -> None:
        state: dict[str, Any] = self._optimizer.state.pop(span.parameter, {})
        for part in parts:
            if state:
                self._optimizer.state[part.parameter] = {k: _slice(v, span, part) for k, v in state.items()}

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def states(self) -> Iterator[tuple[Piece, str, torch.Tensor]]:
        """Yields the optimizer's state tensors piece by piece, flat; they are views and change with the next update."""
        self._show_state()
        for span in self.spans:
            for name, value in self._optimizer.state.get(span.parameter, {}).items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    continue
                if value.shape != span.shape:
                    yield span.pieces[0], name, value
                    continue
                flat = value.reshape(-1)
                for piece in span.pieces:
                    start = piece.offset - span.start
                    yield piece, name, flat[start : start + piece.numel]

    def scalars(self) -> dict[str, dict[str, Any]]:
        """Returns what else the optimizer keeps per variable: numbers, and tensors that are numbers."""
        self._show_state()
        found: dict[str, dict[str, Any]] = {}
        for span in self.spans:
            for name, value in self._optimizer.state.get(span.parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    if value.dim() > 0:
                        continue
                    value = {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
                for piece in span.pieces:
                    if piece.start == 0:
                        found.setdefault(self._variables[piece.variable].name, {})[name] = value
        return found

    def restore(self, read: ReadState, scalars: dict[str, dict[str, Any]], version: int) -> None:
        """Restores an optimizer's state from a checkpoint, whatever the shards were then.

        Args:
            read: Returns the states of a variable, name to (shape, dtype), or the elements of one.
            scalars: What `scalars` returned on all shards.
            version: How many updates had been made; the schedule is brought to that step.
        """
        self._read(read, scalars)
        self.rates.begin_at(version)

    def load(self, read: ReadState, scalars: dict[str, dict[str, Any]]) -> None:
        """Replaces the optimizer's state between two updates; options and schedule stay as they are."""
        self._optimizer.state.clear()
        self.state.begin()
        for span in self.spans:
            span.steps = 0
        self._read(read, scalars)

    def _read(self, read: ReadState, scalars: dict[str, dict[str, Any]]) -> None:
        def kind(piece: Piece) -> Any:
            name = self._variables[piece.variable].name
            return read.states(name), scalars.get(name, {})

        self._cut(kind)
        for span in self.spans:
            names, numbers = kind(span.pieces[0])
            state = {name: decode(value) for name, value in numbers.items()}
            for name, (shape, dtype) in names.items():
                state[name] = self._restored(span, name, shape, dtype, read)
            if state:
                self._optimizer.state[span.parameter] = state
        self._take_state()

    def _restored(
        self, span: Span, name: str, shape: tuple[int, ...], dtype: torch.dtype, read: ReadState
    ) -> torch.Tensor:
        first = self._variables[span.pieces[0].variable]
        if shape != tuple(first.shape):
            return read.elements(first.name, name, 0, prod(shape)).view(shape)
        whole = torch.zeros(span.stop - span.start, dtype=dtype)
        for piece in span.pieces:
            values = read.elements(self._variables[piece.variable].name, name, piece.start, piece.stop)
            whole[piece.offset - span.start :][: piece.numel] = values.reshape(-1)
        return whole.view(span.shape)


def _slice(value: Any, whole: Span, part: Span) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != whole.shape or value.dim() == 0:
        return value.clone()
    return value[part.start - whole.start : part.stop - whole.start].clone()
