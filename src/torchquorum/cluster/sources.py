"""Finds out which task this process is: from the program's arguments, flags, the environment, or the program's defaults.

`tq.join` and the CLI call `resolve`; the launcher calls `launcher_task` for each task it starts. `environment` reads the
sources in the environment. What always holds: an earlier source wins; the cluster comes whole from one source, and so does the
task; a source that is not needed is not read; a half described task is an error, never a guess; `Resolved.why` names the source
that won and those that were not used.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import msgspec

from torchquorum import env
from torchquorum.cluster.environment import WHY, Environment, LauncherTask, read_environment, sources_set, takes_ps
from torchquorum.cluster.finding import Finding, Rendezvous
from torchquorum.cluster.flags import EXAMPLE, IDENTITY, ClusterFlags, check_transport, parse_flags
from torchquorum.cluster.secret import OPEN, Access, read_access
from torchquorum.cluster.spec import EVALUATOR, ClusterSpec, JobAddresses, TaskId
from torchquorum.errors import ClusterError, FlagError

# Exchanges the tasks' addresses; returns the cluster, and a listening socket for this task's address.
Exchange = Callable[[Rendezvous], tuple[ClusterSpec, int]]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """This task and its cluster.

    Attributes:
        cluster: All tasks.
        task: This one.
        transport: `auto`, `shm` or `tcp`.
        source: Where it comes from: `arguments`, `flags`, `launcher`, `TF_CONFIG`, `CLUSTER_SPEC`, `torchrun`, `SLURM_*`,
            `defaults`, or two joined by `and`.
        remaining: The program's arguments without our flags, in order.
        listen_fd: An open listening socket for this task's address, from the launcher or the exchange, or None.
        access: The cluster's secret, if it has one.
        why: One line: where the cluster comes from, and which sources were set and not used.
    """

    cluster: ClusterSpec
    task: TaskId
    transport: str
    source: str
    remaining: list[str]
    listen_fd: int | None
    access: Access = OPEN
    why: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class TaskArguments:
    """What the program itself says about its task; None leaves it to the other sources.

    Attributes:
        cluster: All tasks.
        job_name: This task's job.
        task_index: This task's index.
        transport: `auto`, `shm` or `tcp`.
        secret_file: The file with the cluster's secret.
        insecure: Whether the task may listen for other hosts without a secret.
        min_workers: How many workers the run needs to begin; the others may join and leave.
    """

    cluster: ClusterSpec | Mapping[str, JobAddresses] | None = None
    job_name: str | None = None
    task_index: int | None = None
    transport: str | None = None
    secret_file: str | None = None
    insecure: bool | None = None
    min_workers: int | None = None

    def names_all(self, flags: ClusterFlags) -> bool:
        """Whether arguments and flags together describe the task, so that no other source is needed."""
        filled = self.filled_from(flags)
        hosts = self.cluster is not None or (flags.ps_hosts is not None and flags.worker_hosts is not None)
        return hosts and filled.job_name is not None and filled.task_index is not None

    def filled_from(self, flags: ClusterFlags) -> "TaskArguments":
        """Returns the arguments, with the flags' values where the program says nothing."""
        names = [f.name for f in fields(self) if f.name != "cluster" and getattr(self, f.name) is None]
        return replace(self, **{name: getattr(flags, name) for name in names})


def resolve(
    argv: Sequence[str] | None = None,
    arguments: TaskArguments | None = None,
    *,
    defaults: ClusterFlags | None = None,
    exchange: Exchange | None = None,
    own: Sequence[str] = (),
) -> Resolved | None:
    """Finds out which task this process is.

    Args:
        argv: The program's arguments without its name; None takes those of this process.
        arguments: What the program itself says; it wins over every other source.
        defaults: Values for missing flags, used where the environment names no cluster.
        exchange: Exchanges the addresses of tasks that torchrun or srun has started.
        own: Flags that belong to the program although they have the name of one of ours.

    Returns:
        The task and its cluster, or None where no source names one.

    Raises:
        FlagError: A flag is misspelt or not allowed, or the task is only half described.
        ClusterError: The cluster or the task is not valid.
        SecretError: The secret cannot be read.
    """
    arguments = TaskArguments() if arguments is None else arguments
    own = own if takes_ps() else (*own, "ps")  # elsewhere `--ps` belongs to the program
    flags, remaining = parse_flags(sys.argv[1:] if argv is None else argv, own=own)
    seen = _read_environment(arguments, flags)
    finding = seen.finding
    flags, by_flags = (flags, "flags") if finding is not None else _fill_in(flags, defaults)
    asked = arguments.filled_from(flags)
    spec = _read_cluster(asked.cluster, flags, asked.min_workers)
    _refuse_half(flags, asked, has_cluster=spec is not None, finding=finding)

    # The cluster comes whole from one source.
    listen_fd: int | None = None
    if spec is not None:
        cluster_source = by_flags if asked.cluster is None else "arguments"
    elif finding is not None:
        spec, listen_fd = _cluster_of(finding, exchange)
        if asked.min_workers is not None:
            spec = ClusterSpec(spec.as_dict(), min_workers=asked.min_workers)
        cluster_source = finding.source
    else:
        return None
    # So does the task; both may come from different sources.
    if asked.job_name is not None and asked.task_index is not None:
        task = spec.find_task(asked.job_name, check_index(asked.task_index))
        named = arguments.job_name is not None or arguments.task_index is not None
        task_source = "arguments" if named else by_flags
    else:
        assert finding is not None
        task, task_source = finding.task, finding.source
        if task.job != EVALUATOR:
            spec.check_task(task)
    inherited = finding is not None and cluster_source == task_source == finding.source
    source = " and ".join(dict.fromkeys((cluster_source, task_source)))
    return Resolved(
        cluster=spec,
        task=task,
        transport=_choose_transport(arguments.transport, flags, finding),
        source=source,
        remaining=remaining,
        listen_fd=listen_fd if inherited else None,
        why=explain(source, spec, seen, about=finding.about if inherited and finding is not None else ""),
        access=read_access(asked.secret_file, asked.insecure),
    )


def _read_environment(arguments: TaskArguments, flags: ClusterFlags) -> Environment:
    """Reads the environment, unless arguments and flags already describe the task."""
    if not arguments.names_all(flags):
        return read_environment(flags.ps)
    if flags.ps is not None:
        raise FlagError(
            f"--ps={flags.ps}: is the number of ps tasks among those of torchrun or srun; here --ps_hosts lists them"
        )
    return Environment(unused=tuple(sources_set()))


def explain(source: str, cluster: ClusterSpec, seen: Environment, *, about: str = "") -> str:
    """Returns one line: where the cluster comes from, and which sources of the environment were not used."""
    ps, workers = cluster.num_tasks("ps"), cluster.num_tasks("worker")
    counts = f"{ps + workers} tasks: {ps} ps, {workers} worker{'s' if workers > 1 else ''}"
    line = f"cluster from {source} ({', '.join(filter(None, (about, counts)))})"
    passed_over = [*seen.unused]
    if seen.winner is not None and seen.winner not in source:
        passed_over.insert(0, seen.winner)
    if not passed_over:
        return line
    why = WHY.get(source, f"{source} win over the environment")
    verb = "is" if len(passed_over) == 1 else "are"
    was = "was" if len(passed_over) == 1 else "were"
    return f"{line}; {' and '.join(passed_over)} {verb} set too and {was} not used, because {why}"


def _cluster_of(finding: Finding, exchange: Exchange | None) -> tuple[ClusterSpec, int | None]:
    """Returns the cluster of a source, exchanging addresses if needed, and the socket of this task."""
    if finding.cluster is not None:
        return finding.cluster, finding.listen_fd
    assert finding.rendezvous is not None
    if exchange is None:
        raise ClusterError(
            f"{finding.source} started this process; its tasks know each other's addresses only after they have joined"
        )
    return exchange(finding.rendezvous)


def launcher_task(cluster: ClusterSpec, task: TaskId, transport: str = "auto", listen_fd: int | None = None) -> str:
    """Returns the value of TORCHQUORUM_TASK for a task that the launcher starts.

    Args:
        cluster: All tasks.
        task: The task that is started.
        transport: `auto`, `shm` or `tcp`.
        listen_fd: A listening socket that the task inherits, bound to its address.

    Raises:
        ClusterError: The cluster has no such task.
        FlagError: There is no such transport.
    """
    cluster.check_task(task)
    record = LauncherTask(
        cluster=cluster.as_dict(),
        job=task.job,
        index=task.index,
        transport=check_transport(transport, label="transport"),
        listen_fd=listen_fd,
        min_workers=cluster.min_workers if cluster.elastic else msgspec.UNSET,
    )
    return msgspec.json.encode(record).decode()


def check_index(index: int) -> int:
    """Returns a task's index, unchanged.

    Raises:
        ClusterError: It is not a whole number.
    """
    if isinstance(index, bool) or not isinstance(index, int):
        raise ClusterError(f"task_index={index!r}: must be a whole number, 0 or more; give the task's index in its job")
    return index


def _fill_in(given: ClusterFlags, defaults: ClusterFlags | None) -> tuple[ClusterFlags, str]:
    """Returns the flags with the program's defaults for missing ones, and the name of this source."""
    if defaults is None:
        return given, "flags"
    missing = {f.name: getattr(defaults, f.name) for f in fields(given) if getattr(given, f.name) is None}
    filled = replace(given, **missing)
    if all(getattr(given, name) is None for name in IDENTITY):
        return filled, "defaults"
    return filled, "flags" if filled == given else "flags and defaults"


def _read_cluster(
    cluster: ClusterSpec | Mapping[str, JobAddresses] | None,
    flags: ClusterFlags,
    min_workers: int | None,
) -> ClusterSpec | None:
    if cluster is not None:
        if isinstance(cluster, ClusterSpec) and min_workers is None:
            return cluster
        given = cluster.as_dict() if isinstance(cluster, ClusterSpec) else cluster
        return ClusterSpec(given, min_workers=min_workers)
    if flags.ps_hosts is None or flags.worker_hosts is None:
        return None
    return ClusterSpec({"ps": flags.ps_hosts, "worker": flags.worker_hosts}, min_workers=min_workers)


def _refuse_half(flags: ClusterFlags, asked: TaskArguments, *, has_cluster: bool, finding: Finding | None) -> None:
    """Refuses a task that is named in part, where no other source completes it."""
    hosts_missing = [n for n in ("ps_hosts", "worker_hosts") if not has_cluster and getattr(flags, n) is None]
    task_missing = [n for n in ("job_name", "task_index") if getattr(asked, n) is None]
    if len(hosts_missing) == len(task_missing) == 2:
        return
    # Two sources never share one description: half a task from flags and half from TF_CONFIG is an error.
    missing = [name for half in (task_missing, hosts_missing) if len(half) == 1 or finding is None for name in half]
    if not missing:
        return
    given = [name for name in IDENTITY if name not in hosts_missing + task_missing]
    raise FlagError(
        f"{_list_flags(given)} without {_list_flags(missing)}: a task needs all of {_list_flags(IDENTITY)} (the first "
        f"two or the last two may come from the environment instead); write for example {EXAMPLE}"
    )


def _list_flags(names: Sequence[str]) -> str:
    return " ".join(f"--{name}" for name in names)


def _choose_transport(explicit: str | None, flags: ClusterFlags, finding: Finding | None) -> str:
    if explicit is not None:
        return check_transport(explicit, label="transport")
    if flags.transport is not None:
        return flags.transport
    # The launcher's `auto` is no choice, so the environment variable may still choose.
    if finding is not None and finding.transport not in (None, "auto"):
        return finding.transport
    chosen = env.transport()
    return "auto" if chosen is None else check_transport(chosen, label=env.TRANSPORT)
