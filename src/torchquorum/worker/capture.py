"""`tq.capture`: a training step that a GPU replays as one CUDA graph, instead of being told each operation anew.

Used by training loops, on their thread. A small model spends most of a step on the way to the GPU: the mlp of the
benchmarks makes 907 eager steps a second on an H200 and 12,283 captured ones. What always holds: a step does what
`zero_grad`, the loss, `backward` and `optimizer.step` do one after the other; where nothing can be captured (no GPU, a model
that looks at its own values, shapes that change all the time) it does exactly that, and says why, once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.update.gradient_norm import norms_of
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.optimizer import Optimizer

Loss = Callable[..., torch.Tensor]
EAGER_FIRST = 3  # libraries choose their kernels and memory grows before a graph can be captured
MOST_GRAPHS = 4
MOST_REASON = 300
_Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(slots=True)
class _Graph:
    """A captured step: where its inputs go in, and where its loss and gradients come out."""

    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    loss: torch.Tensor
    gradients: list[torch.Tensor | None]
    flat: FlatParameters
    norms: npt.NDArray[np.float32] | None


class CapturedStep:
    """One training step, from a batch to the next version; see `capture`.

    Attributes:
        captured: Whether the last call replayed a graph.
        why_not: Why nothing is captured; empty as long as nothing speaks against it.
    """

    def __init__(self, loss: Loss, optimizer: Optimizer) -> None:
        if not callable(loss):
            raise ConfigError(
                f"tq.capture: the first argument computes the loss of a batch; {type(loss).__name__} came"
            )
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"tq.capture: the second argument is a tq.Optimizer; {type(optimizer).__name__} came")
        self._loss, self._optimizer = loss, optimizer
        self._graphs: dict[_Signature, _Graph] = {}
        self._seen: dict[_Signature, int] = {}
        self._side: torch.cuda.Stream | None = None
        self.captured = False
        self.why_not = ""

    def __call__(self, *inputs: torch.Tensor) -> float:
        """Makes a step with a batch.

        Args:
            inputs: The batch, as the loss takes it; tensors, on any device.

        Returns:
            The loss. What became of the gradient is in `optimizer.last`.
        """
        flat = self._optimizer.flat
        device = flat.cuda_device if flat is not None else None
        if flat is None or device is None or self._optimizer.local is not None:
            return self._eager(inputs)
        inputs = tuple(x.to(device, non_blocking=True) for x in inputs)
        signature = tuple((tuple(x.shape), x.dtype) for x in inputs)
        found = self._graphs.get(signature)
        if found is not None and found.flat is flat:
            return self._replay(found, inputs)
        count = self._seen[signature] = self._seen.get(signature, 0) + 1
        if count > EAGER_FIRST and not self.why_not and len(self._graphs) < MOST_GRAPHS:
            captured = self._try(flat, inputs)
            if captured is not None:
                self._graphs[signature] = captured
                return self._replay(captured, inputs)
        return self._beside(inputs, device)

    def _eager(self, inputs: tuple[torch.Tensor, ...]) -> float:
        self.captured = False
        self._optimizer.zero_grad()
        loss = self._loss(*inputs)
        loss.backward()
        value = float(loss.detach())
        self._optimizer.step(loss=value)
        return value

    def _beside(self, inputs: tuple[torch.Tensor, ...], device: torch.device) -> float:
        """An eager step on a stream of its own, so that nothing in it belongs to the stream that others use."""
        if self.why_not:
            return self._eager(inputs)
        if self._side is None:
            self._side = torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            value = self._eager(inputs)
        current.wait_stream(self._side)
        return value

    def _replay(self, found: _Graph, inputs: tuple[torch.Tensor, ...]) -> float:
        for static, given in zip(found.inputs, inputs, strict=True):
            if static is not given:
                static.copy_(given, non_blocking=True)
        found.graph.replay()
        for parameter, gradient in zip(found.flat.parameters, found.gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        if found.flat.gradients is not None:
            found.flat.gradients.norms = found.norms
        self.captured = True
        self._optimizer.check()
        self._optimizer.push(found.loss.item)  # in memory of the host, there when the gradients are
        return found.loss.item()

    def _try(self, flat: FlatParameters, inputs: tuple[torch.Tensor, ...]) -> _Graph | None:
        try:
            return self._capture(flat, inputs)
        except Exception as error:
            self.why_not = _reason(error)
            _end_capture(flat.cuda_device)
            for parameter in flat.parameters:
                parameter.grad = None
            self._optimizer.say(
                f"the training step cannot be captured as a CUDA graph and goes on operation by operation: {self.why_not}"
            )
            return None

    def _capture(self, flat: FlatParameters, inputs: tuple[torch.Tensor, ...]) -> _Graph:
        static = [x.clone() for x in inputs]
        together = flat.flat_gradients()
        loss_out = torch.zeros((), pin_memory=True)
        norms = torch.zeros(len(together.buffers), pin_memory=True) if together is not None else None
        for parameter in flat.parameters:
            parameter.grad = None
        torch.cuda.current_stream(static[0].device if static else None).synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on to use the GPU
            loss = self._loss(*static)
            loss.backward()
            gradients = [p.grad for p in flat.parameters]
            complete = together is not None and _gather(flat.parameters, gradients, together.views)
            if complete and norms is not None and together is not None:
                norms.copy_(torch.stack(norms_of(together.buffers)), non_blocking=True)
            loss_out.copy_(loss.detach().to(torch.float32), non_blocking=True)
        if complete and together is not None:
            gradients = list[torch.Tensor | None](together.views)
        return _Graph(
            graph, static, loss_out, gradients, flat, norms.numpy() if complete and norms is not None else None
        )


def _end_capture(device: torch.device | None) -> None:
    """After a capture that failed: torch takes its random numbers for still captured, until one succeeds; so here is one."""
    graph = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
    with suppress(RuntimeError), torch.cuda.device(device), graph:
        torch.zeros(1, device=device)


def _gather(parameters: list[nn.Parameter], gradients: list[Any], views: list[torch.Tensor]) -> bool:
    """Copies the gradients into one piece; False, and nothing is copied, if a trained parameter has none."""
    pairs = [(v, g) for p, v, g in zip(parameters, views, gradients, strict=True) if p.requires_grad]
    if any(g is None or g.layout != torch.strided or g.dtype != v.dtype for v, g in pairs):
        return False
    torch._foreach_copy_([v for v, _ in pairs], [g for _, g in pairs])
    return True


def capture(loss: Loss, optimizer: Optimizer) -> CapturedStep:
    """Makes a training step that runs as one CUDA graph where the model allows it.

        step = tq.capture(lambda x, y: cross_entropy(model(x), y), optimizer)
        with tq.Session(task, model, optimizer, last_step=3000) as session:
            while not session.should_stop():
                loss = step(*next(batches))

    On a GPU the first steps of a shape of inputs run as usual, then one is captured and replayed from then on: Python code in
    the loss runs no more, so it must do the same thing every time. What cannot be captured, and everything on the CPU, runs
    as it would without; on a GPU it is said why.

    Args:
        loss: Computes the loss of a batch, as a tensor with one element.
        optimizer: What the session has.

    Returns:
        The step: called with the tensors of a batch, it returns the loss as a number.
    """
    return CapturedStep(loss, optimizer)


def _reason(error: BaseException) -> str:
    """Returns the first error of several, in one line: what ended the capture, not what followed from it."""
    while error.__context__ is not None:
        error = error.__context__
    text = " ".join(str(error).splitlines()[:1]) or type(error).__name__
    return text[:MOST_REASON]
