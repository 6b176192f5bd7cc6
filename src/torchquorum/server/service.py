"""What a ps task answers to each message: handle(message) -> replies. Sockets, threads and the clock stay outside.

Driven by `torchquorum.server.serve` and by tests: `handle` for each message, `tick` as time passes, `commit` before replies of a
durable run leave. What always holds: a message that makes no sense gets a Fault and changes nothing; there is a run from the
creation of the variables until they are discarded, and nothing of it before or after.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torchquorum.wire.messages as m
from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster import TaskId
from torchquorum.errors import LostPlaceError, RefusedError, TorchQuorumError, UpdateError
from torchquorum.formats.journal import JournalError
from torchquorum.server.creation import check_creation, create_run
from torchquorum.server.ending import Ending
from torchquorum.server.followers import Followers
from torchquorum.server.following import Following
from torchquorum.server.identity import Identity
from torchquorum.server.leader_contact import LeaderContact
from torchquorum.server.leading import Leading
from torchquorum.server.plan_difference import check_same_plan
from torchquorum.server.processes import Pids, note_process
from torchquorum.server.rate_limit import RateLimit
from torchquorum.server.reader_welcome import welcome_reader
from torchquorum.server.reply import LEADER, Incoming, Reply
from torchquorum.server.routes import NO_VARIABLES, ROUTES
from torchquorum.server.saver import Saver
from torchquorum.server.staying import Staying
from torchquorum.server.tally import Tally
from torchquorum.server.task_life import TaskLife
from torchquorum.server.waiting_joins import WaitingJoins, what_joins_wait_for
from torchquorum.wire import codec
from torchquorum.wire.channel import READS, Peer
from torchquorum.wire.codec import Frame

MAX_FAULT = 4000
OVER = m.End(True, "the job is over")
# What a worker or a chief wants of a run: when an update has failed, the answer is why. It may still leave.
REFUSED_WHEN_BROKEN = frozenset(
    {
        m.Create,
        m.Join,
        m.Push,
        m.Pull,
        m.PullRows,
        m.Assign,
        m.Probe,
        m.FateOf,
        m.Save,
        m.Settle,
        m.TakeBuffers,
        m.TakeBatches,
        m.UseBatches,
        m.AtBarrier,
    }
)
# What a connection may say that has shown the read-only form of the secret.
FOR_READERS = frozenset({m.ReaderHello, m.Read, m.ReadRows, m.ReaderBeat, m.StatusRequest})


class Service:
    """One ps task.

    Args:
        me: Who this task is.
        say: Prints a line for people.
        clock: Tells the time to what reads and writes files.
        saver: Writes checkpoints; by default on a thread of its own.

    Attributes:
        run: What belongs to the variables; None while there are none.
        generation: The last creation of the variables that was tried.
        pids: The processes of workers on this host.
        staying: The workers' programs that may begin another session.
        frozen: The connections of readers that take nothing, to be closed by the ps thread.
        shard_0: What is known of shard 0, on the others.
        over: No other job will come: shard 0 ends, and with it every ps task.
        failure: What made an update impossible, if something did.
        turned_away: Returns the connections that the listener refused, by reason.
        moved_bytes: Returns how many bytes have come from a peer or reached it, as far as the listener knows.
    """

    def __init__(
        self, me: Identity, say: Callable[[str], None], clock: Clock = SYSTEM, saver: Saver | None = None
    ) -> None:
        self.life = TaskLife(
            me=me,
            say=say,
            clock=clock,
            saver=saver or Saver(clock),
            tally=Tally(me.started_at),
            followers=Followers(me),
        )
        self.run: Leading | Following | None = None
        self.generation = 0
        self.pids: Pids = {}
        self.rate_limit = RateLimit()
        self.frozen: list[Peer] = []
        self.shard_0 = LeaderContact()
        self.over = False
        self.turned_away: Callable[[], dict[str, int]] = dict
        self.failure: UpdateError | JournalError | None = None
        self.moved_bytes: Callable[[Peer], int] = lambda _: 0
        self.staying = Staying(me.cluster.num_tasks("worker"))
        self._waiting = WaitingJoins()
        self._handlers: dict[type[m.Message], Callable[[Incoming[Any]], list[Reply]]] = {
            m.Hello: self._hello,
            m.Create: self._create,
            m.Join: self._join,
            m.Probe: self._probe,
            m.StatusRequest: self._status,
            m.Have: self._heard_of_shard,
            m.HaveKeys: self._heard_of_shard,
            m.HaveRead: self._heard_of_shard,
            m.ReaderHello: self._reader_hello,
            m.ShardHello: self._heard_of_shard,
            m.Fault: self.shard_0.hear,
            m.Stay: self._stay,
            m.Over: self._hear_over,
        }

    # -- messages -----------------------------------------------------------------------------------------------------

    def handle(self, peer: Peer, frames: Sequence[Frame], now: float, wall: float) -> list[Reply]:
        """Answers one message."""
        if peer == LEADER:
            self.shard_0.heard_at = now
        try:
            message, tensors = codec.split(frames)
        except codec.WireError as error:
            self.rate_limit.count(peer)
            return [Reply(peer, m.Fault("wire", str(error)[:MAX_FAULT]))]
        return self._answer(Incoming(peer, message, tensors, now, wall))

    def _answer(self, got: Incoming[m.AnyMessage]) -> list[Reply]:
        replies: list[Reply] = []
        try:
            if self.run is not None:
                replies += self.run.before(got.message)
            replies += self._route(got)
            if self.run is not None:
                replies += self.run.advance()
        except AssertionError:
            raise  # a mistake of our own
        except (UpdateError, JournalError) as error:
            replies += self._break_off(error, got.now, got.wall)
            if type(got.message) in REFUSED_WHEN_BROKEN:
                replies += self._route(got)  # which says so
        except Exception as error:  # a sender's mistake: the others are served on
            self.rate_limit.count(got.peer)
            text = f"{self.life.me.task}: {error}"[:MAX_FAULT]
            replies.append(got.reply(m.Fault(type(error).__name__, text, getattr(got.message, "request", -1))))
        return replies

    def _break_off(self, error: UpdateError | JournalError, now: float, wall: float) -> list[Reply]:
        """An update, or what was promised to survive, cannot be made: the run is over for everybody."""
        if self.run is None:
            raise error
        if self.failure is None:
            self.failure = error
            cause = error.__cause__
            if cause is not None and not isinstance(cause, TorchQuorumError):  # a program's own, or torch's
                self.life.say("".join(traceback.format_exception(cause)).rstrip())
        return self.run.break_off(str(error), now, wall)

    def _route(self, got: Incoming[Any]) -> list[Reply]:
        """Checks what the table says of a message, and hands it over."""
        kind = type(got.message)
        if got.peer.endswith(READS) and kind not in FOR_READERS:
            raise RefusedError(
                "this connection has shown a read-only secret, with which a run can be read and nothing else; a task of the run needs the "
                "cluster's own --secret-file"
            )
        if self.run is not None and self.run.broken and kind in REFUSED_WHEN_BROKEN:
            return [got.reply(m.Fault("UpdateError", self.run.broken, getattr(got.message, "request", -1)))]
        route = ROUTES.get(kind)
        if route is None:
            handler = self._handlers.get(kind)
            return handler(got) if handler is not None else [_not_for_a_ps(got)]
        if route.only_shard_0 and self.life.me.index != 0:
            raise ValueError(route.only_shard_0)
        if route.from_shard_0 and got.peer != LEADER:
            return [_not_for_a_ps(got)]
        if route.counted:
            self.rate_limit.count(got.peer)
        run = self.run
        if not isinstance(run, route.needs):
            if route.otherwise is None:
                raise LostPlaceError(NO_VARIABLES)
            return route.otherwise(got)
        if route.joined:
            message, workers = got.message, run.shard.workers
            if not workers.knows(message.worker, message.incarnation):
                request = getattr(message, "request", -1)
                fault = run.requests.not_joined(message.worker, message.incarnation, request)
                return [] if route.quiet else [got.reply(fault)]
            if route.request and not workers.is_current(message.worker, got.peer, message.request):
                return []  # the worker has its answer and has gone on
        return route.handler(run, got)

    # -- what is answered with and without a run ----------------------------------------------------------------------

    def _hello(self, got: Incoming[m.Hello]) -> list[Reply]:
        """A task's greeting; the process of a worker on this host is watched from now on."""
        self.rate_limit.count(got.peer)
        me, hello = self.life.me, got.message
        if hello.protocol != m.PROTOCOL:
            text = m.refuse_protocol(hello.task, hello.protocol, hello.package, str(me.task))
            return [got.reply(m.Fault("protocol", text))]
        task = TaskId.parse(hello.task)
        me.cluster.check_task(task)
        if hello.host == me.host and me.host and task.job == "worker" and 0 < hello.pid < 1 << 31:
            note_process(self.pids, task.index, hello.incarnation, hello.pid)
        return [got.reply(me.welcome(self.run.generation if self.run is not None else None))]

    def _reader_hello(self, got: Incoming[m.ReaderHello]) -> list[Reply]:
        """The greeting of who only reads."""
        self.rate_limit.count(got.peer)
        hello = got.message
        if hello.protocol != m.PROTOCOL:
            who = f"the reader {hello.name[:80]}"
            return [
                got.reply(
                    m.Fault("protocol", m.refuse_protocol(who, hello.protocol, hello.package, str(self.life.me.task)))
                )
            ]
        return [got.reply(welcome_reader(self.life.me, hello, self.run))]

    def _create(self, got: Incoming[m.Create]) -> list[Reply]:
        """The chief creates the variables, or has them created again because a ps has lost its own."""
        create, run = got.message, self.run
        if run is not None:
            check_same_plan(run.plan, create.plan, "the chief")
            same = create.generation == self.generation
            if not create.replace or same:
                repeated = same and create.generation != 0  # the same creation, asked for twice
                return [got.reply(m.Created(run.shard.version, not repeated))]
        check_creation(self.life.me, create, got.frames)
        # Nothing can be refused any more without losing the variables that are here.
        if run is not None:
            self.run = None
            run.discard()
        self.generation = create.generation
        self.run = create_run(self.life, create, got.frames, got.now, got.wall)
        return [got.reply(m.Created(self.run.shard.version, False)), *self._let_in(got.now, got.wall)]

    def _join(self, got: Incoming[m.Join]) -> list[Reply]:
        if self.run is not None and self.run.admits:
            return self.run.requests.join(got)
        self.rate_limit.count(got.peer)
        self._waiting.add(got.peer, got.message)
        return [got.reply(what_joins_wait_for(got.message.request, created=self.run is not None))]

    def _let_in(self, now: float, wall: float) -> list[Reply]:
        """Answers those that have waited to join."""
        replies: list[Reply] = []
        for peer, join in self._waiting.take():
            replies += self._answer(Incoming(peer, join, [], now, wall))
        return replies

    def _probe(self, got: Incoming[m.Probe]) -> list[Reply]:
        request = got.message.request
        if got.peer in self._waiting:
            return [got.reply(what_joins_wait_for(request, created=self.run is not None))]
        if self.run is None:
            return [got.reply(m.Unknown(request, self.generation))]
        return self.run.requests.probe(got)

    def _heard_of_shard(self, got: Incoming[m.Have | m.HaveKeys | m.HaveRead | m.ShardHello]) -> list[Reply]:
        log_ends = self.run.shard.followed if self.run is not None else None
        refused = self.life.followers.hear(got.peer, got.message, self.generation, log_ends, got.now)
        over = [got.reply(m.Over())] if self.over else []
        if refused is not None:
            return [got.reply(refused), *over]
        return [*(self.run.heard_of_shard(got) if isinstance(self.run, Leading) else []), *over]

    def say_over(self) -> list[Reply]:
        """No other job will come: returns what tells the other shards, which are told again whenever they ask."""
        self.over = True
        return self.life.followers.say_over()

    def _hear_over(self, got: Incoming[m.Over]) -> list[Reply]:
        """Shard 0 ends: so does this task, whatever it has heard of the log."""
        if got.peer != LEADER:
            return [_not_for_a_ps(got)]
        self.over = True
        heard = self.heartbeat()
        return [heard] if heard is not None else []

    def begin_again(self) -> bool:
        """The job is over, and there may be another one: forgets it; returns whether there was one."""
        if self.run is None:
            return False
        run, self.run = self.run, None
        if isinstance(run, Leading):
            self.life.followers.job_is_over(run.generation, run.leader.log)
        run.discard()
        wall = self.life.clock.wall()
        self.life = replace(self.life, tally=Tally(wall), ending=Ending())
        return True

    def _stay(self, got: Incoming[m.Stay]) -> list[Reply]:
        self.staying.hear(got.message, got.now)
        return []

    def _status(self, got: Incoming[m.StatusRequest]) -> list[Reply]:
        self.rate_limit.count(got.peer)
        return [got.reply(m.Status(self.status(), got.message.request))]

    # -- time, disk, end ----------------------------------------------------------------------------------------------

    def tick(self, now: float, wall: float) -> list[Reply]:
        """Time has passed: deaths, checkpoints, the end of the job."""
        if self.run is None:
            return []
        if isinstance(self.run, Leading):
            self.run.requests.hear_bytes(self.moved_bytes, now)
        self.frozen += self.run.reads.frozen(self.moved_bytes, now)
        replies = self._guarded(lambda run: run.tick(now, wall), now, wall)
        if self._waiting and self.run.admits:
            replies += self._let_in(now, wall)
        return replies

    def process_ended(self, worker: int, incarnation: int, now: float, wall: float) -> list[Reply]:
        """The process of a worker on this host is gone."""
        self.pids.pop((worker, incarnation), None)
        self.staying.gone(worker)
        return self._guarded(lambda run: run.process_ended(worker, incarnation, now, wall), now, wall)

    def stop(self, now: float, wall: float) -> list[Reply]:
        """Ends the run: every worker is released with the news."""
        return self._guarded(lambda run: run.stop(wall), now, wall)

    def _guarded(self, act: Callable[[Leading | Following], list[Reply]], now: float, wall: float) -> list[Reply]:
        """Does something with the run, if there is one; an update that fails in it ends the run for everybody."""
        try:
            return act(self.run) if self.run is not None else []
        except (UpdateError, JournalError) as error:
            return self._break_off(error, now, wall)

    def heartbeat(self) -> Reply | None:
        """Returns what a shard other than 0 tells shard 0 now and then."""
        if self.life.me.index == 0:
            return None
        if self.run is None:  # of no creation: it follows no log, also not to the end of the one that it has forgotten
            return Reply(LEADER, self.life.me.shard_hello(0, 0, over=self.over))
        run = self.run
        return Reply(LEADER, self.life.me.shard_hello(self.generation, run.shard.followed, run.broken, over=self.over))

    @property
    def uncommitted(self) -> bool:
        """Whether replies have to wait for `commit`."""
        return self.run is not None and self.run.shard.uncommitted

    def commit(self) -> None:
        """Waits until the disk has the journal, and the ledger with it, where a run is to survive a loss of power."""
        if self.run is not None:
            self.run.commit()

    @property
    def ended(self) -> m.End | None:
        """Returns the end of the job, once it has come. May be called on any thread."""
        run = self.run  # which another thread may take away
        end = run.shard.ended if run is not None else None
        return end or (OVER if self.over else None)

    def status(self) -> dict[str, Any]:
        """Returns the state of the run for people and reports."""
        me = self.life.me
        body: dict[str, Any] = {
            "task": str(me.task),
            "ready": self.run is not None,
            "ps": me.cluster.num_tasks("ps"),
            "workers": me.cluster.num_tasks("worker"),
            "turned_away": self.turned_away(),
            "leader": me.cluster.address(TaskId("ps", 0)),
        }
        return {**body, **self.run.status()} if isinstance(self.run, Leading) else body

    def close(self) -> None:
        """Finishes what the saver writes, and releases memory and files."""
        if self.run is not None:
            self.run.give_up()
        self.life.saver.close()
        if self.run is not None:
            self.run.close()


def _not_for_a_ps(got: Incoming[Any]) -> Reply:
    return got.reply(m.Fault("wire", f"{type(got.message).__name__} is not for a ps task"))
