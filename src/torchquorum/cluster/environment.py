"""Sources of a cluster in the environment, by precedence: the launcher, TF_CONFIG, CLUSTER_SPEC, torchrun, Slurm.

`sources` calls it where arguments and flags do not describe the task. What always holds: the first source that is set wins and
is the only one that is read; the others are only named, to report that they were not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from torchquorum import env
from torchquorum.cluster.finding import Finding
from torchquorum.cluster.flags import check_transport
from torchquorum.cluster.slurm import SOURCE as SLURM
from torchquorum.cluster.slurm import is_step, read_slurm
from torchquorum.cluster.spec import ClusterSpec
from torchquorum.cluster.tf_config import TASK_NAMES, is_tf_config, read_cluster_spec, read_tf_config, shorten
from torchquorum.cluster.torchrun import NAMES, is_torchrun, read_torchrun
from torchquorum.cluster.torchrun import SOURCE as TORCHRUN
from torchquorum.errors import ClusterError

LAUNCHER = "launcher"
WHY = {
    LAUNCHER: "torchquorum's launcher started this task",
    env.TF_CONFIG: "TF_CONFIG names every task",
    env.CLUSTER_SPEC: "CLUSTER_SPEC names every task",
    TORCHRUN: "torchrun started this process",
    SLURM: "srun started this process",
}


class LauncherTask(msgspec.Struct, kw_only=True, frozen=True):
    """What TORCHQUORUM_TASK holds."""

    cluster: dict[str, list[str]]
    job: str
    index: int
    transport: str = "auto"
    listen_fd: int | None = None
    min_workers: int | msgspec.UnsetType = msgspec.UNSET  # all of them


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the environment says.

    Attributes:
        finding: What the winning source says; None if no source is set, or this process is alone.
        winner: Its name.
        unused: The names of the sources that are set and were not read.
    """

    finding: Finding | None = None
    winner: str | None = None
    unused: tuple[str, ...] = ()


def sources_set() -> dict[str, Callable[[int | None], Finding | None]]:
    """Returns the sources that are set, by precedence, each with its reader, which takes the value of `--ps`."""
    found: dict[str, Callable[[int | None], Finding | None]] = {}
    launcher, config, spec = env.task(), env.tf_config(), env.variables(env.CLUSTER_SPEC)
    torchrun, slurm = env.variables(*NAMES), env.variables("ENVIRONMENT", prefix="SLURM")
    if launcher is not None:
        found[LAUNCHER] = lambda _: read_launcher(launcher)
    if config is not None and is_tf_config(config):
        found[env.TF_CONFIG] = lambda _: read_tf_config(config)
    if spec:
        found[env.CLUSTER_SPEC] = lambda _: read_cluster_spec(spec[env.CLUSTER_SPEC], env.variables(*TASK_NAMES))
    if is_torchrun(torchrun):
        found[TORCHRUN] = lambda ps: read_torchrun(torchrun, ps)
    if is_step(slurm):
        found[SLURM] = lambda ps: read_slurm(slurm, ps)
    return found


def takes_ps() -> bool:
    """Whether `--ps N` is our flag here: torchrun or srun started this process, and gives only the number of processes."""
    return next(iter(sources_set()), None) in (TORCHRUN, SLURM)


def read_environment(given_ps: int | None) -> Environment:
    """Reads the source that wins.

    Args:
        given_ps: The value of `--ps`: how many of the processes of torchrun or srun are ps.

    Raises:
        ClusterError: It is not valid, or contradicts `--ps`.
    """
    found = sources_set()
    if not found:
        return Environment()
    winner, *others = found
    return Environment(finding=found[winner](given_ps), winner=winner, unused=tuple(others))


def explain_alone() -> str:
    """Returns why a process has no cluster: no source names one, or the launcher started a single process."""
    winner = next(iter(sources_set()), None)
    if winner is None:
        return "no cluster given (by flags, launcher, TF_CONFIG, CLUSTER_SPEC, torchrun or srun)"
    return f"{winner} started a single process, which cannot be a cluster of ps and worker"


def read_launcher(text: str) -> Finding:
    """Reads what a launcher of ours tells its tasks."""
    try:
        record = msgspec.json.decode(text, type=LauncherTask)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ClusterError(
            f"{env.TASK}={shorten(text)}: must be what torchquorum's launcher writes there ({error}); "
            f"unset {env.TASK} when you start a task by hand"
        ) from None
    least = None if isinstance(record.min_workers, msgspec.UnsetType) else record.min_workers
    cluster = ClusterSpec(record.cluster, min_workers=least)
    return Finding(
        source=LAUNCHER,
        cluster=cluster,
        task=cluster.find_task(record.job, record.index),
        transport=check_transport(record.transport, label=f"transport in {env.TASK}"),
        listen_fd=record.listen_fd,
    )
