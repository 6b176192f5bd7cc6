"""Where a task learns who it is: the program's arguments, flags, the environment, the program's defaults.

`tq.join` and the CLI call `resolve`; the launcher calls `launcher_task` for each task it starts. `environment` has the
sources of the environment. What always holds: an earlier source wins, the cluster and the task are each taken from one
source whole, a source that is not needed is not read, a task that is half described is an error, never a guess, and
`Resolved.why` says who won and who was passed over.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import msgspec

from torchquorum import env
from torchquorum.cluster.environment import WHY, Environment, LauncherTask, read_environment, sources_set, takes_ps
from torchquorum.cluster.finding import Finding, Meeting
from torchquorum.cluster.flags import EXAMPLE, IDENTITY, ClusterFlags, check_transport, parse_flags
from torchquorum.cluster.secret import OPEN, Access, read_access
from torchquorum.cluster.spec import EVALUATOR, ClusterSpec, JobAddresses, TaskId
from torchquorum.errors import ClusterError, FlagError

# Exchanges addresses where tasks do not know each other's: the cluster, and a listening socket for this task's address.
Meet = Callable[[Meeting], tuple[ClusterSpec, int]]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Who this task is, and who the others are.

    Attributes:
        cluster: All tasks.
        task: This one.
        transport: `auto`, `shm` or `tcp`.
        source: Where it was found: `arguments`, `flags`, `launcher`, `TF_CONFIG`, `CLUSTER_SPEC`, `torchrun`, `SLURM_*`,
            `defaults`, or two joined by `and`.
        remaining: The program's arguments without our flags, in order.
        listen_fd: An open listening socket for this task's address, of the launcher or of the exchange, or None.
        access: Who may talk to this task, and the secret with which it talks to others.
        why: One line that says where the cluster is from, and which sources were set and not used.
    """

    cluster: ClusterSpec
    task: TaskId
    transport: str
    source: str
    remaining: list[str]
    listen_fd: int | None
    access: Access = OPEN
    why: str = field(default="", compare=False)


def resolve(
    argv: Sequence[str] | None = None,
    cluster: ClusterSpec | Mapping[str, JobAddresses] | None = None,
    job_name: str | None = None,
    task_index: int | None = None,
    transport: str | None = None,
    defaults: ClusterFlags | None = None,
    secret_file: str | None = None,
    insecure: bool | None = None,
    *,
    meet: Meet | None = None,
    own: Sequence[str] = (),
    min_workers: int | None = None,
) -> Resolved | None:
    """Find out who this task is.

    Args:
        argv: The program's arguments without its name; None takes those of this process.
        cluster: The tasks, where the program knows them.
        job_name: This task's job, likewise.
        task_index: This task's index, likewise.
        transport: `auto`, `shm` or `tcp`, likewise.
        defaults: What a flag says that was not given, where the environment says nothing.
        secret_file: Where the secret is, where the program knows it.
        insecure: Whether the task may do without one, likewise.
        meet: Exchanges the addresses of tasks that torchrun has started.
        own: Flags that belong to the program although they have the name of one of ours.
        min_workers: How many workers must be there for the run to begin, where the others may come and go.

    Returns:
        The task and its cluster, or None where no source names one.

    Raises:
        FlagError: A flag is misspelt or not allowed, or the task is only half described.
        ClusterError: The cluster or the task is not what it has to be.
        SecretError: There is no secret where one was said to be.
    """
    own = own if takes_ps() else (*own, "ps")  # elsewhere `--ps` is the program's own, or nobody's
    given, remaining = parse_flags(sys.argv[1:] if argv is None else argv, own=own)
    whole = {"job_name": job_name, "task_index": task_index, "ps_hosts": cluster, "worker_hosts": cluster}
    complete = all(value is not None or getattr(given, name) is not None for name, value in whole.items())
    seen = Environment(unused=tuple(sources_set())) if complete else read_environment(given.ps)
    finding = seen.finding
    if complete and given.ps is not None:
        raise FlagError(f"--ps={given.ps}: says how many tasks of torchrun or srun are ps; --ps_hosts says it here")
    flags, by_flags = (given, "flags") if finding is not None else _fill_in(given, defaults)
    job = flags.job_name if job_name is None else job_name
    index = flags.task_index if task_index is None else task_index
    spec = _read_cluster(cluster, flags, flags.min_workers if min_workers is None else min_workers)
    _refuse_half(flags, spec=spec, job=job, index=index, finding=finding)

    sources: list[str] = []
    listen_fd = finding.listen_fd if finding is not None else None
    if spec is not None:
        sources.append(by_flags if cluster is None else "arguments")
    elif finding is not None:
        spec, listen_fd = _cluster_of(finding, meet)
        if flags.min_workers is not None or min_workers is not None:
            spec = ClusterSpec(spec.as_dict(), min_workers=flags.min_workers if min_workers is None else min_workers)
        sources.append(finding.source)
    else:
        return None
    if job is not None and index is not None:
        task = spec.find_task(job, check_index(index))
        sources.append("arguments" if job_name is not None or task_index is not None else by_flags)
    else:
        assert finding is not None
        task = finding.task
        if task.job != EVALUATOR:
            spec.check_task(task)
        sources.append(finding.source)
    inherited = finding is not None and set(sources) == {finding.source}
    source = " and ".join(dict.fromkeys(sources))
    return Resolved(
        cluster=spec,
        task=task,
        transport=_choose_transport(transport, flags, finding),
        source=source,
        remaining=remaining,
        listen_fd=listen_fd if inherited else None,
        why=explain(source, spec, seen, about=finding.about if inherited and finding is not None else ""),
        access=read_access(
            flags.secret_file if secret_file is None else secret_file,
            flags.insecure if insecure is None else insecure,
        ),
    )


def explain(source: str, cluster: ClusterSpec, seen: Environment, *, about: str = "") -> str:
    """Returns the line that says where the cluster is from, and what was set in the environment and not used."""
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


def _cluster_of(finding: Finding, meet: Meet | None) -> tuple[ClusterSpec, int | None]:
    """Returns the cluster of a source, where need be by meeting the other tasks, and the socket of this task."""
    if finding.cluster is not None:
        return finding.cluster, finding.listen_fd
    assert finding.meeting is not None
    if meet is None:
        raise ClusterError(
            f"{finding.source} started this process, and its tasks exchange their addresses when they join: ask one of them"
        )
    return meet(finding.meeting)


def launcher_task(cluster: ClusterSpec, task: TaskId, transport: str = "auto", listen_fd: int | None = None) -> str:
    """Return what the launcher puts into TORCHQUORUM_TASK for the task it starts.

    Args:
        cluster: All tasks.
        task: The one that is started.
        transport: `auto`, `shm` or `tcp`.
        listen_fd: A listening socket that the task inherits, bound to its address.

    Raises:
        ClusterError: The task is not one of the cluster.
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
    """Return a task's index as it is.

    Raises:
        ClusterError: It is not a whole number.
    """
    if isinstance(index, bool) or not isinstance(index, int):
        raise ClusterError(f"task_index={index!r}: must be a whole number, 0 or more; give the task's place in its job")
    return index


def _fill_in(given: ClusterFlags, defaults: ClusterFlags | None) -> tuple[ClusterFlags, str]:
    """Return the flags with the program's defaults for what is missing, and who has spoken."""
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


def _refuse_half(
    flags: ClusterFlags, *, spec: ClusterSpec | None, job: str | None, index: int | None, finding: Finding | None
) -> None:
    """Refuse a task that is named in part, where no other source completes it."""
    hosts_missing = [name for name in ("ps_hosts", "worker_hosts") if spec is None and getattr(flags, name) is None]
    task_missing = [name for name, value in (("job_name", job), ("task_index", index)) if value is None]
    if len(hosts_missing) == len(task_missing) == 2:
        return
    # Two sources never share the description of one thing: half a task from flags and half from TF_CONFIG is nobody.
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
    # `auto` of the launcher is no choice, so it leaves room for the environment's.
    if finding is not None and finding.transport not in (None, "auto"):
        return finding.transport
    chosen = env.transport()
    return "auto" if chosen is None else check_transport(chosen, label=env.TRANSPORT)
