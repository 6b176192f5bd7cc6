"""A ps task of a replay: it follows the record's steps in their order, as soon as the workers have sent what each of them needs.

In place of `torchquorum.server.service`, on a thread of `torchquorum replay`. There is no quorum here and no clock: a gradient waits for
its turn, a worker for its place in the record. What always holds: steps are followed in order, each once, on every shard by itself; a
worker that asks for something else than the record says ends the replay with words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

import torchquorum.wire.messages as m
from torchquorum.clock import Clock
from torchquorum.cluster import TaskId
from torchquorum.errors import LostPlaceError, TorchQuorumError
from torchquorum.replay.barriers_again import BarriersAgain
from torchquorum.replay.handed_again import HandedAgain
from torchquorum.replay.progress import ReplayProgress
from torchquorum.replay.recreation import Recreation
from torchquorum.replay.rows_again import RowsAgain
from torchquorum.replay.script import LifeKey, ReplayStep, ScriptedLife
from torchquorum.rules.quorum import Key
from torchquorum.server.identity import Identity
from torchquorum.server.reads import Reads
from torchquorum.server.reply import Incoming, Reply
from torchquorum.server.run import Run
from torchquorum.server.saver import Saver
from torchquorum.server.service import Service
from torchquorum.server.shard import Shard
from torchquorum.server.task_life import TaskLife
from torchquorum.server.worker_requests import WorkerRequests
from torchquorum.wire.channel import Peer
from torchquorum.wire.recorded import ASSIGN, JOIN, PULL, PUSH, Answer, Began, GaveRows

Asked = Incoming[Any]
KINDS: dict[type[m.Message], str] = {m.Join: JOIN, m.Push: PUSH, m.Pull: PULL, m.Assign: ASSIGN}
LOST = "the variables were lost here, and created again"


class ReplayedRequests(WorkerRequests):
    """Keeps what workers send; the record says when they are answered."""

    def _arrived(self, got: Incoming[m.Push], key: Key) -> list[Reply]:
        return []

    def _rows_asked(self, asked: m.PullRows) -> list[Reply]:
        return []

    def _probed(self, got: Incoming[m.Probe], key: Key | None) -> list[Reply]:
        return [got.reply(m.Unknown(got.message.request, self.generation))]


class Replaying(Run):
    """One creation of the variables: its shard follows the record."""

    def __init__(self, life: TaskLife, shard: Shard) -> None:
        super().__init__(life, shard, ReplayedRequests(life.me, shard), Reads(shard))

    def tick(self, now: float, wall: float) -> list[Reply]:
        """Nothing happens by time."""
        return []


class ReplayService(Service):
    """Answers the workers of a replay.

    Args:
        me: Which ps task this is.
        say: Prints a line for people.
        clock: Is not asked.
        saver: Writes nothing.
        progress: What is followed, and how far all ps tasks are.
    """

    def __init__(
        self, me: Identity, say: Callable[[str], None], clock: Clock, saver: Saver, *, progress: ReplayProgress
    ) -> None:
        super().__init__(me, say, clock, saver)
        self._progress, self._script, self.index = progress, progress.script, me.index
        self.at = 0
        self._asked: dict[LifeKey, Asked] = {}
        self._peers: dict[Peer, LifeKey] = {}
        self._joined: dict[LifeKey, int] = {}  # how many creations of the variables a life has joined
        self._creation, self._handed, self._rows = Recreation(me.index, progress), HandedAgain(), RowsAgain()
        self._barriers = BarriersAgain(self._script)
        self._next_answers = {key: self._script.answers_of(life) for key, life in self._script.lives.items()}
        self._handlers_of: dict[type[m.Message], Callable[[Asked], list[Reply]]] = {
            m.Hello: self._greet,
            m.Create: self._take_create,
            m.Join: self._take_join,
            m.Push: self._take_request,
            m.Pull: self._take_request,
            m.Assign: self._take_request,
            m.Values: self._take_values,
            m.PullRows: self._take_rows,
            m.Probe: self._tell,
            m.Beat: lambda got: [got.reply(m.Alive(self._version, stop=False))],
            m.Leave: self._let_go,
            m.Stop: lambda got: [got.reply(m.Alive(self._version, stop=True))],
            m.FateOf: self._tell_fate,
            m.Save: lambda got: [
                got.reply(m.SaveState(got.message.number, "done", self._version, progress.folder, ""))
            ],
            m.Settle: lambda got: [got.reply(m.Settled(done=True))],
            m.Position: lambda _: [],
            m.Buffers: lambda _: [],
            m.TakeBuffers: lambda got: self._handed.buffers(self._script.life_of(got.message), got),
            m.TakeBatches: self._hand,
            m.AtBarrier: self._take_barrier,
            m.UseBatches: lambda got: [got.reply(m.BatchesUsed(got.message.request, ok=True))],
            m.StatusRequest: lambda got: [got.reply(m.Status(self.status(), got.message.request))],
            m.Stay: lambda _: [],
        }

    # -- messages -----------------------------------------------------------------------------------------------------

    @property
    def _version(self) -> int:
        return self.run.shard.version if self.run is not None else 0

    def _route(self, got: Asked) -> list[Reply]:
        handler = self._handlers_of.get(type(got.message))
        if handler is None:
            return super()._route(got)
        return handler(got)

    def _answer(self, got: Asked) -> list[Reply]:
        replies = super()._answer(got)
        return replies + self.follow()

    def tick(self, now: float, wall: float) -> list[Reply]:
        """Others may have made what is waited for."""
        return self.follow()

    def process_ended(self, worker: int, incarnation: int, now: float, wall: float) -> list[Reply]:
        """The launcher sees the ends of processes."""
        self.pids.pop((worker, incarnation), None)
        return []

    def heartbeat(self) -> Reply | None:
        """No ps task leads here."""
        return None

    def status(self) -> dict[str, Any]:
        """Returns what lets those go on that wait for others, or for a checkpoint."""
        me, version = self.life.me, self._version
        everybody = list(range(me.cluster.num_tasks("worker")))
        body = {"task": str(me.task), "ready": self.run is not None, "live": everybody, "stopped": False, "updates": 1}
        return {**body, "global_step": version, "saved_step": version, "ps": me.cluster.num_tasks("ps")}

    def _next_generation(self, life: ScriptedLife) -> int | None:
        joined = self._joined.get(life.key, 0)
        return life.generations[joined] if joined < len(life.generations) else None

    def _greet(self, got: Incoming[m.Hello]) -> list[Reply]:
        replies = self._hello(got)
        task = TaskId.parse(got.message.task)
        life = self._script.lives.get((task.index, got.message.incarnation))
        if life is not None and replies and isinstance(replies[0].message, m.Welcome):
            self._peers[got.peer] = life.key
            wanted = self._next_generation(life)
            there = self.run is not None and wanted in (None, self.run.generation)
            replies[0].message.created = there or (self.run is None and life.worker != 0)
        return replies

    def _take_create(self, got: Incoming[m.Create]) -> list[Reply]:
        """The chief creates the variables; of a chief that joins those that are there, nothing is taken."""
        life = self._script.lives.get(self._peers.get(got.peer, (-1, -1)))
        if life is None:
            raise ValueError("the record has no such life of the chief")
        if self.run is not None and self._next_generation(life) == self.run.generation:
            return [got.reply(m.Created(self._version, existing=True))]
        self._creation.asked = got
        return [got.reply(m.Alive(self._version, stop=False))]

    def _take_join(self, got: Incoming[m.Join]) -> list[Reply]:
        life = self._script.life_of(got.message)
        got.message.fastpath = False
        self._asked[life.key] = got
        return [got.reply(self._wait(got.message.request))]

    def _take_request(self, got: Incoming[Any]) -> list[Reply]:
        message, run = got.message, self.run
        life = self._script.life_of(message)
        if run is None or not run.shard.workers.knows(message.worker, message.incarnation):
            raise LostPlaceError(LOST)
        if not run.shard.workers.is_current(message.worker, got.peer, message.request):
            return []
        before = self._asked.get(life.key)
        if answer := run.shard.answer(message.worker, message.incarnation, message.request):
            return answer
        if isinstance(message, m.Push):
            if self.index == 0 and (before is None or before.message.request != message.request):
                self._progress.compare(life, message)
            run.requests.push(got)
        self._asked[life.key] = got
        return []

    def _take_values(self, got: Incoming[m.Values]) -> list[Reply]:
        if self.run is None:
            raise LostPlaceError(LOST)
        return self.run.requests.keep_values(got)

    def _take_rows(self, got: Incoming[m.PullRows]) -> list[Reply]:
        message = got.message
        if self.run is None or not self.run.shard.workers.knows(message.worker, message.incarnation):
            raise LostPlaceError(LOST)
        return self._rows.ask(self.run, got)

    def _take_barrier(self, got: Incoming[m.AtBarrier]) -> list[Reply]:
        message = got.message
        if self.run is None or not self.run.shard.workers.knows(message.worker, message.incarnation):
            raise LostPlaceError(LOST)
        return [got.reply(self._barriers.ask(message, self.at))]

    def _tell(self, got: Incoming[m.Probe]) -> list[Reply]:
        probe = got.message
        asked = self._asked.get((probe.worker, probe.incarnation))
        if asked is not None and asked.message.request == probe.request:
            asked.peer = got.peer
            return [got.reply(self._wait(probe.request))]
        if self.run is not None and (answer := self.run.shard.answer(probe.worker, probe.incarnation, probe.request)):
            return answer
        return [got.reply(m.Unknown(probe.request, self.generation))]

    def _wait(self, request: int) -> m.Held:
        waited = self._progress.awaited.get(self.index, "its place in the record")
        return m.Held(request, f"its place in the record, which is at: {waited}", 0, 1, [])

    def _tell_fate(self, got: Incoming[m.FateOf]) -> list[Reply]:
        """What had become of a gradient when its worker joined again."""
        asked = got.message
        key = asked.worker, asked.incarnation, asked.local_step
        decided = self._script.decided.get(key)
        joined = max((n for n in self._next_answers.get(key[:2], []) if n < self.at), default=-1)
        if decided is None or self._script.decided_at[key] > joined:
            return [got.reply(m.Fate(*key, "open"))]
        state = "accepted" if decided.accepted else "refused"
        return [got.reply(m.Fate(*key, state, decided.reason, decided.met, decided.loss))]

    def _let_go(self, got: Incoming[m.Leave]) -> list[Reply]:
        leave = got.message
        key = leave.worker, leave.incarnation
        if self.index == 0:
            self._progress.left.add(key)
        later = self._ahead(key)
        if later and self.index == 0:
            item = self._script.steps[later[0]].item
            assert isinstance(item, Answer)
            why = f" ({leave.why})" if leave.why else ""
            self._progress.fail(
                f"/job:worker/task:{leave.worker} has left the run{why}, and in the record it goes on: {_name(item)}"
            )
        return [got.reply(m.Bye())]

    # -- what else the record has -------------------------------------------------------------------------------------

    def _hand(self, got: Incoming[m.TakeBatches]) -> list[Reply]:
        """Hands out the batches that the worker was given, in their order."""
        life = self._script.life_of(got.message)
        replies = self._handed.batches(life, got, loses=lambda: self._loses_here(life))
        if replies is None:
            self._asked[life.key] = got
        return replies or []

    def _loses_here(self, life: ScriptedLife) -> bool:
        """Whether a worker learns of the loss of the variables by something else than a push, and now."""
        if self.run is None or self.at >= self._progress.end or self.run.generation not in life.generations:
            return False
        lost = self._script.lost_at(life, self.run.generation)
        return isinstance(self._script.steps[self.at].item, Began) and lost is not None and lost[1] == 0

    # -- the steps ----------------------------------------------------------------------------------------------------

    def follow(self) -> list[Reply]:
        """Follows the record as far as what it needs is there; returns the answers."""
        replies: list[Reply] = []
        steps = self._script.steps
        try:
            while self.at < self._progress.end and not self._progress.failed and self._can(steps[self.at], replies):
                self.at += 1
                self._progress.at[self.index] = self.at
                if self.run is not None:
                    self._progress.keep((self.run.generation, self.run.shard.place), self.run.shard)
            if self.at < self._progress.end:
                self._progress.awaited[self.index] = _name_step(steps[self.at], self.run)
            replies += self._answer_unrecorded()
        except TorchQuorumError as error:
            self._progress.fail(str(error))
        return replies

    def _can(self, step: ReplayStep, replies: list[Reply]) -> bool:
        """Follows a step, if what it needs is there."""
        item = step.item
        if self.at in self._script.passed_over:
            return True
        if isinstance(item, Began):
            return self._begin(item, replies)
        run = self.run
        assert run is not None, step
        if run.plan.num_shards <= self.index:
            return True
        match item:
            case m.Apply():
                if not all(Key(*key) in run.shard.tracks[item.track].gradients for key in item.keys):
                    return False
                self._progress.look_at(run.shard, item)
                run.shard.follow(item)
            case m.Assigned():
                key = (item.worker, item.incarnation, item.number)
                if not run.shard.tracks[item.track].given.has(key, item.variables, state=item.state):
                    replies += self._ask_for_values(run, (item.worker, item.incarnation))
                    return False
                run.shard.follow(item)
            case m.Drop():
                run.shard.follow(item)
            case Answer():
                return self._give(run, item, replies)
            case GaveRows():
                return self._rows.give(run, item, replies, is_first=self.index == 0)
            case _:
                pass
        return True

    def _ask_for_values(self, run: Run, key: LifeKey) -> list[Reply]:
        """The worker led when it assigned, which here it learns now."""
        asked = self._asked.get(key)
        if asked is None or not isinstance(asked.message, m.Assign) or asked.message.has_values:
            return []
        del self._asked[key]
        return _answer_as_before(run, asked, m.Outcome(False, m.STANDS_IN, run.shard.version))

    def _give(self, run: Run, item: Answer, replies: list[Reply]) -> bool:
        """Answers a worker, once it has asked."""
        release = item.release
        key = release.worker, release.incarnation
        asked = self._asked.get(key)
        if asked is None:
            return False
        kind, number = KINDS[type(asked.message)], _number_of(asked.message)
        if kind == PUSH and item.kind == PULL:
            return True  # what it looked at then it need not look at now
        if kind == PULL and item.kind != PULL:
            del self._asked[key]
            replies += _answer_as_before(run, asked)
            return False
        if kind != item.kind or (kind != JOIN and number != item.number):
            raise TorchQuorumError(
                f"/job:worker/task:{key[0]} {_words(kind, number)}, where in the record it {_words(item.kind, item.number)}: its program "
                "does not do the same again. Does it decide by time, or by what is not recorded?"
            )
        if kind == JOIN:
            self._joined[key] = self._joined.get(key, 0) + 1
            run.requests.join(asked)
        request = asked.message.request
        del self._asked[key]
        entry = msgspec.structs.replace(release, request=request)
        answers = run.shard.follow(entry, item.outcome)
        if kind == JOIN and self.index == 0:
            for reply in answers:
                if isinstance(reply.message, m.Variables):
                    reply.message.position = self._script.lives[key].placed.get(run.generation)
                    reply.message.kept = self._script.began_of(run.generation).kept
        replies += answers
        return True

    def _answer_unrecorded(self) -> list[Reply]:
        """Lets workers go on that made steps which were lost before anybody had recorded them, up to where they noticed."""
        run, replies = self.run, list[Reply]()
        if run is None:
            return replies
        for key, asked in list(self._asked.items()):
            life = self._script.lives[key]
            if isinstance(asked.message, m.Join | m.TakeBatches) or run.generation not in life.generations:
                continue
            lost, asks = self._script.lost_at(life, run.generation), asked.message
            beyond = not any(self._script.steps[n].generation == run.generation for n in self._ahead(key))
            if lost is not None and beyond and (not isinstance(asks, m.Push) or asks.local_step <= lost[0]):
                if lost[1] == 0 and not isinstance(asks, m.Push):
                    continue  # it is what told the worker of the loss
                del self._asked[key]
                for track in run.shard.tracks:
                    track.gradients.copy_borrowed(life.worker)
                    track.tables.copy_borrowed(life.worker)
                replies += _answer_as_before(run, asked)
        return replies

    def _ahead(self, key: LifeKey) -> list[int]:
        return [number for number in self._next_answers.get(key, []) if number >= self.at]

    def _waits(self, key: LifeKey) -> bool:
        """Whether a worker waits for something that the log does not answer."""
        return self._rows.waits(key) or self._barriers.waits(key)

    # -- creation -----------------------------------------------------------------------------------------------------

    def _begin(self, item: Began, replies: list[Reply]) -> bool:
        """The variables are created, once the chief has said so; whoever still asks for those before hears that they are lost."""
        run, create = self.run, self._creation.asked
        if run is not None and run.generation != item.generation:
            if not self._creation.all_have_lost(run, self._asked, self.at, self._waits):
                return False
            replies += self._rows.lose(LOST)
            for key, asked in list(self._asked.items()):
                if not isinstance(asked.message, m.Join):
                    del self._asked[key]
                    replies.append(asked.reply(m.Fault("LostPlaceError", LOST, asked.message.request)))
            self.run = None
            run.discard()
        if self.index >= item.plan.num_shards:
            return True
        if create is None:
            return False
        shard = self._creation.make(item, create)
        if shard is None:
            return False
        self._creation.asked = None
        self.generation = item.generation
        self.run = Replaying(self.life, shard)  # pyright: ignore[reportAttributeAccessIssue]
        replies.append(create.reply(m.Created(shard.version, existing=False)))
        return True


def _answer_as_before(run: Run, asked: Asked, outcome: m.Outcome | None = None) -> list[Reply]:
    """Answers a worker with the versions that it was given last: of the optimizer whose gradient it pushes, or of all."""
    message = asked.message
    tracks = [run.shard.tracks[message.track]] if isinstance(message, m.Push) else run.shard.tracks
    who = message.worker, message.incarnation, message.request
    return [reply for track in tracks for reply in track.answers.renumber(*who, outcome)]


def _name_step(step: ReplayStep, run: Run | None) -> str:
    """Returns what a step waits for, in words."""
    item = step.item
    match item:
        case Began():
            return f"the chief to create the variables (version {item.version})"
        case m.Apply():
            pending = run.shard.tracks[item.track].gradients if run is not None else item.keys
            missing = [k for k in item.keys if Key(*k) not in pending]
            named = ", ".join(f"/job:worker/task:{w} (local step {s})" for w, _, s in missing[:4])
            return f"update {item.version}, which needs the gradient of {named}"
        case Answer():
            return _name(item)
        case m.Assigned():
            return f"/job:worker/task:{item.worker} to assign values"
        case GaveRows():
            return f"/job:worker/task:{item.worker} to ask for rows"
        case _:
            return type(item).__name__


def _number_of(message: Any) -> int:
    if isinstance(message, m.Push):
        return message.local_step
    return message.number if isinstance(message, m.Assign) else 0


def _words(kind: str, number: int) -> str:
    texts = {JOIN: "joins", PULL: "pulls", PUSH: f"pushes local step {number}", ASSIGN: f"makes assignment {number}"}
    return texts[kind]


def _name(item: Answer) -> str:
    return f"/job:worker/task:{item.release.worker}, which {_words(item.kind, item.number)} before version {item.release.version + 1}"
