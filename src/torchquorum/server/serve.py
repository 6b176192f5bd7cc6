"""The thread of a ps task: receives, hands to the service, sends what it answers, until the job ends.

Everything that is concurrent or timed about a ps is here. `serve` is called by `tq.join()` in a ps process; `PsTask` also runs on
a thread of a program that trains alone. What always holds: one thread at a time is in the service, the one that holds the turn;
that is the ps thread, or, for a connection with a thread of its own, that thread. Time that the ps thread did not see does not count
(`SeenTime`): after a pause of this task nobody is taken for lost.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchquorum.clock import SYSTEM, Clock, SeenTime
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.cluster.secret import OPEN, Access
from torchquorum.cluster.signals import Signals
from torchquorum.errors import DeadlineError, InterruptedRunError, RefusedError, TaskLostError
from torchquorum.formats.storage import locate, write_whole
from torchquorum.memory.segments import host_id
from torchquorum.server.farewell import TURN_S, Farewell
from torchquorum.server.identity import Identity
from torchquorum.server.leading import Leading
from torchquorum.server.leading_reads import OVER_S
from torchquorum.server.outbox import Outbox
from torchquorum.server.processes import ProcessWatch
from torchquorum.server.reply import LEADER
from torchquorum.server.saver import Jobs, Saver
from torchquorum.server.service import OVER, Service
from torchquorum.update.updater import warm_up
from torchquorum.wire import transports
from torchquorum.wire.address import refuses
from torchquorum.wire.channel import Channel, Listener, Peer
from torchquorum.wire.codec import Frame
from torchquorum.wire.messages import End
from torchquorum.wire.transport import Listening

TICK_S = 0.25
SAVING_TICK_S = 0.01
FASTPATH_TICK_S = 0.02
SAY_EVERY_S = 15.0
WAIT_FOR_CHIEF_S = 3600.0
LEADER_SILENCE_S = 30.0  # of one whose host says that nobody listens there
LEADER_LOST_S = 1800.0  # of one that may only be paused, or cut off
COMPLETE_S = 4.0  # how long several optimizers may complete what a loop has begun, after a signal to a ps task
LEADER_DIAL_S = 5.0  # a connection on which it has been silent for so long is made anew
PAUSE_S = 1.0  # a longer turn of the loop was a pause of this task
RECEIVED_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How a ps task serves.

    Attributes:
        listen_fd: A listening socket made by the launcher, if any.
        access: Which tasks may connect, and the secret with which this one connects to shard 0.
        say: Prints a line for people.
        report: Where shard 0 writes the report when the job ends.
        started_at: When the job was started, in seconds since the epoch; by default now.
        clock: Tells the time.
        random_bits: Returns a random number of so many bits, for ids.
        jobs: Writes checkpoints; by default a thread.
        refuses: Whether nobody listens at an address, as its host says.
        make_service: Makes what answers messages; a replay has its own.
        alone: Whether the one worker is in this process, and nobody starts it again.
    """

    listen_fd: int | None = None
    access: Access = OPEN
    say: Callable[[str], None] = print
    report: str | None = None
    started_at: float | None = None
    clock: Clock = SYSTEM
    random_bits: Callable[[int], int] = secrets.randbits
    jobs: Jobs | None = None
    refuses: Callable[[str], bool] = refuses
    make_service: Callable[[Identity, Callable[[str], None], Clock, Saver], Service] = Service
    alone: bool = False


class PsTask:
    """A ps task at work.

    Args:
        cluster: The cluster.
        index: Which ps this is.
        options: How it serves.
        listener: Where messages come in; by default the cluster's address of this task.
        leader: The connection to shard 0; by default made where there is one.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        index: int,
        options: ServeOptions | None = None,
        *,
        listener: Listener | None = None,
        leader: Channel | None = None,
    ) -> None:
        self._options = options = options or ServeOptions()
        self._clock, self._say = options.clock, options.say
        self._seen = SeenTime(options.clock, PAUSE_S)
        self._leader_asked_at = -math.inf
        incarnation = options.random_bits(62)
        self.task = TaskId("ps", index)
        self._turn = threading.Lock()
        self._failed: BaseException | None = None
        self._end: End | None = None
        self._listener = listener or transports.listen(
            Listening(
                address=cluster.address(self.task),
                listen_fd=options.listen_fd,
                access=options.access,
                readers=True,
                take=self._take,
                say=self._announce,
                clock=self._clock,
            )
        )
        me = Identity(
            cluster=cluster,
            index=index,
            incarnation=incarnation,
            host=host_id(),
            started_at=self._clock.wall() if options.started_at is None else options.started_at,
            ways=tuple(self._listener.ways),
            alone=options.alone,
        )
        self._leader = leader
        if index > 0 and leader is None and options.make_service is Service:
            name = f"ps/{index}/{incarnation:016x}".encode()
            dial = transports.connector(cluster, options.access, self._clock, silence_s=LEADER_DIAL_S)
            self._leader = dial(cluster.address(TaskId("ps", 0)), name)
        self.service = options.make_service(me, self._say, self._clock, Saver(self._clock, options.jobs))
        self.service.turned_away = lambda: self._listener.turned_away
        self.service.moved_bytes = self._listener.moved_bytes
        self.service.life.followers.refuses = options.refuses
        self._outbox = Outbox(self.service, self._listener, self._leader)
        self._signals = Signals(self._announce, "stopping the run")
        self._stopped = self._between_jobs = self._led = False
        self._stops_at = 0.0
        self._farewell_to = Farewell(
            cluster, options.refuses, self._announce, self._answer, hurried=lambda: self._signals.asked
        )
        self.processes = ProcessWatch(self.service.pids)

    def _announce(self, line: str) -> None:
        self._say(f"{self.task}: {line}")

    @property
    def ended(self) -> End | None:
        """Returns the end of the job, once it has come."""
        return self._end or self.service.ended

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being made. May be called on any thread."""
        run = self.service.run
        return isinstance(run, Leading) and run.checkpoints.busy

    @property
    def interrupted(self) -> bool:
        """Whether a signal has asked this task to end the run."""
        return self._signals.asked

    def end(self, why: str) -> None:
        """Ends this task, as if its process were killed. May be called on any thread."""
        self._end = End(False, why)

    def serve(self) -> bool:
        """Serves until the job ends.

        Returns:
            Whether it ended well.

        Raises:
            DeadlineError: The chief never came.
        """
        self._outbox.begin()
        warm_up()
        self._signals.install()
        last, end = None, self._serve_job(None)
        while end.ok and end is not last and self._end is None and self._begin_again():
            last, end = end, self._serve_job(end)
        if end.ok and self._led and self._end is None:
            self._dismiss()
        if not end.ok and self.service.failure is None and not self._options.alone:
            self._announce(f"ended: {end.why}")
        return end.ok

    def _begin_again(self) -> bool:
        """The job is over: whether there may be another, as the programs of workers go on. For all ps tasks shard 0 knows."""
        with self._turn:
            if self._leader is not None:
                return not self.service.over and self.service.begin_again()
            return self.service.staying.somebody(self._seen.now()) and self.service.begin_again()

    def _serve_job(self, before: End | None) -> End:
        """Serves until a job ends; after another one, until no worker's program is left that could begin one."""
        self._between_jobs = before is not None
        started = said = ticked = counted = self._seen.turn()
        while self.ended is None:
            self._receive()
            now = self._seen.turn()
            if now - ticked >= self._tick_s:
                ticked = now
                with self._turn:
                    self._tick(now)
                    if now - counted >= 1.0:
                        counted = now
                        self.service.rate_limit.reset()
            self._obey_signals()
            if self.service.run is None and before is not None and (self._signals.asked or self._is_over(now)):
                return before
            self._check_leader(now)
            if self.service.run is None and before is not None:
                continue
            if self.service.run is None and now - said >= SAY_EVERY_S:
                said = now
                self._wait_for_chief(now - started)
        end = self.ended
        if end is OVER and before is None:
            self._announce("the job is over: /job:ps/task:0 has ended it")
        if self._end is None:
            self._farewell()
        return end

    def _is_over(self, now: float) -> bool:
        """Between two jobs: whether no other will come, because no worker's program goes on. Shard 0 says so to the others.

        If it has gone, the last job is over all the same.
        """
        if self._leader is not None:
            heard = self.service.shard_0.heard_at
            if heard is None or now - heard <= LEADER_SILENCE_S:
                return False
        return not self.service.staying.somebody(now)

    def close(self) -> None:
        """Closes sockets and files, and releases memory."""
        self._signals.remove()
        self.processes.close()
        self._listener.close()  # first, and with it the threads of connections: none is in the service after this
        self.service.close()
        if self._leader is not None:
            self._leader.close()

    @property
    def _tick_s(self) -> float:
        if self.service.life.saver.busy:
            return SAVING_TICK_S
        with self._turn:
            run = self.service.run
            return FASTPATH_TICK_S if run is not None and run.fastpath_is_open else TICK_S

    # -- messages -----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Waits for a message, then takes all that are there before it looks at the clock again."""
        timeout_s = self._tick_s
        if self._leader is None:
            received = self._listener.receive(timeout_s)
        else:
            self._listener.wait([self._leader], timeout_s)
            while (frames := self._leader.receive(0.0)) is not None:
                self._handle(LEADER, frames)
            received = self._listener.receive(0.0)
        count = 0
        while received is not None and self.ended is None:
            self._handle(*received)
            count += 1
            received = self._listener.receive(0.0) if count < RECEIVED_AT_ONCE else None
        with self._turn:
            self._outbox.commit()
        self._after_others()

    def _handle(self, peer: Peer, frames: list[Frame]) -> None:
        with self._turn:
            self._outbox.send(self.service.handle(peer, frames, self._seen.now(), self._clock.wall()))

    def _take(self, peer: Peer, frames: list[Frame]) -> None:
        """Handles a message on a connection's own thread; what only the ps thread can do is left to that."""
        if torch.get_num_threads() > 1:
            torch.set_num_threads(1)  # of this thread and later ones: not as many for each connection
        try:
            self._handle(peer, frames)
        except BaseException as error:
            self._failed = error
        left = self._failed or self._outbox.waiting or self.service.rate_limit.exceeded
        if left or self.ended is not None:
            self._listener.wake()

    def _after_others(self) -> None:
        """Does what the threads of connections have left to this one."""
        self._outbox.send_to_leader()
        while self.service.rate_limit.exceeded:
            self._listener.hang_up(self.service.rate_limit.exceeded.pop())
        while self.service.frozen:
            self._listener.hang_up(self.service.frozen.pop())
        if self._failed is not None:
            raise self._failed

    # -- time ---------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        wall = self._clock.wall()
        if self.service.run is not None:
            self._seen.most_s = min(PAUSE_S, self.service.run.plan.liveness_s / 2)
        self._outbox.send(self.service.tick(now, wall))
        self._send_heartbeat()
        for worker, incarnation in self.processes.ended():
            self._outbox.send(self.service.process_ended(worker, incarnation, now, wall))
        self._outbox.commit()

    def _send_heartbeat(self) -> None:
        heartbeat = self.service.heartbeat()
        if heartbeat is not None:
            self._outbox.send([heartbeat])

    def _wait_for_chief(self, waited_s: float) -> None:
        chief = TaskId("worker", 0)
        where = self.service.life.me.cluster.address(chief)
        if waited_s > WAIT_FOR_CHIEF_S:
            raise DeadlineError(
                f"{self.task}: waited {waited_s:.0f} s for {chief} ({where}) to create the variables and gave up. "
                f"Start it with the same --ps_hosts and --worker_hosts, and check that it can reach this task."
            )
        self._announce(f"waiting for {chief} ({where}) to create the variables: {waited_s:.0f} s")

    def _obey_signals(self) -> None:
        """Ctrl-C on a ps: the run is stopped, the chief saves, and the ps ends when all have left."""
        if self._signals.asked and not self._stopped:
            self._stopped = True
            if not isinstance(self.service.run, Leading):
                if self._between_jobs:
                    return
                raise KeyboardInterrupt
            if self.service.run.plan.more and not self.service.run.leader.quorum.stopped:
                # Of several optimizers: a chief that was asked too ends the run where its loop has stepped them all.
                self._stops_at = self._stops_at or self._clock.now() + COMPLETE_S
                if self._clock.now() < self._stops_at:
                    self._stopped = False
                    return
            with self._turn:
                self.service.life.ending.hurried_at = self._seen.now()
                self._outbox.send(self.service.stop(self._clock.now(), self._clock.wall()))
                self._outbox.commit()

    def _check_leader(self, now: float) -> None:
        if self.service.shard_0.refuses:
            raise RefusedError(f"{self.task}: {self.service.shard_0.refuses}")
        if self._leader is not None and self.service.run is not None and self.service.shard_0.heard_at is None:
            self.service.shard_0.heard_at = now  # a run has begun, and shard 0 has yet to say its first word
        heard = self.service.shard_0.heard_at
        if heard is None or now - heard <= LEADER_SILENCE_S or now - self._leader_asked_at < SAY_EVERY_S:
            return
        # It is silent. One that is paused or cut off may come back; one whose host says that nobody listens is gone.
        self._leader_asked_at = now
        first = TaskId("ps", 0)
        address = self.service.life.me.cluster.address(first)
        who = f"{first} ({address}), which decides for all ps tasks, has not answered for {now - heard:.0f} s"
        if now - heard > LEADER_LOST_S or self._options.refuses(address):
            raise TaskLostError(
                f"{self.task}: {who}. The job cannot go on; look at that task's output and start the job again."
            )
        self._announce(f"{who}; waiting for it")

    # -- the end ------------------------------------------------------------------------------------------------------

    def _farewell(self) -> None:
        """Writes the report, then answers a little longer: workers get their Bye and shards the end of the log."""
        run = self.service.run
        if not isinstance(run, Leading):
            with self._turn:
                self._send_heartbeat()
            return
        self._led = True
        self._write_report(run)
        self._farewell_to.wait(lambda: run.leader.log.behind() - self.service.life.followers.elsewhere)
        self._let_readers_end(run)

    def _let_readers_end(self, run: Leading) -> None:
        """Gives readers that ask now and then a moment to take the last version."""
        began = now = self._seen.turn()
        with self._turn:
            self._outbox.send(run.reads.say_over())
        while run.reads.owing(now) and now - began < OVER_S and not self._signals.asked:
            now = self._answer(TURN_S)

    def _dismiss(self) -> None:
        """No other job will come: the other ps tasks end with this one."""
        with self._turn:
            self._outbox.send(self.service.say_over())
        others = set(range(1, self.service.life.me.cluster.num_tasks("ps")))
        self._farewell_to.wait(lambda: others - self.service.life.followers.left)

    def _answer(self, timeout_s: float) -> float:
        """Answers the next message, if one comes in time; returns the time."""
        received = self._listener.receive(timeout_s)
        if received is not None:
            self._handle(*received)
            with self._turn:
                self._outbox.commit()
        return self._seen.turn()

    def _write_report(self, run: Leading) -> None:
        with self._turn:
            body = self.service.status()
        logdir = run.plan.logdir
        for target in filter(None, (self._options.report, logdir and str(locate(logdir) / "report.json"))):
            try:
                write_whole(locate(target), json.dumps(body, indent=2) + "\n")
            except OSError as error:
                self._announce(f"the report {target} could not be written: {error.strerror}")


def serve(cluster: ClusterSpec, index: int, options: ServeOptions) -> None:
    """Runs a ps task until the job ends.

    Raises:
        TaskLostError: The job ended badly.
        InterruptedRunError: It ended well, because a signal had asked this task to end it.
    """
    ps = PsTask(cluster, index, options)
    locked = ", for those who know the secret" if options.access.secret is not None else ""
    options.say(f"{ps.task}: serving on {cluster.address(ps.task)} (process {os.getpid()}){locked}")
    try:
        if not ps.serve():
            raise TaskLostError(f"{ps.task}: the job did not end well; see the lines above")
        if ps.interrupted:
            raise InterruptedRunError(f"{ps.task}: the run was stopped by a signal to this task")
    finally:
        ps.close()
