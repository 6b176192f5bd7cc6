"""The connection to a Ray cluster, and the reservations that a run holds in it.

Called by `on_ray`. Imports ray only when a run on Ray begins. What always holds: a Ray that was started here is shut down here;
a run's placement groups are removed with it; every wait for a reservation has a deadline.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchquorum import env
from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster import TaskId
from torchquorum.errors import ConfigError, DeadlineError, TorchQuorumError
from torchquorum.launcher.ray_address import find_cluster, no_cluster
from torchquorum.launcher.ray_host import TaskHost
from torchquorum.launcher.ray_lines import RayOutputFilter
from torchquorum.lines import first_of

SAY_EVERY_S = 15.0
POLL_S = 0.2
REMOVE_S = 10.0
STORE_BYTES = 80 << 20  # the minimum: tensors do not go through Ray's object store
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Ray:
    """Where on Ray a run takes place: `tq.launch(train, on=tq.Ray(gpus_per_worker=1))`.

    Attributes:
        address: The Ray cluster: auto, host:port or ray://host:port. None uses the cluster of RAY_ADDRESS or the one that
            this process is connected to, and starts Ray on this machine if there is neither.
        cpus_per_worker: CPUs that each worker reserves; None for 1, or for an equal share of the cores of a Ray started here.
        gpus_per_worker: GPUs that each worker reserves on its machine; may be a fraction.
        placement_timeout_s: How long to wait for the machines of the ps tasks and of the first workers, in seconds.
    """

    address: str | None = None
    cpus_per_worker: float | None = None
    gpus_per_worker: float = 0
    placement_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name, least in (("cpus_per_worker", 0), ("gpus_per_worker", 0), ("placement_timeout_s", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < float("inf"):
                raise ConfigError(f"{name}={value:g}: must be {least} or more")
            if name != "placement_timeout_s" and value is not None and value > 1 and value != int(value):
                raise ConfigError(f"{name}={value:g}: above 1 Ray allows whole numbers only; use {int(value)}")


def check_installed() -> None:
    """Checks that Ray is installed.

    Raises:
        ConfigError: It is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("running on Ray needs Ray, which is not installed here: pip install 'torchquorum[ray]'")


def import_ray() -> Any:
    """Imports Ray.

    Raises:
        ConfigError: It is not installed.
    """
    check_installed()
    import ray

    return ray


def refresh_configuration() -> None:
    """Makes a Ray that was imported earlier read its settings again, where it can."""
    with contextlib.suppress(ImportError, AttributeError):
        from ray._raylet import Config  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

        Config.initialize("")


class RayConnection:
    """A Ray cluster in use.

    Args:
        options: Which cluster.
        ps: Number of ps tasks; each reserves one CPU.
        workers: Number of workers.
        say: Receives the useful lines that Ray prints.

    Attributes:
        ray: The module.
        is_own: Whether it was started here for this run.
        cpus_per_worker: CPUs that a worker reserves.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers at that address.
    """

    def __init__(self, options: Ray, ps: int, workers: int, say: Callable[[str], None] = lambda _: None) -> None:
        loaded = "ray" in sys.modules
        self._auth_before = env.ray_auth_mode()
        address = options.address or ("auto" if env.ray_address() is not None else "local")
        found = loaded and bool(import_ray().is_initialized())
        if not found and address != "local":
            check_installed()
            address, auth_mode = find_cluster(address)
            env.set_ray_auth_mode(auth_mode)  # Ray reads it when it is imported
        self.ray = ray = import_ray()
        if loaded and not found:
            refresh_configuration()
        cores = os.cpu_count() or 1
        self._connected, self.is_own = not found, not found and address == "local"
        share = max(1, cores // workers) if self.is_own else 1
        self.cpus_per_worker = share if options.cpus_per_worker is None else options.cpus_per_worker
        if found:
            if options.address not in (None, "auto"):
                raise ConfigError(
                    f"address={options.address!r}: this process already uses a Ray cluster; leave the address out"
                )
            return
        self._filter = RayOutputFilter(say)
        more: dict[str, Any] = {}
        if self.is_own:
            # CPUs are only reservations here: this machine runs as many tasks as were asked for, as without Ray.
            needed = ps + workers * self.cpus_per_worker
            more = {
                "num_cpus": int(max(cores, needed + 1)),
                "include_dashboard": False,
                "object_store_memory": STORE_BYTES,
                "_system_config": {"worker_niceness": 0},  # Ray's default is 15, the local launcher's tasks have 0
            }
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **more)
        except Exception as error:  # Ray raises many types, Exception itself among them
            why = " ".join(str(error).split())[:300]
            if not self.is_own:
                raise no_cluster(address, why) from None
            raise ConfigError(
                f"Ray could not be started on this machine ({why}); `ray start --head` shows more"
            ) from None

    @property
    def host(self) -> str | None:
        """The address by which tasks reach each other: loopback on a Ray started here, None where each machine has its own."""
        return LOOPBACK if self.is_own else None

    def machines(self) -> list[dict[str, Any]]:
        """Returns the machines that are alive, as Ray describes them."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def describe(self) -> str:
        """Returns what the cluster has, in words."""
        machines = [
            f"{node['NodeManagerAddress']} ({describe_resources(node['Resources'])})" for node in self.machines()
        ]
        shown = first_of(machines, 8)
        free = describe_resources(self.ray.available_resources())
        return f"{len(machines)} machine{'s' if len(machines) != 1 else ''}: {shown}; free: {free}"

    def close(self) -> None:
        """Disconnects, if this run connected; shuts down a Ray that was started here."""
        if self._connected:
            self._connected = False
            self.ray.shutdown()
            self._filter.restore()
            env.set_ray_auth_mode(self._auth_before)


class Reservation:
    """What the cluster reserves for one task, and the task's actor there.

    Args:
        connection: The cluster.
        task: The task.
        group: The placement group.
        bundle: The index of its bundle in the group.
        resources: What the task reserves.
    """

    def __init__(
        self, connection: RayConnection, task: TaskId, group: Any, bundle: int, resources: dict[str, float]
    ) -> None:
        self._connection, self.task, self.group, self._bundle = connection, task, group, bundle
        self.resources = resources
        self.address: str | None = None
        self.machine = ""
        self._host: Any = None

    @property
    def host(self) -> Any:
        """Returns the actor, created on first use; Ray restarts it when it dies, on another machine if needed."""
        if self._host is None:
            ray = self._connection.ray
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self._bundle
            )
            self._host = (
                ray.remote(TaskHost)
                .options(
                    num_cpus=self.resources.get("CPU", 0),
                    num_gpus=self.resources.get("GPU", 0),
                    max_restarts=-1,
                    max_task_retries=0,
                    max_concurrency=4,  # following the output, starting, signals
                    scheduling_strategy=strategy,
                )
                .remote(str(self.task), self._connection.host)
            )
        return self._host

    @property
    def is_reserved(self) -> bool:
        """Whether the cluster has made room for the task; then its actor runs or is about to."""
        return self._connection.ray.util.placement_group_table(self.group).get("state") == "CREATED"

    def release(self) -> Any:
        """Ends the actor; returns a call that fails once it is gone, or None if there was no actor."""
        if self._host is None:
            return None
        host, self._host = self._host, None
        self._connection.ray.kill(host, no_restart=True)
        return host.follow.remote(0.0)


class Reservations:
    """All reservations of a run: makes them, waits for them, gives them back.

    Args:
        connection: The cluster.
        options: What a worker reserves, and how long to wait.
        say: Receives progress messages.
        clock: Used for all waits.
    """

    def __init__(
        self, connection: RayConnection, options: Ray, say: Callable[[str], None], clock: Clock = SYSTEM
    ) -> None:
        self._connection, self._options, self._say, self._clock = connection, options, say, clock
        self._groups: list[Any] = []
        self._made: list[Reservation] = []

    def reserve(self, tasks: list[TaskId]) -> list[Reservation]:
        """Reserves room for tasks in one placement group, on different machines where possible; does not wait."""
        wanted = [self._resources(task) for task in tasks]
        group = self._connection.ray.util.placement_group(wanted, strategy="SPREAD")
        self._groups.append(group)
        reservations = [
            Reservation(self._connection, t, group, i, r) for i, (t, r) in enumerate(zip(tasks, wanted, strict=True))
        ]
        self._made += reservations
        return reservations

    def give_back(self, reservation: Reservation) -> None:
        """Gives back a reservation whose group holds nothing else."""
        reservation.release()
        self._connection.ray.util.remove_placement_group(reservation.group)
        self._groups.remove(reservation.group)
        self._made.remove(reservation)

    def wait(self, reservations: list[Reservation]) -> None:
        """Waits until the cluster has made all these reservations, which share one group.

        Raises:
            DeadlineError: It has not after `placement_timeout_s`.
            ConfigError: It never can, on a Ray that was started here.
        """
        began = told = self._clock.now()
        if self._connection.is_own:
            self._check_own(reservations)
        while not reservations[0].group.wait(timeout_seconds=POLL_S):
            now = self._clock.now()
            if now - began > self._options.placement_timeout_s:
                raise DeadlineError(self.explain(reservations, now - began))
            if now - told > SAY_EVERY_S:
                told = now
                self._say(
                    f"waiting for {describe_reservations(reservations)}: {now - began:.0f} s; {self._connection.describe()}"
                )

    def explain(self, reservations: list[Reservation], waited_s: float) -> str:
        """Returns an error message: what was asked for, what the cluster has, and what to do."""
        return (
            f"waited {waited_s:.0f} s for {describe_reservations(reservations)} on Ray, and there is no room; the cluster has "
            f"{self._connection.describe()}. Add machines, ask for less (--ps, --cpus-per-worker, --gpus-per-worker), "
            "or wait longer with --placement-timeout"
        )

    def close(self) -> None:
        """Gives all reservations back; returns when no actor and no placement group is left."""
        ray = self._connection.ray
        leaving = [ref for reservation in self._made if (ref := reservation.release()) is not None]
        for group in self._groups:
            ray.util.remove_placement_group(group)
        if leaving:
            ray.wait(leaving, num_returns=len(leaving), timeout=REMOVE_S, fetch_local=False)
        deadline = self._clock.now() + REMOVE_S
        while any(ray.util.placement_group_table(g).get("state") not in (None, "REMOVED") for g in self._groups):
            if self._clock.now() > deadline:
                self._say(
                    f"Ray has not removed the run's placement groups within {REMOVE_S:.0f} s; it removes them with the job"
                )
                break
            self._clock.sleep(POLL_S)
        self._groups, self._made = [], []

    def _resources(self, task: TaskId) -> dict[str, float]:
        if task.job == "ps":
            return {"CPU": 1}
        asked = {"CPU": self._connection.cpus_per_worker, "GPU": self._options.gpus_per_worker}
        # Ray has no empty reservation; a hundredth of a CPU comes close.
        return {name: float(amount) for name, amount in asked.items() if amount} or {"CPU": 0.01}

    def _check_own(self, reservations: list[Reservation]) -> None:
        there = self._connection.ray.cluster_resources()
        for reservation in reservations:
            for name, amount in reservation.resources.items():
                if amount > there.get(name, 0):
                    raise ConfigError(
                        f"{reservation.task} needs {describe_resources(reservation.resources)}, and this machine has "
                        f"{describe_resources(there)}; ask for less, or use a larger Ray cluster with --address"
                    )


def describe_resources(resources: dict[str, float]) -> str:
    """Returns resources in words: 4 CPU, 1 GPU."""
    shown = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)]
    return ", ".join(shown) or "no CPU"


def describe_reservations(reservations: list[Reservation]) -> str:
    """Returns reservations in words: 2 ps with 1 CPU each, 1 worker with 4 CPU, 1 GPU."""
    parts: list[str] = []
    for job in ("ps", "worker"):
        of_job = [reservation for reservation in reservations if reservation.task.job == job]
        if of_job:
            each = " each" if len(of_job) > 1 else ""
            name = "workers" if job == "worker" and len(of_job) > 1 else job
            parts.append(f"{len(of_job)} {name} with {describe_resources(of_job[0].resources)}{each}")
    return " and ".join(parts)


class ActorLostError(TorchQuorumError):
    """A task's actor is gone, usually with its machine."""
