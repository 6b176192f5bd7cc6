"""Which runs can use the fast path: those whose rule leaves the ps nothing to decide while all workers are well.

Asked by the shard, which makes the page, by its host and by the workers. Which optimizers and dtypes can be updated by workers
is said by `torchquorum.update.kernels`.
"""

from __future__ import annotations

import os

from torchquorum.memory.lock import supported
from torchquorum.update.constraints import constrained
from torchquorum.update.kernels import SLICED_IN, Kernel, kernels_for
from torchquorum.wire.messages import Plan


def may_have_fastpath(plan: Plan) -> bool:
    """Whether a run can use the fast path at all."""
    if plan.rule.local_steps is not None or plan.compress:
        return False  # what is given is made from a residual that is the worker's alone
    if plan.tables:
        return False  # rows are where only the ps reaches them
    if (plan.record or plan.durable) and plan.name:
        return False  # of several optimizers each has a page of its own: what a worker did on one is not ordered with the others
    if plan.durable and not hasattr(os, "pidfd_open"):
        return False  # a worker cannot see whether the ps is alive
    if not supported() or plan.num_shards > 1 or plan.average is not None:
        return False
    return mode_of(plan) is not None and fastpath_kernels(plan) is not None


def fastpath_kernels(plan: Plan) -> list[Kernel] | None:
    """Returns the kernels with which workers make the updates of a run, one for each parameter group; None if only the ps can."""
    return constrained(kernels_for(plan.optimizer, plan.schedule), plan.after_update)


def mode_of(plan: Plan) -> str | None:
    """Returns `turns`, `rounds`, or None for a rule under which the ps has more to decide."""
    rule = plan.rule
    if rule.pipeline or rule.max_lead is not None or rule.grace is not None:
        return None
    needed = rule.needed(plan.num_workers)
    if rule.least(plan.num_workers) != needed:
        return None  # the ps chooses how many are waited for
    if needed == 1 and (plan.num_workers == 1 or rule.max_staleness is None):
        return "turns"
    # In a round each worker updates a slice of the vector.
    sliced = all(v.dtype in SLICED_IN for v in plan.variables if v.group >= 0)
    return "rounds" if rule.max_staleness == 0 and needed == plan.num_workers and sliced else None
