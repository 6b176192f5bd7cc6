"""The tasks of a cluster and their addresses.

`sources` builds a `ClusterSpec` from the user's description; all layers above read it. What always holds for it: its jobs are
`ps` and `worker`, each with at least one task; indices run from 0 without gaps; every address is a clean `host:port`, and no
two tasks share one. A `chief` (or `master`) job becomes worker 0; an `evaluator` job is left out.
"""

import difflib
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchquorum.errors import ClusterError

PS = "ps"
WORKER = "worker"
JOBS = (PS, WORKER)
EVALUATOR = "evaluator"

JobAddresses = str | Sequence[str] | Mapping[int, str] | Mapping[str, str]

_CHIEF_JOBS = ("chief", "master")
_JOBS_ACCEPTED = (*JOBS, *_CHIEF_JOBS, EVALUATOR)

# Straight and typographic quotes, back quotes and guillemets: left by shells, web pages and word processors.
QUOTES = "'\"`\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\u00b4\u00ab\u00bb\u2039\u203a"

_TASK_NAME = re.compile(r"/?job:(?P<job>[A-Za-z][A-Za-z0-9_]*)(?:/replica:[0-9]+)?/task:(?P<index>[0-9]{1,9})/?")
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
_INTEGER = re.compile(r"[+-]?[0-9]{1,9}")


@dataclass(frozen=True, order=True)
class TaskId:
    """One process of the cluster; `str()` gives its name, `/job:ps/task:0`.

    Attributes:
        job: `ps` or `worker`; or `evaluator`, which is not part of the cluster.
        index: Which task of the job, from 0.
    """

    job: str
    index: int

    def __post_init__(self) -> None:
        if self.index < 0:
            raise ClusterError(f"task index {self.index} of job {self.job!r}: must be 0 or more; count tasks from 0")

    def __str__(self) -> str:
        return f"/job:{self.job}/task:{self.index}"

    @property
    def is_chief(self) -> bool:
        """Whether this is the chief, worker 0."""
        return self.job == WORKER and self.index == 0

    @classmethod
    def parse(cls, name: str) -> "TaskId":
        """Reads a task's name, `/job:worker/task:1` or `/job:worker/replica:0/task:1`.

        Raises:
            ClusterError: The text is not a task's name.
        """
        match = _TASK_NAME.fullmatch(strip_quotes(name))
        if match is None:
            raise ClusterError(
                f"task name {name!r}: must look like /job:worker/task:1; give the job and the index in this form"
            )
        return cls(match["job"], int(match["index"]))


class ClusterSpec:
    """The tasks of a cluster and their addresses; immutable, comparable and hashable.

    Args:
        cluster: The addresses of each job: a sequence, a mapping from index to address, or one text with commas.
            Besides `ps` and `worker` it may have `chief` or `master`, one task that becomes worker 0 and moves the
            others up by one, and `evaluator`, which is left out.
        min_workers: How many workers a run needs to begin; the others may join and leave. None if all of them belong to
            the run.

    Raises:
        ClusterError: A job, an index or an address is not allowed, or there is no ps or no worker.
    """

    __slots__ = ("_addresses", "_chief_job", "_min_workers")

    _addresses: dict[str, tuple[str, ...]]
    _chief_job: str | None
    _min_workers: int

    def __init__(self, cluster: Mapping[str, JobAddresses], *, min_workers: int | None = None) -> None:
        given = _read_jobs(cluster)
        _refuse_duplicates(given)
        chiefs = [job for job in _CHIEF_JOBS if job in given]
        if len(chiefs) > 1:
            raise ClusterError(
                "jobs 'chief' and 'master': both mean the one task that becomes worker 0; keep one of the two"
            )
        self._chief_job = chiefs[0] if chiefs else None
        chief = given[self._chief_job] if self._chief_job else ()
        if len(chief) > 1:
            raise ClusterError(
                f"job {self._chief_job!r} with {len(chief)} tasks: there is one chief; make the others 'worker' tasks"
            )
        self._addresses = {PS: given.get(PS, ()), WORKER: chief + given.get(WORKER, ())}
        for job in JOBS:
            if not self._addresses[job]:
                raise ClusterError(_explain_missing_job(job, given))
        self._min_workers = _check_min_workers(min_workers, len(self._addresses[WORKER]))

    @property
    def min_workers(self) -> int:
        """How many workers a run needs to begin; fewer than the cluster has if workers may join and leave."""
        return self._min_workers

    @property
    def elastic(self) -> bool:
        """Whether workers may join and leave."""
        return self._min_workers < len(self._addresses[WORKER])

    @property
    def jobs(self) -> tuple[str, ...]:
        """The names of the jobs: ps and worker."""
        return JOBS

    @property
    def ps(self) -> tuple[TaskId, ...]:
        """The ps tasks in order."""
        return self.tasks(PS)

    @property
    def workers(self) -> tuple[TaskId, ...]:
        """The worker tasks in order; the first is the chief."""
        return self.tasks(WORKER)

    def num_tasks(self, job: str) -> int:
        """Returns the number of tasks of a job.

        Raises:
            ClusterError: There is no such job.
        """
        return len(self._addresses[self._check_job(job)])

    def tasks(self, job: str) -> tuple[TaskId, ...]:
        """Returns the tasks of a job in order.

        Raises:
            ClusterError: There is no such job.
        """
        return tuple(TaskId(job, index) for index in range(self.num_tasks(job)))

    def address(self, task: TaskId) -> str:
        """Returns the address of a task, `host:port`; an IPv6 host is in brackets.

        Raises:
            ClusterError: There is no such task.
        """
        self.check_task(task)
        return self._addresses[task.job][task.index]

    def check_task(self, task: TaskId) -> None:
        """Checks that a task belongs to this cluster.

        Raises:
            ClusterError: There is no such task.
        """
        count = self.num_tasks(task.job)
        if task.index >= count:
            raise ClusterError(_explain_index(task.job, task.index, count))

    def find_task(self, job: str, index: int) -> TaskId:
        """Returns the task for a job and an index as the user numbers them.

        They are the same as here unless the cluster was given with a chief: the chief is worker 0 and worker i is i + 1. An
        evaluator is not part of the cluster, which need not list it: it follows the run from outside.

        Raises:
            ClusterError: There is no such task.
        """
        job = strip_quotes(job)
        if job == EVALUATOR:
            if index != 0:
                raise ClusterError(f"task {index} of job 'evaluator': there is one evaluator, which is task 0")
            return TaskId(EVALUATOR, 0)
        if job == self._chief_job:
            if index != 0:
                raise ClusterError(_explain_index(job, index, 1))
            return TaskId(WORKER, 0)
        self._check_job(job)
        shift = 1 if job == WORKER and self._chief_job else 0
        count = self.num_tasks(job) - shift
        if not 0 <= index < count:
            raise ClusterError(_explain_index(job, index, count))
        return TaskId(job, index + shift)

    def as_dict(self) -> dict[str, list[str]]:
        """Returns the addresses of each job, a chief as worker 0; `ClusterSpec` of the result has the same tasks."""
        return {job: list(addresses) for job, addresses in self._addresses.items()}

    def _check_job(self, job: str) -> str:
        if job in self._addresses:
            return job
        allowed = [*JOBS, self._chief_job] if self._chief_job else [*JOBS]
        chief = "the chief is worker 0: use job 'worker' and index 0"
        change = chief if job in _CHIEF_JOBS else suggest(job, allowed) or "use one of them"
        raise ClusterError(f"job {job!r}: this cluster has the jobs {join_words(allowed)}; {change}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterSpec):
            return NotImplemented
        return self._addresses == other._addresses and self._min_workers == other._min_workers

    def __hash__(self) -> int:
        return hash((*self._addresses.items(), self._min_workers))

    def __repr__(self) -> str:
        least = f", min_workers={self._min_workers}" if self.elastic else ""
        return f"ClusterSpec({self.as_dict()!r}{least})"


def split_addresses(text: str) -> list[str]:
    """Splits a list of addresses, `host:port,host:port`, into its entries, cleaned but not checked.

    Quotes around the list or an entry, brackets around the list, spaces and a trailing comma are accepted.
    """
    text = _strip_list_brackets(strip_quotes(text))
    entries = [strip_quotes(entry) for entry in text.split(",")]
    if entries[-1] == "":
        entries.pop()
    return entries


def parse_address(text: str, *, label: str) -> str:
    """Returns an address as a clean `host:port`.

    Quotes, spaces around the parts and a prefix `grpc://` or `tcp://` are accepted.

    Args:
        text: The given address.
        label: Whose address it is, for the message.

    Raises:
        ClusterError: The text is not an address.
    """
    given = f"address {text!r} of {label}"
    clean = re.sub(r"\s*:\s*", ":", strip_quotes(text))
    scheme = _SCHEME.match(clean)
    if scheme is not None:
        if scheme["scheme"].lower() not in ("grpc", "tcp"):
            raise ClusterError(f"{given}: must be host:port; leave out {scheme[0]!r}")
        clean = strip_quotes(clean[scheme.end() :].removesuffix("/"))
    if re.search(r"\s", clean):
        raise ClusterError(f"{given}: must be one host:port without spaces inside; separate addresses with commas")
    host, colon, port = clean.rpartition(":")
    if not colon or clean.endswith("]") or _is_ipv6(clean):
        example = f"[{clean}]:2222" if _is_ipv6(clean) else f"{clean or 'localhost'}:2222"
        raise ClusterError(f"{given}: must be host:port and has no port; write for example {example}")
    return f"{_parse_host(host, port, given)}:{_parse_port(host, port, given)}"


def strip_quotes(text: str) -> str:
    """Removes spaces and quotes of any kind, straight or typographic, from both ends of a text."""
    return text.strip(QUOTES + " \t\r\n\u00a0")


def suggest(word: str, known: Iterable[str]) -> str | None:
    """Returns `did you mean ...?` with the known word that resembles a misspelt one, or None."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else None


def join_words(words: Sequence[str]) -> str:
    """Joins words: `ps, worker and chief`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _check_min_workers(given: int | None, workers: int) -> int:
    if given is None:
        return workers
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= workers:
        raise ClusterError(
            f"min_workers={given!r}: must be a whole number from 1 to {workers}, the number of workers; leave it out if "
            "all of them belong to the run"
        )
    return given


def _read_jobs(cluster: Mapping[str, JobAddresses]) -> dict[str, tuple[str, ...]]:
    if not isinstance(cluster, Mapping):
        raise ClusterError(
            f"cluster {cluster!r}: must be a dict from job to addresses; "
            "write for example {'ps': ['localhost:2222'], 'worker': ['localhost:2223']}"
        )
    given: dict[str, tuple[str, ...]] = {}
    for name, addresses in cluster.items():
        job = strip_quotes(str(name))
        if job not in _JOBS_ACCEPTED:
            change = suggest(job, _JOBS_ACCEPTED) or "rename it"
            raise ClusterError(f"job {job!r}: a cluster has the jobs {join_words(_JOBS_ACCEPTED)}; {change}")
        if job in given:
            raise ClusterError(f"job {job!r}: given twice; join the two lists of addresses")
        if job != EVALUATOR:
            entries = enumerate(_list_addresses(job, addresses))
            given[job] = tuple(parse_address(entry, label=str(TaskId(job, index))) for index, entry in entries)
    return given


def _list_addresses(job: str, addresses: JobAddresses) -> list[str]:
    if isinstance(addresses, str):
        entries: list[str] = split_addresses(addresses)
    elif isinstance(addresses, Mapping):
        entries = _list_by_index(job, addresses)
    elif isinstance(addresses, Sequence):
        entries = list(addresses)
        # `[FLAGS.worker_hosts]` is a list with one element that holds the whole text.
        if len(entries) == 1 and isinstance(entries[0], str):
            entries = split_addresses(entries[0])
    else:
        raise ClusterError(
            f"job {job!r} with {addresses!r}: must be a list of host:port; write for example ['localhost:2222']"
        )
    if not entries:
        raise ClusterError(
            f"job {job!r} with no address: must have at least one host:port; add one, or leave out the job"
        )
    for index, entry in enumerate(entries):
        if not isinstance(entry, str) or not entry.strip():
            raise ClusterError(
                f"address {entry!r} of {TaskId(job, index)}: must be a text, host:port; write 'localhost:2222'"
            )
    return entries


def _list_by_index(job: str, addresses: Mapping[int, str] | Mapping[str, str]) -> list[str]:
    by_index: dict[int, str] = {}
    for key, address in addresses.items():
        if isinstance(key, bool) or not re.fullmatch(r"[0-9]{1,9}", str(key).strip()):
            raise ClusterError(
                f"index {key!r} of job {job!r}: must be a whole number from 0; number the tasks 0, 1, ..."
            )
        index = int(key)
        if index in by_index:
            raise ClusterError(f"index {index} of job {job!r}: given twice; give each task its own index")
        by_index[index] = address
    if sorted(by_index) != list(range(len(by_index))):
        raise ClusterError(
            f"indices {sorted(by_index)} of job {job!r}: must run from 0 without gaps, "
            f"because every task counts; list all {max(by_index) + 1} tasks"
        )
    return [by_index[index] for index in range(len(by_index))]


def _refuse_duplicates(given: Mapping[str, tuple[str, ...]]) -> None:
    owner: dict[str, TaskId] = {}
    for job, addresses in given.items():
        for index, address in enumerate(addresses):
            task = TaskId(job, index)
            other = owner.setdefault(address.lower(), task)
            if other != task:
                raise ClusterError(
                    f"address {address!r} of {other} and {task}: every task needs its own; change one of the two ports"
                )


def _strip_list_brackets(text: str) -> str:
    for opening, closing in ("[]", "()"):
        inner = text[1:-1]
        # `[::1]` is a host in brackets, and in `[::1]:1,[::2]` the first bracket does not belong to the last.
        encloses = text.startswith(opening) and text.endswith(closing) and not _is_ipv6(inner)
        if encloses and not inner.split(opening)[0].count(closing):
            return strip_quotes(inner)
    return text


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return "]" not in text  # the standard library takes it as part of the scope, after a %


def _parse_host(host: str, port: str, given: str) -> str:
    host = strip_quotes(host)
    if host.startswith("[") and host.endswith("]") and _is_ipv6(host[1:-1]):
        return host
    if _is_ipv6(host):
        raise ClusterError(f"{given}: an IPv6 host must be in brackets; write [{host}]:{port}")
    if not host:
        raise ClusterError(f"{given}: must be host:port and has no host; write for example localhost:{port}")
    if not _HOST.fullmatch(host):
        raise ClusterError(f"{given}: {host!r} is not the name or the IP address of a host; write host:port")
    return host


def _parse_port(host: str, port: str, given: str) -> int:
    port = strip_quotes(port)
    if not port:
        raise ClusterError(f"{given}: must be host:port and has no port; write for example {host}:2222")
    if not _INTEGER.fullmatch(port):
        raise ClusterError(
            f"{given}: the port {port!r} must be a number from 1 to 65535; write for example {host}:2222"
        )
    if not 1 <= int(port) <= 65535:
        raise ClusterError(f"{given}: the port {port} must be from 1 to 65535; choose a free one, for example 2222")
    return int(port)


def _explain_index(job: str, index: int, count: int) -> str:
    if count == 0:
        return f"task {index} of job {job!r}: this cluster has none besides the chief; use job 'chief' and index 0"
    allowed = "one task, index 0" if count == 1 else f"{count} tasks, index 0 to {count - 1}"
    return f"task {index} of job {job!r}: the job has {allowed}; use one of these, or add the address of task {index}"


def _explain_missing_job(job: str, given: Mapping[str, tuple[str, ...]]) -> str:
    came = f"cluster with {join_words([*given])}" if given else "cluster without any task"
    why = "a ps holds the variables" if job == PS else "a worker computes the gradients"
    return f"{came}: must have at least one {job}, because {why}; add for example {job!r}: ['localhost:2222']"
