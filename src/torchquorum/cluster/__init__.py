"""Who exists: the cluster's tasks, their addresses, and where a task learns them."""

from torchquorum.cluster.flags import ClusterFlags, parse_flags
from torchquorum.cluster.sources import Resolved, launcher_task, resolve
from torchquorum.cluster.spec import ClusterSpec, TaskId
from torchquorum.cluster.worker_range import WorkerRange

__all__ = [
    "ClusterFlags",
    "ClusterSpec",
    "Resolved",
    "TaskId",
    "WorkerRange",
    "launcher_task",
    "parse_flags",
    "resolve",
]
