"""What a program writes to its parameters inside a run: an error, or, with `session.assign()`, the run's next version.

Owned by the worker's part in the run. What always holds: after an error the parameters are as the program left them; after an
assignment they hold the version that it made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

import torchquorum.wire.messages as m
from torchquorum.errors import ConfigError
from torchquorum.memory.slots import section_views
from torchquorum.placement.layout import CONSTANT
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import tensor_frame
from torchquorum.worker.exchange import Exchange
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.loaded_state import LoadedState
from torchquorum.worker.requests import Requests
from torchquorum.worker.run_view import RunView
from torchquorum.worker.writes import SuspectedWriteError, Watch, same_bits


@dataclass(frozen=True, slots=True)
class Assignment:
    """A worker's assignment: what its parameters held when it came to it.

    Attributes:
        number: Which assignment of this worker it is.
        held: The version that the parameters had been given.
        exact: Whether all of them had; not if another version was on its way.
        suspected: The variables that had been written to, or may have been.
        values: What the parameters held, by variable.
    """

    number: int
    held: int
    exact: bool
    suspected: list[int]
    values: dict[int, torch.Tensor]


class _Member(Protocol):
    @property
    def watch(self) -> Watch: ...
    def pull(self) -> m.Variables: ...
    def finish_request(self) -> None: ...
    def take(self, limit_s: float, /) -> m.Variables: ...


class OwnWrites:
    """Finds out what was written, refuses it or gives it to the run.

    Args:
        flat: The worker's parameters.
        exchange: May still be copying into the parameters.
        requests: How the ps tasks are asked.
        view: Where this worker stands.
        member: Takes versions, and suspects writes.
    """

    def __init__(
        self,
        flat: FlatParameters,
        exchange: Exchange,
        requests: Requests,
        view: RunView,
        member: _Member,
    ) -> None:
        self._flat, self._exchange, self._requests = flat, exchange, requests
        self._view, self._member, self._channels = view, member, requests.channels
        end = requests.channels.end
        self._who, self._round_s = (end.index, end.incarnation), end.patience.round_s

    def look(self) -> None:
        """Raises ConfigError if the program has written to parameters since they were given a version."""
        try:
            self._member.watch.look()
        except SuspectedWriteError as suspected:
            if not self._view.stopped:
                self.judge(suspected.variables)

    def judge(self, suspected: Sequence[int]) -> None:
        """Raises ConfigError, with the parameters as the program left them, unless they hold what they held before."""
        kept = self._keep(suspected, suspected)
        written = self._find_written(kept)
        if not written:
            return
        self._put_back(kept, written)
        raise ConfigError(
            f"parameter{'s' if len(written) > 1 else ''} {self._names(written)}: written to inside the run, which changes this "
            "worker's copy only, until the next version comes from the ps tasks. To make the values the run's, call "
            "session.assign() after the write, on all workers at the same place; for a constraint after every update give "
            "tq.Optimizer(after_update=tq.Clamp(...)), tq.MaxNorm or tq.UnitNorm. Values to begin with are written before the "
            "session begins."
        )

    def _names(self, variables: Sequence[int]) -> str:
        names = [self._flat.layout.variables[i].name for i in variables]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def _keep(self, suspected: Sequence[int], looked_at: Sequence[int]) -> Assignment:
        """Returns what these parameters hold, which stay as they are; all are in their places afterwards."""
        chosen = sorted({*suspected, *looked_at})
        values = {i: self._flat.parameters[i].detach().clone() for i in chosen}
        self._flat.take_back()
        number = self._view.assignments
        return Assignment(number, self._view.version, not self._requests.is_open, list(suspected), values)

    def _find_written(self, kept: Assignment) -> list[int]:
        """Takes the current version and returns which of the kept values are the program's and not that version's.

        That is exact if it still is the version that was held then; if others have followed, the suspected ones are returned.
        """
        self._member.pull()
        if not kept.exact or self._view.version != kept.held:
            return kept.suspected
        parameters = self._flat.parameters
        return [i for i, value in kept.values.items() if not same_bits(value, parameters[i].detach())]

    def _put_back(self, kept: Assignment, written: Sequence[int]) -> None:
        with torch.no_grad():
            for i in written:
                self._flat.parameters[i].data.copy_(kept.values[i])

    def begin(self) -> Assignment:
        """This worker has come to an assignment: keeps what the parameters hold, written to or not."""
        suspected: list[int] = []
        try:
            self._member.watch.look()
            self._exchange.settle()
            self._member.watch.confirm()
        except SuspectedWriteError as found:
            suspected = found.variables
        self._view.assignments += 1
        trained = [i for i, v in enumerate(self._flat.layout.variables) if v.group != CONSTANT]
        return self._keep(suspected, trained)

    def assign(self, assignment: Assignment, *, gives: bool, loaded: LoadedState | None = None) -> bool:
        """Waits until an assignment is made and takes the version; with `gives`, what was written and what is loaded is assigned.

        Returns:
            False if this worker has to give its own values.
        """
        written: list[int] = []
        if gives:
            written = self._find_written(assignment)
            if written:
                self._put_back(assignment, written)
            if written or loaded is not None:
                self._send_values(assignment, written, loaded)
        self._member.finish_request()
        number = self._channels.next_number()
        message = m.Assign(*self._who, number, assignment.number, assignment.held, gives, written)
        if gives and loaded is not None:
            message.state, message.settings = True, loaded.settings
        self._requests.begin(number, [(message, []) for _ in self._channels.end.ps])
        answer = self._member.take(self._round_s)
        return answer.outcome is None or answer.outcome.reason != m.STANDS_IN

    def _send_values(self, assignment: Assignment, written: list[int], loaded: LoadedState | None) -> None:
        """Sends what the parameters hold, and the optimizer's state, to every ps task, each its part."""
        message = m.Values(*self._who, assignment.number, written)
        for k, region in enumerate(self._flat.layout.trained):
            frames: list[Frame] = []
            if written:
                memory = torch.zeros(region.size_bytes, dtype=torch.uint8)
                with torch.no_grad():
                    self._flat.store(region, section_views(region, memory))
                frames.append(tensor_frame(memory))
            if loaded is not None:
                message.optimizer, state = loaded.part(k, self._flat.layout, self._flat.parameters)
                frames.append(state)
            self._channels.ask(
                k,
                message,
                frames,
                kind=m.ValuesKept,
                what="values to be kept for an assignment",
                limit_s=self._round_s,
            )
