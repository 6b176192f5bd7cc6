"""What a worker does once it has joined: it pushes gradients, on the fast path or by message, and pulls variables.

Owned by the worker's thread, through its link, and made anew for every join. What always holds: a gradient has one number, whether
it goes on the fast path or by message, so it counts once; after `push` and `pull` the parameters hold one whole version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import torch

import torchquorum.wire.messages as m
from torchquorum.fastpath.records import GradientId
from torchquorum.fastpath.steps import FastPathSteps
from torchquorum.memory.slots import Slots
from torchquorum.wire.codec import Frame
from torchquorum.wire.settings import RATE, Settings, changes, only_rates, with_rates
from torchquorum.worker.exchange import Exchange
from torchquorum.worker.fastpath import can_use_fastpath, open_fastpath
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.optimizer_state import OptimizerState
from torchquorum.worker.own_writes import OwnWrites
from torchquorum.worker.positions import Positions
from torchquorum.worker.requests import Requests
from torchquorum.worker.residuals import Residuals
from torchquorum.worker.row_exchange import PushedRows, RowExchange
from torchquorum.worker.run_view import RunView
from torchquorum.worker.step import Step
from torchquorum.worker.writes import SuspectedWriteError, Watch, WriteWatch

LISTEN_S = 0.001
LaterLoss = Callable[[], float]


class RunMember:
    """A worker's part in a run.

    Args:
        plan: The run's plan.
        flat: The worker's parameters.
        shared: Of each ps task, whether memory is shared with it.
        requests: How the ps tasks are asked.
        view: Where this worker stands; kept up to date here.
        positions: Notes where it stood at each version.
        residuals: What this worker has computed and not yet given, where something can be kept.

    Attributes:
        exchange: The memory that gradients and variables go through.
        writes: What the program has written to its parameters.
        fastpath: The fast path, if ps task 0 offers one.
        on_stop: Is called when an answer says that the run is over.

    Raises:
        SegmentError: No shared memory can be had.
    """

    def __init__(
        self,
        plan: m.Plan,
        flat: FlatParameters,
        shared: Sequence[bool],
        *,
        requests: Requests,
        view: RunView,
        positions: Positions,
        residuals: Residuals | None = None,
    ) -> None:
        self.plan, self.flat = plan, flat
        self.residuals = residuals
        self.exchange = Exchange(flat, shared, in_place=not plan.rule.pipeline and residuals is None)
        self.fastpath: FastPathSteps | None = None
        self._rows = RowExchange(flat.tables, requests.channels) if flat.tables else None
        self._requests, self._channels = requests, requests.channels
        self._view, self._positions = view, positions
        self.on_stop: Callable[[], None] = lambda: None
        end = requests.channels.end
        self._who, self._round_s, self._clock = (end.index, end.incarnation), end.patience.round_s, end.clock
        self.watch: Watch = WriteWatch(flat, end.clock)
        self.writes = OwnWrites(flat, self.exchange, requests, view, self)
        self._pushed_at = 0
        self._state: list[tuple[m.StateRef, Frame]] = []
        self._listen_at = 0.0

    def join(self, life: bytes = b"", lost: int = -1) -> m.Variables:
        """Joins at all ps tasks and takes the current version; returns shard 0's answer. `life` and `lost` are for a record."""
        number, fast = self._channels.next_number(), can_use_fastpath(self.plan, self.exchange)
        messages: list[tuple[m.Message, Sequence[Frame]]] = []
        for k in range(len(self._channels.end.ps)):
            slots = self.exchange.memory_of(k)
            ref = slots.ref if slots is not None else None
            messages.append(
                (
                    m.Join(*self._who, number, ref, self.plan if k == 0 else None, fast, life if k == 0 else b"", lost),
                    [],
                )
            )
        self._requests.begin(number, messages)
        answer = self.take(self._channels.end.patience.start_s)
        updates_here = self.fastpath is not None and self.fastpath.direct  # there is a fast path only where it is used
        if (
            not self.pipeline and not updates_here and self.residuals is None
        ):  # pipelined, the ps reads one gradient while the next is computed
            self.exchange.copy_early(lambda: not self._requests.is_open)
        return answer

    @property
    def pipeline(self) -> bool:
        """Whether a gradient is computed while the one before is on its way."""
        return self.plan.rule.pipeline

    def close(self) -> None:
        """Gives the memory up."""
        self.exchange.close()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def push(
        self, loss: float | LaterLoss | None, settings: Settings | None = None, *, allow_nonfinite: bool = False
    ) -> Step:
        """Sends the gradients; waits until they count and takes the version that follows (pipelined: the one before).

        Args:
            loss: The loss, or what returns it when the gradients are there.
            settings: Those of the program, if they count; they go with the gradient where they differ from the run's.
            allow_nonfinite: Whether gradients with NaN or infinity are pushed as if they were whole.
        """
        view, requests, exchange = self._view, self._requests, self.exchange
        self._channels.end.check_process()
        self.writes.look()
        # Pipelined, the gradient before this one is still on its way: its answer is taken first.
        computed_at = view.version
        previous = self.take(self._round_s) if requests.is_open else None
        before = self._pushed_at
        if view.stopped:
            return self._step(previous, before)
        self._positions.before_push()
        # Nothing is open: this gradient gets its numbers, which hold on the fast path and by message.
        self._pushed_at = computed_at
        view.local_step += 1
        number = self._channels.next_number()
        change = changes(view.settings, settings) if settings and settings is not view.settings else []
        rates = [group[RATE] for group in settings] if change and settings and only_rates(change) else None
        if settings and not change:
            view.settings = settings  # equal, and from now on the same object
        fastpath = self.fastpath if rates is not None or not change else None  # only rates travel on the fast path
        try:
            if fastpath is not None and fastpath.direct and (step := self._push_fast(fastpath, number, loss, rates)):
                return step
            # The fast path reads copies, or is closed: the gradients go where the ps tasks, or other workers, find them.
            absent = exchange.fill()
            self.watch.confirm()
        except SuspectedWriteError as suspected:  # by a GPU, nothing is sent yet
            self.writes.judge(suspected.variables)
            number, absent = self._channels.next_number(), exchange.fill()
        loss = _known(loss)
        if self.fastpath is not None and exchange.device is not None:
            self.fastpath.done()
        rows = self._rows.collect() if self._rows is not None else None
        norm = math.hypot(exchange.norm(), self._rows.norm if self._rows is not None else 0.0)
        finite = allow_nonfinite or math.isfinite(norm)
        if self.residuals is not None:
            self.residuals.apply(exchange.sections(), finite=finite)
        if fastpath is not None and not fastpath.direct and finite and not absent[0]:
            step = self._push_fast(fastpath, number, loss, rates, norm)
            if step is not None:
                return step
        # By message, under the same numbers: what the fast path may have begun cannot count twice.
        push = m.Push(*self._who, number, view.local_step, computed_at, -1, [], loss, finite, [], -1, norm)
        self._send_push(push, absent, rows, settings if change else [])
        if self.pipeline:
            return self._step(previous, before)
        return self._step(self.take(self._round_s), computed_at)

    def _send_push(
        self, push: m.Push, absent: list[list[int]], rows: PushedRows | None, settings: Settings | None
    ) -> None:
        """Sends each shard its part of a gradient, which is otherwise described as in `push`."""
        messages = []
        for k, without in enumerate(absent):
            slot = 0 if self.exchange.memory_of(k) is not None else -1
            message = msgspec.structs.replace(push, slot=slot, absent=without)
            if k == 0:
                message.settings, message.revision = settings or [], self._view.revision
            compressed = self.residuals.frame(k) if self.residuals is not None and slot < 0 else None
            frames = self.exchange.frames(k) if compressed is None else [compressed]
            if rows is not None:
                message.rows, frames = rows[k][0], [*frames, *rows[k][1]]
            messages.append((message, frames))
        self._requests.begin(push.request, messages)

    def _push_fast(
        self,
        fastpath: FastPathSteps,
        number: int,
        loss: float | LaterLoss | None,
        rates: list[float] | None,
        norm: float = math.nan,
    ) -> Step | None:
        """Makes the update with the other workers of this host, or None: then it goes by message, under the same number."""
        view, channels, exchange = self._view, self._channels, self.exchange
        if (now := self._clock.now()) >= self._listen_at:  # what arrives meanwhile can wait for a millisecond
            self._listen_at = now + LISTEN_S
            channels.attend()
        if channels.closed(0):
            return None
        computed_at = view.version
        gradient = GradientId(self._who[1], view.local_step, number, computed_at, norm)
        taken = fastpath.step(gradient, lambda: _known(loss), rates)
        if taken is None:
            return None
        # Our gradient is in the version `taken`: the parameters follow it.
        if not taken.loaded:
            with torch.no_grad():
                exchange.pull(0, taken.slot)
            exchange.settle()
        if not taken.reading:
            fastpath.done()  # else the GPU may still be reading: it is done when the next gradient is there
        view.version, view.lr, view.used_lr, view.position = taken.version, taken.rates, taken.used, None
        if self.plan.schedule is None:
            view.settings = with_rates(view.settings, taken.used)
        self.watch.note()
        self._positions.note(taken.version)
        channels.while_waiting()
        reason = "fresh" if taken.met <= computed_at else "within bound"
        return Step(taken.version, view.local_step, True, reason, taken.met - computed_at, taken.rates[0], stop=False)

    def _step(self, answer: m.Variables | None, computed_at: int) -> Step:
        view, outcome = self._view, answer.outcome if answer is not None else None
        if outcome is None:
            stopped = view.stopped
            accepted, reason, staleness = (False, "past last step", 0) if stopped else (None, "pipelined", 0)
        else:
            accepted, reason, staleness = outcome.accepted, outcome.reason, max(0, outcome.met - computed_at)
        return Step(view.version, view.local_step, accepted, reason, staleness, view.lr[0], view.stopped)

    # -- variables ----------------------------------------------------------------------------------------------------

    def pull(self, *, averaged: bool = False) -> m.Variables:
        """Takes the current version, or the moving averages at it; returns shard 0's answer."""
        self.finish_request()
        self.watch.before_pull()
        self._send_pull(averaged=averaged)
        return self.take(self._round_s)

    def pull_state(self) -> OptimizerState:
        """Takes the current version, and returns the optimizer's state at it, as all ps tasks have it."""
        self.finish_request()
        self.watch.before_pull()
        self._send_pull(averaged=False, state=True)
        self.take(self._round_s)
        state, self._state = self._state, []
        return OptimizerState(self.flat.layout.variables, state)

    def finish_request(self) -> None:
        """Takes the answer to the open request, if there is one: pipelined, a push may be."""
        if self._requests.is_open:
            self.take(self._round_s)

    def _send_pull(self, *, averaged: bool, state: bool = False) -> None:
        number = self._channels.next_number()
        pull = m.Pull(*self._who, number, averaged, state)
        self._requests.begin(number, [(pull, []) for _ in self._channels.end.ps])

    def take(self, limit_s: float) -> m.Variables:
        """Waits for the answer of every ps task to the open request and loads it. Returns shard 0's."""
        requests, view = self._requests, self._view
        first_message = requests.open[0][0]
        averaged = isinstance(first_message, m.Pull) and first_message.averaged
        state = isinstance(first_message, m.Pull) and first_message.state
        # These come with the answer to a join, also where that is of a version that is gone by now.
        restored, kept = None, list[tuple[int, int]]()
        while True:
            # A request is open: every ps task answers with its part of a version, which is loaded at once.
            answers = requests.answers(limit_s)
            restored, kept = answers[0][0].position or restored, answers[0][0].kept or kept
            if state:
                self._state = [(a.optimizer, frames[-1]) for a, frames in answers if a.optimizer is not None]
                answers = [(a, frames[:-1] if a.optimizer is not None else frames) for a, frames in answers]
            loaded = [self._load(k, message, frames) for k, (message, frames) in enumerate(answers)]
            versions = {message.version for message, _ in answers}
            requests.settle()
            if all(loaded) and len(versions) == 1:
                break
            # Frozen for so long that a version was reused: take the current one.
            self._send_pull(averaged=averaged, state=state)
        # Nothing is open and the parameters hold one whole version.
        first = answers[0][0]
        if first.generation != view.generation:
            view.assignments = 0
        view.version, view.lr, view.generation = first.version, first.lr, first.generation
        view.used_lr = first.used or view.used_lr
        if first.revision >= 0:
            view.settings, view.revision = first.settings, first.revision
        view.stopped = view.stopped or first.stop
        view.position, view.kept = restored, kept or view.kept
        self.watch.note()
        if first.stop:
            self.on_stop()
        self._positions.note(first.version)
        self._positions.send(first.version if first.stop else first.save)
        return first

    def _load(self, k: int, message: m.Variables, frames: Sequence[Frame]) -> bool:
        """Copies a shard's variables into the parameters; False if they were overwritten meanwhile."""
        return self.exchange.load(k, message, frames, lambda ring: self._open_fastpath(message, ring))

    def _open_fastpath(self, answer: m.Variables, versions: Slots) -> None:
        if answer.fastpath is not None:
            self.fastpath = open_fastpath(
                answer, self._who, self.plan, self.flat, self.exchange, versions, self._clock, self.watch.confirm
            )


def _known(loss: float | LaterLoss | None) -> float | None:
    value = loss() if callable(loss) else loss
    return value if value is not None and math.isfinite(value) else None
