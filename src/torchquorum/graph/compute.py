"""A compute task: it only joins, has none of the user's code, and computes the graphs that clients send.

Run by `torchquorum join`, on its main thread, and by `tq.graph.Server`, on a thread of its own. Beside it the inbox
(`torchquorum.graph.inbox`) talks to clients. In a run (`torchquorum.graph.compute_run`) it is an ordinary worker: a session pulls,
pushes and recovers. What always holds: it is in one run at a time; when that run is over, the task ends.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.cluster.secret import OPEN, Access
from torchquorum.errors import DeadlineError, GraphError, TorchQuorumError
from torchquorum.graph import graph_messages as g
from torchquorum.graph.compute_run import GRAPH_ERRORS, IDLE_S, SAY_EVERY_S, ComputeRun, execute_graph
from torchquorum.graph.compute_session import ComputeSession, make_session
from torchquorum.graph.inbox import Inbox, Work
from torchquorum.graph.runner import Program
from torchquorum.session.join import Task, say
from torchquorum.session.states import SessionState
from torchquorum.wire.messages import Fault
from torchquorum.wire.transports import connector

FIRST_CLIENT_S = 3600.0


class ComputeTask:
    """A compute task at work.

    Args:
        task: Which task it is.
        cluster: The cluster with ps tasks that it can be a worker of; or, for a server that only executes graphs, the addresses
            of all tasks by job.
        device: Where it computes.
        transport: auto, shm or tcp.
        listen_fd: A listening socket for its address, if there is one already.
        access: Who may connect, and the secret with which it connects to the ps tasks.
        clock: Tells the time.
    """

    def __init__(
        self,
        task: TaskId,
        cluster: ClusterSpec | dict[str, list[str]],
        *,
        device: torch.device | None = None,
        transport: str = "auto",
        listen_fd: int | None = None,
        access: Access = OPEN,
        clock: Clock = SYSTEM,
    ) -> None:
        self.task, self._clock = task, clock
        self.device = device or torch.device("cpu")
        self._worker: Task | None = None
        if isinstance(cluster, ClusterSpec):
            connect = connector(cluster, access)
            self._worker = Task(
                cluster=cluster, id=task, transport=transport, source="client", connect=connect, access=access
            )
        self._closing = False
        self.inbox = Inbox(
            task,
            cluster.as_dict() if isinstance(cluster, ClusterSpec) else cluster,
            device=str(self.device),
            listen_fd=listen_fd,
            access=access,
            say=say,
            clock=clock,
        )

    def run(self, *, first_client_s: float = FIRST_CLIENT_S, quiet: bool = False) -> None:
        """Serves clients until a run that it was part of, or came too late for, is over, or `close`.

        Raises:
            TorchQuorumError: No client came in time, or the run ended badly.
        """
        started = said_at = self._clock.now()
        while not self._closing:
            work = self.inbox.take(IDLE_S)
            now = self._clock.now()
            if work is not None:
                started = said_at = now
                if isinstance(work.message, g.Execute):
                    execute_graph(self.inbox, work, self.device)
                elif isinstance(work.message, g.Train) and self._train(work):
                    return
                elif isinstance(work.message, g.Finish) and self._worker is not None:
                    self._miss(work, self.inbox.caller())
                    return
            elif now - started > first_client_s:
                raise DeadlineError(
                    f"{self.task}: waited {now - started:.0f} s for a client at {self.inbox.address} and gave up. Start the "
                    "program that holds the model, with this address in its --worker_hosts."
                )
            elif not quiet and now - said_at >= SAY_EVERY_S:
                said_at = now
                say(f"{self.task}: waiting for a client at {self.inbox.address}: {now - started:.0f} s")

    @staticmethod
    def warm_up() -> None:
        """Loads what the first batch needs, while there is no client yet: torch loads many of its parts at their first use."""
        parameter = torch.nn.Parameter(torch.zeros(1))
        torch.optim.SGD([parameter], lr=0.0).zero_grad()
        parameter.sum().backward()

    def ask_to_close(self) -> None:
        """Makes `run` return soon; from any thread."""
        self._closing = True

    def close(self) -> None:
        """Closes the socket."""
        self.inbox.close()

    def _train(self, work: Work) -> bool:
        """Is a worker of a client's run until that is over. False if it could not join."""
        message: g.Train = work.message
        try:
            program, session = self._join_run(work)
        except GRAPH_ERRORS as error:
            if (finish := self.inbox.finish_request()) is not None and finish.ok:
                self._miss(work, message.client)
                return True
            say(f"{self.task}: cannot join the run of {message.client}: {error}")
            self.inbox.reply(work.peer, Fault(f"train/{message.run}", f"{self.task}: {error}"))
            self.inbox.end_run()
            return False
        # The session has begun: from here on every error ends the task, and the client is told.
        say(f"{self.task}: computing {program.name} for {message.client} over {'+'.join(set(session.transports))}")
        run = ComputeRun(session, program, self.inbox, self._clock)
        session.meanwhile = run.meanwhile
        try:
            with ExitStack() as stack:
                stack.push(session)
                run.serve()
        except BaseException as error:
            self.inbox.update(state="failed", text=f"failed: {error}")
            self.inbox.tell_client(Fault("failed", f"{self.task} failed: {error}"))
            raise
        self.inbox.update(state="finished", text="has left the run")
        self.inbox.reply(work.peer, g.Finished(message.run, self.inbox.life))
        say(f"{self.task}: done at global step {session.global_step} after {session.local_step} local steps")
        return True

    def _join_run(self, work: Work) -> tuple[Program, ComputeSession]:
        """Loads the graph and joins the run; returns the session, which has begun."""
        message: g.Train = work.message
        if self._worker is None:
            raise GraphError(f"{self.task} belongs to no cluster with ps tasks: it executes graphs, it does not train")
        variables = {v.name: (tuple(v.shape), v.dtype) for v in message.plan.variables}
        buffers = {b.name: (tuple(b.shape), b.dtype) for b in message.plan.buffers}
        program = Program(message.graph, work.frames, self.device, variables, buffers)
        if len(message.graph.outputs) != 1:
            raise GraphError(f"a graph with {len(message.graph.outputs)} outputs: the loss must be the only one")
        session = make_session(self._worker, message.plan, message.options, program)
        self.inbox.update(state="joining", text="joining the run")

        def check_not_over() -> None:
            # Ps tasks that have not answered by the end of the run are gone and will not come back.
            if session.state is SessionState.CONNECTING and self.inbox.finish_request() is not None:
                raise TorchQuorumError(f"{self.task}: the run was over before its ps tasks answered")

        session.meanwhile = check_not_over
        session.__enter__()
        return program, session

    def _miss(self, work: Work, client: str) -> None:
        """The run has ended well without this task, which is not needed any more."""
        self.inbox.update(state="finished", text="is not needed: the run is over")
        self.inbox.reply(work.peer, g.Finished(work.message.run, self.inbox.life))
        say(f"{self.task}: the run of {client} has ended without this task; there is nothing left to compute")
