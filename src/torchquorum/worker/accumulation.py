"""Gradients that accelerate accumulates: whether a step comes before its time.

Asked by the optimizer at every step. What always holds: accelerate is looked at only where the program has imported it.
"""

from __future__ import annotations

import sys

from torchquorum.errors import ConfigError


def check_accumulation() -> None:
    """Raises ConfigError in the middle of `accelerator.accumulate()`: a prepared optimizer makes no step there."""
    module = sys.modules.get("accelerate.state")
    if module is None:
        return
    shared = module.GradientState._shared_state
    if shared and not shared.get("sync_gradients", True):
        raise ConfigError(
            "optimizer.step() between two updates of accelerator.accumulate(): the optimizer was not prepared, so every micro-batch would "
            "be an update. Write optimizer = accelerator.prepare(tq.Optimizer(...)), and use what it returns"
        )
