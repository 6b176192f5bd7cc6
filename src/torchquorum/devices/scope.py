"""`tq.devices.device(name)`: tensors made, modules built and operations run inside the block are on that device.

As TensorFlow's tf.device: names merge from outside in, and the inputs of an operation are moved. Built on a torch function
mode, as torch.device's own block is, so it belongs to one thread. What always holds: only the innermost block has an effect; what was
placed explicitly (`device=`, `.to()`, a torch.device block further in) stays there; in-place operations and views stay with
their tensor; a name is looked up at the first operation that needs it, so that an error can name that operation.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ContextDecorator, ExitStack
from enum import Enum
from types import TracebackType
from typing import Any

import torch
import torch.utils._device as torch_device
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from torchquorum.devices.cannot_run import SoftMode, explain
from torchquorum.devices.inventory import accelerators, current, parse, resolve, setting
from torchquorum.devices.names import DeviceName

# Operators, of which those of the first line have a reflected form; and functions that view a tensor without computing.
_BINARY = "add sub mul div truediv floordiv mod pow matmul and or xor lshift rshift"
_UNARY = "neg pos abs invert eq ne lt le gt ge"
_VIEWING = (
    "alias as_strided broadcast_to chunk detach diagonal flatten hsplit vsplit dsplit imag real movedim moveaxis mH mT adjoint "
    "narrow permute ravel reshape resolve_conj resolve_neg select split split_with_sizes squeeze swapaxes swapdims t "
    "tensor_split transpose unbind unflatten unsqueeze view_as_complex view_as_real numel result_type can_cast promote_types"
)
_WRITES_UNSEEN = ("batch_norm", "instance_norm")  # they change running statistics without a version counter
_OPERATORS = frozenset(f"__{side}{name}__" for name in _BINARY.split() for side in ("", "r"))
_OPERATORS |= frozenset(f"__{name}__" for name in _UNARY.split())
_VIEWS = frozenset(_VIEWING.split())


class _Kind(Enum):
    """What a function of torch does, as far as a block is concerned."""

    FACTORY = "makes a tensor from nothing"
    COMPUTE = "computes from tensors"
    OTHER = "asks, moves, views or changes in place"


_kinds: dict[Any, _Kind] = {}


def _kind_of(function: Any) -> _Kind:
    kind = _kinds.get(function)
    if kind is None:
        kind = _kinds[function] = _classify(function)
    return kind


def _classify(function: Any) -> _Kind:
    if function in torch_device._device_constructors():
        return _Kind.FACTORY
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _Kind.COMPUTE
    name = getattr(function, "__name__", "")
    if name in _OPERATORS:
        return _Kind.COMPUTE
    private = name.startswith(("_", "is_", "set_", "get_")) or (name.endswith("_") and not name.endswith("__"))
    if private or name in _VIEWS:
        return _Kind.OTHER
    homes = (torch, nn.functional, torch.linalg, torch.fft, torch.special)
    return _Kind.COMPUTE if any(callable(getattr(home, name, None)) for home in homes) else _Kind.OTHER


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Scope] = []


_scopes = _Scopes()


class Scope(TorchFunctionMode):
    """One block on this thread's stack of blocks; `tq.devices.device` and placed modules push it.

    Args:
        name: What the block asks for, merged with the outer blocks.
        device: The device, where it is known already.
        gather: Without a device: run an operation whose inputs are on several devices on that of the first.
    """

    def __init__(self, name: DeviceName, *, device: torch.device | None = None, gather: bool = False) -> None:
        super().__init__()
        self.name, self.device, self._gather = name, device, gather
        self._known = device is not None or gather or name.type is None
        self._default: torch.device | None = None

    def __enter__(self) -> Scope:
        self._default = torch_device.CURRENT_DEVICE
        _scopes.stack.append(self)
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        _scopes.stack.remove(self)
        super().__exit__(*problem)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function of torch, on the block's device if it makes or computes something."""
        kwargs = kwargs or {}
        if _scopes.stack[-1] is not self:
            return func(*args, **kwargs)
        kind = _kind_of(func)
        if kind is _Kind.FACTORY:
            if kwargs.get("device") is None and torch_device.CURRENT_DEVICE is self._default:
                device = self._find(func)
                kwargs = {**kwargs, "device": device} if device is not None else kwargs
        elif kind is _Kind.COMPUTE and kwargs.get("out") is None and not kwargs.get("inplace"):
            device = first_device(args, kwargs) if self._gather else self._find(func)
            if device is not None and any(is_elsewhere(x, device) for x in _tensors((args, kwargs))):
                return _run_there(func, args, kwargs, device)
        return func(*args, **kwargs)

    def _find(self, func: Any) -> torch.device | None:
        if not self._known:
            self.device = resolve(self.name, _describe(func))
            self._known = True
        return self.device


class device(ContextDecorator):
    """Puts the tensors made, the modules built and the operations run inside the block on a device.

    Args:
        name: As TensorFlow or PyTorch write it: `/job:worker/task:0/device:CUDA:0`, `/gpu:1`, `/cpu:0`, `cuda:1`, a
            torch.device. What it leaves open comes from the blocks around it. None ignores those.
        allow_soft_placement: Whether the CPU is used for a device that is not there or cannot run an operation; by
            default as in `tq.join`, `tq.Session` or `tq.tensorflow.allow_soft_placement`.

    Raises:
        DeviceError: The name is misspelt; or, at the first operation inside, it names a device that is not there.
    """

    def __init__(self, name: str | torch.device | None, *, allow_soft_placement: bool | None = None) -> None:
        self._given = None if name is None else parse(name)
        self._soft = allow_soft_placement
        self._open: list[tuple[ExitStack, Scope]] = []

    def _recreate_cm(self) -> device:
        """As a decorator: every call, on any thread, has a block of its own."""
        again = device(None, allow_soft_placement=self._soft)
        again._given = self._given
        return again

    def __enter__(self) -> DeviceName:
        outer = _scopes.stack[-1].name if _scopes.stack and self._given is not None else DeviceName()
        name = self._given.inside(outer) if self._given is not None else DeviceName()
        if not name.belongs_to(current().task):
            resolve(name, "tq.devices.device")
        blocks = ExitStack()
        blocks.enter_context(setting(soft=self._soft))
        if current().soft and name.type not in (None, "CPU") and accelerators():
            blocks.enter_context(SoftMode())
        scope = blocks.enter_context(Scope(name))
        self._open.append((blocks, scope))
        return name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        blocks, scope = self._open.pop()
        blocks.close()
        explained = explain(error, default=scope.device)
        if explained is not None:
            raise explained from error


def is_elsewhere(value: Any, device: torch.device) -> bool:
    """Whether this is a tensor that has to be moved to be on the device, and can be."""
    return isinstance(value, torch.Tensor) and value.device != device and value.device.type != "meta"


def first_device(*arguments: Any) -> torch.device | None:
    """Returns the device of the first tensor among the arguments of a call; meta, from which nothing can be moved, first."""
    found = None
    for tensor in _tensors(arguments):
        if tensor.device.type == "meta":
            return tensor.device
        found = found or tensor.device
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)


def is_inside_a_block() -> bool:
    """Whether this thread is inside a block that puts operations somewhere."""
    return bool(_scopes.stack)


def _run_there(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Moves the inputs, computes, and copies back what the function changed in place, such as running statistics."""
    moved: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def move(value: Any) -> Any:
        if not is_elsewhere(value, device):
            return value
        there = value.to(device)
        moved.append((value, there, there._version))
        return there

    args, kwargs = tree_map(move, (args, kwargs))
    result = func(*args, **kwargs)
    unseen = getattr(func, "__name__", "") in _WRITES_UNSEEN
    for here, there, version in moved if device.type != "meta" else ():
        if there._version != version or (unseen and not there.requires_grad):
            with torch.no_grad():
                here.copy_(there)
    return result


def _describe(func: Any) -> str:
    """Names an operation and, if that is what happens, the module that is being built."""
    name = getattr(func, "__name__", str(func)).strip("_")
    frame, module = sys._getframe(1), None
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and isinstance(owner, nn.Module):
            module = type(owner).__name__
        frame = frame.f_back
    return f"operation {name}" + (f" of module {module}" if module else "")
