"""An example of the model's input, taken from the program's own first step, from which `tq.SummaryHook` draws the graph.

Owned by the hook; on the thread of the training loop. What always holds: nothing that the program computes changes: a copy of the model is
asked, in evaluation mode, and a model that draws random numbers even there is not drawn.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

MOST_BYTES = 1 << 29  # of a model that is copied without being asked to


class SeenInput:
    """Waits for the first call of a model.

    Args:
        model: The model; it is called by the program.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._inputs: tuple[Any, ...] | None = None
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        compiled = getattr(model, "_compiled_call_impl", None) is not None
        self._hook = None
        if size <= MOST_BYTES and not compiled:
            self._hook = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        if self._inputs is None and inputs and not named and all(isinstance(x, torch.Tensor) for x in inputs):
            self._inputs = inputs

    def take(self) -> tuple[torch.nn.Module, tuple[Any, ...]] | None:
        """A step has been made: stops waiting, and returns a copy of the model with an input, if it can be drawn from them."""
        hook, self._hook = self._hook, None
        inputs, self._inputs = self._inputs, None
        if hook is None:
            return None
        hook.remove()
        if inputs is None:
            return None
        try:
            model = copy.deepcopy(self._model).cpu().eval()
            example = tuple(x.detach().to("cpu", copy=True) for x in inputs)
            before = torch.get_rng_state()
            with torch.no_grad():
                model(*example)
            drew = not torch.equal(before, torch.get_rng_state())
            torch.set_rng_state(before)
        except Exception:
            return None  # such as a model that names its device: without an example of the program it has no graph
        return None if drew else (model, example)
