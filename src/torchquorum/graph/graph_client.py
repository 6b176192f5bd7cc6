"""`tq.graph.connect`: a client that runs small graphs on the tasks of a server's cluster.

It asks the server that it is given which tasks there are, waits until all of them have answered, and runs graphs on any of
them. What always holds: a graph is sent once, so it runs at most once; every wait has a deadline and names the task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster import TaskId
from torchquorum.cluster.secret import Access, read_access
from torchquorum.cluster.spec import parse_address
from torchquorum.errors import ClusterError, ConfigError, DeadlineError, GraphError, TorchQuorumError
from torchquorum.graph import graph_messages as g
from torchquorum.graph.export import export_program, write_graph
from torchquorum.graph.tensors import pack, unpack
from torchquorum.lines import write_line
from torchquorum.session.join import say
from torchquorum.wire.channel import Channel
from torchquorum.wire.codec import Frame, WireError
from torchquorum.wire.entry_channel import EntryChannel
from torchquorum.wire.messages import PACKAGE, PROTOCOL
from torchquorum.wire.rpc import Asker, Patience

SCHEME = "tq://"
WAIT_S = 60.0
RUN_S = 600.0
GREETING = Patience(probe_s=0.25, say_s=10.0)
RUNNING = Patience(probe_s=0.25, silence_s=10.0, say_s=10.0)


class TaskConnections:
    """The connections to all compute tasks of one cluster.

    Args:
        target: Where one of its tasks listens; it knows the others.
        access: The cluster's secret, if it has one.
        wait_s: How long the tasks may take to answer, all together.
        clock: Tells the time.
        connect: Makes a connection to an address; the last argument is the task's name.

    Raises:
        DeadlineError: A task has not answered in time.
    """

    def __init__(
        self,
        target: str,
        access: Access,
        wait_s: float,
        *,
        clock: Clock = SYSTEM,
        connect: Callable[[str, Access, str], Channel] = EntryChannel,
    ) -> None:
        self._access, self._clock, self._connect = access, clock, connect
        self.askers: dict[TaskId, Asker] = {}
        first = self._asker(target, "the server", "client", f"a server at {target}")
        first.advice = "Start it, and check host and port."
        try:
            attached = self._greet(first, wait_s)
        finally:
            first.channel.close()
        self.master = TaskId.parse(attached.task)
        try:
            for job, addresses in attached.cluster.items():
                for index, address in enumerate(addresses) if job != "ps" else ():
                    task = TaskId(job, index)
                    self.askers[task] = self._asker(address, str(task), str(self.master), f"{task} ({address})")
            self._greet_all(wait_s)
        except BaseException:
            self.close()
            raise

    def _asker(self, address: str, name: str, me: str, there: str) -> Asker:
        def split(frames: Sequence[Frame]) -> tuple[Any, list[Frame]]:
            try:
                return g.split(frames)
            except WireError as error:
                raise TorchQuorumError(f"{address} is not a compute task: {error}") from None

        return Asker(
            channel=self._connect(address, self._access, name),
            me=me,
            there=there,
            patience=GREETING,
            clock=self._clock,
            say=say,
            split=split,
            advice="Start it with the same cluster, or check that its port can be reached.",
        )

    def _greet(self, asker: Asker, limit_s: float) -> g.Attached:
        """Waits until a task has answered."""
        return asker.at_start().ask(_attach(), kind=g.Attached, what=asker.there, limit_s=limit_s)[0]

    def _greet_all(self, wait_s: float) -> None:
        """Waits, visibly, until every task has answered, as a TensorFlow session does."""
        deadline = self._clock.now() + wait_s
        missing: list[Asker] = []
        for asker in self.askers.values():
            try:
                self._greet(asker, 0.0)
            except DeadlineError:
                missing.append(asker)
        if missing:
            say(f"{self.master}: waiting for {', '.join(asker.there for asker in missing)}: 0 s")
        for asker in missing:
            self._greet(asker, max(0.0, deadline - self._clock.now()))

    def execute(self, task: TaskId, message: g.Execute, frames: list[Frame]) -> tuple[g.Outputs, list[Frame]]:
        """Has a task run a graph, once; while it does, its inbox answers that it is alive.

        Raises:
            TaskLostError: The task does not answer any more.
        """
        asker = replace(self.askers[task], me="client", patience=RUNNING)
        return asker.ask(
            message,
            frames,
            kind=g.Outputs,
            what=f"{task} to run a graph",
            limit_s=RUN_S,
            accept=lambda answer: answer.number == message.number,
            again=_attach(),
        )

    def close(self) -> None:
        """Closes the connections."""
        for asker in self.askers.values():
            asker.channel.close()
        self.askers.clear()


def _attach() -> g.Attach:
    return g.Attach(PROTOCOL, "a client", PACKAGE)


class _Function(nn.Module):
    """A plain function as a module, which is what torch.export exports."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class GraphClient:
    """Runs small graphs on the tasks of a server's cluster; made by `tq.graph.connect`."""

    def __init__(
        self,
        target: str,
        *,
        log_device_placement: bool = False,
        wait_s: float = WAIT_S,
        secret_file: str | None = None,
    ) -> None:
        access = read_access(secret_file)
        address = parse_address(target.removeprefix(SCHEME), label="the target")
        self._log, self._number = log_device_placement, 0
        self._connections = TaskConnections(address, access, wait_s)
        self.master = self._connections.master

    @property
    def tasks(self) -> list[TaskId]:
        """Returns the tasks that can run graphs, in order."""
        return list(self._connections.askers)

    def run(self, function: Callable[..., Any], *inputs: torch.Tensor, on: str | int | None = None) -> Any:
        """Exports a function of tensors, runs it on a task, and returns what it returned.

        Args:
            function: Any function of tensors, or a module, that torch.export can export.
            *inputs: What to call it with.
            on: Which task runs it: its name, or its number in the job. By default the first task of the cluster, as in
                TensorFlow, whichever task the client is connected to.
        """
        task = self._choose(on)
        module = function if isinstance(function, nn.Module) else _Function(function)
        exported = export_program(module, inputs, batch=False)
        spec, values = write_graph(exported, getattr(function, "__name__", type(function).__name__))
        _, constants = pack(values, copy=False)
        specs, frames = pack([x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)], copy=False)
        self._number += 1
        message = g.Execute(self._number, spec, specs)
        answer, returned = self._connections.execute(task, message, [*constants, *frames])
        if answer.error:
            raise GraphError(answer.error)
        if self._log:
            for line in answer.placement:
                write_line(line)
        outputs = [t.clone() for t in unpack(answer.outputs, returned)]
        shape = exported.call_spec.out_spec
        assert shape is not None
        return pytree.tree_unflatten(outputs, shape)

    def close(self) -> None:
        """Closes the connections."""
        self._connections.close()

    def __enter__(self) -> GraphClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _choose(self, on: str | int | None) -> TaskId:
        tasks = self.tasks
        if not tasks:
            raise ConfigError("the client is closed; connect again")
        if on is None:
            return tasks[0]
        task = TaskId(self.master.job, on) if isinstance(on, int) else TaskId.parse(on.partition("/device:")[0])
        if task not in tasks:
            raise ClusterError(f"on={on!r}: the tasks are {', '.join(map(str, tasks))}")
        return task


def connect(
    target: str, *, log_device_placement: bool = False, wait_s: float = WAIT_S, secret_file: str | None = None
) -> GraphClient:
    """Connects to a server and waits for all tasks of its cluster.

    Args:
        target: A server's `target`: tq://localhost:2222, or only host:port.
        log_device_placement: Print which task and device ran each operation.
        wait_s: How long to wait for the tasks.
        secret_file: The file with the cluster's secret; by default the environment says.
    """
    return GraphClient(target, log_device_placement=log_device_placement, wait_s=wait_s, secret_file=secret_file)
