"""A worker's requests to all ps tasks: sent, asked about until every ps task has answered, and sent again where one is not known.

Owned by the worker's thread, through its link. What always holds: one request is open at a time; a request is asked about every
`probe_s` while nothing is on its way, and sent again if the ps does not know it; every wait ends with an answer or with an error that
names task, address, what was waited for and what to do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torchquorum.wire.messages as m
from torchquorum.clock import SeenTime
from torchquorum.cluster import TaskId
from torchquorum.errors import LostCreationError
from torchquorum.wire import codec
from torchquorum.wire.codec import Frame
from torchquorum.wire.rpc import Arrived, SignsOfLife, error_of, tell_bytes
from torchquorum.worker.link_states import LinkState, LinkStates
from torchquorum.worker.ps_channels import PsChannels

FLUSH_S = 0.05
ABOUT_REQUEST = (m.Variables, m.Held, m.Unknown, m.Fault)


Answer = tuple[m.Variables, list[Frame]]


@dataclass(slots=True)
class Waiting:
    """A wait for the answers to the open request, or until it has left: what the ps tasks have said so far, and their signs of life.

    `found` has the answers of each ps task, by track; those of `wanted` tracks are to come.
    """

    seen: SeenTime
    lives: list[SignsOfLife]
    wanted: frozenset[int]
    what: str = "its turn"
    found: dict[int, dict[int, Answer]] = field(default_factory=dict)
    started: float = field(init=False)
    asked: float = field(init=False)
    reported: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.asked = self.reported = self.seen.now()

    def missing(self) -> list[int]:
        """Returns the ps tasks that owe an answer."""
        return [k for k in range(len(self.lives)) if self._owes(k)]

    def next_missing(self) -> int | None:
        """Returns the first of them."""
        return next((k for k in range(len(self.lives)) if self._owes(k)), None)

    def _owes(self, k: int) -> bool:
        return len(self.found.get(k, ())) < len(self.wanted)

    def generations(self, k: int | None = None) -> set[int]:
        """Returns the creations of the variables that the answers, of one ps task or of all, are of."""
        found = self.found.values() if k is None else [self.found.get(k, {})]
        return {answer.generation for answers in found for answer, _ in answers.values()}


class Requests:
    """The request that a worker has open at all ps tasks, or had last.

    Args:
        channels: The channels to them.
        states: The state of the link.

    Attributes:
        channels: The channels to them.
        number: The number of the request.
        open: The messages of the open request, one for each ps task; after a loss, of the one that was open.
        waiting_for: What the open request waits for, as a ps task last said; empty if none has said.
        save_wanted: Is called with a version whose position a ps task wants for a checkpoint.
    """

    def __init__(self, channels: PsChannels, states: LinkStates) -> None:
        self.channels, self._states, self._end = channels, states, channels.end
        channels.is_for_request = self._keep
        self.number = 0
        self.open: list[tuple[m.Message, Sequence[Any]]] = []
        self.waiting_for = ""
        self._tracks = frozenset({0})
        self._early: list[deque[Arrived]] = [deque() for _ in range(len(channels))]  # not yet looked at
        self._taking = False
        self.save_wanted: Callable[[int], None] = lambda _version: None

    @property
    def is_open(self) -> bool:
        """Whether a request is sent and not yet settled."""
        return self._states.now is LinkState.AWAITING

    def awaited(self) -> int | None:
        """Returns the number of the request whose answers are being waited for now, if there is one."""
        return self.number if self._taking else None

    def begin(
        self,
        number: int,
        messages: list[tuple[m.Message, Sequence[Any]]],
        tracks: Sequence[int] = (0,),
        *,
        wait: bool = True,
    ) -> None:
        """Opens a request: one message under this number, with its frames, to each ps task, about the variables of these tracks.

        Waits until it has left; without `wait` the rest leaves while messages are looked for.
        """
        self._states.set(LinkState.AWAITING)
        self._tracks = frozenset(tracks)
        self.number, self.open, self.waiting_for = number, messages, ""
        for early in self._early:
            early.clear()
        self.channels.send_inbox()
        self._send_open(wait=wait)

    def settle(self) -> None:
        """The answers to the open request have been taken."""
        self._states.set(LinkState.IDLE)
        self.open, self.waiting_for = [], ""

    def _send_open(self, *, wait: bool = True) -> None:
        for k, (message, frames) in enumerate(self.open):
            self.channels.post(k, message, frames)
        if wait:
            self._let_leave()

    def _let_leave(self) -> None:
        """Waits until all of the open request has left, to every ps task; as long as bytes leave, however slowly."""
        unsent = self._unsent(range(len(self.channels)), 0.0)
        if not unsent:
            return
        waiting = self._begin_wait("its message to leave")
        while unsent := self._unsent(unsent, FLUSH_S):
            now = waiting.seen.turn()
            if now - waiting.asked >= self._end.patience.probe_s:
                waiting.asked = now
                self.channels.meanwhile()
                self._look_at_lives(waiting, now, unsent, math.inf)

    def _unsent(self, among: Iterable[int], timeout_s: float) -> list[int]:
        return [k for k in among if not self.channels.asker(k).channel.flush(timeout_s)]

    def _begin_wait(self, what: str) -> Waiting:
        seen = self._end.patience.seen_time(self._end.clock)
        lives = [self.channels.life(k, seen.now()) for k in range(len(self.channels))]
        return Waiting(seen, lives, self._tracks, what)

    def answers(self, limit_s: float) -> list[list[Answer]]:
        """Waits for the answers of all ps tasks to the open request; probes those that owe one every `probe_s`.

        Returns, of each ps task, its answers by track.

        Shard 0 is probed also when it has answered: the others wait for its decisions, and do not know that it is gone.
        """
        self._taking = True
        try:
            waiting = self._begin_wait("its turn")
            self._wait_for_all(waiting, limit_s)
            return [[waiting.found[k][track] for track in sorted(self._tracks)] for k in range(len(self.channels))]
        finally:
            self._taking = False

    def _wait_for_all(self, waiting: Waiting, limit_s: float) -> None:
        patience = self._end.patience
        while (k := self._owing(waiting)) is not None:
            # Ps k owes an answer: wait for it, at most until it is time to probe.
            self._hear(waiting, k, self._receive(k, patience.probe_s))
            now = waiting.seen.turn()
            self.channels.meanwhile()
            if now - waiting.asked < patience.probe_s and not self.channels.closed(k):
                continue
            waiting.asked = now
            # Time to probe: first take what has arrived from any of them meanwhile.
            for owing in sorted({0, *waiting.missing()}):
                while self._hear(waiting, owing, self._receive(owing, 0.0)) and owing in waiting.missing():
                    pass
            if waiting.next_missing() is None:
                continue
            # Some still owe an answer: ask what became of the request; one that is gone or silent ends the wait.
            probe = codec.encode(m.Probe(self._end.index, self._end.incarnation, self.number))
            self._look_at_lives(waiting, now, sorted({0, *waiting.missing()}), limit_s, probe)

    def _look_at_lives(
        self, waiting: Waiting, now: float, those: Sequence[int], limit_s: float, probe: Frame | None = None
    ) -> None:
        """Looks for signs of life, probes where nothing is on its way, and says every `say_s` how the wait stands.

        Raises:
            TaskLostError: A ps task is gone or silent.
            DeadlineError: The wait has grown too long, not counting the time in which large messages went on.
        """
        for k in those:
            asker, life = self.channels.asker(k), waiting.lives[k]
            if not life.look(now) and probe is not None:
                asker.channel.send([probe])
            since = max(waiting.started, *(other.transferred for other in waiting.lives))
            asker.check(now - since, now - life.heard, limit_s, waiting.what)
        if now - waiting.reported >= self._end.patience.say_s:
            waiting.reported = now
            told = tell_bytes([waiting.lives[k] for k in those])
            self._end.tell(f"waiting for {waiting.what}: {now - waiting.started:.0f} s{told}")

    def _owing(self, waiting: Waiting) -> int | None:
        """Returns the first ps that owes an answer. Some of before a restore and some of after it are none: all are asked again."""
        if waiting.next_missing() is None and len(waiting.generations()) > 1:
            waiting.found.clear()
            self._send_open()
        return waiting.next_missing()

    def _keep(self, k: int, message: Any, frames: list[Frame]) -> bool:
        """Keeps what belongs to the open request, and arrives while something else is awaited."""
        belongs = isinstance(message, ABOUT_REQUEST) and message.request == self.number and self.is_open
        if belongs:
            self._early[k].append((message, frames))
        return belongs

    def _receive(self, k: int, timeout_s: float) -> Arrived | None:
        return self._early[k].popleft() if self._early[k] else self.channels.arrive(k, timeout_s)

    def _hear(self, waiting: Waiting, k: int, received: Arrived | None) -> bool:
        """Takes what ps k said about the open request; False if it said nothing."""
        if received is None:
            return False
        waiting.lives[k].heard = waiting.seen.now()
        answer, tensors = received
        match answer:
            case m.Fault() if answer.request in (-1, self.number):
                raise error_of(answer)
            case m.Variables() if answer.request == self.number and answer.track in waiting.wanted:
                waiting.found.setdefault(k, {})[answer.track] = answer, tensors
            case m.Held() if answer.request == self.number:
                waiting.what = self.waiting_for = self._reason(answer, k)
                self.save_wanted(answer.save)  # the chief may be waiting for it, and this worker for the chief
            case m.Unknown() if answer.request == self.number:
                older = [other for other in waiting.found if waiting.generations(other) - {answer.generation}]
                for again in (k, *older):  # what others answered before a restore does not count any more
                    waiting.found.pop(again, None)
                    self.channels.post(again, *self.open[again])
            case _:
                self.channels.route(k, answer, tensors)  # or an answer to something older
        return True

    def _reason(self, held: m.Held, k: int) -> str:
        """Returns what a request waits for at ps task k, and for whom.

        Raises:
            LostCreationError: That is the chief's to do, and this is the chief, which has done it.
        """
        end = self._end
        if held.what == m.CREATION and end.task.is_chief:
            raise LostCreationError(
                f"{end.task}: {end.where(k)} holds no variables any more: it was restarted just after they had been created"
            )
        names = [f"/job:worker/task:{i} ({end.cluster.address(TaskId('worker', i))})" for i in held.missing]
        missing = f"; missing {', '.join(names)}" if names else ""
        return f"{held.what} ({held.have} of {held.need}{missing})"
