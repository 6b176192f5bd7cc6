"""The worker's side of the protocol: says hello, joins, pushes, pulls and leaves, over one channel per ps task.

Owned by the worker's thread; a second thread (`torchquorum.worker.beat`) says that the worker is alive. What always holds:
one request is open at a time; a request is asked about every `probe_s` until it is answered, and sent again if the ps does
not know it; every wait ends with an answer or with an error that names task, address, what was waited for and what to do.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

import torchquorum.transport.messages as m
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.errors import ClusterError, DeadlineError, RefusedError, TaskLostError
from torchquorum.transport import codec
from torchquorum.transport.board import Board, Given
from torchquorum.transport.channel import Channel
from torchquorum.transport.codec import Frame
from torchquorum.transport.door import DoorChannel
from torchquorum.transport.lane import LaneChannel
from torchquorum.transport.memory import SegmentError, host_id, tensor_frame
from torchquorum.transport.shared_lock import supported
from torchquorum.transport.slots import Slots, section_views
from torchquorum.worker.asking import wait_for_save, wait_for_workers
from torchquorum.worker.board_steps import BoardSteps
from torchquorum.worker.buffer_link import BufferLink
from torchquorum.worker.device_update import DeviceRound, DeviceUpdate
from torchquorum.worker.exchange import Exchange
from torchquorum.worker.faults import error_of
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.patience import Patience, Wait, Waiting
from torchquorum.worker.positions import Position, Positions
from torchquorum.worker.resume import enter_door, take_lane, take_up
from torchquorum.worker.step import Step

Connect = Callable[[str, bytes], Channel]
GOODBYE_S = 2.0
LISTEN_S = 0.001
LaterLoss = Callable[[], float]
_Kind = TypeVar("_Kind", bound=m.Message)


class Client:
    """A worker's connection to the ps tasks.

    Args:
        cluster: Who exists.
        index: Which worker this is.
        incarnation: The id of this life of the worker.
        connect: Makes a channel from an address and an identity.
        transport: auto, shm or tcp.
        patience: How long to wait.
        say: Prints a line for people.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        index: int,
        incarnation: int,
        connect: Connect,
        *,
        transport: str = "auto",
        patience: Patience | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.cluster, self.index, self.incarnation = cluster, index, incarnation
        self.task = TaskId("worker", index)
        self.patience = patience or Patience()
        self.transport = transport
        self._say = say
        self._ps = cluster.tasks("ps")
        # A new name for every connection: a closed one may linger, and must not take the answers of the next.
        self._identity = f"worker/{index}/{incarnation:016x}/{secrets.token_hex(4)}".encode()
        self._connect = connect
        self._channels = [connect(cluster.address(ps), self._identity) for ps in self._ps]
        self._shared = [False] * len(self._ps)
        self._doors = [""] * len(self._ps)
        self._lanes = [""] * len(self._ps)
        self._wait = Wait(self.task, cluster, self.patience)
        self._exchange: Exchange | None = None
        self._flat: FlatParameters | None = None
        self._plan: m.Plan | None = None
        self._request = 0
        self._open: list[tuple[m.Message, list[Any]]] | None = None
        self._pushed_at = 0
        self.while_waiting: Callable[[], None] = lambda: None
        self._positions: Positions | None = None
        self.position: dict[str, Any] | None = None
        self.buffers: BufferLink | None = None
        self.version = self.reign = 0
        self.local_step = 0
        self.stopped = False
        self.lr = [0.0]
        self.pipeline = False
        self.allow_nonfinite = False
        self._board: BoardSteps | None = None
        self._listen_at = 0.0

    def go_on_from(self, before: Client) -> None:
        """Takes over the counts of a connection that was lost."""
        self._request, self.local_step = before._request, before.local_step
        self.version, self.lr, self.reign = before.version, before.lr, before.reign

    # -- the life of a worker -----------------------------------------------------------------------------------------

    def hello(self) -> list[bool]:
        """Greets every ps task and waits until all have answered.

        Returns:
            Whether each already holds variables.
        """
        host = host_id()
        created: list[bool] = []
        for k, ps in enumerate(self._ps):
            greeting = m.Hello(m.PROTOCOL, str(self.task), self.incarnation, host, os.getpid(), m.PACKAGE)
            answer = self.ask(
                k, greeting, [], m.Welcome, self.patience.start_s, f"{ps} ({self.cluster.address(ps)}) to answer"
            )
            created.append(answer.created)
            same_host = bool(host) and answer.host == host
            if self.transport == "shm" and not same_host:
                raise ClusterError(
                    f"--transport=shm: {ps} ({self.cluster.address(ps)}) is not on this host, or this system has no shared "
                    "memory; use --transport=auto or tcp"
                )
            self._shared[k] = same_host and self.transport != "tcp"
            self._doors[k] = answer.door if self._shared[k] else ""
            self._lanes[k] = answer.lane
        return created

    def create(
        self,
        plan: m.Plan,
        flat: FlatParameters,
        restore: str | None = None,
        *,
        reign: int = 0,
        replace: bool = False,
        journal: m.JournalRef | None = None,
        only_existing: bool = False,
    ) -> bool:
        """The chief hands its variables, or the path of a checkpoint with them, to the ps tasks, shard 0 last.

        With `replace`, ps tasks that hold variables give them up, as others lost theirs; with `only_existing` all must hold some.

        Returns:
            Whether they had variables before, which then stay as they are.
        """
        existing = False
        for k in reversed(range(len(self._ps))):
            frames: list[Frame] = []
            for region in (flat.layout.trained[k], flat.layout.constants[k]) if restore is None else ():
                values = torch.zeros(region.size_bytes, dtype=torch.uint8)
                flat.store(region, section_views(region, values))
                frames.append(tensor_frame(values))
            if k == 0 and plan.buffers:
                assert self.buffers is not None
                frames.append(tensor_frame(self.buffers.local.capture().pack()))
            answer = self.ask(
                k,
                m.Create(plan, restore, reign, replace, journal, only_existing),
                frames,
                m.Created,
                self.patience.start_s,
                "the variables to be created",
            )
            existing = existing or answer.existing
        return existing

    def join(self, plan: m.Plan, flat: FlatParameters) -> None:
        """Joins the run, once the chief has created the variables, and takes the current version."""
        self._flat, self._plan = flat, plan
        self.pipeline = plan.rule.pipeline
        try:
            self._join(plan)
        except SegmentError as error:
            if self.transport == "shm":
                raise
            self._say(f"{self.task}: {error}; using TCP instead")
            self._shared, self._doors = [False] * len(self._ps), [""] * len(self._ps)
            self._join(plan)
        for k, door in enumerate(self._doors):
            entered = enter_door(self, door) if door else None
            if entered is not None:
                self._channels[k].close()
                self._channels[k] = entered
            elif self._lanes[k] and (lane := take_lane(self, k, self._lanes[k])) is not None:
                self._channels[k].close()
                self._channels[k] = lane
            self._channels[k].send([codec.encode(m.Here(self.index, self.incarnation, self._request))])

    def _join(self, plan: m.Plan) -> None:
        assert self._flat is not None
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = Exchange(self._flat, self._shared)
        self._board = None
        self._request += 1
        self._open = []
        for k in range(len(self._ps)):
            slots = self._exchange.memory_of(k)
            ref = slots.ref if slots is not None else None
            join = m.Join(self.index, self.incarnation, self._request, ref, plan if k == 0 else None, supported())
            self._open.append((join, []))
        self._send_open()
        self._take(self.patience.start_s)
        options = plan.optimizer.groups
        stateless = plan.optimizer.name == "SGD" and not any(group.get("momentum") for group in options)
        updates_here = stateless and self._board is not None and self._board.direct
        if not self.pipeline and not updates_here:  # pipelined, the ps reads one gradient while the next is computed
            self._exchange.copy_early(lambda: self._open is None)

    def push(self, loss: float | LaterLoss | None = None) -> Step:
        """Sends the gradients; waits until they count and takes the version that follows (pipelined: the one before).

        A loss that a GPU still computes is a function, which is called when the gradients are there.
        """
        computed_at = self.version
        previous = self._take(self.patience.round_s) if self._open is not None else None
        before = self._pushed_at
        if self.stopped:
            return self._step(previous, before)
        self._pushed_at = computed_at
        self.local_step += 1
        self._request += 1
        if self._board is not None and self._board.direct and (step := self._push_on_board(loss)) is not None:
            return step
        exchange = self._moves()
        self._flat_checked()
        absent = exchange.fill()
        loss = _known(loss)
        if self._board is not None and exchange.device is not None:
            self._board.done()
        finite = self.allow_nonfinite or exchange.finite()
        if self._board is not None and not self._board.direct and finite and not absent[0]:
            step = self._push_on_board(loss)
            if step is not None:
                return step
        self._open = []
        for k in range(len(self._ps)):
            slot = 0 if exchange.memory_of(k) is not None else -1
            message = m.Push(
                self.index,
                self.incarnation,
                self._request,
                self.local_step,
                computed_at,
                slot,
                absent[k],
                loss,
                finite,
            )
            self._open.append((message, exchange.frames(k)))
        self._send_open()
        if self.pipeline:
            return self._step(previous, before)
        return self._step(self._take(self.patience.round_s), computed_at)

    def _push_on_board(self, loss: float | LaterLoss | None) -> Step | None:
        """Makes the update with the other workers of this host, or None: then it goes by message, under the same number."""
        assert self._board is not None
        self._flat_checked()
        if (now := time.monotonic()) >= self._listen_at:  # what comes meanwhile can wait for a millisecond
            self._listen_at = now + LISTEN_S
            if (received := self._channels[0].receive(0.0)) is not None:
                self._heard_by_the_way(received)
        if self._closed(0):
            return None
        given = Given(self.incarnation, self.local_step, self._request, self.version)
        taken = self._board.step(given, lambda: _known(loss))
        if taken is None:
            return None
        exchange = self._moves()
        if not taken.loaded:
            with torch.no_grad():
                exchange.pull(0, taken.slot)
            exchange.settle()
        if not taken.reading:
            self._board.done()  # else the GPU may still be reading: it is done when the next gradient is there
        computed_at, self.version, self.lr = self.version, taken.version, taken.rates
        self.position = None
        if self._positions is not None:
            self._positions.note(self.version)
        self.while_waiting()
        reason = "fresh" if taken.met <= computed_at else "within bound"
        return Step(self.version, self.local_step, True, reason, taken.met - computed_at, self.lr[0], False)

    def _heard_by_the_way(self, received: list[Frame]) -> None:
        """Takes a message that came while nothing was asked."""
        answer, _ = codec.split(received)
        if isinstance(answer, m.Fault) and answer.request == -1:
            raise error_of(answer)
        self._is_wanted(answer)

    def take_up(self, before: Client) -> Step | None:
        """After a connection was lost in the middle of a push: learns what became of it, see `torchquorum.worker.resume`."""
        return take_up(self, before)

    def pull(self, *, averaged: bool = False) -> int:
        """Takes the current version, or the moving averages at it; returns it."""
        if self._open is not None:
            self._take(self.patience.round_s)
        self._request += 1
        self._open = [(m.Pull(self.index, self.incarnation, self._request, averaged), []) for _ in self._ps]
        self._send_open()
        self._take(self.patience.round_s)
        return self.version

    def leave(self, *, finished: bool, loss: float | None = None, accuracy: float | None = None) -> None:
        """Says goodbye; a ps that is gone is no error."""
        self.send_position()  # a checkpoint may still be made of this version, and nobody could ask any more
        goodbye = m.Leave(self.index, self.incarnation, loss, accuracy, finished)
        for k in reversed(range(len(self._ps))):
            with suppress(DeadlineError, TaskLostError, RefusedError):
                self.ask(k, goodbye, [], m.Bye, GOODBYE_S, "goodbye")

    def close(self) -> None:
        """Gives sockets and memory up."""
        for channel in self._channels:
            channel.close()
        if self._exchange is not None:
            self._exchange.close()
        if self.buffers is not None:
            self.buffers.close()

    @property
    def transports(self) -> list[str]:
        """Returns how this worker talks to each ps task."""
        return ["shm" if shared else "tcp" for shared in self._shared]

    def _step(self, answer: m.Variables | None, computed_at: int) -> Step:
        outcome = answer.outcome if answer is not None else None
        if outcome is None:
            reason = "past last step" if self.stopped else "pipelined"
            accepted = False if self.stopped else None
            return Step(self.version, self.local_step, accepted, reason, 0, self.lr[0], self.stopped)
        staleness = max(0, outcome.met - computed_at)
        return Step(
            self.version, self.local_step, outcome.accepted, outcome.reason, staleness, self.lr[0], self.stopped
        )

    # -- tensors ------------------------------------------------------------------------------------------------------

    @property
    def flat(self) -> FlatParameters | None:
        """Returns the worker's parameters, once it has joined."""
        return self._flat

    @property
    def plan(self) -> m.Plan | None:
        """Returns the plan that it joined with."""
        return self._plan

    def _moves(self) -> Exchange:
        assert self._exchange is not None, "joined before"
        return self._exchange

    def _flat_checked(self) -> None:
        assert self._flat is not None
        self._flat.check()

    def nonfinite(self) -> list[str]:
        """Returns the variables whose gradients hold NaN or infinity."""
        return self._moves().nonfinite()

    def say(self, line: str) -> None:
        """Prints a line for people, with the worker's name."""
        self._say(f"{self.task}: {line}")

    def _load(self, k: int, message: m.Variables, frames: Sequence[Frame]) -> bool:
        """Copies a shard's variables into the parameters; False if they were overwritten meanwhile."""
        return self._moves().load(k, message, frames, lambda ring: self._open_board(message.board, ring))

    def _open_board(self, ref: m.MemoryRef | None, ring: Slots) -> None:
        own = self._moves().memory_of(0)
        if ref is None or own is None:
            return
        assert self._flat is not None and self._plan is not None
        plan, exchange = self._plan, self._moves()
        board = Board.open(ref, plan.num_workers, len(plan.optimizer.groups))
        rounds = plan.rule.needed(plan.num_workers) > 1
        on_gpu = exchange.device is not None
        self._board = BoardSteps(
            board,
            self.index,
            self.incarnation,
            self._flat,
            ring,
            own,
            rounds=rounds,
            device=DeviceUpdate(self._flat, exchange) if on_gpu and not rounds else None,
            device_round=DeviceRound(self._flat, exchange, ring) if on_gpu and rounds else None,
        )

    # -- requests -----------------------------------------------------------------------------------------------------

    def _send_open(self) -> None:
        assert self._open is not None
        for k, (message, frames) in enumerate(self._open):
            self._channels[k].send([codec.encode(message), *frames])

    def _take(self, patience_s: float) -> m.Variables:
        """Waits for the answer of every ps task to the open request and loads it. Returns shard 0's."""
        first_message = self._open[0][0] if self._open else None
        averaged = isinstance(first_message, m.Pull) and first_message.averaged
        restored = None  # which comes with the answer to a join, also where that is of a version that is gone by now
        while True:
            answers = self._answers(patience_s)
            restored = answers[0][0].position or restored
            loaded = [self._load(k, message, frames) for k, (message, frames) in enumerate(answers)]
            versions = {message.version for message, _ in answers}
            self._open = None
            if all(loaded) and len(versions) == 1:
                break
            self._request += 1  # frozen for so long that a version was reused: take the current one
            self._open = [(m.Pull(self.index, self.incarnation, self._request, averaged), []) for _ in self._ps]
            self._send_open()
        first = answers[0][0]
        self.version, self.lr, self.reign = first.version, first.lr, first.reign
        self.stopped = self.stopped or first.stop
        self.position = restored
        if first.stop and self.buffers is not None:
            self.buffers.give_final(self.version)
        self._note_position(first)
        return first

    def _note_position(self, answer: m.Variables) -> None:
        """Keeps where this worker stands when it first holds a version; tells shard 0 if it asks, and at the end."""
        if self._positions is not None:
            self._positions.note(answer.version)
            self._send_position(answer.version if answer.stop else answer.save)

    def begin_positions(self, capture: Callable[[], Position]) -> None:
        """From now on this worker's position is noted whenever it takes a new version; now for the first time."""
        self._positions = Positions(capture, self.version)

    def wait_for_workers(self, count: int, at_most_s: float | None = None) -> None:
        """Waits until so many workers have joined, this one counted; `at_most_s` goes on without the others then."""
        wait_for_workers(self, count, at_most_s)

    def send_position(self) -> None:
        """Tells shard 0 where this worker stood when it first held its current version."""
        self._send_position(self.version)

    def _send_position(self, wanted: int) -> None:
        found = self._positions.at(wanted) if self._positions is not None else None
        if found is not None:
            version, position = found
            self._channels[0].send([codec.encode(m.Position(self.index, self.incarnation, version, position.encode()))])
            if self.buffers is not None and position.buffers is not None:
                self.buffers.give(version, position.buffers)

    # -- buffers ------------------------------------------------------------------------------------------------------

    def take_buffers(self, *, joining: bool = False) -> dict[str, torch.Tensor]:
        """Asks for the run's buffers and waits for them; while it waits, this worker's own may be asked for."""
        assert self.buffers is not None
        if self._open is not None:
            self._take(self.patience.round_s)
        return self.buffers.take(self.version, joining=joining, waiting=self._while_taking)

    def _while_taking(self, waited_s: float, silent_s: float) -> bool:
        if (received := self._channels[0].receive(0.0)) is not None:
            self._is_wanted(codec.split(received)[0])
        self.while_waiting()
        self._check(0, waited_s, silent_s, self.patience.round_s, "the run's buffers", starting=False)
        return received is not None

    def _is_wanted(self, answer: m.Message) -> bool:
        """Gives this worker's buffers if that is what a ps has asked for."""
        if isinstance(answer, m.Wanted) and self.buffers is not None:
            self.buffers.give(self.version, self.buffers.local.capture(), number=answer.number)
        return isinstance(answer, m.Wanted)

    def stop(self) -> None:
        """Ends the run for everybody; whoever waits is released. Not answered here: the next answer says so."""
        self._channels[0].send([codec.encode(m.Stop(self.index, self.incarnation))])

    def save(self, number: int, folder: str, keep: int, *, wait_s: float = 0.0) -> m.SaveState | None:
        """Asks for a checkpoint; with `wait_s`, waits for it and returns how it went.

        Raises:
            DeadlineError: It was not there in time.
        """
        request = m.Save(self.index, self.incarnation, number, folder, keep)
        if wait_s <= 0:
            self._channels[0].send([codec.encode(request)])
            return None
        return wait_for_save(self, request, wait_s)

    def _answers(self, patience_s: float) -> list[tuple[m.Variables, list[Frame]]]:
        """Waits for the answers of all ps tasks to the open request; probes those that owe one every `probe_s`.

        Shard 0 is probed also when it has answered: the others wait for its decisions, and do not know that it is gone.
        """
        waiting = Waiting(len(self._ps), time.monotonic())
        while (k := self._owing(waiting)) is not None:
            self._hear(waiting, k, self._channels[k].receive(self.patience.probe_s))
            now = time.monotonic()
            self.while_waiting()
            if now - waiting.asked < self.patience.probe_s and not self._closed(k):
                continue
            waiting.asked = now
            for owing in sorted({0, *waiting.missing()}):
                while self._hear(waiting, owing, self._channels[owing].receive(0.0)) and owing not in waiting.found:
                    pass
            if waiting.next_missing() is None:
                continue
            probe = codec.encode(m.Probe(self.index, self.incarnation, self._request))
            for owing in sorted({0, *waiting.missing()}):
                self._channels[owing].send([probe])
                silent_s = now - waiting.heard[owing]
                self._check(owing, now - waiting.started, silent_s, patience_s, waiting.what, starting=False)
            if now - waiting.told >= self.patience.say_s:
                waiting.told = now
                self._say(f"{self.task}: waiting for {waiting.what}: {now - waiting.started:.0f} s")
        return [waiting.found[k] for k in range(len(self._ps))]

    def _owing(self, waiting: Waiting) -> int | None:
        """Returns the first ps that owes an answer. Some of before a restore and some of after it are none: all are asked again."""
        if waiting.next_missing() is None and len({answer.reign for answer, _ in waiting.found.values()}) > 1:
            waiting.found.clear()
            self._send_open()
        return waiting.next_missing()

    def _closed(self, k: int) -> bool:
        channel = self._channels[k]
        return isinstance(channel, DoorChannel | LaneChannel) and channel.closed

    def _hear(self, waiting: Waiting, k: int, received: list[Frame] | None) -> bool:
        """Takes what ps k said about the open request; False if it said nothing."""
        if received is None:
            return False
        assert self._open is not None
        waiting.heard[k] = time.monotonic()
        answer, tensors = codec.split(received)
        match answer:
            case m.Fault() if answer.request in (-1, self._request):
                raise error_of(answer)
            case m.Variables() if answer.request == self._request:
                waiting.found[k] = answer, tensors
            case m.Held() if answer.request == self._request:
                waiting.what = self._wait.who(answer, k)
                self._send_position(answer.save)  # the chief may be waiting for it, and this worker for the chief
            case m.Unknown() if answer.request == self._request:
                older = [other for other, (found, _) in waiting.found.items() if found.reign != answer.reign]
                for again in (k, *older):  # what others answered before a restore does not count any more
                    waiting.found.pop(again, None)
                    message, frames = self._open[again]
                    self._channels[again].send([codec.encode(message), *frames])
            case _:
                self._is_wanted(answer)  # or an answer to something older
        return True

    def ask(
        self, k: int, message: m.Message, frames: list[Frame], kind: type[_Kind], patience_s: float, what: str
    ) -> _Kind:
        """Sends a message to one ps task until it answers with one of `kind`."""
        started = heard = told = asked = time.monotonic()
        starting = isinstance(message, m.Hello | m.Create)  # a ps that is not up yet, or busy with a large model
        packet = [codec.encode(message), *frames]
        self._channels[k].send(packet)
        while True:
            received = self._channels[k].receive(self.patience.probe_s)
            now = time.monotonic()
            if received is not None:
                heard = now
                answer, _ = codec.split(received)
                if isinstance(answer, kind):
                    return answer
                if isinstance(answer, m.Fault) and answer.request == -1:
                    raise error_of(answer)
                self._is_wanted(answer)
            if now - asked >= self.patience.probe_s:
                asked = now
                self._channels[k].send(packet)
                self.while_waiting()
            self._check(k, now - started, now - heard, patience_s, what, starting=starting)
            if now - told >= self.patience.say_s:
                told = now
                self._say(f"{self.task}: waiting for {what}: {now - started:.0f} s")

    def _check(self, k: int, waited_s: float, silent_s: float, patience_s: float, what: str, *, starting: bool) -> None:
        if self._closed(k):
            raise self._wait.closed(k, what)
        self._wait.check(k, waited_s, silent_s, patience_s, what, starting=starting)


def _known(loss: float | LaterLoss | None) -> float | None:
    value = loss() if callable(loss) else loss
    return value if value is not None and math.isfinite(value) else None
