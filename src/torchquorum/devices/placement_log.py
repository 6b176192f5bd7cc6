"""The placement log: where every variable lives and every operation runs, one line each, as TensorFlow prints it.

`tq.tensorflow.log_device_placement()` prints it for a block; a session with `log_device_placement=True` for its variables and its first
step (`torchquorum.session.hooks.device_hook`). What always holds: a line is `name: (kind): device`; names are unique, numbered as
TensorFlow does (add, add_1, ...); operations of the backward pass are in it, on any thread of autograd. Operations
of other threads of the program, and of compiled code, are not.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from torchquorum.cluster.spec import TaskId
from torchquorum.devices.cannot_run import ran_on_cpu
from torchquorum.devices.inventory import CPU_DEVICE, available, current, name_of
from torchquorum.devices.names import DeviceName
from torchquorum.errors import ConfigError
from torchquorum.placement.layout import Layout

# Operations that compute nothing: marks for the profiler, and tensors passed through.
_BOOKKEEPING = ("profiler::", "aten::detach", "aten::lift_fresh", "aten::alias", "aten::_local_scalar_dense")
_NAME = "_torchquorum_name"


class PlacementLog:
    """Makes the lines; several threads may add to it."""

    def __init__(self, task: TaskId, write: Callable[[str], None]) -> None:
        self.task, self._write = task, write
        self._used: set[str] = set()
        self._constants: set[int] = set()
        self._lock = threading.Lock()

    def header(self) -> None:
        """Adds the devices of this task."""
        self._write("Device mapping:")
        for device in available():
            self._write(f"{name_of(device, self.task)} -> {_hardware(device)}")

    def variables(self, layout: Layout, module: nn.Module) -> None:
        """Adds every variable with the shards it lives on, and what of it is on another device of the worker than the CPU."""
        for name, parameter in module.named_parameters():
            homes = [DeviceName().on(TaskId("ps", shard)) for shard in layout.shard_of(name)]
            self._write(f"{name}: (Parameter): {', '.join(map(str, homes))}")
            if parameter.device != CPU_DEVICE:
                self._write(f"{name}: (Copy): {name_of(parameter.device, self.task)}")
        for name, buffer in module.named_buffers():
            self._write(f"{name}: (Buffer): {name_of(buffer.device, self.task)}")

    def operation(self, function: Any, inputs: Sequence[Any], device: torch.device) -> None:
        """Adds an operation that was run, after the constants that it is the first to use."""
        with self._lock:
            for value in inputs:
                if hasattr(value, _NAME) and id(value) not in self._constants:
                    self._constant(value)
            name = self._unique(_name(function).rpartition("::")[2].lstrip("_"))
            self._write(f"{name}: ({function}): {name_of(device, self.task)}")

    def constant(self, value: torch.Tensor) -> None:
        """Adds a constant that was made."""
        with self._lock:
            self._constant(value)

    def _constant(self, value: torch.Tensor) -> None:
        self._constants.add(id(value))
        self._write(f"{self._unique(getattr(value, _NAME))}: (Const): {name_of(value.device, self.task)}")

    def _unique(self, name: str) -> str:
        unique, number = name, 0
        while unique.lower() in self._used:
            number += 1
            unique = f"{name}_{number}"
        self._used.add(unique.lower())
        return unique


def _name(function: Any) -> str:
    """The operation's name as its schema has it, aten::add."""
    schema = getattr(function, "_schema", None)
    return schema.name if schema is not None else getattr(function, "__name__", "operation")


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return (
            f"device: {device.index}, name: {found.name}, memory: {found.total_memory / 2**30:.1f} GiB, "
            f"compute capability: {found.major}.{found.minor}"
        )
    return f"threads: {torch.get_num_threads()}" if device == CPU_DEVICE else f"device: {device.index}"


class _Active(threading.local):
    def __init__(self) -> None:
        self.modes: list[LogMode] = []
        self.muted = False


_active = _Active()


class LogMode(TorchDispatchMode):
    """Gives every operation of its thread, and of backward passes begun there, to a log until it is closed."""

    def __init__(self, log: PlacementLog) -> None:
        super().__init__()
        self._log, self._open, self._entered = log, False, False

    def open(self) -> None:
        """Begins to watch this thread."""
        self._open = self._entered = True
        _active.modes.append(self)
        self.__enter__()

    def close(self) -> None:
        """Stops watching; while another mode is on top of this one, a later call removes it."""
        if self._open:
            self._open = False
            _active.modes.remove(self)
        if self._entered and _get_current_dispatch_mode() is self:
            self._entered = False
            self.__exit__(None, None, None)
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()  # what was not compiled while it was watched is compiled from now on

    @property
    def gone(self) -> bool:
        """Whether it is removed, and costs nothing any more."""
        return not self._entered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation and notes where it ran; possibly on a thread of autograd."""
        ran_on_cpu.operation = None
        result = func(*args, **(kwargs or {}))
        if self._open and not _active.muted and not _name(func).startswith(_BOOKKEEPING):
            inputs = tree_leaves((args, kwargs))
            device = CPU_DEVICE if ran_on_cpu.operation is func else _device_of([*tree_leaves(result), *inputs])
            self._log.operation(func, inputs, device)
        return result


def _device_of(values: Sequence[Any]) -> torch.device:
    """Where the first of the tensors is: results come first, so a copy counts where it arrives."""
    return next((value.device for value in values if isinstance(value, torch.Tensor)), CPU_DEVICE)


@contextmanager
def log_device_placement(enabled: bool = True, *, write: Callable[[str], None] = print) -> Iterator[None]:
    """Prints the devices of this task, and a line for every operation that runs inside the block, as it runs.

    Args:
        enabled: False prints nothing, so that a flag can be passed on.
        write: Takes each line; by default it is printed.
    """
    if not enabled:
        yield
        return
    log = PlacementLog(current().task, write)
    log.header()
    mode = LogMode(log)
    mode.open()
    try:
        yield
    finally:
        mode.close()


def constant(
    value: Any, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None, name: str = "Const"
) -> Any:
    """Makes a tensor that has a name in the placement log, as tf.constant.

    Args:
        value: A number, or nested lists of numbers.
        dtype: As torch chooses it by default.
        shape: Its shape; if there are fewer values than that takes, the last one is repeated.
        name: Its name in the log.

    Returns:
        An ordinary tensor, on the device of the innermost `tq.devices.device` block.
    """
    muted, _active.muted = _active.muted, True
    try:
        tensor = torch.tensor(value, dtype=dtype)
        if shape is not None:
            tensor = _shaped(tensor, tuple(shape))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"tq.tensorflow.constant({value!r}, name={name!r}): must be a number or lists of numbers; {error}"
        ) from None
    finally:
        _active.muted = muted
    setattr(tensor, _NAME, name)
    for mode in _active.modes:
        mode._log.constant(tensor)
    return tensor


def _shaped(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    missing = torch.Size(shape).numel() - tensor.numel()
    if missing < 0 or not tensor.numel():
        raise ValueError(f"{tensor.numel()} values do not make a tensor of shape {list(shape)}")
    flat = tensor.flatten()
    return torch.cat([flat, flat[-1:].expand(missing)]).reshape(shape) if missing else flat.reshape(shape)
