"""The weight of a sparse embedding while a session runs: its rows are on the ps tasks, and only those that a batch names come here.

A parameter keeps its identity and its shape; its memory is given up. `F.embedding` and `F.embedding_bag`, which modules of torch call in
their forward pass, get the rows of the ids they are given; any other use is an error that says so. What always holds: gradients gather
in `grad` as torch itself gathers sparse ones, so what is pushed has the bits that an optimizer of this process would see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.memory.key_index import Keys
from torchquorum.worker.row_transfer import to_device

PullRows = Callable[[Keys], torch.Tensor]
_ATTRIBUTES = [
    "shape",
    "dtype",
    "device",
    "requires_grad",
    "is_leaf",
    "is_sparse",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_quantized",
]
_ATTRIBUTES += [
    "layout",
    "ndim",
    "grad_fn",
    "names",
    "is_mkldnn",
    "is_mps",
    "is_xla",
    "is_xpu",
    "is_nested",
    "itemsize",
    "nbytes",
]
_ATTRIBUTES += ["_backward_hooks", "_version", "retains_grad", "output_nr"]
_METHODS = [
    "size",
    "dim",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "is_complex",
    "ndimension",
    "stride",
]
_METHODS += ["__len__", "__hash__"]
_ALLOWED: set[Any] = {getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)}
_ALLOWED |= {getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)}
_ALLOWED |= {torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_}  # pyright: ignore[reportAttributeAccessIssue]
_EMBEDDINGS = (F.embedding, F.embedding_bag)


class SparseGradient(torch.autograd.Function):
    """The identity on pulled rows; their gradient becomes a sparse one of the whole table, as torch's own is."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Returns the rows."""
        ctx.keys, ctx.shape = keys, anchor.shape
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Returns the gradient of the anchor."""
        (gradient,) = gradients
        if gradient.is_sparse:
            where, values = ctx.keys.index_select(0, gradient._indices()[0]), gradient._values()
        else:
            where, values = ctx.keys, gradient
        whole = torch.sparse_coo_tensor(where[None], values, ctx.shape, check_invariants=False)
        return whole, None, None


class RowParameter(nn.Parameter):
    """A parameter whose rows are on the ps tasks. A parameter becomes one, and an ordinary one again, in place."""

    _name: str
    _anchor: torch.Tensor
    _pull: PullRows
    _plain: type[nn.Parameter]

    @staticmethod
    def begin(parameter: nn.Parameter, name: str, pull: PullRows) -> None:
        """Makes a parameter one of rows; its memory is free afterwards."""
        shape, plain = parameter.shape, type(parameter)
        anchor = torch.zeros(1, dtype=parameter.dtype, device=_real(parameter.device))
        if not parameter.is_meta:
            parameter.data = anchor.expand(shape)
        parameter.grad = None
        parameter.__class__ = RowParameter
        assert isinstance(parameter, RowParameter)
        parameter._name, parameter._pull, parameter._plain = name, pull, plain
        parameter._anchor = anchor.expand(shape).requires_grad_(True)

    def end(self, values: torch.Tensor) -> None:
        """Makes it an ordinary parameter with these values."""
        self.__class__ = self._plain  # pyright: ignore[reportAttributeAccessIssue]
        for name in ("_name", "_anchor", "_pull", "_plain"):
            delattr(self, name)
        self.data = values

    @property
    def grad(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The gradient that has gathered, sparse; None if there is none."""
        return self._anchor.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._anchor.grad = value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Serves the forward pass of embeddings, and questions about shape and kind; refuses the rest."""
        given = kwargs or {}
        if func in _EMBEDDINGS and len(args) > 1 and isinstance(args[1], RowParameter):
            weight, rest = args[1], {**given}
            names = ("offsets",) if func is F.embedding_bag else ("padding_idx",)
            rest.update(zip(names, args[2:], strict=False))
            return _embed(weight, func, args[0], rest)
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        if func is torch.Tensor.__repr__:
            weight = args[0]
            return f"<{weight._name}: {list(weight.shape)} {weight.dtype}, rows on the ps tasks>"
        weight = next((a for a in (*args, *given.values()) if isinstance(a, RowParameter)), None)
        name = weight._name if weight is not None else "an embedding's weight"
        raise ConfigError(
            f"{name}: its rows are on the ps tasks while the session runs, so {_called(func)} cannot use it; only the forward pass of "
            "nn.Embedding and nn.EmbeddingBag can. Use it before or after the session, or build the module with sparse=False"
        )


def _embed(weight: RowParameter, func: Any, ids: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Calls torch's function with the rows of these ids instead of the whole weight."""
    if given.get("max_norm") is not None:
        raise ConfigError(f"{weight._name}: max_norm= would write to rows in the forward pass; leave it out")
    count = weight._anchor.shape[0]
    wanted = ids.detach().reshape(-1).to(device="cpu", dtype=torch.int64)
    keys, inverse = torch.unique(wanted, return_inverse=True)
    if len(keys) and (int(keys[0]) < 0 or int(keys[-1]) >= count):
        wrong = int(keys[0]) if int(keys[0]) < 0 else int(keys[-1])
        raise IndexError(
            f"index out of range in self: {weight._name} has rows 0 to {count - 1}, and {wrong} was asked for"
        )
    device = weight._anchor.device
    rows, local = to_device(weight._pull(keys.numpy()), device), to_device(inverse.view(ids.shape), device)
    padding = _padding(given.get("padding_idx"), keys, count)
    if padding == len(keys) or not len(
        keys
    ):  # a row that no id means: torch treats gradients otherwise where there is no padding
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    given["padding_idx"] = padding
    if torch.is_grad_enabled() and weight._anchor.requires_grad:
        rows = SparseGradient.apply(weight._anchor, rows, keys.to(device))
    if func is F.embedding_bag and given.get("offsets") is not None:
        given["offsets"] = given["offsets"].to(torch.int64)
    return func(local, rows, **{**given, "sparse": True})


def _padding(padding: int | None, keys: torch.Tensor, count: int) -> int | None:
    """Returns the place of the padding's key among these, the one after the last if it is not there; None without padding."""
    if padding is None:
        return None
    key = padding + count if padding < 0 else padding
    place = int(np.searchsorted(keys.numpy(), key))
    return place if place < len(keys) and int(keys[place]) == key else len(keys)


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def _called(func: Any) -> str:
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__name__", str(func))
    return f".{owner.__name__}" if name == "__get__" and owner is not None else f"{name}()"
