"""Rows of later batches, asked for while this one is computed: whose tables the ids are of, and batches that are taken one ahead.

Called by the session, on the thread of the training loop. What always holds: ids reach a table of the model or are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.worker.row_tables import RowsOf, RowTables
from torchquorum.worker.variable_names import plain_names

_Batch = TypeVar("_Batch")


def prefetch(model: nn.Module, tables: Sequence[RowTables], ids: Any) -> None:
    """Asks for rows.

    Args:
        model: The model.
        tables: The tables of each optimizer.
        ids: Of the only table, or of several by module or name.
    """
    every = [(own, each) for own in tables for each in own.all]
    if isinstance(ids, torch.Tensor):
        if len(every) != 1:
            names = ", ".join(each.spec.name for _, each in every[:5]) or "none"
            raise ConfigError(
                f"session.prefetch(ids): the model has {len(every)} tables of rows ({names}); name them: session.prefetch({{module: ids}})"
            )
        own, each = every[0]
        own.prefetch_ids(each, ids)
        return
    if not isinstance(ids, Mapping):
        raise ConfigError(
            f"session.prefetch({type(ids).__name__}): give a tensor of ids, or a mapping from modules to ids"
        )
    of = _names(model, [each for _, each in every])
    for module, given in ids.items():
        found = next(((own, each) for own, each in every if each is of.get(module)), None)
        if found is None or not isinstance(given, torch.Tensor):
            shown = module if isinstance(module, str) else type(module).__name__
            why = "has no rows on the ps tasks" if found is None else f"ids are a {type(given).__name__}, not a tensor"
            raise ConfigError(f"session.prefetch({{{shown!r}: ...}}): {why}")
        found[0].prefetch_ids(found[1], given)


def _names(model: nn.Module, every: Sequence[RowsOf]) -> dict[Any, RowsOf]:
    """Returns the tables by module, by the module's name, and by that of the parameter."""
    plain, found = plain_names(model), dict[Any, RowsOf]()
    for name, module in model.named_modules():
        own = {id(parameter) for parameter in module._parameters.values() if parameter is not None}
        for each in every:
            if id(each.parameter) in own:
                found[module] = found[plain(name)] = found[each.spec.name] = each
    return found


def ahead(batches: Iterable[_Batch], ask: Callable[[_Batch], None]) -> Iterator[_Batch]:
    """Yields batches; each has been asked for before the one that comes before it is yielded."""
    source = iter(batches)
    try:
        batch = next(source)
    except StopIteration:
        return
    for following in source:
        ask(following)
        yield batch
        batch = following
    yield batch
