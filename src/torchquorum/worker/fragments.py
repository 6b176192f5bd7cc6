"""Streaming: the model in fragments, each pushed at an inner step of its own and on its way while the worker goes on.

Made by `tq.Optimizer.split` where its rule is `tq.Local(h, fragments=..., overlap=...)`; on the worker's thread. To the run each
fragment is an optimizer of its own, with a round and a version (Douillard et al. 2025, Streaming DiLoCo). With P fragments, fragment k
is pushed after the inner steps n with n mod h = (k + 1) h / P, and mixed in `overlap` steps later. What always holds: one fragment is on
its way at a time, so where a version comes in follows from the inner step alone; each fragment's change is pushed once in h inner steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

import torch

from torchquorum.errors import ConfigError
from torchquorum.rules import Rule
from torchquorum.update.optimizers import step_without_hooks
from torchquorum.worker.attached import AttachedOptimizer
from torchquorum.worker.local_steps import LocalSteps
from torchquorum.worker.step import Step


class FragmentPart(Protocol):
    """What a fragment is to the run: an optimizer of its own."""

    @property
    def attached(self) -> AttachedOptimizer | None: ...  # noqa: D102
    @property
    def local(self) -> LocalSteps | None: ...  # noqa: D102


_Part = TypeVar("_Part", bound=FragmentPart)


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """What was sent last and is not mixed in yet: which fragment, after which inner step, with which loss."""

    fragment: int
    inner_step: int
    loss: float | None


class Fragments(Generic[_Part]):
    """The fragments of one optimizer's parameters.

    Args:
        inner: Makes the inner steps, of all of them.
        parts: What each is to the run.
        rule: When they are pushed.

    Attributes:
        parts: What each is to the run.
        last: What became of the last inner step, or of the fragment that it pushed or mixed in.
    """

    def __init__(self, inner: torch.optim.Optimizer, parts: Sequence[_Part], rule: Rule) -> None:
        self.parts, self.last = list(parts), None
        self.last: Step | None
        self._inner, self._overlap = inner, rule.overlap
        assert rule.local_steps is not None
        self._h = rule.local_steps
        self._sent: _OnItsWay | None = None

    def _of(self, fragment: int) -> tuple[AttachedOptimizer, LocalSteps]:
        part = self.parts[fragment]
        assert part.attached is not None and part.local is not None
        return part.attached, part.local

    def step(self, closure: Callable[[], Any] | None, loss: float | None, examples: float | None = None) -> Any:
        """Makes an inner step; takes what has come, and pushes what is due."""
        first, counts = self._of(0)
        link = first.link
        link.positions.before_push()
        if first.observer is not None:
            first.observer.before_run()
        found = step_without_hooks(self._inner, *([closure] if closure is not None else []))
        for k in range(len(self.parts)):
            self._of(k)[1].count(found if closure is not None else loss, examples)
        view, n = first.view, counts.inner_step
        self.last = Step(view.version, link.local_step, None, "inner", 0, view.lr[0], link.stopped, first.called)
        due = self._due(n)
        if self._sent is not None and (due is not None or n - self._sent.inner_step >= self._overlap):
            self._receive()
        if due is not None:
            self._push(due, n)
        elif self._sent is not None:
            link.attend()  # bytes move while the worker computes
        return found

    def _due(self, n: int) -> int | None:
        """Returns the fragment that is pushed after n inner steps."""
        count = len(self.parts)
        return next((k for k in range(count) if (n - (k + 1) * self._h // count) % self._h == 0), None)

    def _push(self, fragment: int, n: int) -> None:
        attached, local = self._of(fragment)
        loss = local.loss
        if self._overlap:
            local.send(lambda: attached.send(loss, local.contribution))
            self._sent = _OnItsWay(fragment, n, loss)
        else:
            self.last = local.push(lambda: attached.push(loss, local.contribution))

    def _receive(self) -> None:
        assert self._sent is not None
        sent, self._sent = self._sent, None
        attached, local = self._of(sent.fragment)
        self.last = local.receive(lambda: attached.receive(sent.loss))

    def begin(self) -> None:
        """A session begins."""
        self._sent = None


def cut(parameters: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Cuts parameters, in their order, into so many runs of about as many bytes.

    Raises:
        ConfigError: There are fewer parameters.
    """
    if len(parameters) < count:
        raise ConfigError(f"fragments={count}: the optimizer has {len(parameters)} parameters; give at most as many")
    sizes = [p.numel() * p.element_size() for p in parameters]
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    found: list[list[torch.Tensor]] = [[] for _ in range(count)]
    k = 0
    for i, (parameter, middle) in enumerate(zip(parameters, middles, strict=True)):
        left = len(parameters) - i
        while found[k] and k < count - 1 and (middle * count >= (k + 1) * sum(sizes) or left <= count - 1 - k):
            k += 1
        found[k].append(parameter)
    return found
