"""The variables of a replay are created again: from what the chief sends, or from those of the creation before.

Owned by a ps task of the replay. What always holds: nothing is created before the chief has asked for it, and before every worker that goes
on after the loss of the variables before has come to what told it of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

import torchquorum.wire.messages as m
from torchquorum.errors import TorchQuorumError
from torchquorum.replay.progress import ReplayProgress
from torchquorum.replay.script import LifeKey
from torchquorum.server.plan_difference import check_same_plan
from torchquorum.server.recorder import checksum_of
from torchquorum.server.reply import Incoming
from torchquorum.server.run import Run
from torchquorum.server.shard import Shard
from torchquorum.wire.recorded import Began


class Recreation:
    """What a creation of the variables needs.

    Args:
        index: Which ps task this is.
        progress: What is followed, and how far all ps tasks are.

    Attributes:
        asked: The chief's message, until its variables are created.
    """

    def __init__(self, index: int, progress: ReplayProgress) -> None:
        self._index, self._progress = index, progress
        self.asked: Incoming[m.Create] | None = None

    def all_have_lost(
        self, run: Run, asked: Mapping[LifeKey, Incoming[Any]], at: int, waits: Callable[[LifeKey], bool]
    ) -> bool:
        """Whether every worker that goes on after the loss of these variables has come to what told it of the loss.

        That is in `asked`, or something else for which it `waits`.
        """
        if self._index > 0 and (self.asked is not None or self._progress.at[0] > at):
            return True
        for life in self._progress.script.lives.values():
            goes_on = run.generation in life.generations[:-1]
            if goes_on and run.shard.workers.knows(*life.key):
                last = asked.get(life.key)
                if (last is None or isinstance(last.message, m.Join)) and not waits(life.key):
                    return False
        return True

    def make(self, item: Began, create: Incoming[m.Create]) -> Shard | None:
        """Returns the shard of a creation; None while what it goes on from is not there.

        Raises:
            TorchQuorumError: The program's plan or first values are others than those of the record.
        """
        if self._index == 0:
            _check(item, create)
        base = self._progress.script.base_of(item)
        if base is None:
            message = replace(create.message, plan=item.plan, generation=item.generation)
            return Shard.created(self._index, message, create.frames)
        kept = self._progress.kept.get(base)
        if kept is None or not kept.complete:
            return None
        return Shard.made_of(self._index, item.plan, kept, kept.manifest, item.generation)


def _check(item: Began, create: Incoming[m.Create]) -> None:
    try:
        check_same_plan(item.plan, create.message.plan, "the program as it is now")
    except TorchQuorumError as error:
        raise TorchQuorumError(
            f"{error}\n(`the chief` is that of the record: was the program changed since?)"
        ) from error
    if item.base < 0 and (found := checksum_of(item.plan, create.frames)) != item.checksum:
        raise TorchQuorumError(
            f"the chief's first values are not those that were recorded (checksum {found:08x}, recorded {item.checksum:08x}): the "
            "model is made with other random numbers, or read from a file that has changed"
        )
