"""Copies of gradients that overlap with the backward pass: each leaves the GPU as soon as it has been accumulated.

Owned by the worker's exchange, which asks at every step what has arrived. A hook on each parameter clones its gradient on the
GPU and copies the clone to the shards' memory on a stream of its own. The gradients of a captured step leave after it: torch
captures no copy to memory that it has not pinned itself. What always holds: a gradient counts as copied only if what was
copied equals, bit for bit up to the sign of zero, the gradient that the parameter has at the step. Nothing is
inferred from torch's counts of changes: `.data` and `GradScaler.unscale_` change gradients uncounted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from torchquorum.worker.flat import FlatParameters, Pusher

LEAST_BYTES = 1 << 23  # of all gradients: with fewer, the comparison costs as much as the copy
LEAST_PIECE_BYTES = 1 << 22  # of one gradient: to begin a copy costs the CPU about 0.1 ms, in which the bus moves 5 MB
MOST_MISSES = (
    3  # after so many steps in a row in which most had changed, as when each is clipped, no more is copied early
)
NOTHING: frozenset[int] = frozenset()


class Overlap:
    """The copies of gradients that begin before the step.

    Args:
        flat: The worker's parameters.
        pushers: Of each shard, where its gradients go.
        may: Says whether the shards' memory may be written now; the next push sends what it holds.
        stream: Where the copies are made; without one they are made at once.
    """

    def __init__(
        self,
        flat: FlatParameters,
        pushers: Sequence[Pusher],
        may: Callable[[], bool],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._flat, self._may, self._stream = flat, may, stream
        self._targets: dict[int, list[tuple[torch.Tensor, slice | None]]] = {}
        for pusher in pushers:
            for _, variable, target, part in pusher.entries:
                self._targets.setdefault(variable, []).append((target, part))
        self._begun: dict[int, torch.Tensor] = {}  # the clones that were copied since the last step
        self._passes: dict[int, int] = {}
        self._usual: dict[int, int] = {}  # how many backward passes the last step was made of
        self._misses = 0
        self._handles: list[Any] = []
        for variable in self._targets:
            parameter = flat.parameters[variable]
            if parameter.requires_grad:
                hook = partial(self._arrived, variable)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._begun:
            self._settle()
        self._begun.clear()

    # -- while the backward pass goes on, on autograd's thread ------------------------------------------------------------

    def _arrived(self, variable: int, parameter: torch.Tensor) -> None:
        """A gradient has been accumulated."""
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided or gradient.dtype != parameter.dtype:
            return
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            return
        passes = self._passes[variable] = self._passes.get(variable, 0) + 1
        if variable in self._begun or passes < self._usual.get(variable, 1) or gradient.nbytes < LEAST_PIECE_BYTES:
            return
        if self._misses < MOST_MISSES and self._may():
            try:
                self._send(variable, gradient)
            except torch.OutOfMemoryError:  # the memory suffices for the training only
                self._misses = MOST_MISSES

    def _send(self, variable: int, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            sent = gradient.detach().clone()  # the gradient itself may be changed or freed before it is copied
            self._begun[variable] = sent
            if self._stream is None:
                self.copy_out(variable, sent)
                return
            self._stream.wait_stream(torch.cuda.current_stream(sent.device))
            with torch.cuda.stream(self._stream):
                self.copy_out(variable, sent)

    def copy_out(self, variable: int, sent: torch.Tensor) -> None:
        """Copies a gradient to the shards' memory; on a GPU this only begins, on the current stream."""
        for target, part in self._targets[variable]:
            target.copy_(sent if part is None else sent.reshape(-1)[part], non_blocking=self._stream is not None)

    # -- at the step, on the worker's thread -------------------------------------------------------------------------------

    def held(self) -> frozenset[int]:
        """Waits for the early copies, and returns the variables whose gradients need not be copied any more."""
        begun, self._begun = self._begun, {}
        self._usual, self._passes = self._passes, {}
        if begun:
            self._settle()
        pairs: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for variable, sent in begun.items():
            gradient = self._flat.parameters[variable].grad
            if gradient is not None and gradient.layout == torch.strided and gradient.dtype == sent.dtype:
                pairs.append((variable, sent, gradient.detach()))
        found = _equal(pairs) if pairs else NOTHING
        if begun:
            self._misses = 0 if 2 * len(found) >= len(begun) else self._misses + 1
        return found

    def _settle(self) -> None:
        # An order among streams is not enough: the host itself writes zeros where a gradient is gone, and the clones are
        # about to be freed.
        if self._stream is not None:
            self._stream.synchronize()


def is_worth_it(flat: FlatParameters) -> bool:
    """Whether the gradients are so large that copying them takes longer than the hooks and the comparison."""
    return sum(region.size_bytes for region in flat.layout.trained) >= LEAST_BYTES


def _equal(pairs: list[tuple[int, torch.Tensor, torch.Tensor]]) -> frozenset[int]:
    """Returns the numbers of the pairs of equal tensors; the first of each pair is overwritten. Waits for the GPU once."""
    with torch.no_grad():
        differences = [sent for _, sent, _ in pairs]
        torch._foreach_sub_(differences, [gradient for _, _, gradient in pairs])
        sums = torch.stack(list(torch._foreach_norm(differences, 1)))  # NaN differs from all
        return frozenset(v for (v, _, _), zero in zip(pairs, (sums == 0).tolist(), strict=True) if zero)
