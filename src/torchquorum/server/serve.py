"""The thread of a ps task: receives, hands to the service, sends what it answers, until the job ends.

Everything that is concurrent or timed about a ps is here. `serve` is called by `tq.join()` in a ps process, or runs as a
thread of a program that trains alone. What always holds: whoever is in the service has the turn; that is the ps thread,
or, for what comes on a lane with a thread of its own, that thread.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
import zmq

from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.cluster.secret import OPEN, Access
from torchquorum.cluster.signals import Signals
from torchquorum.errors import DeadlineError, RefusedError, TaskLostError
from torchquorum.formats.storage import locate, write_whole
from torchquorum.server.me import Me
from torchquorum.server.service import LEADER, Service
from torchquorum.server.shard import Reply
from torchquorum.server.update import warm_up
from torchquorum.transport import codec
from torchquorum.transport.channel import Channel, Listener, Peer
from torchquorum.transport.codec import Frame
from torchquorum.transport.door import DoorListener
from torchquorum.transport.lane_listener import Take
from torchquorum.transport.memory import host_id
from torchquorum.transport.zmq_channel import ZmqListener, bind_host, connector

TICK_S = 0.25
SAVING_TICK_S = 0.01
BOARD_TICK_S = 0.02
SAY_EVERY_S = 15.0
WAIT_FOR_CHIEF_S = 3600.0
FAREWELL_S = 3.0
LEADER_SILENCE_S = 30.0
TAKE_AT_ONCE = 64


def new_incarnation() -> int:
    """Returns a new random id for the life of a task."""
    return secrets.randbits(62)


class Server:
    """A ps task at work.

    Args:
        cluster: Who exists.
        index: Which ps this is.
        listen_fd: A listening socket made by the launcher, if any.
        access: Whom this task lets in, and the secret with which it talks to shard 0.
        say: Prints a line for people.
        report: Where shard 0 writes the report when the job ends.
        started_at: When the job was started, in seconds since the epoch.
        connect: How to reach shard 0, and how to listen; replaced where the network is not ZeroMQ.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        index: int,
        *,
        listener: Listener | None = None,
        leader: Channel | None = None,
        listen_fd: int | None = None,
        say: Callable[[str], None] = print,
        report: str | None = None,
        started_at: float | None = None,
        access: Access = OPEN,
    ) -> None:
        incarnation = new_incarnation()
        started = time.time() if started_at is None else started_at
        self.task = TaskId("ps", index)
        self._turn, self._ps_thread = threading.Lock(), threading.get_ident()
        self._failed: BaseException | None = None
        self._for_leader: deque[list[Frame]] = deque()
        self._listener = listener or _open(
            cluster.address(self.task), listen_fd, access, lambda line: say(f"{self.task}: {line}"), self._take
        )
        me = Me(
            cluster=cluster,
            index=index,
            incarnation=incarnation,
            host=host_id(),
            started_at=started,
            door=self._listener.name if isinstance(self._listener, DoorListener) else "",
            lane=self._listener.lane if isinstance(self._listener, DoorListener) else "",
        )
        self._leader = leader
        if index > 0 and leader is None:
            name = f"ps/{index}/{incarnation:016x}".encode()
            self._leader = connector(cluster, access)(cluster.address(TaskId("ps", 0)), name)
        self.service = Service(me, say)
        if isinstance(self._listener, DoorListener | ZmqListener):
            heard_of = self._listener
            self.service.turned_away = lambda: heard_of.turned_away
        self._say, self._report = say, report
        self._signals = Signals(lambda line: say(f"{self.task}: {line}"), "stopping the run")
        self._stopped = False
        self._watched: dict[int, tuple[int, int]] = {}
        self._poller = select.poll()
        self._held: list[Reply] = []

    def serve(self) -> bool:
        """Serves until the job ends.

        Returns:
            Whether it ended well.

        Raises:
            DeadlineError: The chief never came.
        """
        self._ps_thread = threading.get_ident()
        warm_up()
        self._signals.install()
        started = told = ticked = forgiven = time.monotonic()
        while self.service.ended is None:
            self._receive()
            now = time.monotonic()
            if now - ticked >= self._tick_s:
                ticked = now
                with self._turn:
                    self._tick(now)
                    if now - forgiven >= 1.0:
                        forgiven = now
                        self.service.strangers.forgive()
            self._check_leader(now)
            self._obey_signals()
            if self.service.shard is None and now - told >= SAY_EVERY_S:
                told = now
                self._wait_for_chief(now - started)
        end = self.service.ended
        self._farewell()
        if not end.ok:
            self._say(f"{self.task}: ended: {end.why}")
        return end.ok

    def close(self) -> None:
        """Gives sockets, memory and files up."""
        self._signals.remove()
        for fd in self._watched:
            os.close(fd)
        self._watched.clear()
        self._listener.close()  # first, and with it the threads of lanes: whoever is in the service comes out
        self.service.parts.saver.close()
        if self.service.ledger is not None:
            self.service.ledger.close()
        if self.service.shard is not None:
            self.service.shard.close()
        if self._leader is not None:
            self._leader.close()

    @property
    def _tick_s(self) -> float:
        if self.service.parts.saver.busy:
            return SAVING_TICK_S
        with self._turn:
            return BOARD_TICK_S if self.service.board is not None and self.service.board.is_open else TICK_S

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
        taken = 0
        while received is not None and self.service.ended is None:
            self._handle(*received)
            taken += 1
            received = self._listener.receive(0.0) if taken < TAKE_AT_ONCE else None
        with self._turn:
            self._send_held()
        self._after_others()

    def _handle(self, peer: Peer, frames: list[Frame]) -> None:
        with self._turn:
            self._send(self.service.handle(peer, frames, time.monotonic(), time.time()))

    def _take(self, peer: Peer, frames: list[Frame]) -> None:
        """Handles a message on a lane's own thread; what only the ps thread can do is left to that."""
        if torch.get_num_threads() > 1:
            torch.set_num_threads(1)  # of this thread and later ones: not so many for each lane
        try:
            self._handle(peer, frames)
        except BaseException as error:
            self._failed = error
        service = self.service
        left = self._failed or self._held or self._for_leader or service.strangers.unwanted
        if (left or service.ended is not None) and isinstance(self._listener, DoorListener):
            self._listener.ring()

    def _after_others(self) -> None:
        """Does what threads of lanes have left to this one."""
        self._send_to_leader()
        while self.service.strangers.unwanted:
            self._listener.hang_up(self.service.strangers.unwanted.pop())
        if self._failed is not None:
            raise self._failed

    def _send_to_leader(self) -> None:
        while self._for_leader and self._leader is not None:
            self._leader.send(self._for_leader.popleft())

    def _send(self, replies: list[Reply]) -> None:
        """Sends answers; in a run that is to survive a loss of power, once the disk has what they tell of."""
        journal = self.service.shard.journal if self.service.shard is not None else None
        if self._held or (journal is not None and journal.uncommitted):
            self._held += replies
        else:
            self._send_now(replies)

    def _send_held(self) -> None:
        """One wait for the disk serves all that was handled since the last."""
        if self._held:
            self.service.commit()
            held, self._held = self._held, []
            self._send_now(held)

    def _send_now(self, replies: list[Reply]) -> None:
        for reply in replies:
            frames = [codec.encode(reply.message), *reply.frames]
            if reply.peer == LEADER:
                self._for_leader.append(frames)
                if threading.get_ident() == self._ps_thread:
                    self._send_to_leader()
                continue
            try:
                sent = self._listener.send(reply.peer, frames)
            except zmq.ZMQError:
                continue  # the peer is gone
            if sent is not None and reply.slot is not None and self.service.shard is not None:
                self.service.shard.versions.sending(reply.slot, sent)

    def _tick(self, now: float) -> None:
        self._send(self.service.tick(now, time.time()))
        heartbeat = self.service.heartbeat()
        if heartbeat is not None:
            self._send([heartbeat])
        self._watch()
        for fd, _ in self._poller.poll(0):
            worker, incarnation = self._watched.pop(fd)
            self._poller.unregister(fd)
            os.close(fd)
            self._send(self.service.process_ended(worker, incarnation, now, time.time()))
        self._send_held()

    def _watch(self) -> None:
        """Watches the processes of workers on this host, so that a death is known at once."""
        for fd in [fd for fd, key in self._watched.items() if key not in self.service.pids]:
            self._poller.unregister(fd)
            del self._watched[fd]
            os.close(fd)
        watched = set(self._watched.values())
        for key, pid in list(self.service.pids.items()):
            if key in watched:
                continue
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._send(self.service.process_ended(*key, time.monotonic(), time.time()))
                continue
            except OSError:  # no file is left to watch it with: its beats are what says that it lives
                continue
            self._watched[fd] = key
            self._poller.register(fd, select.POLLIN)

    def _wait_for_chief(self, waited_s: float) -> None:
        chief = TaskId("worker", 0)
        where = self.service.me.cluster.address(chief)
        if waited_s > WAIT_FOR_CHIEF_S:
            raise DeadlineError(
                f"{self.task}: waited {waited_s:.0f} s for {chief} ({where}) to create the variables and gave up. "
                f"Start it with the same --ps_hosts and --worker_hosts, and check that it can reach this task."
            )
        self._say(f"{self.task}: waiting for {chief} ({where}) to create the variables: {waited_s:.0f} s")

    def _obey_signals(self) -> None:
        """Ctrl-C on a ps: the run is stopped, the chief saves, and the ps ends when all have left."""
        if self._signals.asked and not self._stopped:
            self._stopped = True
            if self.service.leader is None:
                raise KeyboardInterrupt
            with self._turn:
                self._send(self.service.stop(time.time()))
                self._send_held()

    def _check_leader(self, now: float) -> None:
        if self.service.refused:
            raise RefusedError(f"{self.task}: {self.service.refused}")
        heard = self.service.leader_heard_at
        if heard is not None and now - heard > LEADER_SILENCE_S:
            first = TaskId("ps", 0)
            raise TaskLostError(
                f"{self.task}: {first} ({self.service.me.cluster.address(first)}), which decides for all ps tasks, has not "
                f"answered for {now - heard:.0f} s. The job cannot go on; look at that task's output and start the job again."
            )

    def _farewell(self) -> None:
        """Answers a little longer, so that workers hear their Bye and shards the end of the log; then the report."""
        self._write_report()
        leader, deadline = self.service.leader, time.monotonic() + FAREWELL_S
        shards = self.service.me.cluster.num_tasks("ps")
        if leader is None or shards == 1:
            heartbeat = self.service.heartbeat()
            with self._turn:
                self._send([heartbeat] if heartbeat else [])
            return
        while leader.log and time.monotonic() < deadline:
            received = self._listener.receive(0.05)
            if received is not None:
                self._handle(*received)
                with self._turn:
                    self._send_held()

    def _write_report(self) -> None:
        if self.service.leader is None:
            return
        with self._turn:
            body = self.service.status()
        logdir = self.service.leader.plan.logdir
        for target in filter(None, (self._report, logdir and str(locate(logdir) / "report.json"))):
            try:
                write_whole(locate(target), json.dumps(body, indent=2) + "\n")
            except OSError as error:
                self._say(f"{self.task}: the report {target} could not be written: {error.strerror}")


def _open(address: str, listen_fd: int | None, access: Access, say: Callable[[str], None], take: Take) -> Listener:
    outside = ZmqListener(address, listen_fd, access=access, say=say)
    if sys.platform != "linux":  # pragma: no cover (other systems)
        return outside
    try:
        return DoorListener(outside, lanes=bind_host(address) if access.secret is None else None, take=take)
    except BaseException:
        outside.close()
        raise


def serve(
    cluster: ClusterSpec,
    index: int,
    *,
    listen_fd: int | None,
    say: Callable[[str], None],
    report: str | None,
    started_at: float | None,
    access: Access = OPEN,
) -> None:
    """Runs a ps task until the job ends.

    Raises:
        TaskLostError: The job ended badly.
    """
    server = Server(cluster, index, listen_fd=listen_fd, say=say, report=report, started_at=started_at, access=access)
    locked = ", for those who know the secret" if access.secret is not None else ""
    say(f"{server.task}: serving on {cluster.address(server.task)} (process {os.getpid()}){locked}")
    try:
        if not server.serve():
            raise TaskLostError(f"{server.task}: the job did not end well; see the lines above")
    finally:
        server.close()
