"""An optimizer's state that a worker gives: with the chief's Create, for an assignment, and as it stands in the journal.

Made by the shard. What always holds: it fits the shard's variables, so that following the log cannot fail on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from torchquorum.formats.checkpoint_manifest import torch_dtype
from torchquorum.placement.layout import Region, Variable
from torchquorum.update.spans import ELEMENTWISE
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import frame_tensor, tensor_frame
from torchquorum.wire.messages import StateRef
from torchquorum.wire.settings import decode


class GivenState:
    """An optimizer's state for one shard, as `Updater.load` asks for it.

    Args:
        ref: What there is.
        frame: Its bytes.
        region: The shard's variables.
        variables: The run's variables.
        optimizer: The class of the optimizer.

    Raises:
        ValueError: It does not fit the variables.
    """

    def __init__(
        self, ref: StateRef, frame: Frame, region: Region, variables: Sequence[Variable], optimizer: str
    ) -> None:
        self.ref = ref
        here = {(p.variable, p.start, p.numel) for section in region.sections for p in section.pieces}
        names = {variables[variable].name for variable, _, _ in here}
        sizes = [piece.count * _item_bytes(piece.dtype) for piece in ref.pieces]
        self.memory = frame_tensor(frame, sum(sizes)).clone()
        self._states: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
        self._parts: dict[tuple[str, str, int], torch.Tensor] = {}
        at = 0
        for piece, size in zip(ref.pieces, sizes, strict=True):
            of = variables[piece.variable] if 0 <= piece.variable < len(variables) else None
            whole = bool(piece.shape)
            fits = (piece.variable, piece.start, piece.count) in here and not whole
            if whole and optimizer not in ELEMENTWISE:  # of a shape of its own: its variable is here, and not cut
                cut = of is None or (piece.variable, 0, of.numel) not in here
                fits = not cut and piece.start == 0 and piece.count == prod(piece.shape)
            if of is None or not fits:
                raise ValueError(f"state {piece.state!r:.80} of variable {piece.variable} does not fit the variables")
            shape = tuple(piece.shape) if whole else tuple(of.shape)
            self._states.setdefault(of.name, {})[piece.state] = (shape, torch_dtype(piece.dtype))
            self._parts[of.name, piece.state, piece.start] = (
                self.memory[at : at + size].clone().view(torch_dtype(piece.dtype))
            )
            at += size
        if not names.issuperset(ref.scalars):
            raise ValueError(f"numbers of variables that are not here: {sorted(set(ref.scalars) - names)[:5]}")
        for numbers in ref.scalars.values():
            for value in numbers.values():
                decode(value)

    @property
    def frame(self) -> Frame:
        """Returns its bytes."""
        return tensor_frame(self.memory)

    def states(self, variable: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shape and dtype of each state of a variable."""
        return self._states.get(variable, {})

    def elements(self, variable: str, state: str, start: int, stop: int) -> torch.Tensor:
        """Returns the elements [start, stop) of a state, flat: as much of it as this shard holds."""
        return self._parts[variable, state, start][: stop - start]


def _item_bytes(dtype: str) -> int:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {dtype!r:.40} is none of torch's")
    return found.itemsize
