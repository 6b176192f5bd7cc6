"""Names of devices, as users of TensorFlow and of PyTorch write them; pure.

`/job:worker/task:1/device:CUDA:0`, `/gpu:1`, `/cpu:0`, `cuda:1` and `cuda` all become a `DeviceName`, whose text is the first
of these forms. Whether such a device exists is known to `torchquorum.devices.inventory`. What always holds: the
type is one of the known types in capitals; a field that was not given is None, and is inherited from an outer name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from torchquorum.cluster.spec import TaskId, join_words, strip_quotes, suggest
from torchquorum.errors import DeviceError

CPU = "CPU"
GPU = "GPU"  # the accelerator that the task has; CUDA where that is not known
TYPES = ("CPU", "GPU", "CUDA", "MPS", "XPU", "HPU", "MTIA", "XLA", "META")
THIS_TASK = ("localhost", "local")  # what TensorFlow calls the job of a program without a cluster
EXAMPLES = "/job:worker/task:0/device:CPU:0, /gpu:1, /cpu:0, cuda:1 or cpu"

_FIELDS = ("job", "replica", "task", "device")
_JOB = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_INDEX = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceName:
    """A device, or a part of its name.

    Attributes:
        job: The job of its task.
        task: The index of its task.
        type: One of TYPES, or a type that the caller knows besides.
        index: Which device of that type.
    """

    job: str | None = None
    task: int | None = None
    type: str | None = None
    index: int | None = None

    @classmethod
    def parse(cls, text: str, *, more_types: Collection[str] = ()) -> DeviceName:
        """Reads a name.

        Args:
            text: In any of the forms above; types in capitals or not, and quotes around it are ignored.
            more_types: Types besides TYPES, such as a backend that was registered with torch.

        Raises:
            DeviceError: It is no name of a device; the message says what was given, what is allowed, and what was meant.
        """
        if not isinstance(text, str):
            raise DeviceError(f"device {text!r}: must be a name such as {EXAMPLES}")
        types = (*TYPES, *(t.upper() for t in more_types if t.upper() not in TYPES))
        clean = strip_quotes(text)
        parts = [part for part in clean.split("/") if part] if clean.strip("/") else []
        if not parts:
            raise DeviceError(f"device {text!r}: is empty; write {EXAMPLES}")
        name = cls()
        for part in parts:
            name = _read_part(name, part.strip(), text, types)
        return name

    def inside(self, outer: DeviceName) -> DeviceName:
        """Returns this name with what it leaves open taken from an outer one; the index only if the type is the same."""
        same = self.type is None or {self.type, outer.type} in ({self.type}, {GPU, "CUDA"})
        return DeviceName(
            job=self.job if self.job is not None else outer.job,
            task=self.task if self.task is not None else outer.task,
            type=self.type or outer.type,
            index=self.index if self.index is not None or not same else outer.index,
        )

    def on(self, task: TaskId) -> DeviceName:
        """Returns the whole name of a device of this task."""
        return replace(self, job=task.job, task=task.index, type=self.type or CPU, index=self.index or 0)

    def belongs_to(self, task: TaskId) -> bool:
        """Whether the name leaves the task open or means this one."""
        if self.job in THIS_TASK and task.job not in THIS_TASK:
            return not self.task
        return self.job in (None, task.job) and self.task in (None, task.index)

    def __str__(self) -> str:
        text = f"/job:{self.job}" if self.job is not None else ""
        text += f"/task:{self.task}" if self.task is not None else ""
        kind = "CUDA" if self.type == GPU else self.type
        return text + (f"/device:{kind}:{self.index or 0}" if kind is not None else "")


def _read_part(name: DeviceName, part: str, text: str, types: tuple[str, ...]) -> DeviceName:
    """Adds one part of the text, between two slashes, to the name."""
    head, colon, rest = part.partition(":")
    field = head.strip().lower()
    if field == "device" and colon:
        return _read_device(name, rest, text, types)
    if field == "job" and colon:
        if not _JOB.fullmatch(rest):
            raise DeviceError(f"device {text!r}: {part!r} must name a job; write for example /job:worker")
        return _set(name, text, job=rest)
    if field in ("task", "replica") and colon:
        if not _INDEX.fullmatch(rest):
            raise DeviceError(f"device {text!r}: {part!r} must have a whole number, 0 or more; write /{field}:0")
        return name if field == "replica" else _set(name, text, task=int(rest))
    if field.upper() in types:
        return _read_device(name, part, text, types)
    if field in _FIELDS:
        raise DeviceError(f"device {text!r}: {part!r} needs a colon and a value; write {EXAMPLES}")
    hint = suggest(field, [*_FIELDS, *(t.lower() for t in types)])
    raise DeviceError(
        f"device {text!r}: {part!r} is none of {', '.join(f + ':' for f in _FIELDS)} or a type of device "
        f"({join_words([t.lower() for t in types])}); {hint or 'write ' + EXAMPLES}"
    )


def _read_device(name: DeviceName, part: str, text: str, types: tuple[str, ...]) -> DeviceName:
    kind, colon, index = (piece.strip() for piece in part.partition(":"))
    if kind == "*" and not colon:
        return name
    if kind.upper() not in types:
        hint = suggest(kind, [t.lower() for t in types])
        raise DeviceError(
            f"device {text!r}: there is no type of device {kind!r}; allowed are {join_words([t.lower() for t in types])}"
            + (f"; {hint}" if hint else "")
        )
    if not colon or index == "*":
        return _set(name, text, type=kind.upper())
    if not _INDEX.fullmatch(index):
        raise DeviceError(
            f"device {text!r}: {part!r} must have a whole number, 0 or more; write for example {kind.lower()}:0"
        )
    return _set(name, text, type=kind.upper(), index=int(index))


def _set(name: DeviceName, text: str, **fields: str | int) -> DeviceName:
    if any(getattr(name, field) is not None for field in fields):
        raise DeviceError(f"device {text!r}: says {next(iter(fields))} twice; keep one of them")
    return replace(name, **fields)  # pyright: ignore[reportArgumentType]
