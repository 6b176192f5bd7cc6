"""Slurm: the cluster from the variables that `srun` sets for each of its tasks.

Called by `environment`. What always holds: the first tasks are ps and the next is worker 0, the chief; every task computes the
same addresses from the same variables, without communication; two steps on one host have different ports unless there are
hundreds of them; a variable that contradicts another is an error that names both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torchquorum import env
from torchquorum.cluster.finding import Finding, count_ps, read_number, task_of
from torchquorum.cluster.spec import PS, WORKER, ClusterSpec
from torchquorum.errors import ClusterError

SOURCE = "SLURM_*"
MAX_HOSTS = 65536
# Below the ephemeral ports and above the well-known ones: 190 jobs of 64 ports.
FIRST_PORT, JOBS, STRIDE = 20000, 190, 64
_NODELIST = "must be a list of hosts as Slurm writes it, such as n[1-3,07],gpu-a"


def is_step(variables: Mapping[str, str]) -> bool:
    """Whether the variables are those of a task of srun, not of a batch script or a shell."""
    if "SLURM_PROCID" not in variables:
        return False
    return any(name.startswith("SLURM_STEP_") for name in variables) or variables.get("ENVIRONMENT") != "BATCH"


def read_slurm(variables: Mapping[str, str], given_ps: int | None) -> Finding | None:
    """Returns the cluster of a step of srun, or None for a step with a single task, which trains alone.

    Args:
        variables: The variables whose names begin with SLURM.
        given_ps: The value of `--ps`.

    Raises:
        ClusterError: A variable is missing or not valid, or contradicts another.
    """
    counted = next(
        (n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") if n in variables), "SLURM_NTASKS"
    )
    size = read_number(variables, counted, low=1)
    rank = read_number(variables, "SLURM_PROCID")
    if rank >= size:
        raise ClusterError(f"SLURM_PROCID={rank}: must be less than {counted}={size}; unset both outside srun")
    if size == 1:
        return None
    num_ps = count_ps(given_ps, size, whole=f"{counted}={size}")
    nodes, places = _places(variables, size, counted)
    _check_own_position(variables, rank, nodes, places)
    base = _base_port(variables)
    # On a single host, loopback needs no name service and no open firewall.
    hosts = [nodes[node] if len(nodes) > 1 else "127.0.0.1" for node, _ in places]
    addresses = [f"{host}:{base + local}" for host, (_, local) in zip(hosts, places, strict=True)]
    job = variables.get("SLURM_JOB_ID") or variables.get("SLURM_JOBID")
    return Finding(
        source=SOURCE,
        cluster=ClusterSpec({PS: addresses[:num_ps], WORKER: addresses[num_ps:]}),
        task=task_of(rank, num_ps),
        about=f"job {job}" if job else "",
    )


def expand_hosts(text: str, *, label: str) -> list[str]:
    """Returns the hosts of a list in Slurm's notation: `n[1-3,07-09],gpu-a[0-1]b` has eight.

    Args:
        text: The list.
        label: The variable it came from, for the message.

    Raises:
        ClusterError: It is not such a list.
    """
    hosts = [host for part in _split(text, label) for host in _expand(part.strip(), text, label)]
    if not hosts or not all(hosts):
        raise ClusterError(f"{label}={text[:80]}: {_NODELIST}; a host in it has no name")
    return hosts


def _split(text: str, label: str) -> list[str]:
    """Splits at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            break
        if letter == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth != 0:
        raise ClusterError(f"{label}={text[:80]}: {_NODELIST}; its brackets do not match")
    return [*parts, text[start:]]


def _expand(part: str, text: str, label: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    numbers: list[str] = []
    for item in inside.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", item.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not 0 <= last - first < MAX_HOSTS:
            raise ClusterError(f"{label}={text[:80]}: {_NODELIST}; {item!r} is neither a number nor a range of numbers")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    found = [before + number + end for number in numbers for end in _expand(after, text, label)]
    if len(found) > MAX_HOSTS:
        raise ClusterError(f"{label}={text[:80]}: more than {MAX_HOSTS} hosts")
    return found


def expand_counts(text: str, *, label: str) -> list[int]:
    """Returns the tasks of each node: `2(x3),1` is 2, 2, 2, 1.

    Raises:
        ClusterError: It is not such a list.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", item.strip())
        if match is None:
            raise ClusterError(
                f"{label}={text[:80]}: must be the tasks of each node as Slurm writes them, such as 2(x3),1"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _places(variables: Mapping[str, str], size: int, counted: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Returns the nodes, and for each task the index of its node and its index there."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    listed = next((name for name in names if name in variables), None)
    if listed is None:
        raise ClusterError(f"SLURM_STEP_NODELIST is not set: {_NODELIST}; start the program with srun, which sets it")
    nodes = expand_hosts(variables[listed], label=listed)
    spread = next((n for n in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if n in variables), None)
    if spread is None and len(nodes) > 1:
        raise ClusterError(
            "SLURM_STEP_TASKS_PER_NODE is not set: must be the tasks of each node, such as 2(x3),1; start the program with srun"
        )
    counts = expand_counts(variables[spread], label=spread) if spread is not None else [size]
    if len(counts) != len(nodes):
        raise ClusterError(
            f"{spread}={variables.get(spread or '', '')} describes {len(counts)} nodes and {listed}={variables[listed]} has "
            f"{len(nodes)}: they must agree; unset both outside srun"
        )
    if sum(counts) != size:
        raise ClusterError(
            f"{spread} adds up to {sum(counts)} tasks and {counted}={size}: they must agree; unset both outside srun"
        )
    return nodes, _distribute(variables.get("SLURM_DISTRIBUTION", "block"), counts)


def _distribute(how: str, counts: list[int]) -> list[tuple[int, int]]:
    """Returns each task's node and its index there, for Slurm's distributions `block` and `cyclic`."""
    kind = re.split(r"[:,]", how.lower())[0]
    if kind == "cyclic":
        return [(node, local) for local in range(max(counts)) for node, count in enumerate(counts) if local < count]
    if kind in ("block", "*", "", "unknown", "nopack", "pack"):
        return [(node, local) for node, count in enumerate(counts) for local in range(count)]
    raise ClusterError(
        f"SLURM_DISTRIBUTION={how}: must be block or cyclic, because addresses are computed from it; "
        "give srun --distribution=block, or describe the cluster in TF_CONFIG"
    )


def _check_own_position(
    variables: Mapping[str, str], rank: int, nodes: list[str], places: list[tuple[int, int]]
) -> None:
    """Refuses variables that contradict the computed position of this task: then the others would be wrong too."""
    node, local = places[rank]
    for name, due in (("SLURM_LOCALID", local), ("SLURM_NODEID", node)):
        if name in variables and read_number(variables, name) != due:
            raise ClusterError(
                f"{name}={variables[name]}: must be {due} for SLURM_PROCID={rank} by the other variables of Slurm; "
                "give srun --distribution=block, or describe the cluster in TF_CONFIG"
            )
    own = variables.get("SLURMD_NODENAME")
    if own is not None and own != nodes[node]:
        raise ClusterError(
            f"SLURMD_NODENAME={own}: must be {nodes[node]} for SLURM_PROCID={rank} by the other variables of Slurm; "
            "give srun --distribution=block, or describe the cluster in TF_CONFIG"
        )


def _base_port(variables: Mapping[str, str]) -> int:
    given = env.variables(env.PORT)
    if given:
        return read_number(given, env.PORT, low=1, high=65000)
    job = next((n for n in ("SLURM_JOB_ID", "SLURM_JOBID") if n in variables), None)
    number = read_number(variables, job) if job is not None else 0
    step = variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID", "0"))
    number = number * 67 + (int(step) if re.fullmatch(r"[0-9]{1,10}", step) else 0) * 13
    return FIRST_PORT + number % JOBS * STRIDE
