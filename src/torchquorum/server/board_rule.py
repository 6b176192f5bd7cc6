"""Which runs can have a board: those whose rule leaves a ps nothing to decide as long as everybody is well.

Read by the shard, which makes the board, and by its host.
"""

from __future__ import annotations

from torchquorum.transport.messages import Plan
from torchquorum.transport.shared_lock import supported

# In narrower ones the tail of a vector may round otherwise than its body, so parts are not bit for bit the whole.
ROUNDS_IN = ("float32", "float64")


def may_have_board(plan: Plan) -> bool:
    """Whether a run can use a board at all."""
    if plan.durable:
        return False  # the ps writes an update down before anybody has it, so it makes the update itself
    return supported() and plan.num_shards == 1 and plan.average is None and mode_of(plan) is not None


def mode_of(plan: Plan) -> str | None:
    """Returns `turns`, `rounds`, or None for a rule under which the ps has more to decide."""
    rule = plan.rule
    if rule.pipeline or rule.max_lead is not None:
        return None
    needed = rule.needed(plan.num_workers)
    if needed == 1 and (plan.num_workers == 1 or rule.max_staleness is None):
        return "turns"
    narrow = any(v.dtype not in ROUNDS_IN for v in plan.variables if v.group >= 0)
    return "rounds" if rule.max_staleness == 0 and needed == plan.num_workers and not narrow else None
