"""A cluster for in-graph tests in one process: ps and compute tasks are threads, the sockets are real."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torchquorum as tq
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.graph.compute import ComputeTask
from torchquorum.server.serve import PsTask, ServeOptions
from torchquorum.wire.rpc import Patience

PATIENCE = Patience(start_s=60.0, round_s=60.0, silence_s=30.0, probe_s=0.2, say_s=60.0)


def listening() -> socket.socket:
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.listen(128)
    return held


class GraphCluster:
    """Starts one ps and some compute tasks; others may be started later."""

    def __init__(self, *, workers: int = 1, start: int | None = None) -> None:
        self._sockets = [listening() for _ in range(1 + workers)]
        ports = [s.getsockname()[1] for s in self._sockets]
        self.spec = ClusterSpec(
            {"ps": [f"localhost:{ports[0]}"], "worker": [f"localhost:{port}" for port in ports[1:]]}
        )
        self.said: list[str] = []
        self.failures: dict[str, BaseException] = {}
        self.tasks: dict[int, ComputeTask] = {}
        server = PsTask(self.spec, 0, ServeOptions(listen_fd=self._sockets[0].detach(), say=self.said.append))
        self.threads = [self._thread("ps", server.serve, server.close)]
        for index in range(workers if start is None else start):
            self.start(index)

    def start(self, index: int) -> ComputeTask:
        task = ComputeTask(TaskId("worker", index), self.spec, listen_fd=self._sockets[1 + index].detach())
        self.tasks[index] = task
        self.threads.append(self._thread(f"worker {index}", lambda: task.run(quiet=True), task.close))
        return task

    def _thread(self, name: str, run: Any, close: Any) -> threading.Thread:
        def work() -> None:
            try:
                run()
            except BaseException as error:
                self.failures[name] = error
            finally:
                close()

        thread = threading.Thread(target=work, name=f"torchquorum-test-{name}", daemon=True)
        thread.start()
        return thread

    def wait(self, timeout_s: float = 60.0) -> None:
        for task in self.tasks.values():
            task.ask_to_close()
        for thread in self.threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), f"{thread.name} hangs; the ps said {self.said}"
        for held in self._sockets:
            held.close()


@contextmanager
def graph_cluster(**options: Any) -> Iterator[GraphCluster]:
    cluster = GraphCluster(**options)
    yield cluster
    cluster.wait()
    assert not cluster.failures, cluster.failures


def session(
    cluster: GraphCluster, graph: tq.graph.Graph, optimizer: tq.Optimizer, **options: Any
) -> tq.graph.GraphSession:
    return tq.graph.GraphSession(cluster.spec, graph, optimizer, patience=PATIENCE, **options)
