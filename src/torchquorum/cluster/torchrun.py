"""torchrun: the task from the variables that torchrun, and launchers like it, set for each process.

Called by `environment`. The variables give the number of processes and the address of a store, but not the tasks' addresses:
`torchquorum.session.rendezvous` exchanges these at the `Rendezvous` that is returned here. What always holds: the first ranks
are ps and the next is worker 0, the chief; two starts of a job never share keys.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from torchquorum.cluster.finding import Finding, Rendezvous, count_ps, read_number, task_of
from torchquorum.errors import ClusterError

SOURCE = "torchrun"
NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def is_torchrun(variables: Mapping[str, str]) -> bool:
    """Whether torchrun, or a launcher that sets the same variables, has started this process."""
    known = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in variables]
    return "TORCHELASTIC_RUN_ID" in variables or {"RANK", "WORLD_SIZE"} <= {*known} or len(known) >= 3


def read_torchrun(variables: Mapping[str, str], given_ps: int | None) -> Finding | None:
    """Returns this task and the rendezvous, or None for a single process, which trains alone.

    Raises:
        ClusterError: A variable is missing or not valid, or contradicts another.
    """
    size, rank = read_number(variables, "WORLD_SIZE", low=1), read_number(variables, "RANK")
    if rank >= size:
        raise ClusterError(f"RANK={rank}: must be less than WORLD_SIZE={size}; unset both outside torchrun")
    local_size = read_number(variables, "LOCAL_WORLD_SIZE", low=1) if "LOCAL_WORLD_SIZE" in variables else None
    if local_size is not None and local_size > size:
        raise ClusterError(
            f"LOCAL_WORLD_SIZE={local_size}: must be at most WORLD_SIZE={size}; unset both outside torchrun"
        )
    if size == 1:
        return None
    host = variables.get("MASTER_ADDR")
    if host is None:
        raise ClusterError(
            f"MASTER_ADDR is not set, and RANK={rank} and WORLD_SIZE={size} are: must be the host of the store; "
            "start the program with torchrun, which sets it"
        )
    port = read_number(variables, "MASTER_PORT", low=1, high=65535)
    num_ps = count_ps(given_ps, size, whole=f"WORLD_SIZE={size}")
    run, restart = variables.get("TORCHELASTIC_RUN_ID", "none"), variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    rendezvous = Rendezvous(
        host=host,
        port=port,
        prefix=f"torchquorum/{run}/{restart}/",
        rank=rank,
        size=size,
        num_ps=num_ps,
        one_host=local_size == size or (local_size is None and _is_loopback(host)),
        hosted=variables.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("1", "true"),
    )
    about = f"run {run}" if run != "none" else ""
    return Finding(source=SOURCE, task=task_of(rank, num_ps), about=about, rendezvous=rendezvous)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
