"""The client's thread: it finds compute tasks, hands them the graph and batches, and notices who is gone.

Started by `tq.GraphSession`, which it shares a condition with; it alone touches the sockets and the books
(`torchquorum.session.assignments`). What always holds: every task is asked how it is doing four times a second; whatever
was lost on the way is sent again; a task that is silent for `liveness_s`, or whose process has ended, is given up; from
`finish` on nobody new is taken into the run, and who comes is told that it is over.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.cluster.secret import OPEN, Access
from torchquorum.errors import TorchQuorumError
from torchquorum.session.assignments import Assignments, GivenBatch
from torchquorum.transport import codec
from torchquorum.transport import graph_messages as g
from torchquorum.transport import messages as m
from torchquorum.transport.codec import Frame, WireError
from torchquorum.transport.memory import host_id
from torchquorum.transport.zmq_channel import ZmqChannel, connector

ASK_S = 0.25
FETCH_AGAIN_S = 1.0
BUSY_S = 8.0


@dataclass(slots=True)
class Trouble:
    """Why a task cannot compute for us, and since when it says so."""

    kind: str
    text: str
    since: float


@dataclass(slots=True)
class Question:
    """Something that one task is to answer: a Fetch, or a SaveNow."""

    message: Any
    index: int = -1
    asked_at: float = 0.0
    answer: Any = None
    frames: tuple[Frame, ...] = ()


class Contact:
    """The connection to one compute task, and what is known of it."""

    def __init__(self, task: TaskId, address: str, channel: ZmqChannel) -> None:
        self.task, self.address, self.channel = task, address, channel
        self.life = ""
        self.state = "absent"
        self.text = "has not answered yet"
        self.device = "cpu"
        self.heard_at = 0.0
        self.stamp = 0.0
        self.pidfd: int | None = None
        self.finished = False

    def watch(self, pid: int) -> None:
        """Watches the task's process, which is on this host."""
        self.unwatch()
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError:
            self.pidfd = None

    def ended(self) -> bool:
        """Whether the task's process, if it is on this host, has ended."""
        return self.pidfd is not None and bool(select.select([self.pidfd], [], [], 0)[0])

    def unwatch(self) -> None:
        """Stops watching."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    @property
    def place(self) -> str:
        """Returns where its batches are computed, as placement logs write it."""
        kind, _, index = self.device.partition(":")
        return f"{self.task}/device:{kind.upper()}:{index or 0}"

    def __str__(self) -> str:
        return f"{self.task} ({self.address}) {self.text}"


class Dispatcher:
    """The thread and what it shares: take `changed` before looking at anything here.

    Args:
        cluster: Who exists.
        train: What every compute task is told; frames follow it.
        frames: The values of the graph's buffers and constants.
        books: The assignments; nobody else touches them without `changed`.
        liveness_s: A task that is silent for longer is given up.
        say: Prints a line for people.
        access: The cluster's secret, if it has one.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        train: g.Train,
        frames: list[Frame],
        books: Assignments,
        *,
        liveness_s: float,
        say: Callable[[str], None],
        access: Access = OPEN,
    ) -> None:
        self._run, self._client, self._say = train.run, train.client, say
        self._train = [codec.encode(train), *frames]
        self.books, self._liveness_s = books, liveness_s
        self.changed = threading.Condition()
        connect = connector(cluster, access)
        self.contacts = [
            Contact(task, there, connect(there, f"client/{secrets.token_hex(8)}".encode()))
            for task in cluster.tasks("worker")
            for there in [cluster.address(task)]
        ]
        first = cluster.tasks("ps")[0]
        self._leader = connect(cluster.address(first), f"watch/{secrets.token_hex(8)}".encode())
        self._host = host_id()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._finish: g.Finish | None = None
        self._told_all = False
        self.questions: list[Question] = []
        self.troubles: dict[int, Trouble] = {}
        self.stop = False
        self.version = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="torchquorum-dispatcher", daemon=True)

    # -- for the client's own thread ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def wake(self) -> None:
        """There is something new to do."""
        os.eventfd_write(self._wake, 1)

    def finish(self, *, ok: bool) -> None:
        """Tells all tasks that there will be no more batches."""
        self._finish = g.Finish(self._run, ok, False)
        self.wake()

    def close(self) -> None:
        """Ends the thread and closes what it used."""
        self._closing = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)
        for contact in self.contacts:
            contact.unwatch()
            contact.channel.close()
        self._leader.close()
        os.close(self._wake)

    @property
    def ready(self) -> list[int]:
        """Returns the tasks that compute, by index."""
        return sorted(self.books.helpers)

    @property
    def all_left(self) -> bool:
        """Whether everybody has been told that it is over, and nobody is in the run any more."""
        return self._told_all and all(
            c.finished or not c.life or c.state in ("attached", "refused") for c in self.contacts
        )

    def hopeless(self, now: float) -> str:
        """Returns why no task can compute for us, or nothing; one that is busy with a client that is gone becomes free."""
        sure = [t.text for t in self.troubles.values() if t.kind != "busy" or now - t.since > BUSY_S]
        return "; ".join(sure) if len(sure) == len(self.contacts) else ""

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = zmq.Poller()
        channels = {c.channel.socket: c for c in self.contacts}
        for socket in (*channels, self._leader.socket, self._wake):
            poller.register(socket, zmq.POLLIN)
        asked_at = 0.0
        try:
            while not self._closing:
                ready = dict(poller.poll(int(ASK_S * 1000 / 2)))
                with self.changed:
                    if self._wake in ready:
                        os.eventfd_read(self._wake)
                    for socket, contact in channels.items():
                        if socket in ready:
                            self._hear(contact)
                    if self._leader.socket in ready:
                        self._hear_leader()
                    now = time.monotonic()
                    if now - asked_at >= ASK_S:
                        asked_at = now
                        self._look_after(now)
                    self._give()
                    self._put_questions(now)
                    self.changed.notify_all()
        except BaseException as error:  # shown by the client's thread, which waits for us
            with self.changed:
                self.failure = error
                self.changed.notify_all()

    def _look_after(self, now: float) -> None:
        """Asks every task how it is, and ps 0 about the gradients of those that are gone."""
        for contact in self.contacts:
            if contact.ended():
                self._lose(contact, "its process has ended")
            elif contact.life and now - contact.heard_at > self._liveness_s:
                self._lose(contact, f"not heard of for {now - contact.heard_at:.1f} s")
            if not contact.life:
                if self._finish is None:
                    contact.channel.send([codec.encode(g.Attach(m.PROTOCOL, self._client, m.PACKAGE))])
                continue
            helper = self.books.helpers.get(contact.task.index)
            awaiting = [b.number for b in helper.queue] if helper else []
            contact.channel.send([codec.encode(g.Ask(self._run, awaiting, contact.stamp))])
            if self._finish is not None and not contact.finished:
                # The first that still lives ends the run for everybody.
                first = next((c for c in self.contacts if c.state in ("ready", "finishing")), contact)
                order = g.Finish(self._run, self._finish.ok, contact is first)
                contact.channel.send([codec.encode(order)])
        self._told_all = self._finish is not None
        recall = self.books.to_recall()
        if recall is not None:
            helper, batch = recall
            self.contacts[helper.index].channel.send([codec.encode(g.Recall(self._run, batch.number))])
        for doubt in self.books.doubts:
            question = m.FateOf(doubt.worker, doubt.incarnation, doubt.local_step)
            self._leader.send([codec.encode(question)])

    def _lose(self, contact: Contact, why: str) -> None:
        lost = self.books.lost(contact.task.index)
        if contact.state in ("ready", "joining", "loading") and self._finish is None:
            what = f"; asking what became of its {len(lost)} batches" if lost else ""
            self._say(f"{contact.task} ({contact.address}) is lost: {why}{what}")
        contact.finished = contact.finished or self._finish is not None
        contact.unwatch()
        told = self.troubles.get(contact.task.index)
        contact.life, contact.state = "", "absent"
        contact.text = f"says: {told.text}" if told is not None else f"is lost: {why}"
        for question in self.questions:
            if question.index == contact.task.index:
                question.index = -1

    def _hear(self, contact: Contact) -> None:
        while (received := contact.channel.receive(0.0)) is not None:
            contact.heard_at = time.monotonic()
            try:
                message, frames = g.split(received)
                self._take(contact, message, frames)
            except TorchQuorumError as error:
                self._trouble(contact, "wire", f"{contact.task} ({contact.address}) answers strangely: {error}")

    def _take(self, contact: Contact, message: g.AnyGraphMessage, frames: list[Frame]) -> None:
        index = contact.task.index
        match message:
            case g.Attached():
                self._attached(contact, message)
            case g.State() if message.life == contact.life:
                self._take_state(contact, message)
            case g.Done() if message.run == self._run and message.life == contact.life:
                self.stop = self.stop or message.stop
                self.version = max(self.version, message.version)
                self.books.done(index, message)
            case g.Failed() if message.run == self._run and message.life == contact.life:
                self.books.failed(index, message.number, message.text)
            case g.Recalled() if message.run == self._run and message.life == contact.life:
                self.books.recalled(index, message.number)
            case g.Fetched() | g.Saved() if message.run == self._run:
                for question in self.questions:
                    if question.message.number == message.number:
                        question.answer, question.frames = message, tuple(frames)
            case g.Finished() if message.run == self._run:
                contact.finished = True
            case m.Fault():
                self._trouble(contact, message.kind, message.text)
            case _:
                pass

    def _trouble(self, contact: Contact, kind: str, text: str) -> None:
        since = self.troubles[contact.task.index].since if contact.task.index in self.troubles else time.monotonic()
        self.troubles[contact.task.index] = Trouble(kind, text, since)
        contact.text = f"says: {text}"
        if kind.startswith("train/"):
            contact.state = "refused"
        contact.finished = contact.finished or kind == "failed"

    def _attached(self, contact: Contact, message: g.Attached) -> None:
        if TaskId.parse(message.task) != contact.task:
            text = (
                f"at {contact.address} there is {message.task}, not {contact.task}; give every task and the client the "
                "same --worker_hosts, in the same order"
            )
            self._trouble(contact, "task", text)
            return
        if self._finish is not None:  # it was absent so far, and an earlier Attach has reached it
            contact.channel.send([codec.encode(g.Finish(self._run, self._finish.ok, False))])
            return
        contact.life, contact.state, contact.device = message.life, "attached", message.device
        contact.finished, contact.stamp = False, 0.0
        contact.text = "is there"
        if message.host == self._host and self._host:
            contact.watch(message.pid)
        self._send_graph(contact)

    def _send_graph(self, contact: Contact) -> None:
        if self._finish is None:
            contact.channel.send(self._train)

    def _take_state(self, contact: Contact, state: g.State) -> None:
        index = contact.task.index
        contact.stamp = state.stamp
        if state.run != self._run:
            if contact.state in ("ready", "finishing"):
                self._lose(contact, "it has forgotten the run")
            elif contact.state == "attached":
                self._send_graph(contact)
            elif contact.state != "refused":
                contact.state = "attached"  # it could not join, and what it said about that was lost
            return
        contact.text = f"is {state.state}" + (f": {state.text}" if state.text and state.state != "ready" else "")
        self.stop = self.stop or state.stop
        self.version = max(self.version, state.version)
        helper = self.books.helpers.get(index)
        if helper is not None and helper.incarnation != state.incarnation:
            self.books.lost(index)  # it joined again in a new life
            helper = None
        if state.state in ("finished", "finishing", "failed") and self._finish is None:
            self._lose(contact, f"it {state.text}")
            return
        contact.state = state.state
        contact.finished = contact.finished or state.state == "finished"
        if state.state != "ready":
            return
        self.troubles.pop(index, None)
        if helper is None:
            self.books.ready(index, state.incarnation, state.local_step, contact.place, busy_with=state.doing)
            self._say(f"{contact.task} ({contact.address}) is ready at global step {state.version}")
            return
        helper.held = {state.doing: state.held} if state.held else {}
        helper.loss, helper.version = state.loss, state.version
        if not helper.queue and state.doing < 0:
            helper.local_step = state.local_step
        for batch in helper.queue:
            if batch.number in state.unknown:
                self._send_batch(contact, batch)

    def _hear_leader(self) -> None:
        while (received := self._leader.receive(0.0)) is not None:
            try:
                answer, _ = codec.split(received)
            except WireError:
                continue
            if not isinstance(answer, m.Fate):
                continue
            for doubt in list(self.books.doubts):
                if (doubt.worker, doubt.incarnation, doubt.local_step) == (
                    answer.worker,
                    answer.incarnation,
                    answer.local_step,
                ):
                    self.books.settle(doubt, answer.state, answer.reason, answer.met, answer.loss)

    def _give(self) -> None:
        while (given := self.books.next()) is not None:
            helper, batch = given
            self._send_batch(self.contacts[helper.index], batch)

    def _send_batch(self, contact: Contact, batch: GivenBatch) -> None:
        message = g.Batch(self._run, batch.number, batch.seed, batch.specs)
        contact.channel.send([codec.encode(message), *batch.frames])

    def _put_questions(self, now: float) -> None:
        """Puts open questions to a task that can answer at once, if there is one, and again if no answer comes."""
        for question in self.questions:
            if question.answer is not None or (now - question.asked_at < FETCH_AGAIN_S and question.index >= 0):
                continue
            helpers = [self.books.helpers[i] for i in self.ready]
            if not helpers:
                continue
            if question.index not in self.books.helpers:
                first = helpers[0]
                buffers = isinstance(question.message, g.Fetch) and question.message.what == "buffers"
                idle = first if buffers else next((h for h in helpers if not h.queue), first)
                question.index = idle.index
            question.asked_at = now
            self.contacts[question.index].channel.send([codec.encode(question.message)])
