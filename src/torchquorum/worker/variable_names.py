"""The names of variables and buffers: those of the model itself, whatever it is wrapped in.

Used by all that names parameters and buffers to the ps tasks. `torch.compile` puts `_orig_mod.` into the names of a model or of a
part of it, DataParallel and DistributedDataParallel put `module.`. What always holds: the same model has the same names with and
without them, so a run can be resumed either way.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Returns how a name in this model is written without what wraps the model, or a part of it."""
    inserted: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        wraps = isinstance(module, nn.DataParallel | DistributedDataParallel)
        child = "_orig_mod" if "_orig_mod" in module._modules else "module" if wraps else None
        if child is not None:
            inserted.add(f"{path}.{child}" if path else child)
    if not inserted:
        return lambda name: name

    def plain(name: str) -> str:
        parts = name.split(".")
        return ".".join(part for k, part in enumerate(parts) if ".".join(parts[: k + 1]) not in inserted)

    return plain
