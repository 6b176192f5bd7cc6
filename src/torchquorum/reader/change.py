"""What has changed in a run between two versions that a reader has looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from torchquorum.reader.read_copy import AVERAGE, BUFFER, VARIABLE, ReadCopy, ReadVersion, RowChanges, all_keys
from torchquorum.reader.write_model import write_model


@dataclass(frozen=True)
class ChangedRows:
    """The rows of a table that have changed.

    Attributes:
        keys: Which, each once and in order.
        rows: What they are now, one behind the other.
        gone: The keys whose rows have gone: they are again what they would begin with.
        whole: Whether these are all rows that there are, and none that was there before counts.
    """

    keys: torch.Tensor
    rows: torch.Tensor
    gone: torch.Tensor
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Change:
    """A newer version, as far as it differs from the one before.

    Attributes:
        version: The version that this leads to; a number, which also knows the generation and its age.
        full: Whether it is everything there is, and not a difference: at first, after a new generation, or too far behind.
        variables: The variables that differ, whole, by name.
        averages: The moving averages, where they were asked for.
        buffers: The model's buffers that differ.
        rows: Of tables, by name.
        over: Whether the run makes no more versions.
    """

    version: ReadVersion
    full: bool
    variables: Mapping[str, torch.Tensor]
    averages: Mapping[str, torch.Tensor] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: Mapping[str, ChangedRows] = field(default_factory=dict)
    over: bool = False

    @property
    def generation(self) -> int:
        """Returns the creation of the variables that the version belongs to."""
        return self.version.generation

    @property
    def new_generation(self) -> bool:
        """Whether that is another than before: the run was restored, and the version may be smaller."""
        return self.version.new_generation

    @property
    def age_s(self) -> float:
        """Returns how many seconds ago the version was made, when this was read."""
        return self.version.age_s

    def apply(self, model: nn.Module, *, averages: bool = False) -> None:
        """Writes what has changed into a model: its parameters, buffers, and the weights of sparse embeddings.

        Args:
            model: The model, which has the version before.
            averages: Whether the moving averages take the place of the variables.
        """
        values = {**self.variables, **(self.averages if averages else {})}
        write_model(model, values, self.buffers, partly=True)
        weights = dict(model.named_parameters(remove_duplicate=False))
        for name, changed in self.rows.items():
            weight = weights.get(name)
            if weight is not None and weight.numel():
                with torch.no_grad():
                    weight.data[changed.keys.to(weight.device)] = changed.rows.to(weight.device, weight.dtype)


def change_since(
    replica: ReadCopy, tick: int, rows: dict[str, RowChanges], version: ReadVersion, *, over: bool, averages: bool
) -> Change:
    """Returns what has changed since a tick of a replica; of rows what was noted, which is taken."""
    full = replica.complete and (tick == 0 or replica.restarted_since(tick))
    tick = 0 if full else tick
    found = {name: _rows_of(replica, name, noted) for name, noted in rows.items() if name in replica.tables}
    rows.clear()
    return Change(
        version=version,
        full=full,
        variables=replica.changed_since(VARIABLE, tick),
        averages=replica.changed_since(AVERAGE, tick) if averages else {},
        buffers=replica.changed_since(BUFFER, tick),
        rows={
            name: changed for name, changed in found.items() if changed.whole or len(changed.keys) + len(changed.gone)
        },
        over=over,
    )


def _rows_of(replica: ReadCopy, name: str, noted: RowChanges) -> ChangedRows:
    part = replica.tables[name]
    if noted.whole:
        keys, gone = np.sort(all_keys(part)), np.empty(0, np.int64)
    else:
        touched = np.unique(np.concatenate([*noted.keys, *noted.gone]))
        there = part.keys.find(touched) >= 0 if part.keys.grows else np.ones(len(touched), np.bool_)
        keys, gone = touched[there], touched[~there]
    return ChangedRows(
        torch.from_numpy(keys), part.gather(keys).clone(), torch.from_numpy(np.ascontiguousarray(gone)), noted.whole
    )
