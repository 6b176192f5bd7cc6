"""What a program writes to its parameters inside a run: an error, or, with `session.assign()`, the run's next version.

Owned by the worker's part in the run. What always holds: after an error the parameters are as the program left them; after an
assignment they hold the versions that it made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

import torchquorum.wire.messages as m
from torchquorum.errors import ConfigError
from torchquorum.lines import first_of
from torchquorum.memory.slots import section_views
from torchquorum.placement.layout import CONSTANT
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import tensor_frame
from torchquorum.worker.exchange import Exchange
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.loaded_state import LoadedState
from torchquorum.worker.requests import Requests
from torchquorum.worker.run_view import RunView, TrackView
from torchquorum.worker.writes import SuspectedWriteError, Watch, same_bits


@dataclass(frozen=True, slots=True)
class Kept:
    """What the parameters of one optimizer held.

    Attributes:
        held: The version that they had been given.
        exact: Whether all of them had; not if another version was on its way.
        suspected: The variables that had been written to, or may have been.
        values: What the parameters held, by variable.
    """

    held: int
    exact: bool
    suspected: list[int]
    values: dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A worker's assignment: which one of this worker it is, and what each optimizer's parameters held when it came to it."""

    number: int
    kept: list[Kept]


class _Track(Protocol):
    """The worker's part in one optimizer. `exchange` may still be copying into the parameters."""

    @property
    def index(self) -> int: ...
    @property
    def flat(self) -> FlatParameters: ...
    @property
    def exchange(self) -> Exchange: ...
    @property
    def view(self) -> TrackView: ...
    @property
    def watch(self) -> Watch: ...


class _Member(Protocol):
    def pull(self) -> m.Variables: ...
    def finish_request(self) -> None: ...
    def take(self, limit_s: float, /) -> m.Variables: ...


class OwnWrites:
    """Finds out what was written, refuses it or gives it to the run.

    Args:
        tracks: The worker's part in each optimizer, which suspects writes.
        requests: How the ps tasks are asked.
        view: Where this worker stands.
        member: Takes versions.
    """

    def __init__(self, tracks: Sequence[_Track], requests: Requests, view: RunView, member: _Member) -> None:
        self._tracks, self._requests, self._view, self._member = tracks, requests, view, member
        self._channels = requests.channels
        end = requests.channels.end
        self._who, self._round_s = (end.index, end.incarnation), end.patience.round_s

    def look(self, track: int = 0) -> None:
        """Raises ConfigError if the program has written to an optimizer's parameters since they were given a version."""
        try:
            self._tracks[track].watch.look()
        except SuspectedWriteError as suspected:
            if not self._view.stopped:
                self.judge(track, suspected.variables)

    def set_aside(self) -> list[dict[int, torch.Tensor]]:
        """Another version is about to come that no step has asked for: returns what the program has written, by parameter."""
        found = [self._suspect(of) for of in self._tracks]
        if not any(found):
            return []
        return [
            {i: of.flat.parameters[i].detach().clone() for i in those}
            for of, those in zip(self._tracks, found, strict=True)
        ]

    def put_back(self, written: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """The version has come: the parameters hold again what the program has written."""
        with torch.no_grad():
            for of, values in zip(self._tracks, written, strict=False):
                for i, value in values.items():
                    of.flat.parameters[i].data.copy_(value)

    def left_over(self) -> str:
        """Returns the names of parameters that were written to since they were given a version, if there are any; they keep that."""
        those = [self._suspect(of) for of in self._tracks]
        if not any(those):
            return ""
        kept = [self._keep(of, each, each) for of, each in zip(self._tracks, those, strict=True)]
        found = self._find_written(kept)
        self._put_back(kept, found)
        return self._names(found)

    def judge(self, track: int, suspected: Sequence[int]) -> None:
        """Raises ConfigError, with the parameters as the program left them, unless they hold what they held before.

        All parameters take the current versions for that: what was written to those of other optimizers is looked for too.
        """
        kept: list[Kept] = []
        for of in self._tracks:
            those = suspected if of.index == track else self._suspect(of)
            kept.append(self._keep(of, those, those))
        found = self._find_written(kept)
        if not any(found):
            return
        self._put_back(kept, found)
        shown, many = self._names(found), sum(map(len, found)) > 1
        raise ConfigError(
            f"parameter{'s' if many else ''} {shown}: written to inside the run, which changes this "
            "worker's copy only, until the next version comes from the ps tasks. To make the values the run's, call "
            "session.assign() after the write, on all workers at the same place; for a constraint after every update give "
            "tq.Optimizer(after_update=tq.Clamp(...)), tq.MaxNorm or tq.UnitNorm. Values to begin with are written before the "
            "session begins."
        )

    def _names(self, found: Sequence[Sequence[int]]) -> str:
        """Returns the names of parameters, the first of many."""
        names = [of.flat.layout.variables[i].name for of, those in zip(self._tracks, found, strict=True) for i in those]
        return first_of(names)

    def _suspect(self, of: _Track) -> list[int]:
        """Returns which parameters of an optimizer may have been written to, the GPU waited for."""
        try:
            of.watch.look()
            of.exchange.settle()
            of.watch.confirm()
        except SuspectedWriteError as found:
            return found.variables
        return []

    def _keep(self, of: _Track, suspected: Sequence[int], looked_at: Sequence[int]) -> Kept:
        """Returns what these parameters hold, which stay as they are; all are in their places afterwards."""
        chosen = sorted({*suspected, *looked_at})
        values = {i: of.flat.parameters[i].detach().clone() for i in chosen}
        of.flat.take_back()
        return Kept(of.view.version, not self._requests.is_open, list(suspected), values)

    def _find_written(self, kept: Sequence[Kept]) -> list[list[int]]:
        """Takes the current versions and returns which of the kept values are the program's and not of the version held then.

        That is exact if it still is the version that was held; if others have followed, the suspected ones are returned.
        """
        self._member.pull()
        found: list[list[int]] = []
        for of, each in zip(self._tracks, kept, strict=True):
            if not each.exact or of.view.version != each.held:
                found.append(each.suspected)
                continue
            now = of.flat.parameters
            found.append([i for i, value in each.values.items() if not same_bits(value, now[i].detach())])
        return found

    def _put_back(self, kept: Sequence[Kept], written: Sequence[Sequence[int]]) -> None:
        self.put_back([{i: each.values[i] for i in those} for each, those in zip(kept, written, strict=True)])

    def begin(self) -> Assignment:
        """This worker has come to an assignment: keeps what the parameters hold, written to or not."""
        self._view.assignments += 1
        kept: list[Kept] = []
        for of in self._tracks:
            suspected = self._suspect(of)
            trained = [i for i, v in enumerate(of.flat.layout.variables) if v.group != CONSTANT]
            kept.append(self._keep(of, suspected, trained))
        return Assignment(self._view.assignments, kept)

    def assign(self, assignment: Assignment, *, gives: bool, loaded: LoadedState | None = None, track: int = 0) -> bool:
        """Waits until an assignment is made and takes its versions; with `gives`, what was written and what is loaded is assigned.

        Args:
            assignment: The worker's assignment.
            gives: Whether this worker's values count.
            loaded: The state that an optimizer has loaded.
            track: Which optimizer.

        Returns:
            False if this worker has to give its own values.
        """
        written: list[list[int]] = [[] for _ in self._tracks]
        if gives:
            written = self._find_written(assignment.kept)
            self._put_back(assignment.kept, written)
            for of, those in zip(self._tracks, written, strict=True):
                state = loaded if of.index == track else None
                if those or state is not None:
                    self._send_values(of, assignment.number, those, state)
        self._member.finish_request()
        number = self._channels.next_number()
        parts = [m.TrackValues(k.held, those) for k, those in zip(assignment.kept, written, strict=True)]
        if gives and loaded is not None:
            parts[track].state, parts[track].settings = True, loaded.settings
        one, *more = parts
        message = m.Assign(
            *self._who, number, assignment.number, one.version, gives, one.variables, one.state, one.settings, more
        )
        every = [of.index for of in self._tracks]
        self._requests.begin(number, [(message, []) for _ in self._channels.end.ps], every)
        answer = self._member.take(self._round_s)
        return answer.outcome is None or answer.outcome.reason != m.STANDS_IN

    def _send_values(self, of: _Track, number: int, written: list[int], loaded: LoadedState | None) -> None:
        """Sends what an optimizer's parameters hold, and its state, to every ps task, each its part."""
        message = m.Values(*self._who, number, written, track=of.index)
        for k, region in enumerate(of.flat.layout.trained):
            frames: list[Frame] = []
            if written:
                memory = torch.zeros(region.size_bytes, dtype=torch.uint8)
                with torch.no_grad():
                    of.flat.store(region, section_views(region, memory))
                frames.append(tensor_frame(memory))
            if loaded is not None:
                message.optimizer, state = loaded.part(k, of.flat.layout, of.flat.parameters)
                frames.append(state)
            self._channels.ask(
                k,
                message,
                frames,
                kind=m.ValuesKept,
                what="values to be kept for an assignment",
                limit_s=self._round_s,
            )
