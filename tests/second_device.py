"""A second device for tests on machines without a GPU: torch's own registration of a backend, with kernels in Python.

`register()` gives this process the device `sim:0` (PrivateUse1). A tensor there holds a CPU tensor, which its kernels compute
on; an operation that is not in KERNELS has no kernel, and INTEGER_LESS have none for integers, as with a GPU. Autograd runs
its backward pass on a thread of its own, as with a GPU. Only for a process of its own, which must end by `os._exit`: torch
cannot take a backend in Python down.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_map

KEY = "privateuseone"
VIEWS = ["as_strided", "view", "t", "transpose.int", "expand", "detach", "alias", "unsqueeze", "slice.Tensor"]
KERNELS = [
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "mm", "addmm", "sum", "sum.dim_IntList", "mean", "relu",
    "threshold_backward", "ones_like", "zeros_like", "mse_loss", "mse_loss_backward", "_log_softmax",
    "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "native_batch_norm", "pow.Tensor_Scalar", "clone",
]  # fmt: skip
WRITING = ["uniform_", "add_.Tensor", "mul_.Tensor", "zero_", "fill_.Scalar"]
INTEGER_LESS = ["mm", "addmm"]


class SimTensor(torch.Tensor):
    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "SimTensor":
        made = torch._C._acc.create_empty_tensor(raw.shape, raw.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        made.__class__ = cls
        return made

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw

    @property
    def data(self) -> "SimTensor":  # pyright: ignore[reportIncompatibleVariableOverride]
        return SimTensor(self.raw.detach())

    @data.setter
    def data(self, value: "SimTensor") -> None:
        self.raw = value.raw  # torch would exchange the memory, which is in here


def register() -> None:
    """Gives this process the device sim:0."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("sim")
    for name in [*VIEWS, *KERNELS, *WRITING]:
        torch.library.impl(f"aten::{name}", KEY)(kernel(name))

    @torch.library.impl("aten::empty.memory_format", KEY)
    def empty(size: Any, dtype: Any = None, **_: Any) -> SimTensor:
        return SimTensor(torch.zeros(size, dtype=dtype))

    @torch.library.impl("aten::empty_strided", KEY)
    def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> SimTensor:
        return SimTensor(torch.zeros(size, dtype=dtype))

    @torch.library.impl("aten::_copy_from", KEY)
    def copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
        unwrap(target).copy_(unwrap(source))
        return target


def unwrap(value: Any) -> Any:
    return (
        value.raw if isinstance(value, SimTensor) else torch.device("cpu") if isinstance(value, torch.device) else value
    )


def kernel(name: str) -> Any:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        cpu_args, cpu_kwargs = tree_map(unwrap, (args, kwargs))
        floats = all(a.is_floating_point() for a in cpu_args if isinstance(a, torch.Tensor))
        if name in INTEGER_LESS and not floats:
            raise NotImplementedError(f"\"{packet}_sim\" not implemented for 'Long'")
        result = operation(*cpu_args, **cpu_kwargs)
        if name in WRITING:
            return args[0]
        return tree_map(lambda x: SimTensor(x) if isinstance(x, torch.Tensor) else x, result)

    return run
