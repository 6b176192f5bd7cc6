"""What one source in the environment says about the cluster, and the checks that all sources share.

Made by `tf_config`, `slurm` and `torchrun`, read by `sources`. What always holds: every number that came as text was checked,
and an error names its variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torchquorum import env
from torchquorum.cluster.spec import PS, WORKER, ClusterSpec, TaskId
from torchquorum.errors import ClusterError


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where tasks that do not know each other's addresses exchange them: a store of torch.distributed.

    Attributes:
        host: The store's host.
        port: The store's port.
        prefix: The prefix of the keys; different for every start of a job.
        rank: This process's number, from 0; the first are ps.
        size: Number of processes.
        num_ps: How many of them are ps.
        one_host: Whether all processes are on this host.
        hosted: Whether torchrun's agent runs the store; otherwise rank 0 does.
    """

    host: str
    port: int
    prefix: str
    rank: int
    size: int
    num_ps: int
    one_host: bool
    hosted: bool


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one source says.

    Attributes:
        source: Its name, such as `TF_CONFIG`.
        task: This task.
        cluster: All tasks; None where the addresses must be exchanged first, at `rendezvous`.
        transport: `auto`, `shm` or `tcp`, if the source chooses one.
        listen_fd: An open listening socket for this task's address.
        about: What the source says about the job besides its tasks, such as `job 42`.
        rendezvous: Where the addresses are exchanged.
    """

    source: str
    task: TaskId
    cluster: ClusterSpec | None = None
    transport: str | None = None
    listen_fd: int | None = None
    about: str = ""
    rendezvous: Rendezvous | None = None


def read_number(variables: Mapping[str, str], name: str, *, low: int = 0, high: int = 2**31 - 1) -> int:
    """Returns the number in a variable.

    Raises:
        ClusterError: It is missing, or not a whole number from low to high.
    """
    text = variables.get(name)
    allowed = (
        f"must be a whole number from {low} to {high}" if high < 2**31 - 1 else f"must be a whole number, {low} or more"
    )
    if text is None:
        raise ClusterError(
            f"{name} is not set: {allowed}; the launcher sets it, so start the program with the launcher"
        )
    if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
        raise ClusterError(f"{name}={text[:80]}: {allowed}; correct it, or unset it")
    return int(text)


def count_ps(given: int | None, size: int, *, whole: str) -> int:
    """Returns how many of a launcher's processes are ps tasks: the value of `--ps` or TORCHQUORUM_PS, otherwise 1.

    Args:
        given: The value of `--ps`.
        size: Number of processes.
        whole: Its source, for the message, such as `WORLD_SIZE=3`.

    Raises:
        ClusterError: There would be no ps, or no worker.
    """
    name, number = "--ps", given
    if number is None and (set_ := env.variables(env.PS)):
        name, number = env.PS, read_number(set_, env.PS)
    if number is None:
        return 1
    if not 1 <= number < size:
        raise ClusterError(
            f"{name}={number}: must be from 1 to {size - 1}, because {whole} and at least one process must be a worker"
        )
    return number


def task_of(rank: int, num_ps: int) -> TaskId:
    """Returns the task of a launcher's process: the first processes are ps, the next is worker 0, the chief."""
    return TaskId(PS, rank) if rank < num_ps else TaskId(WORKER, rank - num_ps)
