"""What the computing thread does with a client's work: batches of a run, questions about it, and single graphs.

Used by `torchquorum.graph.compute`, on its thread. What always holds: a batch is begun only while the client is known to want
it; every batch that was begun gets one result; a client that is silent for too long ends the run of this task.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from torchquorum.clock import SYSTEM, Clock, SeenTime
from torchquorum.errors import GraphError, TaskLostError, TorchQuorumError
from torchquorum.graph import graph_messages as g
from torchquorum.graph.compute_session import ComputeSession
from torchquorum.graph.inbox import Inbox, Work
from torchquorum.graph.runner import Program, placement_lines
from torchquorum.graph.tensors import pack, unpack
from torchquorum.session.join import say
from torchquorum.wire.codec import Frame
from torchquorum.worker.step import Step

CLIENT_SILENCE_S = 60.0
SAY_EVERY_S = 15.0
IDLE_S = 0.2
PAUSE_S = 2.0
LEASE_POLL_S = 0.01
LAST_SAVE_S = 120.0
CLIENT_ENDED = "the client ended before its run was over"
GRAPH_ERRORS = (
    TorchQuorumError,
    RuntimeError,
    ValueError,
    TypeError,
    MemoryError,
)  # what a bad graph or batch may raise


def execute_graph(inbox: Inbox, work: Work, device: torch.device) -> None:
    """Runs a graph once and sends its outputs."""
    message: g.Execute = work.message
    try:
        count = sum(s.kind in ("buffer", "constant") for s in message.graph.inputs)
        program = Program(message.graph, work.frames[:count], device)
        program.check_batch(message.inputs)
        with torch.no_grad():
            outputs = program([t.clone().to(device) for t in unpack(message.inputs, work.frames[count:])])
        if not all(isinstance(value, torch.Tensor) for value in outputs):
            raise GraphError("the graph returns something other than tensors")
        specs, frames = pack(outputs, copy=True)
        inbox.reply(work.peer, g.Outputs(message.number, specs, placement_lines(program, inbox.task), ""), frames)
    except GRAPH_ERRORS as error:
        inbox.reply(work.peer, g.Outputs(message.number, [], [], f"{inbox.task}: {error}"))


class ComputeRun:
    """A worker's part in a client's run, from when it has joined until it leaves.

    Args:
        session: The worker's session, which has begun.
        program: The client's graph.
        inbox: Where work comes from and results go.
        clock: Tells the time.
    """

    def __init__(self, session: ComputeSession, program: Program, inbox: Inbox, clock: Clock = SYSTEM) -> None:
        self._session, self._program, self._inbox, self._clock = session, program, inbox, clock
        self._seen = SeenTime(clock, PAUSE_S)
        self._heard = (
            -1.0,
            self._seen.now(),
        )  # when the client was last heard of, by its messages' time and by what this task has seen
        self._name = str(inbox.task)
        self._pushing = False
        self._finish: g.Finish | None = None

    def serve(self) -> None:
        """Computes what is in the inbox until the client has no more.

        Raises:
            TaskLostError: The client is gone, or has ended its run early.
        """
        session, inbox = self._session, self._inbox
        inbox.update(
            state="ready",
            text="computing",
            incarnation=session.client.incarnation,
            version=session.global_step,
            local_step=session.local_step,
            stop=session.should_stop(),
        )
        said_at = self._seen.turn()
        while self._finish is None and not session.interrupted:
            session.should_stop()  # looks at signals
            work = inbox.take(IDLE_S)
            if work is None:
                session.client.attend()
                said_at = self._check_client(said_at)
            elif isinstance(work.message, g.Batch):
                self._compute(work)
            elif isinstance(work.message, g.Execute):
                execute_graph(inbox, work, self._program.device)
            else:
                self._answer(work, pushing=False)
        inbox.update(state="finishing", text="is leaving the run")
        if self._finish is not None and self._finish.ok and self._finish.stop:
            session.client.stop()
        if self._finish is not None and not self._finish.ok:
            raise TaskLostError(f"{self._name}: {CLIENT_ENDED}")

    def _check_client(self, said_at: float) -> float:
        """Raises if the client has been silent for too long; returns when it last said that it waits."""
        heard_at, client = self._inbox.last_heard()
        now = self._seen.turn()
        if heard_at != self._heard[0]:
            self._heard = heard_at, now
        silent_s = now - self._heard[1]
        if silent_s > CLIENT_SILENCE_S:
            raise TaskLostError(
                f"{self._name}: its client, {client}, has not been heard of for {silent_s:.0f} s, and no other has come to "
                "continue the run. Look at that program's output; start it again, and the tasks too."
            )
        if silent_s > SAY_EVERY_S and now - said_at > SAY_EVERY_S:
            say(f"{self._name}: waiting for its client, {client}, not heard of for {silent_s:.0f} s")
            return now
        return said_at

    # -- batches ------------------------------------------------------------------------------------------------------

    def _is_wanted(self, number: int) -> bool:
        """Whether the client still wants a batch of this task; after a loss of contact its next message is waited for."""
        said_at = self._seen.turn()
        while (answer := self._inbox.may_begin(number)) is None:
            said_at = self._check_client(said_at)
            if self._session.interrupted:
                return False
            self._clock.sleep(LEASE_POLL_S)
        return answer

    def _compute(self, work: Work) -> None:
        session, inbox, message = self._session, self._inbox, work.message
        if not self._is_wanted(message.number):
            inbox.forget_batch(message.number)
            return
        # The lease is valid: the batch is ours, and the client is told that it has begun.
        started = self._clock.now()
        inbox.update(doing=message.number)
        loss: float | None = None
        try:
            if not session.should_stop():
                loss = self._backward(message, work.frames)
                inbox.update(loss=loss)
        except GRAPH_ERRORS as error:
            inbox.finish_batch(g.Failed(message.run, inbox.life, message.number, f"{self._name}: {error}"))
            return
        # The gradient is there: push it. While that waits, `meanwhile` answers questions of the client.
        self._pushing = True
        try:
            session.optimizer.step(loss=loss)
        finally:
            self._pushing = False
        step = session.optimizer.last
        # The fate of the gradient is known, unless the push is pipelined.
        if step.reason == "expired" and not session.client.pipeline:
            inbox.forget_batches()  # the ps tasks took this task for dead, so the client may have given them to others
        inbox.update(incarnation=session.client.incarnation)
        inbox.finish_batch(self._done(message, loss, step, self._clock.now() - started))

    def _done(self, message: g.Batch, loss: float | None, step: Step, seconds: float) -> g.Done:
        pipelined = self._session.client.pipeline and not step.stop  # then `step` tells the fate of the batch before
        return g.Done(
            run=message.run,
            life=self._inbox.life,
            number=message.number,
            loss=loss,
            step=replace(step, accepted=None, reason="pipelined", staleness=0) if pipelined else step,
            seconds=seconds,
        )

    def _backward(self, message: g.Batch, frames: list[Frame]) -> float:
        program = self._program
        program.check_batch(message.inputs)
        inputs = [t.to(program.device) for t in unpack(message.inputs, frames)]
        if program.writes_in_place:
            inputs = [t.clone() for t in inputs]
        # Dropout draws from the batch's own seed, so that a batch gives the same gradient wherever it is computed.
        torch.manual_seed(message.seed)
        self._session.optimizer.zero_grad()
        (loss,) = program(inputs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise GraphError("the graph's output is not a loss: one number that depends on the parameters")
        loss.backward()
        return float(loss.detach())

    # -- questions ----------------------------------------------------------------------------------------------------

    def meanwhile(self) -> None:
        """Called by the session while it waits: during a push, answers what can be answered in the middle of a batch."""
        if not self._pushing:
            return
        self._inbox.update(waiting_for=self._session.client.requests.waiting_for)
        work = self._inbox.take(0.0, urgent=True)
        if work is not None:
            self._answer(work, pushing=True)

    def _answer(self, work: Work, *, pushing: bool) -> None:
        match work.message:
            case g.Finish() as finish:
                self._finish = finish
                if pushing and finish.ok and finish.stop:
                    self._session.client.stop()  # releases this task, and all others that wait
                elif pushing and not finish.ok:
                    raise TaskLostError(f"{self._name}: {CLIENT_ENDED}")
            case g.Fetch() as fetch:
                self._fetch(work, fetch, pushing=pushing)
            case g.SaveNow() as save:
                path, error = "", ""
                try:
                    path = self._session.save(wait_s=LAST_SAVE_S) or ""
                except TorchQuorumError as failure:
                    error = str(failure)
                self._inbox.answer_fetch(work, g.Saved(save.run, save.number, path, error))
            case _:
                pass

    def _fetch(self, work: Work, fetch: g.Fetch, *, pushing: bool) -> None:
        """Sends the client variables, averages or buffers; during a push the variables as they are here."""
        session = self._session
        answer = g.Fetched(fetch.run, fetch.number, session.global_step, [], [], "")
        frames: list[Frame] = []
        try:
            if pushing and fetch.what == "averages":
                raise GraphError(
                    f"{self._name} is in the middle of a batch; ask for averages when all results are there"
                )
            if pushing:
                frames = self._put_tensors(answer, fetch.what)
            elif fetch.what == "averages":
                with session.averaged() as answer.version:
                    frames = self._put_tensors(answer, fetch.what)
            elif fetch.what == "buffers":
                with session.shared_buffers():
                    frames = self._put_tensors(answer, fetch.what)
            else:
                answer.version = session.pull()
                frames = self._put_tensors(answer, fetch.what)
        except TorchQuorumError as failure:
            answer.error = str(failure)
        self._inbox.answer_fetch(work, answer, frames)

    def _put_tensors(self, answer: g.Fetched, what: str) -> list[Frame]:
        variables = self._program.variables
        found = dict(variables.named_buffers() if what == "buffers" else variables.named_parameters())
        answer.names = list(found)
        answer.tensors, frames = pack(list(found.values()), copy=True)
        return frames
