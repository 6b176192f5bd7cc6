"""The cluster: its tasks, their addresses, and how a process finds out which task it is."""

from torchquorum.cluster.flags import ClusterFlags, parse_flags
from torchquorum.cluster.sources import Resolved, TaskArguments, launcher_task, resolve
from torchquorum.cluster.spec import ClusterSpec, TaskId
from torchquorum.cluster.worker_range import WorkerRange

__all__ = [
    "ClusterFlags",
    "ClusterSpec",
    "Resolved",
    "TaskArguments",
    "TaskId",
    "WorkerRange",
    "launcher_task",
    "parse_flags",
    "resolve",
]
