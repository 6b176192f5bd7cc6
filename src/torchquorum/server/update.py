"""One update of a shard: mean of the gradients, then a real torch.optim optimizer over flat memory.

Owned by the ps thread. Variables of one parameter group and dtype that always get gradients together are one flat segment,
so an update is a few large vector operations whatever the number of layers. A step in which some variables have no
gradient splits their segment for good, with its optimizer state, and leaves the absent ones alone, exactly as torch.optim
does. What always holds: the result equals the same optimizer run over the separate parameters, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol, cast

import torch

from torchquorum.errors import ConfigError
from torchquorum.placement.layout import Piece, Region, Variable
from torchquorum.server import schedules
from torchquorum.transport.messages import OptimizerSpec, ScheduleSpec
from torchquorum.transport.slots import DTYPES, Sections

# These update every element by itself, so they may run over flat memory and over slices of a variable.
ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]
)
# A closure, sparse gradients: things a ps cannot give.
IMPOSSIBLE = {"LBFGS": "it evaluates the loss again during a step", "SparseAdam": "it takes sparse gradients only"}
# In these, torch's kernels round the tail of a vector otherwise than its body: only whole variables are bit for bit.
WHOLE_VARIABLES = ("bfloat16", "float16")


class ReadState(Protocol):
    """Where a saved optimizer's state comes from: a checkpoint."""

    def states(self, variable: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shape and dtype of each state of a variable; of elementwise ones, the variable's shape."""
        ...

    def elements(self, variable: str, state: str, start: int, stop: int) -> torch.Tensor:
        """Returns the elements [start, stop) of a state, flat."""
        ...


@dataclass(eq=False)
class Segment:
    """A run of pieces in one section that are updated together; `shape` is a variable's own where that matters."""

    section: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    parameter: torch.nn.Parameter = field(default_factory=lambda: torch.nn.Parameter(torch.empty(0)))

    def view(self, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns this segment of a slot's memory."""
        values = sections[self.section]
        if self.start == 0 and self.shape == (self.stop,) == tuple(values.shape):
            return values
        return values[self.start : self.stop].view(self.shape)


def optimizer_class(name: str) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """Returns a class of torch.optim by name, and nothing else."""
    if name in IMPOSSIBLE:
        raise ConfigError(f"torch.optim.{name} cannot run on a ps: {IMPOSSIBLE[name]}; use SGD, Adam or another")
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)) or name == "Optimizer":
        raise ConfigError(f"optimizer {name!r}: only the classes of torch.optim can run on a ps")
    return cast(Any, found)


def warm_up() -> None:
    """Makes torch.optim load what it loads at its first step, which takes a second, before anybody waits for it."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.0).step()


class Update:
    """The optimizer of one shard."""

    def __init__(
        self,
        region: Region,
        variables: Sequence[Variable],
        optimizer: OptimizerSpec,
        schedule: ScheduleSpec | None,
        values: Sequence[torch.Tensor],
    ) -> None:
        self._region, self._variables = region, variables
        self._elementwise = optimizer.name in ELEMENTWISE
        self._cuts = object()  # stands for how memory is cut into segments now
        self._groups: list[list[Segment]] = [[] for _ in optimizer.groups]
        for index, section in enumerate(region.sections):
            for group, given in enumerate(optimizer.groups):
                # A fused kernel, too, may round the tail of a vector otherwise than its body.
                whole = not self._elementwise or section.dtype in WHOLE_VARIABLES or bool(given.get("fused"))
                pieces = [p for p in section.pieces if variables[p.variable].group == group]
                runs = [[p] for p in pieces] if whole else ([pieces] if pieces else [])
                self._groups[group] += [self._segment(index, run) for run in runs]
        for segment in self._segments:
            segment.parameter.data = segment.view(values)
        groups = [
            {"params": [s.parameter for s in segments], **{k: _plain(v) for k, v in given.items()}}
            for segments, given in zip(self._groups, optimizer.groups, strict=True)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a shard may hold no variable of some group
            self._optimizer = optimizer_class(optimizer.name)(groups)
        self._plain_sgd = optimizer.name == "SGD" and not any(
            group[option]
            for group in self._optimizer.param_groups
            for option in ("momentum", "weight_decay", "maximize", "fused", "foreach", "differentiable")
        )
        self._plain_sgd &= not any(isinstance(group["lr"], torch.Tensor) for group in self._optimizer.param_groups)
        self._schedule = schedules.build(schedule, self._optimizer) if schedule else None
        if self._plain_sgd:
            self._optimizer.step()  # nothing has a gradient: only tells the schedule that steps are being made
        self._rates = [self._current_rates()]  # of the next update, and of those after it that were looked at
        self._scratch = [torch.empty_like(v) for v in values]

    @property
    def _segments(self) -> list[Segment]:
        return [s for segments in self._groups for s in segments]

    @property
    def stateless(self) -> bool:
        """Whether an update is old - rate * mean and nothing else, so that others can make it too."""
        return self._plain_sgd

    @property
    def lr(self) -> list[float]:
        """Returns the learning rate of each parameter group for the next update."""
        return self._rates[0]

    def rates_ahead(self, update: int) -> list[float] | None:
        """Returns the learning rates of the update that comes `update` updates after the next one; only if stateless.

        None if the schedule does not go that far, as OneCycleLR beyond its last step.
        """
        try:
            while len(self._rates) <= update:
                self._rates.append(self._next_rates())
        except ValueError:
            return None
        return self._rates[update]

    def made_elsewhere(self) -> None:
        """An update was made by others, who have written the version: only the schedule goes on."""
        if len(self._rates) == 1:
            self._rates.append(self._next_rates())
        del self._rates[0]

    def _next_rates(self) -> list[float]:
        if self._schedule is not None:
            self._schedule.step()
        return self._current_rates()

    def _current_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def apply(
        self,
        old: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor],
        gradients: Sequence[Sequence[torch.Tensor]],
        absent: frozenset[int],
    ) -> Sequence[torch.Tensor]:
        """Writes the next version into `new`.

        Args:
            old: The sections of the current version.
            new: The sections of the next one, to be written in full.
            gradients: The sections of each gradient, in order of worker and local step; absent variables are zero.
            absent: Variables (by index) that have no gradient in any of them.

        Returns:
            The sections of the mean gradient, until the next update.
        """
        mean = gradients[0] if len(gradients) == 1 else self._mean(gradients)
        if absent:
            self._split(absent)
        if self._plain_sgd:
            self._step_plainly(old, new, mean, absent)
        else:
            self._step(old, new, mean, absent)
        self.made_elsewhere()
        return mean

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
        for segment in self._segments:
            segment.parameter.data = segment.view(new)
            skip = bool(absent) and segment.pieces[0].variable in absent
            segment.parameter.grad = None if skip else segment.view(mean)
        self._optimizer.step()
        for segment in self._segments:
            segment.parameter.grad = None

    def _step_plainly(
        self,
        old: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor],
        mean: Sequence[torch.Tensor],
        absent: frozenset[int],
    ) -> None:
        """SGD without state: new = old - lr * mean in one pass, the same operation as torch.optim's, so the same bits."""
        before, after, step = self._views_of(old), self._views_of(new), self._views_of(mean)
        k = 0
        for segments, rate in zip(self._groups, self._rates[0], strict=True):
            for segment in segments:
                if absent and segment.pieces[0].variable in absent:
                    after[k].copy_(before[k])
                else:
                    torch.add(before[k], step[k], alpha=-rate, out=after[k])
                k += 1

    def _views_of(self, sections: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the segments of a slot's or gradient's memory; of memory that comes again the views are kept."""
        if not isinstance(sections, Sections):
            return [segment.view(sections) for segment in self._segments]
        kept = sections.cut
        if not (isinstance(kept, tuple) and kept[0] is self._cuts):
            kept = sections.cut = (self._cuts, [segment.view(sections) for segment in self._segments])
        return kept[1]

    def _mean(self, gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The sum in order, then one division, in the gradients' own precision."""
        for index, out in enumerate(self._scratch):
            torch.add(gradients[0][index], gradients[1][index], out=out)
            for more in gradients[2:]:
                out.add_(more[index])
            out.div_(len(gradients))
        return self._scratch

    def _segment(self, section: int, pieces: Sequence[Piece]) -> Segment:
        first, last = pieces[0], pieces[-1]
        start, stop = first.offset, last.offset + last.numel  # the padding between pieces is zero and stays so
        variable = self._variables[first.variable]
        if self._elementwise or len(pieces) > 1:
            shape: tuple[int, ...] = (stop - start,)
        elif first.numel == variable.numel:
            shape = tuple(variable.shape)
        else:
            raise ConfigError(
                f"variable {variable.name} is sliced over shards, which its optimizer cannot do; leave slice_bytes out"
            )
        return Segment(section, start, stop, tuple(pieces), shape)

    def _split(self, absent: frozenset[int]) -> None:
        """Splits every segment in which only some variables have a gradient, with its state."""
        self._regroup(lambda piece: piece.variable in absent)

    def _regroup(self, kind_of: Callable[[Piece], Any]) -> None:
        """Splits segments so that all pieces of each are of one kind."""
        for group, segments in enumerate(self._groups):
            parts = [part for segment in segments for part in self._parts(segment, kind_of)]
            if len(parts) != len(segments):
                self._groups[group] = parts
                self._cuts = object()
                self._optimizer.param_groups[group]["params"] = [s.parameter for s in parts]

    def _parts(self, segment: Segment, kind_of: Callable[[Piece], Any]) -> list[Segment]:
        runs: list[list[Piece]] = []
        for piece in segment.pieces:
            if runs and kind_of(runs[-1][-1]) == kind_of(piece):
                runs[-1].append(piece)
            else:
                runs.append([piece])
        if len(runs) == 1:
            return [segment]
        parts = [self._segment(segment.section, run) for run in runs]
        state: dict[str, Any] = self._optimizer.state.pop(segment.parameter, {})
        for part in parts:
            if state:
                self._optimizer.state[part.parameter] = {k: _slice(v, segment, part) for k, v in state.items()}
        return parts

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def states(self) -> Iterator[tuple[Piece, str, torch.Tensor]]:
        """Yields the optimizer's state tensors piece by piece, flat; they are views and change with the next update."""
        for segment in self._segments:
            for name, value in self._optimizer.state.get(segment.parameter, {}).items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    continue
                if value.shape != segment.shape:
                    yield segment.pieces[0], name, value
                    continue
                flat = value.reshape(-1)
                for piece in segment.pieces:
                    start = piece.offset - segment.start
                    yield piece, name, flat[start : start + piece.numel]

    def scalars(self) -> dict[str, dict[str, Any]]:
        """Returns what else the optimizer keeps per variable: numbers, and tensors that are numbers."""
        found: dict[str, dict[str, Any]] = {}
        for segment in self._segments:
            for name, value in self._optimizer.state.get(segment.parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    if value.dim() > 0:
                        continue
                    value = {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
                for piece in segment.pieces:
                    if piece.start == 0:
                        found.setdefault(self._variables[piece.variable].name, {})[name] = value
        return found

    def restore(self, read: ReadState, scalars: dict[str, dict[str, Any]], version: int) -> None:
        """Takes up an optimizer's state as it was saved, whatever the shards were then.

        Args:
            read: Returns the states of a variable, name to (shape, dtype), or the elements of one.
            scalars: What `scalars` returned on all shards.
            version: How many updates had been made; the schedule is brought to that step.
        """

        def kind(piece: Piece) -> Any:
            name = self._variables[piece.variable].name
            return read.states(name), scalars.get(name, {})

        self._regroup(kind)
        for segment in self._segments:
            names, numbers = kind(segment.pieces[0])
            state = {name: _plain(value) for name, value in numbers.items()}
            for name, (shape, dtype) in names.items():
                state[name] = self._restored(segment, name, shape, dtype, read)
            if state:
                self._optimizer.state[segment.parameter] = state
        if self._schedule is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the optimizer's steps were made in another life
                for _ in range(version):
                    self._schedule.step()
        self._rates = [self._current_rates()]

    def _restored(
        self, segment: Segment, name: str, shape: tuple[int, ...], dtype: torch.dtype, read: ReadState
    ) -> torch.Tensor:
        first = self._variables[segment.pieces[0].variable]
        if shape != tuple(first.shape):
            return read.elements(first.name, name, 0, prod(shape)).view(shape)
        whole = torch.zeros(segment.stop - segment.start, dtype=dtype)
        for piece in segment.pieces:
            values = read.elements(self._variables[piece.variable].name, name, piece.start, piece.stop)
            whole[piece.offset - segment.start :][: piece.numel] = values.reshape(-1)
        return whole.view(segment.shape)


def _slice(value: Any, whole: Segment, part: Segment) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != whole.shape or value.dim() == 0:
        return value.clone()
    return value[part.start - whole.start : part.stop - whole.start].clone()


def _plain(value: Any) -> Any:
    """Makes an argument what it was before it travelled: a tuple, a tensor, or itself."""
    if isinstance(value, dict):
        return torch.tensor(value["tensor"], dtype=DTYPES[value["dtype"]])
    return tuple(_plain(v) for v in value) if isinstance(value, list) else value
