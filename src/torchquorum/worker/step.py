"""`tq.types.Step`: what became of one step of a worker. Made by the link, kept as `optimizer.last`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one `optimizer.step()`.

    Attributes:
        version: The version that the parameters hold now; of the first optimizer, the cluster's global step.
        local_step: How many gradients this worker has computed.
        accepted: Whether the gradient was used; None while that is not known (pipelined).
        reason: Why.
        staleness: How many versions old it was when it arrived.
        lr: The learning rate of the first parameter group for the next update, as the ps tasks have it.
        stop: Whether the run is over.
        optimizer: Whose step it was, where there are several optimizers; `version` and `lr` are that one's.
    """

    version: int
    local_step: int
    accepted: bool | None
    reason: str
    staleness: int
    lr: float
    stop: bool
    optimizer: str = ""
