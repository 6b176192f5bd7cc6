"""A worker's step on the fast path: it makes the update itself, in shared memory, without asking the ps.

Owned by the worker's thread, through its connection. How an update is made is in `torchquorum.fastpath.turns` (Async) and
`torchquorum.fastpath.rounds` (Sync of all workers). What always holds: `step` returns None, and nothing has happened, whenever the page is
closed, a wait is too long, or the ps has not looked for a while; the gradient is then pushed by message, under the same
number, and cannot count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torchquorum.clock import SYSTEM, Clock
from torchquorum.fastpath.admission import Admission
from torchquorum.fastpath.page import OPEN, FastPage
from torchquorum.fastpath.participant import MadeVersion, Participant
from torchquorum.fastpath.records import GradientId
from torchquorum.fastpath.rounds import CHUNK, CpuRound, RoundGradients, RoundJournal, RoundSteps, RoundWriter, parts_of
from torchquorum.fastpath.stages import Stages, run
from torchquorum.fastpath.turns import CpuTurn, TurnSteps, TurnWriter
from torchquorum.fastpath.update_journal import UpdateJournal
from torchquorum.memory.slots import Slots
from torchquorum.placement.layout import Layout
from torchquorum.update.kernels import Kernel

PS_SILENT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """What a worker's steps read and write.

    Attributes:
        layout: Where the variables lie, all of them on the one ps.
        parameters: The worker's parameters, in the order of the variables.
        versions: The ps's slots.
        own: The worker's gradient memory.
        kernels: Make the updates, one for each parameter group.
        states: The ps's slots of optimizer state, by name.
        journal: The journal of a durable run.
    """

    layout: Layout
    parameters: Sequence[nn.Parameter]
    versions: Slots
    own: Slots
    kernels: Sequence[Kernel]
    states: Mapping[str, Slots]
    journal: UpdateJournal | None = None


class FastPathSteps:
    """The steps of one worker.

    Args:
        page: The ps's page.
        kind: How an update is made.
        journal: The journal of a durable run.

    Attributes:
        direct: A step takes the gradients from the parameters; else they must be in the worker's gradient memory before.
        made: How many updates were made.
        missed: How many gradients had to be pushed by message.
    """

    def __init__(self, page: FastPage, kind: TurnSteps | RoundSteps, journal: UpdateJournal | None = None) -> None:
        self._page, self._kind, self._journal = page, kind, journal
        self.direct = kind.direct
        self.made = self.missed = 0

    def step(
        self,
        gradient: GradientId,
        loss: Callable[[], float | None] = lambda: None,
        rates: Sequence[float] | None = None,
    ) -> MadeVersion | None:
        """Makes an update with this worker's gradient, or returns None: then it has to be pushed by message.

        Args:
            gradient: Which gradient it is.
            loss: Returns its loss, once the gradient has been computed.
            rates: The learning rates of this worker's program, where they differ from the run's; they count if this worker leads.
        """
        with torch.no_grad():
            made = run(self.stages(gradient, loss, rates))
        self.made += made is not None
        self.missed += made is None
        return made

    def stages(
        self, gradient: GradientId, loss: Callable[[], float | None], rates: Sequence[float] | None = None
    ) -> Stages[MadeVersion | None]:
        """The stages of `step`."""
        page = self._page
        self._kind.arrive()
        if page.words.state != OPEN and not (yield from self._kind.opened()):
            return None
        if page.ps_silent_s >= PS_SILENT_S:
            return None
        return (yield from self._kind.step(gradient, loss, rates))

    def done(self) -> None:
        """The version that was made has been copied."""
        self._kind.done()

    def close(self) -> None:
        """Closes the journal."""
        if self._journal is not None:
            self._journal.close()


def turn_steps(
    user: Participant, memory: WorkerMemory, device: TurnWriter | None = None, clock: Clock = SYSTEM
) -> FastPathSteps:
    """Returns the steps of a worker that takes turns; `device` makes updates on the one GPU of the parameters, if they are on one."""
    journal = memory.journal
    writer = device or CpuTurn(
        memory.layout,
        memory.parameters,
        memory.versions,
        memory.own,
        memory.kernels,
        memory.states,
        journaled=journal is not None,
    )
    return FastPathSteps(user.page, TurnSteps(user, writer, Admission(user, clock=clock), clock, journal), journal)


def round_steps(user: Participant, memory: WorkerMemory, device: RoundWriter | None = None) -> FastPathSteps:
    """Returns the steps of a worker in rounds; `device` writes its part on a GPU whenever it is ready to."""
    region = memory.layout.trained[0]
    parts = parts_of(memory.layout, user.worker, user.page.num_workers, CHUNK)
    journal = RoundJournal(user, memory.layout, memory.journal) if memory.journal is not None else None
    means = memory.own.sections[-1] if journal is not None else None
    on_cpu = CpuRound(parts, region, memory.versions, memory.kernels, memory.states, means)
    writers = [on_cpu] if device is None else [device, on_cpu]
    gradients = RoundGradients(user, region, memory.own)
    return FastPathSteps(user.page, RoundSteps(user, gradients, writers, journal), memory.journal)
