"""Schedulers among what a session saves: when their state is captured, and how it becomes JSON values.

Used by `torchquorum.session.position`. A data source is captured when a new version arrives, since the loop takes the next batch after
that. A scheduler is asked between `optimizer.step()` and the next one, so its state belongs to the moment of the next push. What always
holds: what `unpack` returns loads as what `pack` was given, but for functions, which stay those of the object that loads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler

_TAG = "~kind"


def is_late(source: object) -> bool:
    """Whether a source is changed after `optimizer.step()`, as schedulers and gradient scalers are, and not before, as data is."""
    if isinstance(source, lr_scheduler.LRScheduler | lr_scheduler.ReduceLROnPlateau | torch.amp.GradScaler):
        return True
    return hasattr(source, "step") and not isinstance(source, Iterator) and not hasattr(source, "__iter__")


def is_scheduler(source: object) -> bool:
    """Whether a source is a scheduler object, of torch or of one's own."""
    return is_late(source) and not isinstance(source, torch.amp.GradScaler)


def pack(value: Any) -> Any:
    """Returns a state as JSON values; what cannot be one is left out of its mapping, and None in a list."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TAG: "tensor", "values": value.detach().cpu().double().tolist(), "dtype": dtype}
    if isinstance(value, Mapping):
        items = [[pack(k), pack(v)] for k, v in value.items() if not _is_function(v)]
        return {_TAG: "counter" if isinstance(value, Counter) else "dict", "items": items}
    if isinstance(value, list | tuple | set | frozenset):
        kind = "list" if isinstance(value, list) else "tuple" if isinstance(value, tuple) else "set"
        return {_TAG: kind, "items": [pack(v) for v in value]}
    return None


def unpack(value: Any) -> Any:
    """Returns the state that `pack` was given."""
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind == "tensor":
        return torch.tensor(value["values"], dtype=torch.float64).to(getattr(torch, value["dtype"]))
    if kind in ("dict", "counter"):
        found = {unpack(k): unpack(v) for k, v in value["items"]}
        return Counter(found) if kind == "counter" else found
    items = [unpack(v) for v in value["items"]]
    return tuple(items) if kind == "tuple" else set(items) if kind == "set" else items


def _is_function(value: Any) -> bool:
    known = value is None or isinstance(value, bool | int | float | str | np.generic | torch.Tensor | Mapping)
    return not known and not isinstance(value, list | tuple | set | frozenset)
