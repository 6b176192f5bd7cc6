"""The client's thread: it finds compute tasks, sends them the graph and batches, and notices which are gone.

Started by `tq.graph.GraphSession`; it shares a `GraphRun` with it, and alone uses the sockets. What always holds: every task is asked how
it is doing four times a second; what was lost on the way is sent again; a task that is silent for `liveness_s`, or whose process
has ended, is given up; from `finish` on no new task is taken into the run, and one that comes is told that it is over.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress

from torchquorum.clock import SYSTEM, Clock, SeenTime
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.errors import TorchQuorumError
from torchquorum.graph import graph_messages as g
from torchquorum.graph.assignments import GivenBatch
from torchquorum.graph.contact import Contact
from torchquorum.graph.graph_run import ContactTrouble, GraphRun, Question
from torchquorum.memory.segments import host_id
from torchquorum.wire import codec
from torchquorum.wire import messages as m
from torchquorum.wire.channel import Channel, Descriptor, wait_for_any
from torchquorum.wire.codec import Frame, WireError

ASK_S = 0.25
FETCH_AGAIN_S = 1.0
Connect = Callable[[str, bytes], Channel]


def connect_tasks(cluster: ClusterSpec, connect: Connect) -> list[Contact]:
    """Connects to all compute tasks of a cluster."""
    return [
        Contact(task, there, connect(there, f"client/{secrets.token_hex(8)}".encode()))
        for task in cluster.tasks("worker")
        for there in [cluster.address(task)]
    ]


def connect_leader(cluster: ClusterSpec, connect: Connect) -> Channel:
    """Connects to ps task 0, which knows what became of gradients."""
    return connect(cluster.address(cluster.tasks("ps")[0]), f"watch/{secrets.token_hex(8)}".encode())


class Dispatcher:
    """The thread that talks to the tasks.

    Args:
        run: What it shares with the user's thread.
        train: What every compute task is sent; frames follow it.
        frames: The values of the graph's buffers and constants.
        leader: The connection to ps task 0.
        liveness_s: A task that is silent for longer is given up.
        say: Prints a line for people.
        clock: Tells the time.
    """

    def __init__(
        self,
        run: GraphRun,
        train: g.Train,
        frames: list[Frame],
        leader: Channel,
        *,
        liveness_s: float,
        say: Callable[[str], None],
        clock: Clock = SYSTEM,
    ) -> None:
        self.run, self._client, self._say, self._clock = run, train.client, say, clock
        self._seen = SeenTime(
            clock, min(4 * ASK_S, liveness_s / 2)
        )  # a pause of this client is no silence of the tasks
        self._train = [codec.encode(train), *frames]
        self._leader, self._liveness_s = leader, liveness_s
        self._host = host_id()
        self._closing = False
        self._finish: g.Finish | None = None
        self._thread = threading.Thread(target=self._serve, name="torchquorum-dispatcher", daemon=True)

    # -- for the user's thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def finish(self, *, ok: bool) -> None:
        """Tells all tasks that there will be no more batches."""
        self._finish = g.Finish(self.run.id, ok, False)
        self.run.wake()

    def close(self) -> None:
        """Ends the thread and closes what it used."""
        self._closing = True
        self.run.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)
        for contact in self.run.contacts:
            contact.close()
        self._leader.close()
        os.close(self.run.wake_fd)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        run = self.run
        sources = [*(c.channel for c in run.contacts), self._leader, Descriptor(run.wake_fd)]
        asked_at = 0.0
        try:
            while not self._closing:
                wait_for_any(sources, ASK_S / 2)
                with run.changed:
                    # First what has come, then what is due, then what became possible by it.
                    with suppress(BlockingIOError):
                        os.eventfd_read(run.wake_fd)
                    for contact in run.contacts:
                        self._receive(contact)
                    self._receive_fates()
                    now = self._seen.turn()
                    if now - asked_at >= ASK_S:
                        asked_at = now
                        self._look_after(now)
                    self._assign()
                    self._put_questions(now)
                    run.changed.notify_all()
        except BaseException as error:  # raised by the user's thread, which waits for this one
            with run.changed:
                run.failure = error
                run.changed.notify_all()

    def _look_after(self, now: float) -> None:
        """Asks every task how it is, and ps 0 about the gradients of tasks that are lost."""
        run, assignments = self.run, self.run.assignments
        for contact in run.contacts:
            if contact.ended():
                self._lose(contact, "its process has ended")
            elif contact.life and now - contact.heard_at > self._liveness_s:
                self._lose(contact, f"not heard of for {now - contact.heard_at:.1f} s")
            if not contact.life:
                if self._finish is None:
                    contact.send(g.Attach(m.PROTOCOL, self._client, m.PACKAGE))
                continue
            assignee = assignments.assignees.get(contact.task.index)
            contact.send(g.Ask(run.id, [b.number for b in assignee.queue] if assignee else [], contact.stamp))
            if self._finish is not None and not contact.finished:
                # The first that is still alive ends the run for all workers.
                first = next((c for c in run.contacts if c.state in ("ready", "finishing")), contact)
                contact.send(g.Finish(run.id, self._finish.ok, contact is first))
        run.told_all = self._finish is not None
        if (recall := assignments.to_recall()) is not None:
            run.contacts[recall[0].index].send(g.Recall(run.id, recall[1].number))
        for doubt in assignments.doubts:
            self._leader.send([codec.encode(m.FateOf(doubt.worker, doubt.incarnation, doubt.local_step))])

    def _lose(self, contact: Contact, why: str) -> None:
        run, index = self.run, contact.task.index
        lost = run.assignments.lost(index)
        if contact.state in ("ready", "joining", "loading") and self._finish is None:
            what = f"; asking what became of its {len(lost)} batches" if lost else ""
            self._say(f"{contact.task} ({contact.address}) is lost: {why}{what}")
        contact.finished = contact.finished or self._finish is not None
        contact.unwatch()
        trouble = run.troubles.get(index)
        contact.life, contact.state = "", "absent"
        contact.text = f"says: {trouble.text}" if trouble is not None else f"is lost: {why}"
        for question in run.questions:
            if question.index == index:
                question.index = -1

    # -- what compute tasks send --------------------------------------------------------------------------------------

    def _receive(self, contact: Contact) -> None:
        while (received := contact.channel.receive(0.0)) is not None:
            contact.heard_at = self._seen.now()
            try:
                message, frames = g.split(received)
                self._handle(contact, message, frames)
            except TorchQuorumError as error:
                text = f"{contact.task} ({contact.address}) sends what cannot be understood: {error}"
                self._note_trouble(contact, "wire", text)

    def _handle(self, contact: Contact, message: g.AnyGraphMessage, frames: list[Frame]) -> None:
        run, index = self.run, contact.task.index
        match message:
            case g.Attached():
                self._attach(contact, message)
            case g.State() if message.life == contact.life:
                self._take_state(contact, message)
            case g.Done() if message.run == run.id and message.life == contact.life:
                run.stop = run.stop or message.step.stop
                run.version = max(run.version, message.step.version)
                run.assignments.done(index, message)
            case g.Failed() if message.run == run.id and message.life == contact.life:
                run.assignments.failed(index, message.number, message.text)
            case g.Recalled() if message.run == run.id and message.life == contact.life:
                run.assignments.recalled(index, message.number)
            case g.Fetched() | g.Saved() if message.run == run.id:
                for question in run.questions:
                    if question.message.number == message.number:
                        question.answer, question.frames = message, tuple(frames)
            case g.Finished() if message.run == run.id:
                contact.finished = True
            case m.Fault():
                self._note_trouble(contact, message.kind, message.text)
            case _:
                pass

    def _note_trouble(self, contact: Contact, kind: str, text: str) -> None:
        before = self.run.troubles.get(contact.task.index)
        since = self._clock.now() if before is None else before.since
        self.run.troubles[contact.task.index] = ContactTrouble(kind, text, since)
        contact.text = f"says: {text}"
        if kind.startswith("train/"):
            contact.state = "refused"
        contact.finished = contact.finished or kind == "failed"

    def _attach(self, contact: Contact, message: g.Attached) -> None:
        if TaskId.parse(message.task) != contact.task:
            text = (
                f"at {contact.address} there is {message.task}, not {contact.task}; give every task and the client the "
                "same --worker_hosts, in the same order"
            )
            self._note_trouble(contact, "task", text)
            return
        if self._finish is not None:  # it was absent until now, and an earlier Attach has reached it
            contact.send(g.Finish(self.run.id, self._finish.ok, False))
            return
        contact.life, contact.state, contact.device = message.life, "attached", message.device
        contact.finished, contact.stamp = False, 0.0
        contact.text = "is there"
        if message.host == self._host and self._host:
            contact.watch(message.pid)
        contact.channel.send(self._train)

    def _take_state(self, contact: Contact, state: g.State) -> None:
        run, assignments, index = self.run, self.run.assignments, contact.task.index
        contact.stamp = state.stamp
        if state.run != run.id:
            self._take_foreign_state(contact)
            return
        # The task is in our run, or is joining or leaving it.
        contact.text = f"is {state.state}" + (f": {state.text}" if state.text and state.state != "ready" else "")
        run.stop = run.stop or state.stop
        run.version = max(run.version, state.version)
        assignee = assignments.assignees.get(index)
        if assignee is not None and assignee.incarnation != state.incarnation:
            assignments.lost(index)  # it joined again with a new incarnation
            assignee = None
        if state.state in ("finished", "finishing", "failed") and self._finish is None:
            self._lose(contact, f"it {state.text}")
            return
        contact.state = state.state
        contact.finished = contact.finished or state.state == "finished"
        if state.state != "ready":
            return
        # It can compute: a new one is entered, a known one is brought up to date.
        run.troubles.pop(index, None)
        if assignee is None:
            assignments.ready(index, state.incarnation, state.local_step, contact.place, busy_with=state.doing)
            self._say(f"{contact.task} ({contact.address}) is ready at global step {state.version}")
            return
        assignee.waiting_for = {state.doing: state.waiting_for} if state.waiting_for else {}
        assignee.loss, assignee.version = state.loss, state.version
        if not assignee.queue and state.doing < 0:
            assignee.local_step = state.local_step
        for batch in assignee.queue:
            if batch.number in state.unknown:
                self._send_batch(contact, batch)

    def _take_foreign_state(self, contact: Contact) -> None:
        """A task is in no run, or in another one."""
        if contact.state in ("ready", "finishing"):
            self._lose(contact, "it has forgotten the run")
        elif contact.state == "attached":
            if self._finish is None:
                contact.channel.send(self._train)
        elif contact.state != "refused":
            contact.state = "attached"  # it could not join, and what it said about that was lost

    def _receive_fates(self) -> None:
        """Ps task 0 answers what became of gradients whose task was lost."""
        while (received := self._leader.receive(0.0)) is not None:
            try:
                fate, _ = codec.split(received)
            except WireError:
                continue
            if not isinstance(fate, m.Fate):
                continue
            about = (fate.worker, fate.incarnation, fate.local_step)
            for doubt in list(self.run.assignments.doubts):
                if (doubt.worker, doubt.incarnation, doubt.local_step) == about:
                    self.run.assignments.settle(doubt, fate.state, fate.reason, fate.met, fate.loss)

    # -- what compute tasks are sent ----------------------------------------------------------------------------------

    def _assign(self) -> None:
        while (assigned := self.run.assignments.next()) is not None:
            assignee, batch = assigned
            self._send_batch(self.run.contacts[assignee.index], batch)

    def _send_batch(self, contact: Contact, batch: GivenBatch) -> None:
        contact.send(g.Batch(self.run.id, batch.number, batch.seed, batch.specs), batch.frames)

    def _put_questions(self, now: float) -> None:
        """Puts open questions to a task that can answer at once, if there is one, and again if no answer comes."""
        for question in self.run.questions:
            if question.answer is not None or (now - question.asked_at < FETCH_AGAIN_S and question.index >= 0):
                continue
            if (index := self._choose(question)) is not None:
                question.index, question.asked_at = index, now
                self.run.contacts[index].send(question.message)

    def _choose(self, question: Question) -> int | None:
        """Returns the task that a question goes to: the same as before; for buffers the first; else an idle one."""
        assignees = self.run.assignments.assignees
        if question.index in assignees or not assignees:
            return question.index if assignees else None
        first = assignees[min(assignees)]
        if isinstance(question.message, g.Fetch) and question.message.what == "buffers":
            return first.index
        return next((i for i in sorted(assignees) if not assignees[i].queue), first.index)
