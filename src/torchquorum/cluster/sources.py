"""Where a task learns who it is: the program's arguments, flags, the launcher, TF_CONFIG, the program's defaults.

`tq.join` and the CLI call `resolve`; the launcher calls `launcher_task` for each task it starts. What always holds: an
earlier source wins, the cluster and the task are each taken from one source whole, a source that is not needed is not
read, and a task that is half described is an error, never a guess.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from torchquorum import env
from torchquorum.cluster.flags import EXAMPLE, IDENTITY, ClusterFlags, check_transport, parse_flags
from torchquorum.cluster.secret import OPEN, Access, read_access
from torchquorum.cluster.spec import ClusterSpec, JobAddresses, TaskId, strip_quotes
from torchquorum.errors import ClusterError, FlagError

_TF_CONFIG_SHAPE = (
    '{"cluster": {"ps": ["host0:2222"], "worker": ["host1:2222", "host2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Who this task is, and who the others are.

    Attributes:
        cluster: All tasks.
        task: This one.
        transport: `auto`, `shm` or `tcp`.
        source: Where it was found: `arguments`, `flags`, `launcher`, `TF_CONFIG`, `defaults`, or two joined by `and`.
        remaining: The program's arguments without our flags, in order.
        listen_fd: An open listening socket inherited from the launcher, for this task's address, or None.
        access: Who may talk to this task, and the secret with which it talks to others.
    """

    cluster: ClusterSpec
    task: TaskId
    transport: str
    source: str
    remaining: list[str]
    listen_fd: int | None
    access: Access = OPEN


class _LauncherTask(msgspec.Struct, kw_only=True, frozen=True):
    """What TORCHQUORUM_TASK holds."""

    cluster: dict[str, list[str]]
    job: str
    index: int
    transport: str = "auto"
    listen_fd: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Finding:
    """What one source of the environment says."""

    source: str
    cluster: ClusterSpec
    task: TaskId
    transport: str | None = None
    listen_fd: int | None = None


def resolve(
    argv: Sequence[str] | None = None,
    cluster: ClusterSpec | Mapping[str, JobAddresses] | None = None,
    job_name: str | None = None,
    task_index: int | None = None,
    transport: str | None = None,
    defaults: ClusterFlags | None = None,
    secret_file: str | None = None,
    insecure: bool | None = None,
) -> Resolved | None:
    """Find out who this task is.

    Args:
        argv: The program's arguments without its name; None takes those of this process.
        cluster: The tasks, where the program knows them.
        job_name: This task's job, likewise.
        task_index: This task's index, likewise.
        transport: `auto`, `shm` or `tcp`, likewise.
        defaults: What a flag says that was not given, where neither the launcher nor TF_CONFIG says anything.
        secret_file: Where the secret is, where the program knows it.
        insecure: Whether the task may do without one, likewise.

    Returns:
        The task and its cluster, or None where no source names one.

    Raises:
        FlagError: A flag is misspelt or not allowed, or the task is only half described.
        ClusterError: The cluster or the task is not what it has to be.
        SecretError: There is no secret where one was said to be.
    """
    given, remaining = parse_flags(sys.argv[1:] if argv is None else argv)
    whole = {"job_name": job_name, "task_index": task_index, "ps_hosts": cluster, "worker_hosts": cluster}
    complete = all(value is not None or getattr(given, name) is not None for name, value in whole.items())
    finding = None if complete else _read_environment()
    flags, by_flags = (given, "flags") if finding is not None else _fill_in(given, defaults)
    job = flags.job_name if job_name is None else job_name
    index = flags.task_index if task_index is None else task_index
    spec = _read_cluster(cluster, flags)
    _refuse_half(flags, spec=spec, job=job, index=index, finding=finding)

    sources: list[str] = []
    if spec is not None:
        sources.append(by_flags if cluster is None else "arguments")
    elif finding is not None:
        spec = finding.cluster
        sources.append(finding.source)
    else:
        return None
    if job is not None and index is not None:
        task = spec.find_task(job, check_index(index))
        sources.append("arguments" if job_name is not None or task_index is not None else by_flags)
    else:
        assert finding is not None
        task = finding.task
        spec.check_task(task)
        sources.append(finding.source)
    inherited = finding is not None and set(sources) == {finding.source}
    return Resolved(
        cluster=spec,
        task=task,
        transport=_choose_transport(transport, flags, finding),
        source=" and ".join(dict.fromkeys(sources)),
        remaining=remaining,
        listen_fd=finding.listen_fd if finding is not None and inherited else None,
        access=read_access(
            flags.secret_file if secret_file is None else secret_file,
            flags.insecure if insecure is None else insecure,
        ),
    )


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
    record = _LauncherTask(
        cluster=cluster.as_dict(),
        job=task.job,
        index=task.index,
        transport=check_transport(transport, label="transport"),
        listen_fd=listen_fd,
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
) -> ClusterSpec | None:
    if cluster is not None:
        return cluster if isinstance(cluster, ClusterSpec) else ClusterSpec(cluster)
    if flags.ps_hosts is None or flags.worker_hosts is None:
        return None
    return ClusterSpec({"ps": flags.ps_hosts, "worker": flags.worker_hosts})


def _read_environment() -> _Finding | None:
    text = env.task()
    if text is not None:
        return _read_launcher(text)
    text = env.tf_config()
    if text is not None:
        return _read_tf_config(text)
    return None


def _read_launcher(text: str) -> _Finding:
    try:
        record = msgspec.json.decode(text, type=_LauncherTask)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ClusterError(
            f"{env.TASK}={_shorten(text)}: must be what torchquorum's launcher writes there ({error}); "
            f"unset {env.TASK} when you start a task by hand"
        ) from None
    cluster = ClusterSpec(record.cluster)
    return _Finding(
        source="launcher",
        cluster=cluster,
        task=cluster.find_task(record.job, record.index),
        transport=check_transport(record.transport, label=f"transport in {env.TASK}"),
        listen_fd=record.listen_fd,
    )


def _read_tf_config(text: str) -> _Finding | None:
    # Quotes around the whole are what `set TF_CONFIG='{...}'` leaves on Windows.
    text = strip_quotes(text)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        position = getattr(error, "pos", 0)
        near = text[max(0, position - 20) : position + 20]
        raise ClusterError(
            f"TF_CONFIG is not JSON near {near!r} ({error}): must look like {_TF_CONFIG_SHAPE}; "
            "check its brackets and commas, and use double quotes inside"
        ) from None
    if config == {}:  # TensorFlow's way to say: no cluster
        return None
    cluster = ClusterSpec(_take(config, "TF_CONFIG", "cluster", dict))
    task = _take(config, "TF_CONFIG", "task", dict)
    job = _take(task, 'TF_CONFIG["task"]', "type", str)
    index = _take(task, 'TF_CONFIG["task"]', "index", int)
    return _Finding(source="TF_CONFIG", cluster=cluster, task=cluster.find_task(job, index))


def _take(part: object, label: str, key: str, kind: type[Any]) -> Any:
    """Return an entry of a part of TF_CONFIG, or say what the part is and what it should be."""
    if not isinstance(part, dict) or key not in part:
        came = f"{label} is {_shorten(json.dumps(part))} and has no {key!r}"
        raise ClusterError(f"{came}: must look like {_TF_CONFIG_SHAPE}; add {key!r}")
    value = part[key]
    # Some operators write the index as a text.
    if kind is int and isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
        return int(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {dict: "an object", str: "a text", int: "a whole number"}
        came = f"{label}[{key!r}] is {_shorten(json.dumps(value))}"
        raise ClusterError(f"{came}: must be {names[kind]}, as in {_TF_CONFIG_SHAPE}; change it")
    return value


def _refuse_half(
    flags: ClusterFlags, *, spec: ClusterSpec | None, job: str | None, index: int | None, finding: _Finding | None
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
        f"two or the last two may come from the launcher or TF_CONFIG instead); write for example {EXAMPLE}"
    )


def _list_flags(names: Sequence[str]) -> str:
    return " ".join(f"--{name}" for name in names)


def _choose_transport(explicit: str | None, flags: ClusterFlags, finding: _Finding | None) -> str:
    if explicit is not None:
        return check_transport(explicit, label="transport")
    if flags.transport is not None:
        return flags.transport
    # `auto` of the launcher is no choice, so it leaves room for the environment's.
    if finding is not None and finding.transport not in (None, "auto"):
        return finding.transport
    chosen = env.transport()
    return "auto" if chosen is None else check_transport(chosen, label=env.TRANSPORT)


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
