"""Programs of Hugging Face accelerate: which optimizer they mean, and what of accelerate cannot work here.

Asked by the session when it is made, and by a loop over epochs. What always holds: accelerate is never imported here, only looked at where
the program has done so; what would have no effect is an error before the first update.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torchquorum.errors import ConfigError
from torchquorum.worker.optimizer import Optimizer


def unwrapped(optimizer: Any) -> Any:
    """Returns the `tq.Optimizer` in one that `accelerator.prepare` or `fabric.setup` has returned; anything else as it is."""
    if isinstance(optimizer, list | tuple):
        return [unwrapped(one) for one in optimizer]
    if isinstance(optimizer, Mapping):
        return {name: unwrapped(one) for name, one in optimizer.items()}
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, Optimizer):  # what Fabric returns says that it is a tq.Optimizer itself
        return optimizer
    if getattr(optimizer, "scaler", None) is not None:
        raise ConfigError(
            "Accelerator(mixed_precision='fp16'): its gradient scaler skips steps of this worker only; use 'bf16' or 'no'"
        )
    return inner


def check_accelerate() -> None:
    """Raises ConfigError if accelerate has other processes for the same work, or another engine."""
    state = _shared("PartialState")
    processes = int(state.get("num_processes", 1) or 1)
    if processes > 1:
        raise ConfigError(
            f"accelerate has {processes} processes of its own: start the workers with `torchquorum run --workers {processes} program.py` "
            "instead of `accelerate launch`, which would average the gradients a second time"
        )
    kind = str(_shared("AcceleratorState").get("distributed_type", state.get("distributed_type", "NO")))
    if any(name in kind.upper() for name in ("DEEPSPEED", "FSDP", "MEGATRON", "XLA")):
        raise ConfigError(
            f"accelerate with {kind}: it has an engine of its own in place of the optimizer; use Accelerator() without it"
        )


def reads_ahead() -> int:
    """Returns how many batches accelerate's loader holds that the program has not seen."""
    gradient = sys.modules.get("accelerate.state")
    if gradient is None or not _shared("GradientState"):
        return 0
    state = gradient.GradientState()
    return int(bool(state.in_dataloader and not state.end_of_dataloader))


def _shared(name: str) -> dict[str, Any]:
    module = sys.modules.get("accelerate.state")
    return dict(getattr(module, name)._shared_state) if module is not None else {}
