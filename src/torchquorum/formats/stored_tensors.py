"""Tensors that are stored in pieces, named by variable: those of a checkpoint, or those that a replay has kept in memory.

The base of both, so that a shard is made from either in the same way. What always holds: a range is read across its pieces, and one that
is not there in full, or of another shape than expected, is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchquorum.formats.checkpoint_manifest import CheckpointError, Kind, Spec, Stored, title, torch_dtype


class StoredTensors:
    """Reads ranges of tensors.

    Attributes:
        where: What holds them, as messages name it.
        tensors: The pieces of each tensor, by kind, variable and state, in order.
    """

    where: object
    tensors: dict[tuple[Kind, str, str], list[Stored]]

    def open_slice(self, piece: Stored) -> Any:
        """Returns something that is cut like a tensor into elements of a piece."""
        raise NotImplementedError

    def rows(self, file: str, table: str) -> Iterator[dict[str, torch.Tensor]]:
        """Yields a table's rows of a file some at a time, by column."""
        raise NotImplementedError

    def averages(self) -> dict[str, Spec]:
        """Returns the spec of each moving average, by variable."""
        return {name: p[0].spec for (kind, name, _), p in self.tensors.items() if kind == "average"}

    def states(self, variable: str) -> dict[str, Spec]:
        """Returns the spec of each optimizer state of a variable."""
        return {s: p[0].spec for (kind, name, s), p in self.tensors.items() if (kind, name) == ("optimizer", variable)}

    def read(
        self,
        kind: Kind,
        variable: str,
        state: str = "",
        start: int = 0,
        stop: int | None = None,
        *,
        expect: Spec | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Reads the elements [start, stop) of a flattened tensor.

        Args:
            kind: Variable, optimizer, average or buffer.
            variable: The variable's or the buffer's name.
            state: The state's name for an optimizer state; the owner for a worker's own buffer.
            start: The first element.
            stop: The element after the last; None for the tensor's end.
            expect: The expected spec of the whole tensor; None accepts any.
            out: The destination, of one dimension and the right dtype; None creates a tensor.

        Returns:
            A tensor of one dimension: a new one, or `out`.

        Raises:
            CheckpointError: There is no such tensor or element, it does not match `expect`, or a file is damaged.
        """
        pieces, what = self.tensors.get((kind, variable, state)), title(kind, variable, state)
        if pieces is None:
            raise CheckpointError(f"{self.where} holds no {what}; was it saved from another model or optimizer?")
        spec = pieces[0].spec
        if expect is not None and spec != expect:
            raise CheckpointError(
                f"{what} is {spec} in {self.where} and {expect} here: it was saved from another model"
            )
        stop = spec.numel if stop is None else stop
        if not 0 <= start <= stop <= spec.numel:
            raise CheckpointError(f"{what} has {spec.numel} elements in {self.where}; [{start}, {stop}) was asked for")
        if out is None:
            out = torch.empty(stop - start, dtype=torch_dtype(spec.dtype))
        assert out.shape == (stop - start,) and out.dtype == torch_dtype(spec.dtype), (out.shape, out.dtype)
        reached = start
        for piece in pieces:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                if first != reached:
                    break
                values = self.open_slice(piece)[first - piece.start : last - piece.start]
                out[first - start : last - start].copy_(values)
                reached = last
        if reached != stop:
            raise CheckpointError(f"{what}: element {reached} of {spec.numel} is missing in {self.where}")
        return out
