"""A whole cluster in one process for tests: ps tasks and workers are threads, the network is queues or, if wanted, sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torchquorum as tq
from tests.ports import free_ports
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.cluster.secret import OPEN
from torchquorum.server.leading import Leading
from torchquorum.server.serve import PsTask, ServeOptions
from torchquorum.session.join import Task
from torchquorum.wire.channel import Channel
from torchquorum.wire.inprocess import InProcessNetwork
from torchquorum.wire.rpc import Patience
from torchquorum.wire.transports import connector

PATIENCE = Patience(start_s=30.0, round_s=30.0, silence_s=20.0, probe_s=0.2, say_s=60.0)
Connect = Callable[[str, bytes], Channel]


class Cluster:
    """Starts ps tasks as threads; `run` runs one function per worker, each in a thread of its own."""

    def __init__(
        self,
        *,
        ps: int = 1,
        workers: int = 1,
        transport: str = "auto",
        wrap: Any = None,
        min_workers: int | None = None,
        sockets: bool = False,
    ) -> None:
        in_process = [*range(1000, 1000 + ps), *range(2000, 2000 + workers)]
        names = [f"localhost:{port}" for port in (free_ports(ps + workers) if sockets else in_process)]
        self.spec = ClusterSpec({"ps": names[:ps], "worker": names[ps:]}, min_workers=min_workers)
        self.transport = transport
        self.network = InProcessNetwork()
        self._dial: Connect = connector(self.spec, OPEN) if sockets else self.network.connect
        self._sockets = sockets
        self.wrap = wrap
        self.said: list[str] = []
        self.servers: list[PsTask] = []
        self._threads: list[threading.Thread] = []
        for server in [self._server(i) for i in range(ps)]:
            self._start(server)

    def _start(self, server: PsTask) -> None:
        thread = threading.Thread(target=self._serve, args=(server,), name="torchquorum-test-ps")
        thread.start()
        self.servers.append(server)
        self._threads.append(thread)

    def restart(self, index: int, timeout_s: float = 30.0) -> None:
        """Another ps takes the place of this one, and knows nothing of it, as when it is killed and started again."""
        last = max(i for i, server in enumerate(self.servers) if server.task.index == index)
        self.servers[last].end("test")
        self._threads[last].join(timeout_s)
        assert not self._threads[last].is_alive(), f"a ps does not end; it said {self.said}"
        self._start(self._server(index))

    def _server(self, index: int) -> PsTask:
        leader = None
        if index > 0:
            leader = self.connect(self.spec.address(TaskId("ps", 0)), f"ps/{index}".encode())
        listener = None if self._sockets else self.network.listen(self.spec.address(TaskId("ps", index)))
        return PsTask(self.spec, index, ServeOptions(say=self.said.append), listener=listener, leader=leader)

    def _serve(self, server: PsTask) -> None:
        try:
            server.serve()
        finally:
            server.close()

    def connect(self, address: str, identity: bytes) -> Channel:
        """Connects a task to an address; tests may replace it."""
        channel = self._dial(address, identity)
        return self.wrap(channel, identity) if self.wrap is not None else channel

    def leading(self, number: int = 0) -> Leading:
        """Returns the run of shard 0, on the ps task that was started as this number."""
        run = self.servers[number].service.run
        assert isinstance(run, Leading)
        return run

    def task(self, index: int) -> Task:
        """Returns the task of a worker."""
        return Task(cluster=self.spec, id=TaskId("worker", index), transport=self.transport, connect=self.connect)

    def run(self, *functions: Callable[[Task], Any], timeout_s: float = 60.0) -> list[Any]:
        """Runs a function per worker, waits for all of them and for the ps tasks, and returns their results."""
        results: list[Any] = [None] * len(functions)
        errors: list[BaseException] = []

        def work(index: int) -> None:
            try:
                results[index] = functions[index](self.task(index))
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=work, args=(i,), name="torchquorum-test-worker") for i in range(len(functions))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), f"a worker hangs; the ps said {self.said}"
        if errors:
            self.stop()
            raise errors[0]
        self.wait(timeout_s)
        return results

    def wait(self, timeout_s: float = 30.0) -> None:
        """Waits for the ps tasks to end by themselves."""
        for thread in self._threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), f"a ps does not end; it said {self.said}"

    def stop(self) -> None:
        """Ends ps tasks that would not end by themselves."""
        for server, thread in zip(self.servers, self._threads, strict=True):
            if thread.is_alive():
                server.end("test")
        self.wait()


_ONE_AT_A_TIME = threading.Lock()
Grads = Callable[[nn.Module, int, int], None]


def train(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    backward: Grads,
    *,
    steps: int,
    ps: int = 1,
    workers: int = 1,
    rule: Any = None,
    transport: str = "auto",
    **options: Any,
) -> tuple[list[torch.Tensor], list[Any]]:
    """Trains on a cluster; `backward(model, worker, step)` makes the gradients. Returns worker 0's parameters, its steps."""
    cluster = Cluster(ps=ps, workers=workers, transport=transport)
    all_in = threading.Barrier(workers)

    def work(task: Task) -> Any:
        with _ONE_AT_A_TIME:  # threads share torch's random state
            model = make_model()
        optimizer = tq.Optimizer(make_optimizer(model), rule=rule or tq.Sync(), **options)
        seen = []
        with tq.Session(task, model, optimizer, last_step=steps, patience=PATIENCE) as session:
            all_in.wait(20)  # otherwise the first one in fills the quorum alone, as it should
            while not session.should_stop():
                optimizer.zero_grad()
                backward(model, task.index, session.local_step)
                optimizer.step()
                seen.append(optimizer.last)
            session.pull()
        return [p.detach().clone() for p in model.parameters()], seen

    return cluster.run(*[work] * workers)[0]
