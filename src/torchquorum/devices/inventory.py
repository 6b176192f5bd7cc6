"""Which devices this task has, and which device a name means: one that exists, the CPU instead, or an error.

Called by `tq.devices.device`, `tq.devices.place` and the session. `configure`, called by `tq.join`, sets which task the
process is and whether placement is soft; `setting` changes that for a block, in its thread. What always holds: a device that does
not exist is never given to torch; a line says once per missing device that the CPU is used instead.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from torchquorum.cluster.spec import TaskId
from torchquorum.devices.names import CPU, GPU, DeviceName
from torchquorum.errors import DeviceError
from torchquorum.lines import write_line

CPU_DEVICE = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Setting:
    """Which task this is, and whether the CPU may be used for a device that is not there or cannot run an operation."""

    task: TaskId
    soft: bool


class _Local(threading.local):
    setting: Setting | None = None


_process = Setting(TaskId("worker", 0), soft=False)
_local = _Local()
said_keys: set[str] = set()


def current() -> Setting:
    """Returns the setting of this thread, or else of the process."""
    return _local.setting or _process


def configure(*, task: TaskId | None = None, soft: bool | None = None) -> None:
    """Changes the setting of the process; `tq.join` calls this."""
    global _process
    _process = _changed(_process, task, soft)


@contextmanager
def setting(*, task: TaskId | None = None, soft: bool | None = None) -> Iterator[Setting]:
    """Changes the setting of this thread inside the block."""
    before = _local.setting
    _local.setting = _changed(current(), task, soft)
    try:
        yield _local.setting
    finally:
        _local.setting = before


def _changed(before: Setting, task: TaskId | None, soft: bool | None) -> Setting:
    return replace(before, task=task or before.task, soft=before.soft if soft is None else soft)


def say_once(line: str, *, key: str) -> None:
    """Prints a line for people on standard error, unless one with the same key was printed before."""
    if key not in said_keys:
        said_keys.add(key)
        write_line(f"torchquorum: {line}", sys.stderr)


def accelerators() -> list[str]:
    """Returns the types of devices besides the CPU that torch can use here, as torch names them."""
    found = ["cuda"] if torch.cuda.is_available() else []
    other = torch.accelerator.current_accelerator(check_available=True)
    return found if other is None or other.type in found else [*found, other.type]


def available() -> list[torch.device]:
    """Returns the devices of this task, the CPU first."""
    devices = [CPU_DEVICE]
    for kind in accelerators():
        count = getattr(torch.get_device_module(kind), "device_count", lambda: 1)()
        devices += [torch.device(kind, index) for index in range(count)]
    return devices


def name_of(device: torch.device, task: TaskId | None = None) -> DeviceName:
    """Returns a device's whole name, /job:worker/task:0/device:CPU:0."""
    return DeviceName(type=device.type.upper(), index=device.index).on(task or current().task)


def list_available(task: TaskId | None = None) -> str:
    """Returns the names of the devices of this task, for messages."""
    return ", ".join(str(name_of(device, task)) for device in available())


def parse(name: str | torch.device | DeviceName) -> DeviceName:
    """Reads a name of a device, also of one that was registered with torch, or takes a torch.device."""
    if isinstance(name, DeviceName):
        return name
    backend = torch._C._get_privateuse1_backend_name()
    more = () if backend == "privateuseone" else (backend,)
    return DeviceName.parse(str(name) if isinstance(name, torch.device) else name, more_types=more)


def resolve(name: DeviceName, what: str, *, soft: bool | None = None) -> torch.device | None:
    """Returns the device that a name means in this task.

    Args:
        name: What was asked for.
        what: For which operation or module, for the message.
        soft: Whether to use the CPU if there is no such device; by default as the setting says.

    Returns:
        The device; None if the name leaves it open.

    Raises:
        DeviceError: It belongs to another task; or there is no such device and placement is not soft.
    """
    here = current()
    if not name.belongs_to(here.task):
        raise DeviceError(_explain_other_task(name, what, here.task))
    if name.type is None:
        return None
    if name.type == "META":
        return torch.device("meta")
    kind = (accelerators() or ["cuda"])[0] if name.type == GPU else name.type.lower()
    index = name.index or 0
    device = CPU_DEVICE if (kind, index) == ("cpu", 0) else torch.device(kind, index)
    if device in available():
        return device
    asked = DeviceName(type=kind.upper(), index=index).on(here.task)
    if here.soft if soft is None else soft:
        say_once(
            f"{what}: there is no device {asked} (available: {list_available()}); using {name_of(CPU_DEVICE)} instead, "
            "because allow_soft_placement is on",
            key=str(asked),
        )
        return CPU_DEVICE
    raise DeviceError(
        f"{what}: was put on {asked}, but there is no such device. Available: {list_available()}. "
        "Name one of these, or pass allow_soft_placement=True to use the CPU instead."
    )


def limit_gpu_memory(fraction: float | None) -> None:
    """Limits this process to a share of the memory of each GPU that it sees, so that other processes can use the rest."""
    if fraction is None:
        return
    if not torch.cuda.is_available():
        say_once(
            f"gpu_memory_fraction={fraction:g} has no effect: there is no CUDA device here", key="gpu_memory_fraction"
        )
        return
    for index in range(torch.cuda.device_count()):
        torch.cuda.set_per_process_memory_fraction(fraction, index)


def _explain_other_task(name: DeviceName, what: str, here: TaskId) -> str:
    local = DeviceName(type=name.type or CPU, index=name.index)
    if name.job == "ps":
        change = (
            "Variables go to the ps tasks by themselves: leave the ps out, and use tq.Optimizer(placement='round_robin' or "
            f"'greedy') to say how they are spread; for the worker's own copy write {local}"
        )
    else:
        change = f"A program runs its operations in its own task: write {local}, or start the program as that task"
    return f"{what}: was put on {name}, which belongs to another task than this one, {here}. {change}."
