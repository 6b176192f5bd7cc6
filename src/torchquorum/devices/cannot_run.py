"""Operations that a device cannot run: with soft placement they run on the CPU, without it the error says what to change.

A device may have no kernel for an operation, or none for a dtype. `SoftMode` sees every operation of its thread, and of the
backward pass on any thread, below autograd; `explain` turns torch's error into ours at the end of a block, and costs nothing
before. What always holds: an operation is tried on its device first; one that cannot run on the CPU either raises torch's own
error; a line says once per operation that the CPU was used.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torchquorum.devices.inventory import CPU_DEVICE, accelerators, list_available, name_of, say_once, setting
from torchquorum.errors import DeviceError

# Torch's messages when a kernel is missing, and when a kernel does not support a dtype.
_NO_KERNEL = re.compile(r"Could not run '(?P<op>[^']+)' with arguments from the '(?P<backend>[^']+)' backend")
_NO_META = re.compile(r"^(?P<op>[\w:.]+): attempted to run this operator with (?P<backend>Meta) tensors")
_NO_MPS = re.compile(r"The operator '(?P<op>[^']+)' is not currently implemented for the (?P<backend>MPS) device")
_NO_DTYPE = re.compile(r"\"(?P<op>\w+)\" not implemented for '(?P<dtype>\w+)'")
_NO_DTYPE_THERE = re.compile(r"doesn't support (?P<dtype>float64|complex\w*)|(?P<op>\w+) is not supported on \w+")


class _RanOnCpu(threading.local):
    operation: Any = None


ran_on_cpu = _RanOnCpu()
"""The operation that this thread has just run on the CPU instead, for the placement log."""


class SoftMode(TorchDispatchMode):
    """Runs on the CPU what its device cannot run."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Has torch.compile compile as usual; compiled code is not watched."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation."""
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            device = _foreign_device(args, kwargs)
            if device is None or not _is_about_device(error) or _returns_view(func):
                raise
            return _run_on_cpu(func, args, kwargs, device, error)


@contextmanager
def allow_soft_placement(enabled: bool = True) -> Iterator[None]:
    """Inside this block the CPU is used in place of a device that is not there, or that cannot run an operation.

    Args:
        enabled: False forbids it inside the block, whatever holds outside.
    """
    with setting(soft=enabled), SoftMode() if enabled and accelerators() else nullcontext():
        yield


def _is_about_device(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, NotImplementedError) or any(
        p.search(text) for p in (_NO_KERNEL, _NO_META, _NO_MPS, _NO_DTYPE, _NO_DTYPE_THERE)
    )


def _foreign_device(args: Any, kwargs: Any) -> torch.device | None:
    """Returns the first device of the inputs that is neither the CPU nor without data."""
    for leaf in tree_leaves((args, kwargs)):
        device = leaf.device if isinstance(leaf, torch.Tensor) else leaf
        if isinstance(device, torch.device) and device.type not in ("cpu", "meta"):
            return device
    return None


def _returns_view(func: Any) -> bool:
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _run_on_cpu(func: Any, args: Any, kwargs: Any, device: torch.device, error: Exception) -> Any:
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fetch(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return copies.setdefault(id(value), (value, value.to(CPU_DEVICE)))[1]
        return CPU_DEVICE if isinstance(value, torch.device) else value

    cpu_args, cpu_kwargs = tree_map(fetch, (args, kwargs))
    try:
        result = func(*cpu_args, **cpu_kwargs)
    except (NotImplementedError, RuntimeError, TypeError):
        raise error from None
    written: dict[int, torch.Tensor] = {}
    for value in _written_by(func, args, kwargs):
        if id(value) in copies:
            written[id(copies[id(value)][1])] = value
            value.copy_(copies[id(value)][1])
    say_once(
        f"operation {func} cannot run on {name_of(device)} ({_first_sentence(error)}); running it on "
        f"{name_of(CPU_DEVICE)} instead, because allow_soft_placement is on",
        key=f"{func} {device}",
    )
    ran_on_cpu.operation = func
    return tree_map(lambda x: (written.get(id(x)) if id(x) in written else x.to(device)) if _is_cpu(x) else x, result)


def _written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the inputs that the operation changes; below autograd there are no version counters."""
    values = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _is_cpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _first_sentence(error: BaseException) -> str:
    return re.split(r"(?<=\w)\. |\n|, but ", str(error).strip(), maxsplit=1)[0][:200].rstrip(".")


def explain(
    error: BaseException | None, *, default: torch.device | None = None, model: nn.Module | None = None
) -> DeviceError | None:
    """Turns torch's error about an operation that a device cannot run into one that says what to change.

    Args:
        error: What ended a block, or None.
        default: The device of the block, for errors that do not name one.
        model: To name the module in which it happened.

    Returns:
        The error to raise, or None if this one is about something else.
    """
    if not isinstance(error, NotImplementedError | RuntimeError | TypeError):
        return None
    found = next((m for p in (_NO_KERNEL, _NO_META, _NO_MPS, _NO_DTYPE) if (m := p.search(str(error)))), None)
    if found is None:
        return None
    device = _device_of(found, default)
    if device is None or device.type == "cpu":
        return None
    where = _module_of(error, model)
    dtype = found.groupdict().get("dtype")
    change = "Put it on the CPU (with tq.devices.device('/cpu:0')) or use another operation" + (
        " or dtype" if dtype else ""
    )
    if device.type == "meta":
        change += "; tensors on meta have no data, so the CPU cannot be used instead"
    else:
        change += "; or pass allow_soft_placement=True to use the CPU instead"
    return DeviceError(
        f"operation {found['op']}{f' of module {where}' if where else ''}: cannot run on {name_of(device)}"
        f"{f' for dtype {dtype}' if dtype else ''}. Available: {list_available()}. {change}. "
        f"(torch says: {_first_sentence(error)})"
    )


def _device_of(found: re.Match[str], default: torch.device | None) -> torch.device | None:
    backend = found.groupdict().get("backend")
    if backend is None:
        kinds = re.findall(r"_(cpu|cuda|mps|xpu)(?=_|$)", found["op"])
        return torch.device(kinds[0], 0) if kinds and kinds[0] != "cpu" else None if kinds else default
    kind = backend.lower().removeprefix("sparse").removeprefix("csr").removeprefix("quantized")
    try:
        device = torch.device(kind)
    except RuntimeError:
        return default
    return default if default is not None and default.type == device.type else device


def _module_of(error: BaseException, model: nn.Module | None) -> str | None:
    """Names the innermost module that was being run or built, with its place in the model if that is known."""
    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    found, trace = None, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            name = names.get(id(owner), "")
            found = f"{name} ({type(owner).__name__})" if name else type(owner).__name__
        trace = trace.tb_next
    return found
