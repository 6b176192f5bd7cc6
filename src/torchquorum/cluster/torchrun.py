"""torchrun: a task from the variables that torchrun, and launchers like it, give to each process.

Called by `sources`. The variables say how many processes there are and where a store is, not where the others listen: that
is exchanged at the `Meeting` which is returned here, by `torchquorum.session.meeting`. What always holds: the first ranks
are ps and the next is worker 0, the chief; the keys of one start of a job are never those of another.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from torchquorum.cluster.finding import Finding, Meeting, count_ps, read_number, task_of
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
    """Whether torchrun, or somebody who does as it does, has started this process."""
    known = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in variables]
    return "TORCHELASTIC_RUN_ID" in variables or {"RANK", "WORLD_SIZE"} <= {*known} or len(known) >= 3


def read_torchrun(variables: Mapping[str, str], given_ps: int | None) -> Finding | None:
    """Returns which task this is and where to meet the others, or None where there is one process, which trains alone.

    Raises:
        ClusterError: A variable is missing, or broken, or contradicts another.
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
            f"MASTER_ADDR is not set, and RANK={rank} and WORLD_SIZE={size} are: must be the host where the processes meet; "
            "start the program with torchrun, which sets it"
        )
    port = read_number(variables, "MASTER_PORT", low=1, high=65535)
    num_ps = count_ps(given_ps, size, whole=f"WORLD_SIZE={size}")
    run, restart = variables.get("TORCHELASTIC_RUN_ID", "none"), variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    meeting = Meeting(
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
    return Finding(source=SOURCE, task=task_of(rank, num_ps), about=about, meeting=meeting)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
