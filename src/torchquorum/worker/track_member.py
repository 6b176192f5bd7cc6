"""What a worker does with the parameters of one optimizer: it pushes gradients, on the fast path or by message, and loads versions.

Owned by the worker's part in the run (`torchquorum.worker.run_member`), which has one for each optimizer. What always holds: a gradient has
one number, whether it goes on the fast path or by message, so it counts once; after `push` the parameters hold one whole version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

import torchquorum.wire.messages as m
from torchquorum.fastpath.policy import may_have_fastpath
from torchquorum.fastpath.records import GradientId
from torchquorum.fastpath.steps import FastPathSteps
from torchquorum.memory.slots import Slots
from torchquorum.update.gradient_sample import is_sampled
from torchquorum.wire.codec import Frame
from torchquorum.wire.settings import RATE, Settings, changes, only_rates, with_rates
from torchquorum.worker.exchange import Exchange
from torchquorum.worker.fastpath import can_use_fastpath, open_fastpath
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.optimizer_state import OptimizerState
from torchquorum.worker.own_writes import OwnWrites
from torchquorum.worker.positions import Positions
from torchquorum.worker.ps_channels import PsChannels
from torchquorum.worker.requests import Requests
from torchquorum.worker.residuals import Residuals
from torchquorum.worker.row_exchange import PushedRows, RowExchange
from torchquorum.worker.run_view import RunView
from torchquorum.worker.step import Step
from torchquorum.worker.writes import SuspectedWriteError, Watch, WriteWatch

LISTEN_S = 0.001
LaterLoss = Callable[[], float]


class _Member(Protocol):
    """The worker's part in the run."""

    @property
    def writes(self) -> OwnWrites: ...
    def take(self, limit_s: float, /) -> m.Variables: ...
    def finish_request(self) -> None: ...


@dataclass(frozen=True, eq=False, slots=True)
class OwnTrack:
    """What a worker has of one optimizer before it joins.

    Attributes:
        index: Which of the run's optimizers.
        plan: The plan of this optimizer.
        flat: Its parameters.
        residuals: What this worker has computed and not yet given, where something can be kept.
    """

    index: int
    plan: m.Plan
    flat: FlatParameters
    residuals: Residuals | None


class TrackMember:
    """A worker's part in one optimizer of a run.

    Args:
        own: What the worker has of it.
        shared: Of each ps task, whether memory is shared with it.
        member: The worker's part in the run.
        requests: How the ps tasks are asked.
        view: Where this worker stands; kept up to date here.
        positions: Notes where it stood at each version.

    Attributes:
        exchange: The memory that gradients and variables go through.
        watch: Is told what comes into the parameters.
        fastpath: The fast path, if ps task 0 offers one.
        previous: The answer to a pipelined push, until the next one.
        state: What the ps tasks sent of the optimizer's state.

    Raises:
        SegmentError: No shared memory can be had.
    """

    def __init__(
        self,
        own: OwnTrack,
        shared: Sequence[bool],
        *,
        member: _Member,
        requests: Requests,
        view: RunView,
        positions: Positions,
    ) -> None:
        self.index, self.plan, self.flat, self.residuals = own.index, own.plan, own.flat, own.residuals
        in_place = not own.plan.rule.pipeline and own.residuals is None
        # In a durable run's rounds each worker leaves its part of the mean gradient beside its gradient.
        slots = 2 if own.plan.durable and may_have_fastpath(own.plan) else 1
        self.exchange = Exchange(own.flat, shared, in_place=in_place, slots=slots)
        self.fastpath: FastPathSteps | None = None
        self._rows: RowExchange | None = None
        if own.flat.tables:
            self._rows = self._row_exchange(own, shared, requests.channels)
        self._member, self._requests, self._channels = member, requests, requests.channels
        self._run, self._positions = view, positions
        self.view = view.tracks[own.index]
        end = requests.channels.end
        self._who, self._round_s, self._clock = (end.index, end.incarnation), end.patience.round_s, end.clock
        self.watch: Watch = WriteWatch(own.flat, end.clock)
        self.previous: m.Variables | None = None
        self._pushed_at = 0
        self.state: list[tuple[m.StateRef, Frame]] = []
        self._listen_at = 0.0
        self._sampled = own.plan.rule.once_per_round and own.plan.num_workers > 1

    def _row_exchange(self, own: OwnTrack, shared: Sequence[bool], channels: PsChannels) -> RowExchange:
        try:
            return RowExchange(own.flat.tables, channels, shared, own.index, lambda: self.view.version)
        except BaseException:
            self.exchange.close()
            raise

    def row_memory(self, k: int) -> m.MemoryRef | None:
        """Returns where ps task k puts rows of tables, and finds their gradients, if memory is shared with it."""
        pool = self._rows.pools[k] if self._rows is not None else None
        return pool.ref if pool is not None else None

    def memory(self, k: int) -> m.TrackMemory:
        """Returns where shard k finds the gradients, and whether this worker can make updates by itself."""
        slots = self.exchange.memory_of(k)
        updates = can_use_fastpath(self.plan, on_gpu=self.exchange.device is not None)
        return m.TrackMemory(slots.ref if slots is not None else None, updates)

    def joined(self) -> None:
        """The worker has joined: from a GPU, gradients may leave during the backward pass."""
        updates_here = self.fastpath is not None and self.fastpath.direct  # there is a fast path only where it is used
        # Pipelined, the ps reads one gradient while the next is computed.
        if not self.plan.rule.pipeline and not updates_here and self.residuals is None:
            self.exchange.copy_early(lambda: not self._requests.is_open)

    def optimizer_state(self) -> OptimizerState:
        """Returns the optimizer's state that came with the last answer, as all ps tasks have it."""
        state, self.state = self.state, []
        return OptimizerState(self.flat.layout.variables, state)

    def close(self) -> None:
        """Gives the memory up."""
        self.exchange.close()
        if self._rows is not None:
            self._rows.close()
        if self.fastpath is not None:
            self.fastpath.close()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def push(
        self,
        loss: float | LaterLoss | None,
        settings: Settings | None = None,
        *,
        allow_nonfinite: bool = False,
        later: bool = False,
        of: m.Contribution | None = None,
    ) -> Step:
        """Sends the gradients; waits until they count and takes the version that follows (pipelined: the one before).

        Args:
            loss: The loss, or what returns it when the gradients are there.
            settings: Those of the program, if they count; they go with the gradient where they differ from the run's.
            allow_nonfinite: Whether gradients with NaN or infinity are pushed as if they were whole.
            later: Whether the answer is taken by `receive`, and nothing is waited for now.
            of: What the gradients are made of, if that is known.
        """
        view, exchange = self.view, self.exchange
        self._channels.end.check_process()
        self._member.writes.look(self.index)
        # Pipelined, the gradient before this one is still on its way: its answer is taken first.
        computed_at = view.version
        self._member.finish_request()
        previous, self.previous = self.previous, None
        before = self._pushed_at
        if self._run.stopped and self.index == 0:  # the others may complete what was begun
            return self._step(previous, before)
        self._positions.before_push()
        # Nothing is open: this gradient gets its numbers, which hold on the fast path and by message.
        self._pushed_at = computed_at
        self._run.local_step += 1
        number = self._channels.next_number()
        change = changes(view.settings, settings) if settings and settings is not view.settings else []
        rates = [group[RATE] for group in settings] if change and settings and only_rates(change) else None
        if settings and not change:
            view.settings = settings  # equal, and from now on the same object
        # Only rates travel on the fast path, where all gradients count alike.
        fastpath = self.fastpath if (rates is not None or not change) and of is None else None
        try:
            if fastpath is not None and fastpath.direct and (step := self._push_fast(fastpath, number, loss, rates)):
                return step
            # The fast path reads copies, or is closed: the gradients go where the ps tasks, or other workers, find them.
            absent = exchange.fill()
            self.watch.confirm()
        except SuspectedWriteError as suspected:  # by a GPU, nothing is sent yet
            self._member.writes.judge(self.index, suspected.variables)
            number, absent = self._channels.next_number(), exchange.fill()
        loss = _known(loss)
        if self.fastpath is not None and exchange.device is not None:
            self.fastpath.done()
        rows = self._rows.collect() if self._rows is not None else None
        norm = math.hypot(exchange.norm(), self._rows.norm if self._rows is not None else 0.0)
        finite = allow_nonfinite or math.isfinite(norm)
        sample = exchange.sample() if self._sampled and is_sampled(computed_at) else 0
        if self.residuals is not None:
            self.residuals.apply(exchange.sections(), finite=finite)
        if fastpath is not None and not fastpath.direct and finite and not absent[0]:
            step = self._push_fast(fastpath, number, loss, rates, norm, sample)
            if step is not None:
                return step
        # By message, under the same numbers: what the fast path may have begun cannot count twice.
        push = m.Push(*self._who, number, self._run.local_step, computed_at, -1, [], loss, finite, norm=norm)
        push.track, push.sample, push.of = self.index, sample, of
        self._send_push(push, absent, rows, settings if change else [], wait=not later)
        if self.plan.rule.pipeline or later:
            return self._step(previous, before)
        return self._step(self._member.take(self._round_s), computed_at)

    def receive(self) -> Step:
        """Waits for the answer to what was pushed `later`, and takes the version that it brings."""
        self._member.finish_request()
        previous, self.previous = self.previous, None
        return self._step(previous, self._pushed_at)

    def _send_push(
        self,
        push: m.Push,
        absent: list[list[int]],
        rows: PushedRows | None,
        settings: Settings | None,
        *,
        wait: bool = True,
    ) -> None:
        """Sends each shard its part of a gradient, which is otherwise described as in `push`."""
        messages = []
        for k, without in enumerate(absent):
            slot = 0 if self.exchange.memory_of(k) is not None else -1
            message = msgspec.structs.replace(push, slot=slot, absent=without)
            if k == 0:
                message.settings, message.revision = settings or [], self.view.revision
            compressed = self.residuals.frame(k) if self.residuals is not None and slot < 0 else None
            frames = self.exchange.frames(k) if compressed is None else [compressed]
            if rows is not None and self._rows is not None:
                frames = [*frames, *self._rows.attach(k, rows, message)]
            messages.append((message, frames))
        self._requests.begin(push.request, messages, [self.index], wait=wait)

    def _push_fast(
        self,
        fastpath: FastPathSteps,
        number: int,
        loss: float | LaterLoss | None,
        rates: list[float] | None,
        norm: float = math.nan,
        sample: int = 0,
    ) -> Step | None:
        """Makes the update with the other workers of this host, or None: then it goes by message, under the same number."""
        view, channels, exchange = self.view, self._channels, self.exchange
        if (now := self._clock.now()) >= self._listen_at:  # what arrives meanwhile can wait for a millisecond
            self._listen_at = now + LISTEN_S
            channels.attend()
        if channels.closed(0):
            return None
        computed_at = view.version
        gradient = GradientId(self._who[1], self._run.local_step, number, computed_at, norm, sample)
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
        view.version, view.lr, view.used_lr, self._run.position = taken.version, taken.rates, taken.used, None
        if self.plan.schedule is None:
            view.settings = with_rates(view.settings, taken.used)
        self.watch.note()
        self._positions.note(self._run.place)
        channels.while_waiting()
        reason = "fresh" if taken.met <= computed_at else "within bound"
        return self._made(True, reason, taken.met - computed_at)

    def _step(self, answer: m.Variables | None, computed_at: int) -> Step:
        outcome = answer.outcome if answer is not None else None
        if outcome is None:
            stopped = self._run.stopped
            accepted, reason, staleness = (False, "past last step", 0) if stopped else (None, "pipelined", 0)
        else:
            accepted, reason, staleness = outcome.accepted, outcome.reason, max(0, outcome.met - computed_at)
        return self._made(accepted, reason, staleness)

    def _made(self, accepted: bool | None, reason: str, staleness: int) -> Step:
        """Returns what became of a step."""
        run, view = self._run, self.view
        return Step(view.version, run.local_step, accepted, reason, staleness, view.lr[0], run.stopped, self.plan.name)

    # -- variables ----------------------------------------------------------------------------------------------------

    def load(self, k: int, message: m.Variables, frames: Sequence[Frame]) -> bool:
        """Copies a shard's variables into the parameters; False if they were overwritten meanwhile."""
        return self.exchange.load(k, message, frames, lambda ring: self._open_fastpath(message, ring))

    def _open_fastpath(self, answer: m.Variables, versions: Slots) -> None:
        if answer.fastpath is not None:
            if self.fastpath is not None:
                self.fastpath.close()
            self.fastpath = open_fastpath(
                answer, self._who, self.plan, self.flat, self.exchange, versions, self._clock, self.watch.confirm
            )

    def took(self, answer: m.Variables) -> None:
        """The parameters hold the version of an answer, which is shard 0's."""
        view = self.view
        view.version, view.lr, view.pace_s = answer.version, answer.lr, answer.pace_s
        view.used_lr = answer.used or view.used_lr
        if answer.revision >= 0:
            view.settings, view.revision = answer.settings, answer.revision
        self.watch.note()


def _known(loss: float | LaterLoss | None) -> float | None:
    value = loss() if callable(loss) else loss
    return value if value is not None and math.isfinite(value) else None
