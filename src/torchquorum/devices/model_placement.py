"""`tq.devices.place`: puts the parts of a model on devices and moves inputs to them, so that the model runs unchanged.

Called by the session (`placement=`) and by programs. What always holds: parameters keep their identity, so an optimizer made
before still has them; a module with a device gets its inputs there; the model's outputs come back to where its inputs were, so
that the loop around it needs no change. How variables are spread over ps tasks is set by `tq.Optimizer(placement=)`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import swap_tensors
from torch.utils._pytree import tree_map

from torchquorum.cluster.spec import suggest
from torchquorum.devices.inventory import CPU_DEVICE, accelerators, parse, resolve
from torchquorum.devices.names import DeviceName
from torchquorum.devices.scope import Scope, first_device, is_inside_a_block
from torchquorum.errors import DeviceError

Target = str | torch.device
Placement = Target | Mapping[str, Target] | Callable[[str, Any], Target | None]

_Model = TypeVar("_Model", bound=nn.Module)
_WILD = re.compile(r"\[[^]]*\]|[*?]")
_handles: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


def place(model: _Model, placement: Placement, *, allow_soft_placement: bool | None = None) -> _Model:
    """Moves a model's parts to devices, and the inputs of each part to its device at every call.

    Args:
        model: It is changed, and returned.
        placement: A device for all of it; or a mapping from names of modules, parameters or buffers to devices, where `*` and
            `?` stand for any characters; or a function of name and module (or parameter) that returns a device or None. A
            module's device holds for everything inside it. Where several entries match, the one with more characters besides
            wildcards decides, then the later. What nothing matches stays where it is.
        allow_soft_placement: Whether the CPU is used in place of a device that is not there; by default as the setting says.

    Returns:
        The model.

    Raises:
        DeviceError: A device is misspelt or not there, or an entry matches nothing; the message names the module.
    """
    if not isinstance(model, nn.Module):
        raise DeviceError(f"tq.devices.place({type(model).__name__}): give it an nn.Module")
    choose = _chooser(model, placement)
    devices: dict[str, torch.device | None] = {}
    for name, thing in _parts(model):
        asked = choose(name, thing)
        if asked is None:
            devices[name] = devices[name.rpartition(".")[0]] if name else None
            continue
        what = f"{_word(thing)} {name} ({type(thing).__name__})" if name else f"model {type(thing).__name__}"
        devices[name] = resolve(parse(asked), what, soft=allow_soft_placement)
    _move(model, devices)
    _follow(model, devices)
    return model


def _parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields every module, parameter and buffer by name, a module before what is inside it; shared ones by every name."""
    for name, module in model.named_modules(remove_duplicate=False):
        yield name, module
        prefix = f"{name}." if name else ""
        for own, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield prefix + own, tensor


def _word(thing: Any) -> str:
    if isinstance(thing, nn.Module):
        return "module"
    return "parameter" if isinstance(thing, nn.Parameter) else "buffer"


def _chooser(model: nn.Module, placement: Any) -> Callable[[str, Any], Target | None]:
    if isinstance(placement, str | torch.device):
        return lambda name, thing: placement if name == "" else None
    if isinstance(placement, Mapping):
        return _by_pattern(model, placement)
    if callable(placement):
        return placement  # pyright: ignore[reportReturnType]
    raise DeviceError(
        f"placement={placement!r}: must be a device, a mapping from names to devices such as "
        "{'fc1': '/gpu:0', 'fc2': '/cpu:0'}, or a function of name and module"
    )


def _by_pattern(model: nn.Module, placement: Mapping[str, Target]) -> Callable[[str, Any], Target | None]:
    names = [name for name, _ in _parts(model)]
    for pattern, target in placement.items():
        if not isinstance(pattern, str):
            raise DeviceError(
                f"placement: {pattern!r} must be the name of a module or parameter, or a pattern of names"
            )
        parse(target)
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = suggest(pattern, [name for name in names if name])
            raise DeviceError(
                f"placement: {pattern!r} matches no module, parameter or buffer of {type(model).__name__}"
                + (f"; {hint}" if hint else f"; it has {', '.join(n for n in names if n)[:300]}")
            )

    rank = {pattern: (len(_WILD.sub("", pattern)), at) for at, pattern in enumerate(placement)}

    def choose(name: str, thing: Any) -> Target | None:
        around = [name, *(name[:at] for at, letter in enumerate(name) if letter == "."), ""]
        matching = [p for p in placement if any(fnmatchcase(n, p) for n in around)]
        return placement[max(matching, key=rank.__getitem__)] if matching else None

    return choose


def _move(model: nn.Module, devices: Mapping[str, torch.device | None]) -> None:
    done: dict[int, tuple[str, torch.device, torch.Tensor]] = {}
    kept: list[torch.Tensor] = []  # so that no id is given to another tensor meanwhile
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for table in (module._parameters, module._buffers):
            for own, tensor in table.items():
                device = devices.get(prefix + own) if tensor is not None else None
                if tensor is None or device is None:
                    continue
                if id(tensor) in done:
                    first, before, moved = done[id(tensor)]
                    if before != device:
                        raise DeviceError(
                            f"placement: {first} and {prefix + own} are one tensor and cannot be on {before} and {device}; "
                            "put both on the same device"
                        )
                else:
                    kept.append(tensor)
                    moved = _moved(tensor, device)
                    done[id(tensor)] = done[id(moved)] = (prefix + own, device, moved)
                table[own] = moved  # pyright: ignore[reportArgumentType]
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()  # it has its weights in a list too


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Moves a parameter in place where torch can, so that optimizers keep it; a buffer is replaced."""
    if tensor.device == device:
        return tensor
    with torch.no_grad():
        there = tensor.to(device)
    if not isinstance(tensor, nn.Parameter):
        return there
    gradient = tensor.grad.to(device) if tensor.grad is not None else None
    tensor.grad = None
    if torch._has_compatible_shallow_copy_type(tensor, there):
        tensor.data = there.data
    else:
        fresh = nn.Parameter(there, requires_grad=tensor.requires_grad)
        try:
            swap_tensors(tensor, fresh)
        except RuntimeError:  # a graph of an earlier forward still holds it
            return fresh
    tensor.grad = gradient
    return tensor


def _follow(model: nn.Module, devices: Mapping[str, torch.device | None]) -> None:
    """Registers hooks that move inputs, at every module that has a device, or parts on several."""
    for handle in _handles.pop(model, []):
        handle.remove()
    handles = _handles.setdefault(model, [])
    everywhere = _devices_inside(model, "", devices)
    if everywhere <= {CPU_DEVICE} and not accelerators():
        return  # there is no other device, so nothing has to be moved
    apart = len(everywhere) > 1
    for name, module in model.named_modules():
        own = {t.device for t in [*module.parameters(recurse=False), *module.buffers(recurse=False)]}
        device = devices.get(name) or (next(iter(own)) if apart and len(own) == 1 else None)
        gather = apart and len(_devices_inside(module, name, devices)) > 1
        if device is not None or gather or module is model:
            boundary = _Boundary(device, gather, len(own) > 1, module is model)
            handles.append(module.register_forward_pre_hook(boundary.before, with_kwargs=True))
            handles.append(module.register_forward_hook(boundary.after, always_call=True))


def _devices_inside(
    module: nn.Module, name: str, devices: Mapping[str, torch.device | None]
) -> set[torch.device | None]:
    chosen = {devices.get(inner) for inner, _ in module.named_modules(prefix=name)}
    return ({t.device for t in [*module.parameters(), *module.buffers()]} | chosen) - {None}


class _Calls(threading.local):
    """The calls of placed modules that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[tuple[_Boundary, torch.device | None, Scope | None]] = []


_calls = _Calls()


@dataclass(frozen=True, slots=True, eq=False)
class _Boundary:
    """What happens where data enters and leaves a module.

    Attributes:
        device: Where the module's inputs go; None leaves them.
        gather: Whether parts of the module are on several devices, so that its own operations may get tensors of each.
        mixed: Whether the module's own parameters do.
        outermost: Whether it is the whole model, whose outputs go back to where its inputs came from.
    """

    device: torch.device | None
    gather: bool
    mixed: bool
    outermost: bool

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Moves the inputs, and opens a block where operations could get tensors of several devices."""
        came_from = first_device(args, kwargs) if self.outermost else None
        scope = self._scope()
        if scope is not None:
            scope.__enter__()
        _calls.stack.append((self, came_from, scope))
        if self.device is not None:
            args, kwargs = _to(args, self.device, module), _to(kwargs, self.device, module) if kwargs else kwargs
        return args, kwargs

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Closes the block, and brings the model's outputs to where its inputs were; also after an exception."""
        if not _calls.stack or _calls.stack[-1][0] is not self:
            return output  # another hook failed before `before` was called
        _, came_from, scope = _calls.stack.pop()
        if scope is not None:
            scope.__exit__(None, None, None)
        return _to(output, came_from) if came_from is not None else output

    def _scope(self) -> Scope | None:
        within = is_inside_a_block()
        if self.device is not None and (self.mixed or (within and not self.gather)):
            return Scope(DeviceName(), device=self.device)
        return Scope(DeviceName(), gather=True) if self.gather else None


def _to(tree: Any, device: torch.device, module: nn.Module | None = None) -> Any:
    """Moves every tensor of a call's inputs (with the module) or outputs (without)."""

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device == device:
            return value
        if value.device.type != "meta":
            return value.to(device)
        if module is None:
            return value
        raise DeviceError(
            f"module {type(module).__name__}: is on {device}, but its input is on meta, where tensors have no data; put the "
            "part of the model before it on a real device, or this one on meta too"
        )

    if type(tree) is tuple and len(tree) == 1 and isinstance(tree[0], torch.Tensor):
        return (move(tree[0]),)
    return move(tree) if isinstance(tree, torch.Tensor) else tree_map(move, tree)
