"""Ray's part: which cluster, who gets a place in it, and what to say when there is none.

`on_ray` calls it. The only module that imports ray, and only when a run on Ray begins. What always holds: a Ray that was started
here ends here; placement groups are the run's own, and are removed with it; waiting for places has a deadline.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchquorum import env
from torchquorum.cluster import TaskId
from torchquorum.errors import ConfigError, DeadlineError, TorchQuorumError
from torchquorum.launcher.ray_address import find_cluster
from torchquorum.launcher.ray_host import TaskHost
from torchquorum.launcher.ray_lines import Quiet

SAY_EVERY_S = 15.0
POLL_S = 0.2
REMOVE_S = 10.0
STORE_BYTES = 80 << 20  # tensors do not travel by Ray's object store: the least that it takes
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Ray:
    """Where on Ray a run takes place: `tq.launch(train, on=tq.Ray(gpus_per_worker=1))`.

    Attributes:
        address: The Ray cluster: auto, host:port or ray://host:port. None takes the one that RAY_ADDRESS names or that this
            process uses already, and starts Ray on this machine if there is none.
        cpus_per_worker: CPUs that each worker reserves; None for one, or for its share of the cores of a Ray started here.
        gpus_per_worker: GPUs likewise, on one machine; may be a fraction.
        placement_timeout_s: How long to wait for the machines of the ps tasks and of the first workers.
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
                raise ConfigError(f"{name}={value:g}: above 1 Ray gives whole ones only; say {int(value)}")


def check_installed() -> None:
    """Makes sure that there is a Ray to import.

    Raises:
        ConfigError: It is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("running on Ray needs Ray, which is not installed here: pip install 'torchquorum[ray]'")


def import_ray() -> Any:
    """Returns Ray.

    Raises:
        ConfigError: It is not installed.
    """
    check_installed()
    import ray

    return ray


def refresh_configuration() -> None:
    """Lets a Ray that was imported before read its settings again, where it can."""
    with contextlib.suppress(ImportError, AttributeError):
        from ray._raylet import Config  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

        Config.initialize("")


class Connection:
    """A Ray cluster in use.

    Args:
        options: Which one.
        ps: How many ps tasks will want a CPU.
        workers: How many workers.
        say: Takes what Ray says meanwhile that is of use.

    Attributes:
        ray: The module.
        is_own: Whether it was started here, for this run.
        cpus_per_worker: What a worker reserves.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at that address.
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
                    f"address={options.address!r}: this process uses a Ray cluster already; leave the address out"
                )
            return
        self._quiet = Quiet(say)
        more: dict[str, Any] = {}
        if self.is_own:
            # Reservations, not cores: on this machine as many tasks run as were asked for, as without Ray.
            needed = ps + workers * self.cpus_per_worker
            more = {
                "num_cpus": int(max(cores, needed + 1)),
                "include_dashboard": False,
                "object_store_memory": STORE_BYTES,
                "_system_config": {"worker_niceness": 0},  # Ray's are 15 steps nicer than the local launcher's tasks
            }
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **more)
        except Exception as error:  # Ray raises anything from ValueError to Exception itself
            why = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"Ray could not be started on this machine ({why}); `ray start --head` tells more"
                if self.is_own
                else f"--address {address}: no Ray cluster answers there ({why}); start one with `ray start --head`, give its "
                "host:port, or leave --address out and Ray is started on this machine"
            ) from None

    @property
    def host(self) -> str | None:
        """By which address tasks reach each other: loopback where all are here, None where each machine has its own."""
        return LOOPBACK if self.is_own else None

    def machines(self) -> list[dict[str, Any]]:
        """Returns the machines that are alive, as Ray describes them."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def describe(self) -> str:
        """Returns what the cluster has, in words."""
        machines = [
            f"{node['NodeManagerAddress']} ({describe_resources(node['Resources'])})" for node in self.machines()
        ]
        shown = ", ".join(machines[:8]) + (f" and {len(machines) - 8} more" if len(machines) > 8 else "")
        free = describe_resources(self.ray.available_resources())
        return f"{len(machines)} machine{'s' if len(machines) != 1 else ''}: {shown}; free: {free}"

    def close(self) -> None:
        """Leaves the cluster, if it was joined for this run; one that was started here ends."""
        if self._connected:
            self._connected = False
            self.ray.shutdown()
            self._quiet.restore()
            env.set_ray_auth_mode(self._auth_before)


class Seat:
    """A place on the cluster that is reserved for a task, and the actor that sits there.

    Args:
        connection: The cluster.
        task: The task.
        group: The placement group.
        bundle: Which part of the group.
        resources: What the task reserves.
    """

    def __init__(
        self, connection: Connection, task: TaskId, group: Any, bundle: int, resources: dict[str, float]
    ) -> None:
        self._connection, self.task, self.group, self._bundle = connection, task, group, bundle
        self.resources = resources
        self.address: str | None = None
        self.machine = ""
        self._host: Any = None

    @property
    def host(self) -> Any:
        """Returns the actor, made when it is first asked for; Ray makes it anew when it dies, elsewhere if need be."""
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
        """Whether the cluster has room for the task now; then its actor is there or about to be."""
        return self._connection.ray.util.placement_group_table(self.group).get("state") == "CREATED"

    def leave(self) -> Any:
        """Ends the actor; returns what fails once it has gone, or None if there was none."""
        if self._host is None:
            return None
        host, self._host = self._host, None
        self._connection.ray.kill(host, no_restart=True)
        return host.follow.remote(0.0)


class Hall:
    """The seats of a run: reserves them, waits for them, gives them back.

    Args:
        connection: The cluster.
        options: What a worker reserves, and how long to wait.
        say: Takes a line for people.
    """

    def __init__(self, connection: Connection, options: Ray, say: Callable[[str], None]) -> None:
        self._connection, self._options, self._say = connection, options, say
        self._groups: list[Any] = []
        self._seats: list[Seat] = []

    def reserve(self, tasks: list[TaskId]) -> list[Seat]:
        """Reserves seats for tasks that go together, ps tasks on different machines where there are some; does not wait."""
        wanted = [self._resources(task) for task in tasks]
        group = self._connection.ray.util.placement_group(wanted, strategy="SPREAD")
        self._groups.append(group)
        seats = [Seat(self._connection, t, group, i, r) for i, (t, r) in enumerate(zip(tasks, wanted, strict=True))]
        self._seats += seats
        return seats

    def give_back(self, seat: Seat) -> None:
        """Gives one seat back that has a group of its own."""
        seat.leave()
        self._connection.ray.util.remove_placement_group(seat.group)
        self._groups.remove(seat.group)
        self._seats.remove(seat)

    def wait(self, seats: list[Seat]) -> None:
        """Waits until all these seats, of one group, are there.

        Raises:
            DeadlineError: They are not after `placement_timeout_s`.
            ConfigError: They cannot be, on a Ray that was started here.
        """
        began = told = time.monotonic()
        if self._connection.is_own:
            self._check_own(seats)
        while not seats[0].group.wait(timeout_seconds=POLL_S):
            now = time.monotonic()
            if now - began > self._options.placement_timeout_s:
                raise DeadlineError(self.explain(seats, now - began))
            if now - told > SAY_EVERY_S:
                told = now
                self._say(f"waiting for {describe_seats(seats)}: {now - began:.0f} s; {self._connection.describe()}")

    def explain(self, seats: list[Seat], waited_s: float) -> str:
        """Returns what was asked for, what the cluster has, and what to do."""
        return (
            f"waited {waited_s:.0f} s for {describe_seats(seats)} on Ray, and there is no room; the cluster has "
            f"{self._connection.describe()}. Add machines, ask for less (--ps, --cpus-per-worker, --gpus-per-worker), "
            "or wait longer with --placement-timeout"
        )

    def close(self) -> None:
        """Gives every seat back; returns when no actor and no placement group is left."""
        ray = self._connection.ray
        leaving = [ref for seat in self._seats if (ref := seat.leave()) is not None]
        for group in self._groups:
            ray.util.remove_placement_group(group)
        if leaving:
            ray.wait(leaving, num_returns=len(leaving), timeout=REMOVE_S, fetch_local=False)
        deadline = time.monotonic() + REMOVE_S
        while any(ray.util.placement_group_table(g).get("state") not in (None, "REMOVED") for g in self._groups):
            if time.monotonic() > deadline:
                self._say(
                    f"Ray has not removed the run's placement groups within {REMOVE_S:.0f} s; it will with the job"
                )
                break
            time.sleep(POLL_S)
        self._groups, self._seats = [], []

    def _resources(self, task: TaskId) -> dict[str, float]:
        if task.job == "ps":
            return {"CPU": 1}
        asked = {"CPU": self._connection.cpus_per_worker, "GPU": self._options.gpus_per_worker}
        # Ray has no empty reservation; a hundredth of a CPU is none.
        return {name: float(amount) for name, amount in asked.items() if amount} or {"CPU": 0.01}

    def _check_own(self, seats: list[Seat]) -> None:
        there = self._connection.ray.cluster_resources()
        for seat in seats:
            for name, amount in seat.resources.items():
                if amount > there.get(name, 0):
                    raise ConfigError(
                        f"{seat.task} wants {describe_resources(seat.resources)}, and this machine has "
                        f"{describe_resources(there)}; ask for less, or give a larger Ray cluster with --address"
                    )


def describe_resources(resources: dict[str, float]) -> str:
    """Returns amounts in words: 4 CPU, 1 GPU."""
    shown = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)]
    return ", ".join(shown) or "no CPU"


def describe_seats(seats: list[Seat]) -> str:
    """Returns what seats were asked for: 2 ps with 1 CPU each, 1 worker with 4 CPU, 1 GPU."""
    parts: list[str] = []
    for job in ("ps", "worker"):
        of_job = [seat for seat in seats if seat.task.job == job]
        if of_job:
            each = " each" if len(of_job) > 1 else ""
            name = "workers" if job == "worker" and len(of_job) > 1 else job
            parts.append(f"{len(of_job)} {name} with {describe_resources(of_job[0].resources)}{each}")
    return " and ".join(parts)


class GoneError(TorchQuorumError):
    """A task's actor is gone, mostly with its machine."""
