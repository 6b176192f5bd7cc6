"""A compute task: it only joins, has none of the user's code, and computes whatever graph a client hands to it.

Run by `torchquorum join`, on its main thread, and by `tq.Server`, on a thread of its own. Beside it the desk
(`torchquorum.session.desk`) talks to clients. In a run it is an ordinary worker: a `tq.Session` pulls, pushes and recovers.
What always holds: a batch is begun only while the client is known to want it; when the client is gone for good, so is the
task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.cluster.secret import OPEN, Access
from torchquorum.errors import DeadlineError, GraphError, TaskLostError, TorchQuorumError
from torchquorum.placement.layout import CONSTANT
from torchquorum.session.desk import Desk, Work
from torchquorum.session.join import Task, say
from torchquorum.session.session import Session
from torchquorum.session.states import State
from torchquorum.transport import codec
from torchquorum.transport import graph_messages as g
from torchquorum.transport.codec import Frame
from torchquorum.transport.messages import Fault, OptimizerSpec, Plan
from torchquorum.transport.tensors import pack, unpack
from torchquorum.transport.zmq_channel import connector
from torchquorum.worker.client import Client, Patience, Step
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.graph_runner import Program, placement_lines
from torchquorum.worker.optimizer import Optimizer

CLIENT_SILENCE_S = 60.0
FIRST_CLIENT_S = 3600.0
SAY_EVERY_S = 15.0
IDLE_S = 0.2
LAST_SAVE_S = 120.0


class PlannedOptimizer(Optimizer):
    """The client's optimizer as a compute task needs it: what it is travels in the plan, and the ps tasks run it."""

    def __init__(self, plan: Plan, parameters: Sequence[torch.nn.Parameter]) -> None:
        groups: list[dict[str, Any]] = [{"params": []} for _ in plan.optimizer.groups]
        for variable, parameter in zip(plan.variables, parameters, strict=True):
            if variable.group != CONSTANT:
                groups[variable.group]["params"].append(parameter)
        super().__init__(
            torch.optim.SGD(groups, lr=0.0),
            plan.rule,
            schedule=plan.schedule,
            placement=plan.placement,
            slice_bytes=plan.slice_bytes,
            average=plan.average,
        )
        self._spec = plan.optimizer

    def spec(self) -> OptimizerSpec:
        """Returns the client's optimizer."""
        return self._spec


class _ComputeClient(Client):
    """A worker's client that remembers what its push waits for, so that the desk can say so."""

    held = ""

    def _hear(self, waiting: Any, k: int, received: list[Frame] | None) -> bool:
        came = super()._hear(waiting, k, received)
        self.held = waiting.what if came and waiting.what != "its turn" else self.held
        return came

    def attend(self) -> None:
        """Answers what ps task 0 asks of a worker that has nothing to do: its buffers, for others that want the run's."""
        while self._open is None and (received := self._channels[0].receive(0.0)) is not None:
            self._is_wanted(codec.split(received)[0])


class ComputeSession(Session):
    """A worker's session that looks after its desk while it waits for a round."""

    client_class = _ComputeClient
    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def _create(self, client: Client, plan: Plan, flat: FlatParameters, created: list[bool]) -> None:
        if not all(created):  # else the client has created the variables, as it should
            super()._create(client, plan, flat, created)

    def _obey_signals(self) -> None:
        super()._obey_signals()
        self.meanwhile()

    @property
    def client(self) -> _ComputeClient:
        """Returns the connection to the ps tasks."""
        client = self._known()
        assert isinstance(client, _ComputeClient)
        return client

    @property
    def interrupted(self) -> bool:
        """Whether a signal has asked this task to go."""
        return self._signals.asked


class ComputeTask:
    """A compute task at work.

    Args:
        name: The task's name, such as /job:worker/task:1.
        address: host:port to listen on.
        cluster: Who exists, if the task can be a worker of a run; None for a server that only executes graphs.
        addresses: The tasks by job that a client should know of.
        index: Its number among the workers.
        device: Where it computes.
        transport: auto, shm or tcp.
        listen_fd: A listening socket for the address, if somebody has made one.
        access: Whom to let in, and the secret with which it talks to the ps tasks.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        cluster: ClusterSpec | None,
        addresses: dict[str, list[str]],
        index: int = 0,
        device: torch.device | None = None,
        transport: str = "auto",
        listen_fd: int | None = None,
        access: Access = OPEN,
    ) -> None:
        self.name, self._cluster, self._index, self._transport = name, cluster, index, transport
        self._access = access
        self.device = device or torch.device("cpu")
        self._session: ComputeSession | None = None
        self._program: Program | None = None
        self._computing = False
        self._finish: g.Finish | None = None
        self._closing = False
        self.desk = Desk(
            name, address, listen_fd=listen_fd, device=str(self.device), cluster=addresses, access=access, say=say
        )

    def run(self, *, first_client_s: float = FIRST_CLIENT_S, quiet: bool = False) -> None:
        """Serves clients until a run that it was part of, or came too late for, is over, or `close`.

        Raises:
            TorchQuorumError: No client came in time, or the run ended badly.
        """
        started = told = time.monotonic()
        while not self._closing:
            work = self.desk.take(IDLE_S)
            now = time.monotonic()
            if work is not None:
                started = told = now
                if isinstance(work.message, g.Execute):
                    self._execute(work)
                elif isinstance(work.message, g.Train) and self._train(work):
                    return
                elif isinstance(work.message, g.Finish) and self._cluster is not None:
                    self._miss(work, self.desk.caller())
                    return
            elif now - started > first_client_s:
                raise DeadlineError(
                    f"{self.name}: waited {now - started:.0f} s for a client at {self.desk.address} and gave up. Start the "
                    "program that holds the model, with this address in its --worker_hosts."
                )
            elif not quiet and now - told >= SAY_EVERY_S:
                told = now
                say(f"{self.name}: waiting for a client at {self.desk.address}: {now - started:.0f} s")

    @staticmethod
    def warm_up() -> None:
        """Loads what the first batch needs, while there is no client yet: torch brings half of itself only when asked."""
        parameter = torch.nn.Parameter(torch.zeros(1))
        torch.optim.SGD([parameter], lr=0.0).zero_grad()
        parameter.sum().backward()

    def ask_to_close(self) -> None:
        """Makes `run` return soon; from any thread."""
        self._closing = True

    def close(self) -> None:
        """Gives the socket up."""
        self.desk.close()

    # -- a graph, once ------------------------------------------------------------------------------------------------

    def _execute(self, work: Work) -> None:
        message: g.Execute = work.message
        try:
            held = sum(s.kind in ("buffer", "constant") for s in message.graph.inputs)
            program = Program(message.graph, work.frames[:held], self.device)
            program.check_batch(message.inputs)
            with torch.no_grad():
                given = program([t.clone().to(self.device) for t in unpack(message.inputs, work.frames[held:])])
            if not all(isinstance(value, torch.Tensor) for value in given):
                raise GraphError("the graph gives something else than tensors")
            specs, frames = pack(given, copy=True)
            lines = placement_lines(program, TaskId.parse(self.name))
            self.desk.reply(work.peer, g.Outputs(message.number, specs, lines, ""), frames)
        except (TorchQuorumError, RuntimeError, ValueError, TypeError, MemoryError) as error:
            self.desk.reply(work.peer, g.Outputs(message.number, [], [], f"{self.name}: {error}"))

    # -- a run --------------------------------------------------------------------------------------------------------

    def _train(self, work: Work) -> bool:
        """Is a worker of a client's run until that is over. False if it never became one."""
        message: g.Train = work.message
        try:
            program = self._load(message, work.frames)
            session = self._make_session(message, program)
            self.desk.update(state="joining", text="joining the run")
            session.meanwhile = lambda: self._check_begun(session)
            session.__enter__()
        except (TorchQuorumError, RuntimeError, ValueError, TypeError, MemoryError) as error:
            if (finish := self.desk.told_to_finish()) is not None and finish.ok:
                self._miss(work, message.client)
                return True
            say(f"{self.name}: cannot join the run of {message.client}: {error}")
            self.desk.reply(work.peer, Fault(f"train/{message.run}", f"{self.name}: {error}"))
            self.desk.end_run()
            return False
        say(f"{self.name}: computing {program.name} for {message.client} over {'+'.join(set(session.transports))}")
        self._program, self._session = program, session
        session.meanwhile = self._meanwhile
        try:
            with ExitStack() as stack:
                stack.push(session)  # which has begun already
                self._say_ready(session)
                self._serve_run(session, program)
                ended = self._finish
                if ended is not None and not ended.ok:
                    raise TaskLostError(f"{self.name}: the client ended before its run was over")
        except BaseException as error:
            self.desk.update(state="failed", text=f"failed: {error}")
            self.desk.tell_client(Fault("failed", f"{self.name} failed: {error}"))
            raise
        self.desk.update(state="finished", text="has left the run")
        self.desk.reply(work.peer, g.Finished(message.run, self.desk.life))
        say(f"{self.name}: done at global step {session.global_step} after {session.local_step} local steps")
        return True

    def _check_begun(self, session: ComputeSession) -> None:
        """Called while the session begins: ps tasks that have not answered by the end of the run are gone, and do not come."""
        if session.state is State.CONNECTING and self.desk.told_to_finish() is not None:
            raise TorchQuorumError(f"{self.name}: the run was over before its ps tasks answered")

    def _miss(self, work: Work, client: str) -> None:
        """The run has ended well without this task, and nobody needs it any more."""
        self.desk.update(state="finished", text="is not needed: the run is over")
        self.desk.reply(work.peer, g.Finished(work.message.run, self.desk.life))
        say(f"{self.name}: the run of {client} has ended without this task; there is nothing left to compute")

    def _load(self, message: g.Train, frames: list[Frame]) -> Program:
        if self._cluster is None:
            raise GraphError(f"{self.name} belongs to no cluster with ps tasks: it executes graphs, it does not train")
        variables = {v.name: (tuple(v.shape), v.dtype) for v in message.plan.variables}
        buffers = {b.name: (tuple(b.shape), b.dtype) for b in message.plan.buffers}
        program = Program(message.graph, frames, self.device, variables, buffers)
        if len(message.graph.outputs) != 1:
            raise GraphError(f"a graph with {len(message.graph.outputs)} outputs: the loss must be the only one")
        return program

    def _make_session(self, message: g.Train, program: Program) -> ComputeSession:
        plan, options = message.plan, message.options
        assert self._cluster is not None
        task = Task(cluster=self._cluster, id=TaskId("worker", self._index), transport=self._transport, source="client")
        task = replace(task, connect=connector(self._cluster, self._access), access=self._access)
        optimizer = PlannedOptimizer(plan, [p for _, p in program.variables.named_parameters()])
        return ComputeSession(
            task,
            program.variables,
            optimizer,
            logdir=plan.logdir,
            last_step=plan.last_step,
            liveness_s=plan.liveness_s,
            save_every_s=options.save_every_s,
            save_every_steps=options.save_every_steps,
            keep=options.keep,
            durable=plan.durable,
            buffers=plan.buffers_mode,
            log_device_placement=options.log_device_placement,
            patience=Patience(start_s=options.start_s, round_s=options.round_s, probe_s=0.5),
        )

    def _say_ready(self, session: ComputeSession) -> None:
        self.desk.update(
            state="ready",
            text="computing",
            incarnation=session.client.incarnation,
            version=session.global_step,
            local_step=session.local_step,
            stop=session.should_stop(),
        )

    def _serve_run(self, session: ComputeSession, program: Program) -> None:
        """Computes what lies in the tray until the client has no more."""
        told = time.monotonic()
        while self._finish is None and not session.interrupted:
            session.should_stop()  # looks at signals
            work = self.desk.take(IDLE_S)
            if work is None:
                session.client.attend()
                told = self._check_client(told)
            elif isinstance(work.message, g.Batch):
                self._batch(session, program, work)
            elif isinstance(work.message, g.Execute):
                self._execute(work)
            else:
                self._serve(work, busy=False)
        self.desk.update(state="finishing", text="is leaving the run")
        if self._finish is not None and self._finish.ok and self._finish.stop:
            session.client.stop()

    def _check_client(self, told: float) -> float:
        heard_at, client = self.desk.heard()
        now = time.monotonic()
        silent_s = now - heard_at
        if silent_s > CLIENT_SILENCE_S:
            raise TaskLostError(
                f"{self.name}: its client, {client}, has not been heard of for {silent_s:.0f} s, and no other has come to go "
                "on with the run. Look at that program's output; start it again, and the tasks too."
            )
        if silent_s > SAY_EVERY_S and now - told > SAY_EVERY_S:
            say(f"{self.name}: waiting for its client, {client}, not heard of for {silent_s:.0f} s")
            return now
        return told

    def _wanted(self, number: int) -> bool:
        """Whether the client still wants a batch of us; after a silence its next word is waited for."""
        told = time.monotonic()
        while (answer := self.desk.may_begin(number)) is None:
            told = self._check_client(told)
            if self._session is not None and self._session.interrupted:
                return False
            time.sleep(0.01)
        return answer

    def _batch(self, session: ComputeSession, program: Program, work: Work) -> None:
        message: g.Batch = work.message
        if not self._wanted(message.number):
            self.desk.drop(message.number)
            return
        started = time.perf_counter()
        self.desk.update(doing=message.number)
        loss: float | None = None
        try:
            if not session.should_stop():
                loss = self._backward(session, program, message, work.frames)
                self.desk.update(loss=loss)
        except (TorchQuorumError, RuntimeError, ValueError, TypeError, MemoryError) as error:
            self.desk.finish_batch(g.Failed(message.run, self.desk.life, message.number, f"{self.name}: {error}"))
            return
        self._computing, session.client.held = True, ""
        try:
            step = session.optimizer.step(loss=loss)
        finally:
            self._computing = False
        if step.reason == "expired" and not session.client.pipeline:
            self.desk.forget_batches()  # the ps tasks took us for dead, so the client may have given them to others
        self.desk.update(incarnation=session.client.incarnation)
        self.desk.finish_batch(self._done(session, message, loss, step, time.perf_counter() - started))

    def _done(
        self, session: ComputeSession, message: g.Batch, loss: float | None, step: Step, seconds: float
    ) -> g.Done:
        late = session.client.pipeline and not step.stop  # what `step` tells is the fate of the batch before
        return g.Done(
            message.run,
            self.desk.life,
            message.number,
            loss,
            step.version,
            step.local_step,
            None if late else step.accepted,
            "pipelined" if late else step.reason,
            0 if late else step.staleness,
            step.lr,
            step.stop,
            seconds,
        )

    def _backward(self, session: Session, program: Program, message: g.Batch, frames: list[Frame]) -> float:
        program.check_batch(message.inputs)
        inputs = [t.to(self.device) for t in unpack(message.inputs, frames)]
        if program.writes_in_place:
            inputs = [t.clone() for t in inputs]
        # Dropout draws from the batch's own seed, so that a batch gives the same gradient wherever it is computed.
        torch.manual_seed(message.seed)
        session.optimizer.zero_grad()
        (loss,) = program(inputs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise GraphError("the graph's output is not a loss: one number that depends on the parameters")
        loss.backward()
        return float(loss.detach())

    # -- beside the batches -------------------------------------------------------------------------------------------

    def _meanwhile(self) -> None:
        """Called while a push waits at the ps tasks: what can be done in the middle of a batch is done."""
        if not self._computing or self._session is None:
            return
        self.desk.update(held=self._session.client.held)
        work = self.desk.take(0.0, urgent=True)
        if work is not None:
            self._serve(work, busy=True)

    def _serve(self, work: Work, *, busy: bool) -> None:
        session = self._session
        assert session is not None
        match work.message:
            case g.Finish() as finish:
                self._finish = finish
                if busy and finish.ok and finish.stop:
                    session.client.stop()  # releases us, and everybody else who waits
                elif busy and not finish.ok:
                    raise TaskLostError(f"{self.name}: the client ended before its run was over")
            case g.Fetch() as fetch:
                self._fetch(session, work, fetch, busy=busy)
            case g.SaveNow() as save:
                path, error = "", ""
                try:
                    path = session.save(wait_s=LAST_SAVE_S) or ""
                except TorchQuorumError as failure:
                    error = str(failure)
                self.desk.answer_fetch(work, g.Saved(save.run, save.number, path, error))
            case _:
                pass

    def _fetch(self, session: ComputeSession, work: Work, fetch: g.Fetch, *, busy: bool) -> None:
        """Gives the client variables, averages or buffers; in the middle of a batch the variables as they are here."""
        error, version = "", session.global_step
        names: list[str] = []
        specs: list[g.TensorSpec] = []
        frames: list[Frame] = []
        try:
            if fetch.what == "averages":
                if busy:
                    raise GraphError(
                        f"{self.name} is in the middle of a batch; ask for averages when all results are there"
                    )
                with session.averaged() as version:
                    names, specs, frames = self._tensors(fetch.what)
            elif busy:  # as they are here
                names, specs, frames = self._tensors(fetch.what)
            elif fetch.what == "buffers":
                with session.shared_buffers():
                    names, specs, frames = self._tensors(fetch.what)
            else:
                version = session.pull()
                names, specs, frames = self._tensors(fetch.what)
        except TorchQuorumError as failure:
            error = str(failure)
        answer = g.Fetched(fetch.run, fetch.number, version, names, specs, error)
        self.desk.answer_fetch(work, answer, frames)

    def _tensors(self, what: str) -> tuple[list[str], list[g.TensorSpec], list[Frame]]:
        assert self._program is not None
        held = self._program.variables
        found = dict(held.named_buffers() if what == "buffers" else held.named_parameters())
        return list(found), *pack(list(found.values()), copy=True)
