"""`tq.Server` and `tq.connect`: the smallest clusters, and what `torchquorum join` runs.

A server is a task that computes graphs for clients: alone, created with no arguments, or one of a few that know each other.
`tq.connect` finds all tasks of the server that it is given, waits for them, visibly, and runs small graphs on any of them.
What always holds: a server's threads end with `close`, or with its process.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchquorum import env
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.cluster.addresses import read_addresses
from torchquorum.cluster.secret import Access, read_access
from torchquorum.cluster.sources import Resolved
from torchquorum.cluster.spec import parse_address
from torchquorum.errors import ClusterError, ConfigError, DeadlineError, GraphError, TorchQuorumError
from torchquorum.lines import write_line
from torchquorum.server.serve import serve
from torchquorum.session.compute import ComputeTask
from torchquorum.session.join import say
from torchquorum.transport import codec
from torchquorum.transport import graph_messages as g
from torchquorum.transport.codec import WireError
from torchquorum.transport.messages import PACKAGE, PROTOCOL, Fault
from torchquorum.transport.tensors import pack, unpack
from torchquorum.transport.zmq_channel import ZmqChannel
from torchquorum.worker import devices
from torchquorum.worker.graph_export import export_program, write_down

SCHEME = "tq://"
ASK_AGAIN_S = 0.25
WAIT_S = 60.0
SAY_S = 1.0
RUN_S = 600.0


def serve_task(found: Resolved, device: str) -> int:
    """Serves as the task that flags or TF_CONFIG name, on this thread, until its job is over; returns the exit code."""
    cluster, task = found.cluster, found.task
    if found.access.note:
        say(f"{task}: {found.access.note}")
    if task.job == "ps":
        report = env.report() if task.index == 0 else None
        serve(
            cluster,
            task.index,
            listen_fd=found.listen_fd,
            say=say,
            report=report,
            started_at=env.started_at(),
            access=found.access,
        )
        return 0
    compute = ComputeTask(
        str(task),
        cluster.address(task),
        cluster=cluster,
        addresses=cluster.as_dict(),
        index=task.index,
        device=check_device(device, task),
        transport=found.transport,
        listen_fd=found.listen_fd,
        access=found.access,
    )
    say(f"{task}: ready to compute for a client at {cluster.address(task)}")
    try:
        compute.warm_up()
        compute.run()
        return 0
    finally:
        compute.close()


def check_device(name: str, task: TaskId) -> torch.device:
    """Returns the device of a name, cuda:1 or /gpu:1, if this task has it."""
    with devices.setting(task=task):
        return devices.resolve(devices.parse(name), "--device", soft=False) or devices.CPU_DEVICE


class Server:
    """A task of a small cluster, serving from the moment it is made, as tf.train.Server.

    Args:
        cluster: The tasks by job: {"local": ["localhost:2222", "localhost:2223"]}, or a `tq.ClusterSpec`, or the same as a
            dict with the jobs ps and worker.
        job_name: Which job this task belongs to.
        task_index: Which task of the job it is.
        listen_fd: A listening socket for its address, if somebody has made one.
        secret_file: The file with the cluster's secret; by default the environment says. Off loopback there must be one.
        insecure: True lets it listen for other hosts without a secret.
    """

    def __init__(
        self,
        cluster: ClusterSpec | Mapping[str, Any],
        job_name: str | None = None,
        task_index: int = 0,
        *,
        listen_fd: int | None = None,
        secret_file: str | None = None,
        insecure: bool | None = None,
    ) -> None:
        self._access = read_access(secret_file, insecure)
        self.addresses = cluster.as_dict() if isinstance(cluster, ClusterSpec) else read_addresses(cluster)
        job = job_name if job_name is not None else next(iter(self.addresses))
        if job not in self.addresses:
            raise ClusterError(f"job {job!r}: the cluster has {', '.join(self.addresses)}")
        if isinstance(task_index, bool) or task_index not in range(len(self.addresses[job])):
            raise ClusterError(
                f"task {task_index} of job {job!r}: the job has {len(self.addresses[job])} tasks, from 0"
            )
        self.task = TaskId(job, task_index)
        self.address = self.addresses[job][task_index]
        trains = set(self.addresses) == {"ps", "worker"}
        self._spec = ClusterSpec(self.addresses) if trains else None
        self._compute: ComputeTask | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        if self.task.job != "ps":
            self._start(listen_fd)

    @classmethod
    def create_local_server(cls) -> Server:
        """Makes a server alone, in this process, on a free port of localhost."""
        held = socket.socket()
        held.bind(("127.0.0.1", 0))
        held.listen(128)
        port = held.getsockname()[1]
        return cls({"localhost": [f"localhost:{port}"]}, "localhost", 0, listen_fd=held.detach())

    @property
    def target(self) -> str:
        """Returns the address that clients connect to: tq://localhost:2222."""
        return SCHEME + self.address

    def _start(self, listen_fd: int | None) -> None:
        compute = self._compute = ComputeTask(
            str(self.task),
            self.address,
            cluster=self._spec,
            addresses=self.addresses,
            index=self.task.index,
            listen_fd=listen_fd,
            access=self._access,
        )

        def run() -> None:
            try:
                compute.run(first_client_s=float("inf"), quiet=True)
            except BaseException as error:  # raised again in join
                self._failure = error

        self._thread = threading.Thread(target=run, name=f"torchquorum-compute-{self.task}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Serves until the run that this task is part of is over, or for ever, as a task that only executes graphs."""
        if self.task.job == "ps":
            assert self._spec is not None
            serve(
                self._spec,
                self.task.index,
                listen_fd=None,
                say=say,
                report=None,
                started_at=None,
                access=self._access,
            )
            return
        try:
            while self._thread is not None and self._thread.is_alive():
                self._thread.join(0.2)
        finally:
            self.close()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stops serving."""
        if self._compute is not None:
            self._compute.ask_to_close()
            assert self._thread is not None
            self._thread.join(timeout=10.0)
            self._compute.close()
            self._compute = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Function(nn.Module):
    """A plain function as a module, which is what torch.export exports."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class _Link:
    """The connection to one task."""

    def __init__(self, task: TaskId, address: str, access: Access, who: str) -> None:
        self.task, self.address = task, address
        self.channel = ZmqChannel(address, f"client/{secrets.token_hex(8)}".encode(), access, who)
        self.device = "cpu"
        self.there = False


class GraphClient:
    """Runs small graphs on the tasks of a server's cluster; made by `tq.connect`."""

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
        self._log, self._wait_s = log_device_placement, wait_s
        self._number = 0
        self._links: dict[TaskId, _Link] = {}
        first = _Link(TaskId("target", 0), address, access, "the server")
        try:
            attached = self._greet(first)
        finally:
            first.channel.close()
        self.master = TaskId.parse(attached.task)
        try:
            for job, addresses in attached.cluster.items():
                for index, there in enumerate(addresses):
                    if job != "ps":
                        task = TaskId(job, index)
                        self._links[task] = _Link(task, there, access, str(task))
            self._find_all()
        except BaseException:
            self.close()
            raise

    @property
    def tasks(self) -> list[TaskId]:
        """Returns the tasks that can run graphs, in order."""
        return list(self._links)

    def run(self, function: Callable[..., Any], *inputs: torch.Tensor, on: str | int | None = None) -> Any:
        """Exports a function of tensors, runs it on a task, and returns what it returned.

        Args:
            function: Any function of tensors, or a module, that torch.export can export.
            *inputs: What to call it with.
            on: Which task runs it: its name, or its number in the job. By default the first task of the cluster, as in
                TensorFlow, whichever task the client is connected to.
        """
        link = self._links[self._choose(on)]
        module = function if isinstance(function, nn.Module) else _Function(function)
        exported = export_program(module, inputs, batch=False)
        spec, values = write_down(exported, getattr(function, "__name__", type(function).__name__))
        _, held = pack(values, copy=False)
        specs, frames = pack([x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)], copy=False)
        self._number += 1
        message = g.Execute(self._number, spec, specs)
        answer, given = self._ask(link, [codec.encode(message), *held, *frames], RUN_S)
        if answer.error:
            raise GraphError(answer.error)
        if self._log:
            for line in answer.placement:
                write_line(line)
        outputs = [t.clone() for t in unpack(answer.outputs, given)]
        shape = exported.call_spec.out_spec
        assert shape is not None
        return pytree.tree_unflatten(outputs, shape)

    def close(self) -> None:
        """Closes the connections."""
        for link in self._links.values():
            link.channel.close()
        self._links.clear()

    def __enter__(self) -> GraphClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _choose(self, on: str | int | None) -> TaskId:
        if not self._links:
            raise ConfigError("the client is closed; connect again")
        if on is None:
            return next(iter(self._links))
        task = TaskId(self.master.job, on) if isinstance(on, int) else TaskId.parse(on.partition("/device:")[0])
        if task not in self._links:
            raise ClusterError(f"on={on!r}: the tasks are {', '.join(map(str, self._links))}")
        return task

    def _greet(self, link: _Link) -> g.Attached:
        """Waits for one task to answer."""
        started = told = time.monotonic()
        while True:
            link.channel.send([codec.encode(g.Attach(PROTOCOL, "a client", PACKAGE))])
            received = link.channel.receive(ASK_AGAIN_S)
            now = time.monotonic()
            if received is not None:
                answer = self._understand(link, received)[0]
                if isinstance(answer, g.Attached):
                    link.there, link.device = True, answer.device
                    return answer
            if now - started > self._wait_s:
                raise DeadlineError(
                    f"waited {now - started:.0f} s for a server at {link.address} and gave up. Start it, and check host and port."
                )
            if now - told >= SAY_S:
                told = now
                say(f"client: waiting for a server at {link.address}: {now - started:.0f} s of {self._wait_s:.0f} s")

    def _find_all(self) -> None:
        """Waits, visibly, until every task of the cluster has answered, as a TensorFlow session does."""
        started = time.monotonic()
        told = 0.0
        while missing := [link for link in self._links.values() if not link.there]:
            for link in missing:
                link.channel.send([codec.encode(g.Attach(PROTOCOL, "a client", PACKAGE))])
            until = time.monotonic() + ASK_AGAIN_S
            for link in missing:
                received = link.channel.receive(max(0.0, until - time.monotonic()) / len(missing))
                if received is not None and isinstance(self._understand(link, received)[0], g.Attached):
                    link.there = True
            now = time.monotonic()
            still = [f"{link.task} ({link.address})" for link in missing if not link.there]
            if still and now - started > self._wait_s:
                raise DeadlineError(
                    f"waited {now - started:.0f} s for {', '.join(still)} and gave up. Start it with the same cluster, or "
                    "check that its port can be reached."
                )
            if still and now - told >= SAY_S:
                told = now
                seconds = f"{now - started:.0f} s of {self._wait_s:.0f} s"
                say(f"{self.master}: waiting for {', '.join(still)}: {seconds}")

    def _ask(self, link: _Link, packet: list[Any], wait_s: float) -> tuple[g.Outputs, list[Any]]:
        """Sends a graph once, and waits for what it gives; it may not be run twice."""
        started = told = heard = time.monotonic()
        link.channel.send(packet)
        while True:
            received = link.channel.receive(ASK_AGAIN_S)
            now = time.monotonic()
            if received is not None:
                heard = now
                answer, frames = self._understand(link, received)
                if isinstance(answer, g.Outputs) and answer.number == self._number:
                    return answer, frames
            else:
                link.channel.send([codec.encode(g.Attach(PROTOCOL, "a client", PACKAGE))])  # is it alive?
            if now - heard > 10.0 or now - started > wait_s:
                raise DeadlineError(
                    f"{link.task} ({link.address}) has not answered for {now - heard:.0f} s, {now - started:.0f} s after it was "
                    "given a graph. Look at that task's output."
                )
            if now - told >= 10.0:
                told = now
                say(f"client: waiting for {link.task} ({link.address}) to run a graph: {now - started:.0f} s")

    def _understand(self, link: _Link, received: list[Any]) -> tuple[Any, list[Any]]:
        try:
            answer, frames = g.split(received)
        except WireError as error:
            raise TorchQuorumError(f"{link.address} is not a compute task: {error}") from None
        if isinstance(answer, Fault):
            raise TorchQuorumError(answer.text)
        return answer, frames


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
