"""The addresses of a cluster that only runs graphs: jobs with any names, and no ps.

Used by `tq.graph.Server`. A cluster that trains is a `ClusterSpec`, with the jobs ps and worker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torchquorum.cluster.spec import TaskId, parse_address, split_addresses
from torchquorum.errors import ClusterError

_JOB = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def read_addresses(cluster: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the clean addresses of each job.

    Raises:
        ClusterError: A job's name or an address is not allowed, or two tasks share one.
    """
    if not isinstance(cluster, Mapping) or not cluster:
        raise ClusterError(
            f"cluster {cluster!r}: must be a dict, such as {{'local': ['localhost:2222', 'localhost:2223']}}"
        )
    found: dict[str, list[str]] = {}
    taken: dict[str, TaskId] = {}
    for job, given in cluster.items():
        if not isinstance(job, str) or not _JOB.fullmatch(job):
            raise ClusterError(f"job {job!r}: a job's name must be letters, digits and underscores, such as 'worker'")
        entries = split_addresses(given) if isinstance(given, str) else list(given)
        if not entries:
            raise ClusterError(f"job {job!r} with no address: must have at least one host:port")
        found[job] = []
        for index, entry in enumerate(entries):
            task = TaskId(job, index)
            address = parse_address(str(entry), label=str(task))
            if address in taken:
                raise ClusterError(
                    f"address {address!r} of {taken[address]} and {task}: each task needs its own address"
                )
            taken[address] = task
            found[job].append(address)
    return found
