"""A worker's link to the ps tasks: it greets them, joins, pushes, pulls and leaves, over one channel per ps task.

Used by the session and by `tq.Optimizer`; owned by the worker's thread. A second thread (`torchquorum.worker.heartbeat`) says that the
worker is alive. `torchquorum.worker.link_states` has the states and the steps between them. What always holds: the
parameters hold one whole version whenever the link is idle; what was being pushed when a connection was lost stays in `unsettled`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

import torchquorum.wire.messages as m
from torchquorum.errors import DeadlineError, RefusedError, SegmentError, TaskLostError
from torchquorum.formats.ledger import name_life
from torchquorum.lines import line_of
from torchquorum.wire.settings import Settings
from torchquorum.worker import joining
from torchquorum.worker.buffer_exchange import BufferExchange
from torchquorum.worker.exchange import first_of
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.link_states import LinkState, LinkStates
from torchquorum.worker.loaded_state import LoadedState
from torchquorum.worker.local_buffers import LocalBuffers
from torchquorum.worker.polls import wait_for_place, wait_for_save, wait_for_workers
from torchquorum.worker.positions import Positions
from torchquorum.worker.ps_channels import PsChannels
from torchquorum.worker.requests import Requests
from torchquorum.worker.residuals import Residuals, make_residuals
from torchquorum.worker.run_member import RunMember
from torchquorum.worker.run_view import RunView
from torchquorum.worker.step import Step
from torchquorum.worker.track_member import LaterLoss
from torchquorum.worker.worker_end import WorkerEnd

GOODBYE_S = 2.0


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A gradient that was being pushed when a ps task was lost: nobody knows whether it counts."""

    push: m.Push


class Link(RunView):
    """A worker's link to the ps tasks.

    Args:
        end: Who this worker is and how it reaches them.

    Attributes:
        channels: The channels to the ps tasks, over which everything of this worker but its heartbeat goes.
        requests: The joins, pushes and pulls on them.
        positions: Where this worker stood at its last versions.
        joined: The worker's part in the run, once it has joined.
        while_waiting: Is called while the link waits; may raise to end the wait.
        residuals: Of each optimizer, what this worker has computed and not yet given, where something can be kept.
        leads: Says whether the settings of this worker's program count: it is the chief, or stands in for it.
        life: What a record needs to run this process again; empty where the run is not recorded.
        lost: What was being pushed when the link before this one was lost, see `Join`.
    """

    def __init__(self, end: WorkerEnd) -> None:
        super().__init__()
        self.end, self.task, self.incarnation = end, end.task, end.incarnation
        self._states = LinkStates()
        self.channels = PsChannels(end)
        self.requests = Requests(self.channels, self._states)
        self.positions = Positions(self.channels)
        self.requests.save_wanted = self.positions.send
        self.channels.while_waiting = lambda: self.while_waiting()
        self._welcomes: list[m.Welcome] = []
        self._shared: list[bool] = []
        self._buffers: BufferExchange | None = None
        self.joined: RunMember | None = None
        self.residuals: list[Residuals | None] | None = None
        self.while_waiting: Callable[[], None] = lambda: None
        self.leads: Callable[[], bool] = lambda: end.index == 0
        self.life, self.lost = b"", -1

    def go_on_from(self, before: Link) -> None:
        """Continues the counts of a link that was lost."""
        self.take_over(before)
        self.channels.count, self.residuals = before.channels.count, before.residuals
        self.life = before.life

    # -- coming and going ---------------------------------------------------------------------------------------------

    def hello(self) -> list[bool]:
        """Greets every ps task and waits until all have answered.

        Returns:
            Whether each already holds variables.
        """
        self._welcomes = joining.greet(self.channels)
        self._shared = joining.shares_memory(self.end, self._welcomes)
        joining.take_faster_ways(self.channels, self._welcomes, self._shared)
        self._states.set(LinkState.GREETED)
        return [welcome.created for welcome in self._welcomes]

    def waits_for_another_run(self, generation: int) -> bool:
        """Whether a ps task, when it was last greeted, still held the variables of this creation."""
        return any(welcome.created and welcome.generation == generation for welcome in self._welcomes)

    def create(
        self, message: m.Create, flats: Sequence[FlatParameters], begins: Sequence[LoadedState | None] = ()
    ) -> bool:
        """The chief hands its variables, or the path of a checkpoint with them, to the ps tasks, shard 0 last.

        The optimizers begin with the states `begins`, where there are some.

        Returns:
            Whether they had variables before, which then stay as they are.
        """
        buffers = self._buffers.local.capture() if self._buffers is not None and message.plan.buffers else None
        return joining.create(self.channels, message, flats, buffers, begins)

    def join(self, plan: m.Plan, flats: Sequence[FlatParameters]) -> None:
        """Joins the run, once the chief has created the variables, and takes the current versions."""
        try:
            self._join(plan, flats)
        except SegmentError as error:
            if self.end.transport == "shm":
                raise
            self.say(f"{error}; using TCP instead")
            self._shared = [False] * len(self._shared)
            self._join(plan, flats)

    def _join(self, plan: m.Plan, flats: Sequence[FlatParameters]) -> None:
        if self.joined is not None:
            self.joined.close()
        if self.residuals is None:
            self.residuals = [
                make_residuals(flat.layout, of.compress, local=of.rule.local_steps is not None)
                for flat, of in zip(flats, plan.tracks(), strict=True)
            ]
        self.joined = joined = RunMember(
            plan,
            flats,
            self._shared,
            requests=self.requests,
            view=self,
            positions=self.positions,
            residuals=self.residuals,
        )
        joined.on_stop = self._buffers.send_final if self._buffers is not None else joined.on_stop
        for k in range(len(self.end.ps)):
            choosers = [track.exchange.chooser(k, self.requests.awaited, track.index) for track in joined.tracks]
            chooser = choosers[0] if len(choosers) == 1 else first_of(choosers)
            self.channels.asker(k).channel.receive_into(chooser, several=len(choosers) > 1)
        joined.join(self.life, self.lost)

    def stay(self) -> None:
        """Tells the ps tasks, before it leaves, that the program goes on and may begin another session."""
        for k in range(len(self.end.ps)):
            self.channels.post(k, m.Stay(self.end.index))

    def leave(
        self, *, failed: BaseException | None = None, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        """Says goodbye, with what the program failed with if it did; a ps that is gone is no error."""
        self.positions.send(
            self.place, final=True
        )  # a checkpoint may still be made of this version, and nobody could ask any more
        why = line_of(failed) if failed is not None else ""
        goodbye = m.Leave(self.end.index, self.incarnation, loss, accuracy, failed is None, why)
        for k in reversed(range(len(self.end.ps))):
            with suppress(DeadlineError, TaskLostError, RefusedError):
                self.channels.ask(k, goodbye, kind=m.Bye, what="goodbye", limit_s=GOODBYE_S)

    def close(self) -> None:
        """Gives sockets and memory up."""
        self._states.set(LinkState.CLOSED)
        self.channels.close()
        if self.joined is not None:
            self.joined.close()

    # -- training -----------------------------------------------------------------------------------------------------

    def push(
        self,
        loss: float | LaterLoss | None = None,
        settings: Settings | None = None,
        *,
        allow_nonfinite: bool = False,
        track: int = 0,
        later: bool = False,
        of: m.Contribution | None = None,
    ) -> Step:
        """Sends the gradients; waits until they count and takes the version that follows (pipelined: the one before).

        A loss that a GPU still computes is a function, which is called when the gradients are there. `settings` are those of the program,
        if they count. `allow_nonfinite` pushes gradients with NaN or infinity as if they were whole. `track` is whose optimizer's they are.
        With `later` nothing is waited for: `receive` takes the answer. `of` is what the gradients are made of.
        """
        return self.member.push(loss, settings, allow_nonfinite=allow_nonfinite, track=track, later=later, of=of)

    def receive(self, track: int) -> Step:
        """Takes the answer to what was pushed of an optimizer with `later`."""
        return self.member.receive(track)

    def pull(self, *, averaged: bool = False) -> int:
        """Takes the current version, or the moving averages at it; returns it."""
        self.member.pull(averaged=averaged)
        return self.version

    @property
    def member(self) -> RunMember:
        """Returns the worker's part in the run; it has joined."""
        assert self.joined is not None
        return self.joined

    @property
    def unsettled(self) -> Unsettled | None:
        """Returns the gradient that was being pushed when the link was lost, if there was one."""
        push = self.requests.open[0][0] if self.requests.open else None
        return Unsettled(push) if isinstance(push, m.Push) else None

    def take_up(self, unsettled: Unsettled | None) -> Step | None:
        """Asks what became of a gradient that a lost link was pushing; if nothing, pushes it again, so that it counts once.

        Returns:
            What became of it; None if nothing was being pushed, or, pipelined, if the next one waits already.
        """
        if unsettled is None or (self.joined is not None and self.joined.pipeline):
            return None
        push, view = unsettled.push, self.tracks[unsettled.push.track]
        name = self.joined.plan.names[push.track] if self.joined is not None else ""
        question = m.FateOf(self.end.index, self.incarnation, push.local_step)
        what, limit_s = "word of a gradient", self.end.patience.round_s
        fate = self.channels.ask(0, question, kind=m.Fate, what=what, limit_s=limit_s)
        if fate.state in ("accepted", "refused"):
            staleness = max(0, fate.met - push.version)
            accepted = fate.state == "accepted"
            return Step(view.version, self.local_step, accepted, fate.reason, staleness, view.lr[0], self.stopped, name)
        if self.stopped:
            return None  # the run has ended without it
        if self.joined is not None and self.joined.plan.rules[push.track].overlap:
            return None  # the worker has gone on meanwhile: what it was is kept, and part of the next
        # The ps tasks know nothing of it: it is pushed again, as the same local step and as computed at its own version.
        self.local_step = push.local_step - 1
        version, view.version = view.version, push.version
        if (residuals := self.residuals_of(push.track)) is not None:
            residuals.undo()
        try:
            return self.push(push.loss, push.settings, allow_nonfinite=push.finite, track=push.track, of=push.of)
        finally:
            view.version = max(version, view.version)

    def residuals_of(self, track: int) -> Residuals | None:
        """Returns what this worker has of an optimizer's gradients and not yet given, where something can be kept."""
        return self.residuals[track] if self.residuals is not None else None

    @property
    def pipeline(self) -> bool:
        """Whether a gradient is computed while the one before is on its way."""
        return self.joined is not None and self.joined.pipeline

    # -- questions and news -------------------------------------------------------------------------------------------

    @property
    def transports(self) -> list[str]:
        """Returns how this worker talks to each ps task."""
        return ["shm" if shared else "tcp" for shared in self._shared]

    def attend(self) -> None:
        """Takes what the ps tasks have sent to a worker that has nothing to do, and sends what other threads have left to ask."""
        for k in range(len(self.end.ps)):
            while self.channels.attend(k):
                pass

    def say(self, line: str) -> None:
        """Prints a line for people, with the worker's name."""
        self.end.tell(line)

    def wait_for_workers(self, count: int, at_most_s: float | None = None, *, begins: bool = False) -> None:
        """Waits until so many workers have joined, this one counted; `at_most_s` goes on without the others then.

        With `begins`, and where workers may come and go, a run that has made updates is not waited for.
        """
        elastic = self.joined is not None and self.joined.plan.elastic
        wait_for_workers(self.channels, count, version=self.version, begins=begins or elastic, at_most_s=at_most_s)

    def wait_for_place(self) -> None:
        """Waits until no other process is at work as this task; one that stays is an error."""
        wait_for_place(self.channels, name_life(self.incarnation))

    def stop(self) -> None:
        """Ends the run for all workers; those that wait are released. Not answered here: the next answer says so."""
        self.channels.post(0, m.Stop(self.end.index, self.incarnation))

    def save(
        self,
        number: int,
        folder: str,
        keep: int,
        *,
        wait_s: float = 0.0,
        retries: Callable[[str], None] = lambda _: None,
    ) -> m.SaveState | None:
        """Asks for a checkpoint; with `wait_s`, waits for it and returns how it went; `retries` as in `polls.wait_for_save`.

        Raises:
            DeadlineError: It was not there in time.
        """
        request = m.Save(self.end.index, self.incarnation, number, folder, keep)
        if wait_s <= 0:
            self.channels.post(0, request)
            return None
        return wait_for_save(self.channels, request, wait_s, retries)

    def begin_save(self, number: int, folder: str, keep: int) -> bool:
        """Asks for a checkpoint of the place of the log where it is now; returns whether it has begun: not while another is made."""
        request = m.Save(self.end.index, self.incarnation, number, folder, keep, at_once=True)
        what, limit_s = "the beginning of a checkpoint", self.end.patience.round_s
        return self.channels.ask(0, request, kind=m.SaveState, what=what, limit_s=limit_s).state != "busy"

    # -- buffers ------------------------------------------------------------------------------------------------------

    def use_buffers(self, local: LocalBuffers) -> None:
        """Shares the model's buffers with the run; called before the link joins."""
        self._buffers = BufferExchange(self.channels, self, local)
        self.positions.send_buffers = self._buffers.send
        self.channels.unasked = self._buffers.send_wanted

    def take_buffers(self, *, joining: bool = False) -> dict[str, torch.Tensor]:
        """Asks for the run's buffers and waits for them; while it waits, this worker's own may be asked for."""
        assert self._buffers is not None
        self.member.finish_request()
        return self._buffers.take(joining=joining)
