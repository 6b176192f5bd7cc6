"""What a ps task has from its start to its end, however often the variables are created.

Made by the service, and handed to every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torchquorum.clock import SYSTEM, Clock
from torchquorum.server.ending import Ending
from torchquorum.server.followers import Followers
from torchquorum.server.identity import Identity
from torchquorum.server.saver import Saver
from torchquorum.server.tally import Tally


@dataclass(frozen=True, kw_only=True)
class TaskLife:
    """What a ps task has from its start to its end, however often the variables are created.

    Attributes:
        me: Who this task is.
        say: Prints a line for people.
        clock: Tells the time to what reads and writes files.
        saver: Writes checkpoints.
        tally: The counts of the job.
        followers: The other ps tasks.
        ending: Whether the job is over, and how.
    """

    me: Identity
    say: Callable[[str], None]
    clock: Clock = SYSTEM
    saver: Saver
    tally: Tally
    followers: Followers
    ending: Ending = field(default_factory=Ending)

    def announce(self, line: str) -> None:
        """Prints a line for people that begins with this task's name."""
        self.say(f"{self.me.task}: {line}")
