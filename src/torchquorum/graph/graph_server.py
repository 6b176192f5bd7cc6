"""`tq.graph.Server`: a task that computes graphs for clients; and `serve_task`, which is what `torchquorum join` runs.

A server is alone, created with no arguments, or one of a few tasks that know each other; `tq.graph.connect`
(`torchquorum.graph.graph_client`) talks to it. What always holds: a server's threads end with `close`, or with its process.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import Any

import torch

from torchquorum import env
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.cluster.addresses import read_addresses
from torchquorum.cluster.secret import read_access
from torchquorum.cluster.sources import Resolved
from torchquorum.devices import inventory as devices
from torchquorum.errors import ClusterError
from torchquorum.graph.compute import ComputeTask
from torchquorum.graph.graph_client import SCHEME
from torchquorum.server.serve import ServeOptions, serve
from torchquorum.session.join import say


def serve_task(found: Resolved, device: str) -> int:
    """Serves as the task that flags or TF_CONFIG name, on this thread, until its job is over; returns the exit code."""
    cluster, task = found.cluster, found.task
    if found.access.note:
        say(f"{task}: {found.access.note}")
    if task.job == "ps":
        report = env.report() if task.index == 0 else None
        started_at = env.started_at()
        options = ServeOptions(
            listen_fd=found.listen_fd, say=say, report=report, started_at=started_at, access=found.access
        )
        serve(cluster, task.index, options)
        return 0
    compute = ComputeTask(
        task,
        cluster,
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
        listen_fd: A listening socket for its address, if there is one already.
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
        cluster = self._spec or self.addresses
        compute = self._compute = ComputeTask(self.task, cluster, listen_fd=listen_fd, access=self._access)

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
            serve(self._spec, self.task.index, ServeOptions(say=say, access=self._access))
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
