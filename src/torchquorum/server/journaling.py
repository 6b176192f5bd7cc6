"""The journal's place in a ps task: what a creation takes from it, and the one that it begins.

Called by `creation`. What always holds: after `restore_journal` the shard is at the
version that the chief named, bit for bit as it was before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from torchquorum.errors import RefusedError
from torchquorum.formats.journal import Head, JournalError, Record, find_lineage, replay_lineage
from torchquorum.formats.journal_write import JournalWriter
from torchquorum.server.shard import Shard
from torchquorum.wire.messages import Create, Plan

# What an update depends on: with any of these changed the same gradients would make other variables.
DECISIVE = (
    "variables",
    "optimizer",
    "schedule",
    "average",
    "after_update",
    "placement",
    "slice_bytes",
    "tables",
    "more",
)


def plan_of_updates(plan: Plan) -> dict[str, Any]:
    """Returns what of a plan the updates depend on, as it stands in a journal."""
    travelled: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(plan))
    return {name: travelled[name] for name in DECISIVE}


def check_plan(found: dict[str, Any], plan: Plan, folder: Path) -> None:
    """Raises JournalError if updates were made with another plan than they would be made with again."""
    ours = plan_of_updates(plan)
    for name in DECISIVE:
        if (found.get(name) or None) != (ours[name] or None):  # an older journal does not have what was not there
            shown = "" if name == "variables" else f": {found.get(name)}, here {ours[name]}"
            raise JournalError(
                f"the journal in {folder} has updates that were made with another {name}{shown}. Start once with the "
                "arguments as they were, so that a checkpoint is made, and change them then; or move the .journal files "
                "away and pass accept_loss=True (--accept-loss) to go back to the last checkpoint."
            )


def take_up_journal(shard: Shard, create: Create, say: Callable[[str], None]) -> list[Record]:
    """Makes the updates again that the journal has beyond the checkpoint, and begins a journal of this generation.

    Returns:
        The updates that were made again.

    Raises:
        RefusedError: That is impossible; the chief gets the reason.
    """
    try:
        made = restore_journal(shard, create)
        shard.journal = begin_journal(shard, create)
    except JournalError as error:
        raise RefusedError(str(error)) from None
    if made:
        say(f"updates {made[0].number} to {made[-1].number} are back from the journal")
    return made


def restore_journal(shard: Shard, create: Create) -> list[Record]:
    """Makes the updates again that the journal has after the checkpoint, as far as the chief says.

    Raises:
        JournalError: The journal does not lead there, or was made with another plan.
    """
    ref = create.journal
    if ref is None or create.restore is None or ref.version <= shard.place:
        return []
    folder, step = Path(create.restore).parent, shard.place
    line = find_lineage(folder, shard.index, create.plan.num_shards, ref.generation, step)
    if line.plan is not None:
        check_plan(line.plan, create.plan, folder)
    made: list[Record] = []
    for record, payload in replay_lineage(line, step, ref.version):
        shard.replay(record, payload)
        made.append(record)
    return made


def begin_journal(shard: Shard, create: Create) -> JournalWriter | None:
    """Begins the journal of a generation at the shard's version, if the plan wants one."""
    plan = create.plan
    if not plan.durable:
        return None
    assert plan.logdir is not None, "a durable run was checked to have a folder"
    after, at = (create.journal.after, create.journal.at) if create.journal is not None else (0, 0)
    head = Head(shard.index, plan.num_shards, create.generation, after, shard.place, at, plan_of_updates(plan))
    return JournalWriter(Path(plan.logdir), head, plan.durable)
