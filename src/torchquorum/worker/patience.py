"""How long a worker waits for the ps tasks, what it has heard so far, and the errors that end a wait.

Read by the client, which does the waiting. What always holds: an error names the worker, the ps task with its address, what
was waited for and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torchquorum.transport.messages as m
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.errors import DeadlineError, LostCreationError, TaskLostError
from torchquorum.transport.codec import Frame


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a worker waits: for the ps and the chief to come up, for a round to close, for a sign of life of a ps."""

    start_s: float = 1800.0
    round_s: float = 1800.0
    silence_s: float = 10.0
    probe_s: float = 1.0
    say_s: float = 10.0


@dataclass(slots=True)
class Waiting:
    """An open request: what the ps tasks have said about it so far."""

    num_ps: int
    started: float
    what: str = "its turn"
    found: dict[int, tuple[m.Variables, list[Frame]]] = field(default_factory=dict)
    heard: list[float] = field(init=False)
    asked: float = field(init=False)
    told: float = field(init=False)

    def __post_init__(self) -> None:
        self.heard = [self.started] * self.num_ps
        self.asked = self.told = self.started

    def missing(self) -> list[int]:
        """Returns the ps tasks that owe an answer."""
        return [k for k in range(self.num_ps) if k not in self.found]

    def next_missing(self) -> int | None:
        """Returns the first of them."""
        return next((k for k in range(self.num_ps) if k not in self.found), None)


class Wait:
    """What a worker says of its waits.

    Args:
        task: Who waits.
        cluster: Where the others are.
        patience: How long.
    """

    def __init__(self, task: TaskId, cluster: ClusterSpec, patience: Patience) -> None:
        self._task, self._cluster, self._patience = task, cluster, patience
        self._ps: Sequence[TaskId] = cluster.tasks("ps")

    def where(self, k: int) -> str:
        """Returns the name of a ps task with its address."""
        return f"{self._ps[k]} ({self._cluster.address(self._ps[k])})"

    def who(self, held: m.Held, k: int) -> str:
        """Returns what a request waits for at a ps task, and for whom.

        Raises:
            LostCreationError: That is the chief's to do, and this is the chief, who has done it.
        """
        if held.what == m.CREATION and self._task.is_chief:
            raise LostCreationError(
                f"{self._task}: {self.where(k)} holds no variables any more: it was restarted just after they had been created"
            )
        names = [f"/job:worker/task:{i} ({self._cluster.address(TaskId('worker', i))})" for i in held.missing]
        missing = f"; missing {', '.join(names)}" if names else ""
        return f"{held.what} ({held.have} of {held.need}{missing})"

    def closed(self, k: int, what: str) -> TaskLostError:
        """Returns the error for a ps task whose connection is gone."""
        return TaskLostError(
            f"{self._task}: {self.where(k)} has closed the connection while this worker waited for {what}: its process is "
            "gone. Look at that task's output; if it does not come back by itself, start it again."
        )

    def check(self, k: int, waited_s: float, silent_s: float, patience_s: float, what: str, *, starting: bool) -> None:
        """Ends a wait that has grown too long; a ps that is still starting may be silent.

        Raises:
            TaskLostError: The ps says nothing.
            DeadlineError: It answers, but not what was asked for.
        """
        if not starting and silent_s > self._patience.silence_s:
            raise TaskLostError(
                f"{self._task}: {self.where(k)} has not answered for {silent_s:.0f} s while this worker waited for {what}. "
                "Look at that task's output; if it is gone, start it again."
            )
        if waited_s > patience_s:
            raise DeadlineError(
                f"{self._task}: waited {waited_s:.0f} s for {what} at {self.where(k)} and gave up. Check that the task runs, "
                "that host and port are the same in --ps_hosts of every task, and that no firewall stands between."
            )
