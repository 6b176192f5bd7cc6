"""The flags that name a task and its cluster.

They are `--job_name`, `--task_index`, `--ps_hosts`, `--worker_hosts`, `--min_workers`, `--transport`, `--secret_file` and
`--insecure`. `sources` calls it with a program's arguments. What always holds: other arguments are returned unchanged and in order, for the
program's own parser; a misspelling of one of our flags is an error, because the process would otherwise be another task than
the user meant.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchquorum.cluster.spec import QUOTES, split_addresses, strip_quotes, suggest
from torchquorum.errors import FlagError

TRANSPORTS = ("auto", "shm", "tcp")

_EXAMPLES = {
    "job_name": "--job_name=worker",
    "task_index": "--task_index=0",
    "ps_hosts": "--ps_hosts=localhost:2222",
    "worker_hosts": "--worker_hosts=localhost:2223,localhost:2224",
    "ps": "--ps=1",
    "min_workers": "--min_workers=2",
    "transport": "--transport=auto",
    "secret_file": "--secret_file=cluster.secret",
    "insecure": "--insecure",
}
IDENTITY = ("job_name", "task_index", "ps_hosts", "worker_hosts")
EXAMPLE = " ".join(_EXAMPLES[field] for field in IDENTITY)

# A misspelling is at least this similar (difflib's ratio) to one of our flags.
_RESEMBLES = 0.85

# Every spelling of a flag, and the field of ClusterFlags it fills.
FIELDS = {
    "job_name": "job_name",
    "task_id": "task_index",
    "task_index": "task_index",
    "ps_hosts": "ps_hosts",
    "ps_host": "ps_hosts",
    "worker_hosts": "worker_hosts",
    "worker_host": "worker_hosts",
    "ps": "ps",
    "min_workers": "min_workers",
    "transport": "transport",
    "secret_file": "secret_file",
    "insecure": "insecure",
}
_WITHOUT_VALUE = ("insecure",)

_DASH = r"[-\u2013\u2014]"  # word processors make an en or em dash of one or two hyphens
_FLAG = re.compile(rf"{_DASH}{{1,2}}(?P<name>[A-Za-z][\w-]*)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """The values of the flags; None for a flag that was not given.

    Attributes:
        job_name: As given, without quotes.
        task_index: 0 or more.
        ps_hosts: The entries of the list; ClusterSpec checks them.
        worker_hosts: The entries of the list, likewise.
        ps: How many of the processes that torchrun or srun has started are ps tasks.
        min_workers: How many workers the run needs to begin; the others may join and leave.
        transport: One of `TRANSPORTS`.
        secret_file: The file with the cluster's secret; read by `torchquorum.cluster.secret`.
        insecure: Whether this task may listen for other hosts without a secret.
    """

    job_name: str | None = None
    task_index: int | None = None
    ps_hosts: tuple[str, ...] | None = None
    worker_hosts: tuple[str, ...] | None = None
    ps: int | None = None
    min_workers: int | None = None
    transport: str | None = None
    secret_file: str | None = None
    insecure: bool | None = None


def parse_flags(argv: Sequence[str], *, own: Sequence[str] = ("ps",)) -> tuple[ClusterFlags, list[str]]:
    """Takes the flags of torchquorum out of a program's arguments.

    Accepts hyphens or underscores, one dash or two, `--flag value` or `--flag=value`, and stray quotes. Arguments after a
    bare `--` are left alone.

    Args:
        argv: The arguments, without the program's name.
        own: Names that belong to the program here; `--ps` is ours only under torchrun or srun.

    Returns:
        The values of the flags, and the remaining arguments in order.

    Raises:
        FlagError: A flag is misspelt, has no value or a wrong one, or is given twice with different values.
    """
    found: dict[str, tuple[Any, str]] = {}
    remaining: list[str] = []
    waiting = list(argv)
    while waiting:
        token = waiting.pop(0)
        if token == "--":
            remaining += [token, *waiting]
            break
        match = _FLAG.fullmatch(token)
        name = match["name"].replace("-", "_") if match else ""
        if match is None or name not in FIELDS or name in own:
            if match is not None and name not in own:
                _refuse_misspelling(token, name)
            remaining.append(token)
            continue
        text = _take_value(name, match["value"], waiting) if name not in _WITHOUT_VALUE else match["value"] or "1"
        _store(found, name, _READERS[FIELDS[name]](name, text), f"--{name}={text}")
    return ClusterFlags(**{field: value for field, (value, _) in found.items()}), remaining


def check_transport(text: str, *, label: str) -> str:
    """Returns a transport's name without quotes.

    Args:
        text: The given name.
        label: Its source, for the message.

    Raises:
        FlagError: There is no such transport.
    """
    clean = strip_quotes(text)
    if clean not in TRANSPORTS:
        change = suggest(clean, TRANSPORTS) or "leave it out to choose it automatically"
        raise FlagError(f"{label}={clean}: must be one of {', '.join(TRANSPORTS)}; {change}")
    return clean


def _refuse_misspelling(token: str, name: str) -> None:
    def similarity(known: str) -> float:
        return difflib.SequenceMatcher(None, name.lower(), known).ratio()

    # `--ps_host` is accepted but not recommended.
    best = max((known for known in FIELDS if not known.endswith("_host")), key=similarity)
    if similarity(best) >= _RESEMBLES:
        given = token.partition("=")[0]
        known = ", ".join(f"--{field}" for field in _EXAMPLES)
        raise FlagError(f"{given}: no such flag; the flags of the cluster are {known}; did you mean --{best}?")


def _take_value(name: str, value: str | None, waiting: list[str]) -> str:
    """Returns the value of a flag, taking its parts from `waiting`."""
    if value is None:
        if not waiting or _FLAG.fullmatch(waiting[0]) or waiting[0] == "--":
            came = f"followed by {waiting[0]}" if waiting else "at the end"
            raise FlagError(f"--{name} {came}: must have a value; write for example {_EXAMPLES[FIELDS[name]]}")
        value = waiting.pop(0)
    # cmd.exe does not know single quotes, and some users do not quote: spaces then split the value into several arguments.
    while waiting and not _FLAG.fullmatch(waiting[0]) and _continues(name, value, waiting[0]):
        value = f"{value} {waiting.pop(0)}"
    if not strip_quotes(value):
        raise FlagError(f"--{name}={value}: must have a value; write for example {_EXAMPLES[FIELDS[name]]}")
    return value


def _continues(name: str, value: str, following: str) -> bool:
    if value[:1] in tuple(QUOTES) and not (len(value) > 1 and value[-1] in QUOTES):
        return following[-1:] in tuple(QUOTES) or following.endswith((",", ":"))
    if not FIELDS[name].endswith("_hosts"):
        return False
    if value.endswith(":"):
        return re.match(r"[0-9]", following) is not None
    return value.endswith(",") and re.search(r":[0-9]*,?$", following) is not None


def _store(found: dict[str, tuple[Any, str]], name: str, value: object, given: str) -> None:
    earlier, earlier_given = found.setdefault(FIELDS[name], (value, given))
    if earlier != value:
        raise FlagError(f"{earlier_given} and {given}: must agree; keep one of them")


def _read_index(name: str, text: str) -> int:
    clean = strip_quotes(text)
    # A number that was copied from a web page may keep Markdown's bold: --task_index=**0**
    if not re.fullmatch(r"[0-9]{1,9}", clean.strip("*")):
        raise FlagError(
            f"--{name}={clean}: must be a whole number, 0 or more; give the task's index in its job's list of hosts, "
            f"for example --{name}=0"
        )
    return int(clean.strip("*"))


def _read_path(name: str, text: str) -> str:
    return text.strip().strip(QUOTES) if text.strip()[:1] in tuple(QUOTES) else text


def _read_yes(name: str, text: str) -> bool:
    clean = strip_quotes(text).lower()
    if clean not in ("1", "true", "yes", "0", "false", "no"):
        raise FlagError(f"--{name}={clean}: takes no value, or one of true and false; write --{name} or leave it out")
    return clean in ("1", "true", "yes")


def _read_count(name: str, text: str) -> int:
    clean = strip_quotes(text)
    if not re.fullmatch(r"[0-9]{1,9}", clean) or int(clean) < 1:
        raise FlagError(f"--{name}={clean}: must be a whole number, 1 or more; write for example --{name}=1")
    return int(clean)


def _read_hosts(name: str, text: str) -> tuple[str, ...]:
    hosts = tuple(split_addresses(text))
    if not hosts or not all(hosts):
        raise FlagError(
            f"--{name}={text}: must be host:port, several with one comma between them; "
            f"write for example {_EXAMPLES[FIELDS[name]]}"
        )
    return hosts


_READERS: dict[str, Callable[[str, str], object]] = {
    "job_name": lambda _, text: strip_quotes(text),
    "task_index": _read_index,
    "ps": _read_count,
    "min_workers": _read_count,
    "ps_hosts": _read_hosts,
    "worker_hosts": _read_hosts,
    "transport": lambda name, text: check_transport(text, label=f"--{name}"),
    "secret_file": _read_path,
    "insecure": _read_yes,
}
