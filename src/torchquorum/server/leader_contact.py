"""What a ps task other than 0 knows of shard 0: when it was last heard of, and whether it refuses this task.

Owned by the service. What always holds: a fault of shard 0 is not answered, or two ps tasks would answer each other for ever.
"""

from __future__ import annotations

import torchquorum.wire.messages as m
from torchquorum.server.reply import LEADER, Incoming, Reply


class LeaderContact:
    """The service's view of shard 0.

    Attributes:
        heard_at: When it was last heard of; None before the first time, and on shard 0.
        refuses: Why it does not accept this task, if it does not.
    """

    def __init__(self) -> None:
        self.heard_at: float | None = None
        self.refuses = ""

    def hear(self, fault: Incoming[m.Fault]) -> list[Reply]:
        """A fault has come, from shard 0 or another task."""
        if fault.peer == LEADER and fault.message.kind == "protocol":
            self.refuses = fault.message.text
        return []
