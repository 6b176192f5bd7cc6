"""`tq.Table`: an embedding over any int64 keys, whose rows are on the ps tasks and nowhere else.

Part of the user's model, like nn.Embedding. The session finds it, says where its rows come from, and takes its gradients. What always
holds: a forward pass asks once for each of its keys; gradients gather until a push has taken them, or `zero_grad`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.memory.key_index import RESERVED_KEY, Keys
from torchquorum.placement.layout import CONSTANT
from torchquorum.update.row_optimizers import Normal, RowOptimizer
from torchquorum.update.row_optimizers import RowwiseAdagrad as _default_optimizer
from torchquorum.wire.plan import InitSpec, TableSpec
from torchquorum.worker.row_transfer import HostCopy, to_device

MODES = ("sum", "mean", "max")
AVERAGES = ("all", "touching")
PullRows = Callable[[Keys], torch.Tensor]


class _Rows(torch.autograd.Function):
    """The identity on pulled rows; hands their gradient to the table."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, rows: torch.Tensor, table: Table, keys: Keys) -> torch.Tensor:
        ctx.table, ctx.keys = table, keys
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.table._gather(ctx.keys, gradients[0].detach())
        return None, None, None, None


class _Lookup(torch.autograd.Function):
    """Rows by place, as F.embedding; the backward pass adds up by place in one pass over memory."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.places, ctx.shape = places, rows.shape
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].new_zeros(ctx.shape)
        return total.index_add_(0, ctx.places, gradients[0]), None


class Anchor(nn.Parameter):
    """Stands for a table among a model's parameters, so that `zero_grad` reaches it; it has no elements."""

    table: Table

    @property
    def grad(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The gradients of rows that have gathered; None if there are none."""
        return self.table.merged()[1] if self.table.gathered else None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value is not None:
            raise ConfigError("the gradient of a tq.Table cannot be set; it comes from backward()")
        self.table.gathered.clear()


class Table(nn.Module):
    """An embedding without a vocabulary: any int64 key has a row, from its first update on.

    Args:
        dim: How wide a row is.
        init: What a row begins with, from (seed, table, key) alone: `tq.rows.Normal`, `Uniform`, `Constant` or `Zeros`.
        optimizer: The optimizer of its rows: `tq.rows.RowwiseAdagrad` (the default), `Adagrad`, `SGD`, `LazyAdam` or `FTRL`.
        admit: After how many gradients that touch it a key gets a row; before, it is what it would begin with.
        ttl: After how long without an update a row goes: a number of steps, or a timedelta.
        capacity: How many rows there may be on all ps tasks; of more the least recently updated go.
        mode: Makes it a bag: `sum`, `mean` or `max` of the rows of each bag, as nn.EmbeddingBag.
        average: How a row's gradients are averaged in a round: over `all` workers, as of the joined batch, or over those `touching` it.
        seed: Of the initial rows.
        dtype: Of the rows: float32 or float64.
    """

    def __init__(
        self,
        dim: int,
        *,
        init: InitSpec | None = None,
        optimizer: RowOptimizer | None = None,
        admit: int = 1,
        ttl: int | timedelta | None = None,
        capacity: int | None = None,
        mode: str | None = None,
        average: str = "all",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        seconds = ttl.total_seconds() if isinstance(ttl, timedelta) else 0.0
        steps = ttl if isinstance(ttl, int) else 0
        for name, value, least in (("dim", dim, 1), ("admit", admit, 1), ("capacity", capacity, 1), ("ttl", ttl, 1)):
            if isinstance(value, int) and value < least:
                raise ConfigError(f"tq.Table({name}={value}): must be {least} or more")
        if isinstance(ttl, timedelta) and seconds <= 0:
            raise ConfigError(f"tq.Table(ttl={ttl}): must be longer than nothing")
        if mode is not None and mode not in MODES:
            raise ConfigError(f"tq.Table(mode={mode!r}): allowed are {', '.join(MODES)}; leave it out for single rows")
        if average not in AVERAGES:
            raise ConfigError(f"tq.Table(average={average!r}): allowed are {', '.join(AVERAGES)}")
        if dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"tq.Table(dtype={dtype}): rows are float32 or float64")
        if init is not None and not isinstance(init, InitSpec):
            raise ConfigError(f"tq.Table(init={init!r}): give tq.rows.Uniform(-0.01, 0.01) or another of tq.rows")
        if optimizer is not None and not isinstance(optimizer, RowOptimizer):
            raise ConfigError(f"tq.Table(optimizer={optimizer!r}): give tq.rows.Adagrad(lr=0.02) or another of tq.rows")
        chosen = optimizer or _default_optimizer()
        self.dim, self.mode = dim, mode
        self.spec = TableSpec(
            name="",
            dim=dim,
            dtype=str(dtype).removeprefix("torch."),
            group=CONSTANT,
            optimizer=chosen.name,
            options=chosen.options,
            init=init or Normal(),
            seed=seed,
            touching=average == "touching",
            admit=admit,
            ttl_steps=steps,
            ttl_s=seconds,
            capacity=capacity or 0,
        )
        self.gathered: list[tuple[Keys, torch.Tensor]] = []
        self.early: HostCopy | None = None  # of the only gradient that has gathered, from a GPU
        self.pull: PullRows = _no_session
        self.ask_evicted: Callable[[], Keys] = lambda: _no_session(np.empty(0, np.int64)).numpy()
        self.anchor = Anchor(torch.empty(0, dim, dtype=dtype))
        self.anchor.table = self

    def forward(
        self, keys: torch.Tensor, offsets: torch.Tensor | None = None, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the rows of keys; with `mode`, one row for each bag.

        Args:
            keys: Int64, of any shape. For bags of two dimensions, or one with offsets.
            offsets: Where each bag begins in `keys`.
            weights: What each row is multiplied by, of the shape of `keys`; for bags of mode `sum`.
        """
        if keys.is_floating_point() or keys.is_complex() or keys.dtype == torch.bool:
            raise ConfigError(f"tq.Table: keys are int64, and these are {keys.dtype}")
        if self.mode is None and (offsets is not None or weights is not None):
            raise ConfigError('tq.Table(...)(keys, offsets=, weights=): they are of bags; give the table mode="sum"')
        wanted = keys.detach().reshape(-1).to(device="cpu", dtype=torch.int64)
        found, places = torch.unique(wanted, return_inverse=True)
        numbers = found.numpy()
        if len(numbers) and int(numbers[0]) == RESERVED_KEY:
            raise ConfigError(f"tq.Table: the key {RESERVED_KEY} is reserved")
        rows, places = to_device(self.pull(numbers), keys.device), to_device(places, keys.device)
        if torch.is_grad_enabled() and self.anchor.requires_grad:
            rows = _Rows.apply(self.anchor, rows, self, numbers)
        if self.mode is None:
            return _Lookup.apply(rows, places).view(*keys.shape, self.dim)  # pyright: ignore
        if not len(numbers):
            rows = torch.cat([rows, rows.new_zeros(1, self.dim)])
        return F.embedding_bag(
            places.view(keys.shape),
            rows,  # pyright: ignore[reportArgumentType]
            offsets,
            mode=self.mode,
            per_sample_weights=weights,
        )

    def _gather(self, keys: Keys, gradient: torch.Tensor) -> None:
        """Keeps a gradient of rows; the first one from a GPU begins its way to the CPU."""
        self.early = HostCopy.begin(gradient) if gradient.is_cuda and not self.gathered else None
        self.gathered.append((keys, gradient))

    def merged(self) -> tuple[Keys, torch.Tensor]:
        """Returns the gradients that have gathered: keys in order, each once, and their rows."""
        if len(self.gathered) > 1:
            every = np.concatenate([keys for keys, _ in self.gathered])
            keys, places = np.unique(every, return_inverse=True)
            parts = torch.cat([rows for _, rows in self.gathered])
            total = parts.new_zeros((len(keys), self.dim))
            self.gathered = [(keys, total.index_add_(0, torch.from_numpy(places).to(parts.device), parts))]
        return self.gathered[0]

    def evicted(self) -> list[int]:
        """Returns the keys whose rows went last, at most 100,000 of each ps task, the latest last; inside a session."""
        return self.ask_evicted().tolist()

    def extra_repr(self) -> str:
        """Returns what stands in the module's text."""
        return f"{self.dim}, optimizer={self.spec.optimizer}" + (f", mode={self.mode}" if self.mode else "")


def _no_session(_keys: Keys) -> torch.Tensor:
    raise ConfigError(
        "the rows of a tq.Table are on the ps tasks: use it inside `with tq.Session(task, model, optimizer)`"
    )
