"""A worker's persistent buffers: found in the module, captured at little cost, and put back.

Owned by the session, on the worker's thread. What always holds: buffers are looked up by name whenever they are needed, since
modules may replace them; those registered with persistent=False are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.formats.checkpoint_manifest import DTYPES, torch_dtype
from torchquorum.wire.messages import BufferSpec
from torchquorum.wire.packing import Packing
from torchquorum.worker.variable_names import plain_names

# Captured at every step, so that a run resumes bit for bit; larger ones, which hardly ever change, when they are wanted.
CAPTURED_BYTES = 16 << 20


def tied_names(model: nn.Module) -> dict[str, str]:
    """Returns the further names of parameters that have several, each with the first."""
    first: dict[int, str] = {}
    plain = plain_names(model)
    return {
        plain(name): first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), plain(name)) != plain(name)
    }


class LocalBuffers:
    """The buffers of one worker's module that belong to its state_dict.

    Args:
        model: The module.
        say: Is told, once, of buffers that cannot travel and stay local.

    Attributes:
        aside: This worker's own values while others stand in the module, to be evaluated; they are what it captures.
    """

    def __init__(self, model: nn.Module, say: Callable[[str], None]) -> None:
        self._where: dict[str, tuple[nn.Module, str]] = {}
        self.aside: dict[str, torch.Tensor] | None = None
        specs: list[BufferSpec] = []
        plain = plain_names(model)
        for prefix, module in model.named_modules(remove_duplicate=False):
            for short, buffer in module._buffers.items():
                if buffer is None or short in module._non_persistent_buffers_set:
                    continue
                name = plain(f"{prefix}.{short}" if prefix else short)
                if isinstance(buffer, nn.parameter.UninitializedBuffer):
                    raise ConfigError(
                        f"buffer {name} of a lazy module has no shape yet; run one batch through it before"
                    )
                dtype = str(buffer.dtype).removeprefix("torch.")
                if dtype not in DTYPES or buffer.layout is not torch.strided:
                    say(f"buffer {name} is {dtype}, {buffer.layout}: a checkpoint cannot hold that, so it stays local")
                    continue
                self._where[name] = (module, short)
                specs.append(BufferSpec(name, tuple(buffer.shape), dtype))
        self.packing = Packing(specs)
        self._expected = {s.name: (torch.Size(s.shape), torch_dtype(s.dtype)) for s in specs}
        self._small: list[str] = []
        room = CAPTURED_BYTES
        for name in sorted(self._where, key=lambda n: self._get(n).nbytes):
            room -= self._get(name).nbytes
            if room >= 0:
                self._small.append(name)

    @property
    def specs(self) -> list[BufferSpec]:
        """Returns what each buffer is, in the module's order."""
        return list(self.packing.specs.values())

    def _get(self, name: str) -> torch.Tensor:
        module, short = self._where[name]
        buffer = module._buffers.get(short)
        if buffer is None:
            raise ConfigError(f"buffer {name} is gone; tq.Session(buffers=...) needs those that it began with")
        return buffer

    def _checked(self, name: str) -> torch.Tensor:
        buffer = self._get(name) if self.aside is None else self.aside[name]
        if (buffer.shape, buffer.dtype) != self._expected[name]:
            spec = self.packing.specs[name]
            raise ConfigError(
                f"buffer {name} is {str(buffer.dtype).removeprefix('torch.')} {list(buffer.shape)} now and was {spec.dtype} "
                f"{list(spec.shape)} when tq.Session began; register it with persistent=False, or give buffers='local'"
            )
        return buffer

    def capture(self) -> CapturedBuffers:
        """Takes the buffers as they are: one copy per dtype and device, without waiting for a GPU."""
        groups: dict[tuple[torch.dtype, torch.device], tuple[list[str], list[torch.Tensor]]] = {}
        with torch.no_grad():
            for name in self._small:
                buffer = self._checked(name)
                names, flat = groups.setdefault((buffer.dtype, buffer.device), ([], []))
                names.append(name)
                flat.append(buffer.reshape(-1))
            return CapturedBuffers(self, [(names, torch.cat(flat)) for names, flat in groups.values()])

    def clone(self) -> dict[str, torch.Tensor]:
        """Returns copies of all buffers."""
        return {name: self._checked(name).detach().clone() for name in self._where}

    def pack(self, captured: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns all buffers in one piece: those that were captured, and the others as they are now."""
        with torch.no_grad():
            return self.packing.pack({n: captured[n] if n in captured else self._checked(n) for n in self._where})

    @torch.no_grad()
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Puts values into the module's buffers."""
        for name, value in values.items():
            buffer = self._get(name)
            try:
                buffer.copy_(value)
            except RuntimeError:  # expanded, or made in inference mode: it cannot be written, but it can be replaced
                module, short = self._where[name]
                module._buffers[short] = value.to(buffer.device, copy=True)


class CapturedBuffers:
    """Buffers as they were at one moment; `pack` makes a frame of them when one is wanted."""

    def __init__(self, owner: LocalBuffers, groups: list[tuple[list[str], torch.Tensor]]) -> None:
        self._owner, self._groups = owner, groups

    def pack(self) -> torch.Tensor:
        """Returns all buffers in one piece."""
        captured: dict[str, torch.Tensor] = {}
        specs = self._owner.packing.specs
        for names, flat in self._groups:
            shapes = [specs[name].shape for name in names]
            parts = flat.cpu().split([torch.Size(shape).numel() for shape in shapes])
            captured |= {n: part.view(shape) for n, part, shape in zip(names, parts, shapes, strict=True)}
        return self._owner.pack(captured)
