"""The worker's parameters as views of flat buffers, and the copies between those and the shards' memory.

Owned by the worker's thread. A module's parameters keep their identity; only their storage moves, once, into one buffer
per dtype and device. Those with a memory format of their own (channels_last) stay where they are. What always holds:
neighbours in a shard that are neighbours here are copied as one piece, so with one ps a pull is one copy per dtype; to torch
each parameter has a storage of its own size, so a part of the model that is saved does not take the rest with it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchquorum.errors import ConfigError
from torchquorum.placement.layout import CONSTANT, Layout, Region, Variable, padded
from torchquorum.update.gradient_norm import norm_of
from torchquorum.wire.channel import Pieces
from torchquorum.worker.row_tables import RowTables
from torchquorum.worker.variable_names import plain_names

MOST_PIECES = 16  # a frame that would go to more places is received in one piece and copied
BufferPlaces = dict[int, tuple[torch.Tensor, int]]  # of each parameter: the buffer that it is a part of, and where
_WHERE: Any = WeakTensorKeyDictionary()  # the same of all parameters in this process


def describe(
    module: nn.Module, optimizer: torch.optim.Optimizer, rows: Collection[int] = (), *, has_tables: bool = False
) -> tuple[list[Variable], list[nn.Parameter]]:
    """Returns the variables of a module in creation order, and the parameters that they stand for; without `rows`, those of tables by id.

    A parameter that the optimizer does not know becomes a constant: the chief's value is every worker's. Shared (tied)
    parameters are one variable.
    """
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    variables, parameters, plain = [], [], plain_names(module)
    for own_name, parameter in module.named_parameters():
        name = plain(own_name)
        if id(parameter) in rows:
            group_of.pop(id(parameter), None)
            continue
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"parameter {name} of a lazy module has no shape yet; run one batch through the model before"
            )
        group = group_of.pop(id(parameter), CONSTANT)
        dtype = str(parameter.dtype).removeprefix("torch.")
        if group != CONSTANT and isinstance(optimizer, torch.optim.SparseAdam):
            raise ConfigError(
                f"parameter {name} belongs to torch.optim.SparseAdam, which takes sparse gradients only, those of nn.Embedding and "
                "nn.EmbeddingBag with sparse=True, and without what needs whole variables "
                "(docs/rows.md); give it to another optimizer, such as Adam with sparse=False"
            )
        if group != CONSTANT and not parameter.is_floating_point():
            raise ConfigError(f"parameter {name} is {dtype}: {_not_trained(parameter)}")
        variables.append(Variable(name=name, shape=tuple(parameter.shape), dtype=dtype, group=group))
        parameters.append(parameter)
    if group_of:
        raise ConfigError(
            f"the optimizer has {len(group_of)} parameters that the model does not: make the optimizer from "
            "model.parameters() of the model given to tq.Session"
        )
    if not has_tables and not any(v.group != CONSTANT for v in variables):
        raise ConfigError("the optimizer has none of the model's parameters, so there is nothing to train")
    return variables, parameters


def _not_trained(parameter: nn.Parameter) -> str:
    """Returns why a parameter cannot be trained on a ps, and what to do."""
    if parameter.is_complex():
        return (
            "the ps tasks hold real numbers only; make it a real parameter with one more dimension of 2 and use torch.view_as_complex() "
            "of it in forward()"
        )
    return "no gradient can train it; leave it out of the optimizer, or make it a buffer with register_buffer()"


class FlatParameters:
    """The parameters of one module, moved into flat buffers in the order of the shards' memory; its tables beside them."""

    def __init__(self, layout: Layout, parameters: Sequence[nn.Parameter], tables: RowTables | None = None) -> None:
        self.layout, self.parameters = layout, list(parameters)
        self.tables = tables if tables is not None else RowTables()
        order = sorted(
            range(len(parameters)),
            key=lambda i: (layout.variables[i].group == CONSTANT, layout.variables[i].group, i),
        )
        self._place: BufferPlaces = {}
        self.gradients: FlatGradients | None = None
        self._trained: list[tuple[torch.Tensor, torch.Tensor, int]] | None = None
        sliced = {v for parts in layout.parts for v, start, stop in parts if stop - start != layout.variables[v].numel}
        apart = {i for i, p in enumerate(parameters) if not p.is_contiguous() and i not in sliced}
        for dtype, device in {(p.dtype, p.device): None for p in parameters}:
            chosen = [
                i for i in order if (parameters[i].dtype, parameters[i].device) == (dtype, device) and i not in apart
            ]
            room = [padded(parameters[i].numel(), layout.variables[i].dtype) for i in chosen]
            buffer = torch.zeros(sum(room), dtype=dtype, device=device)
            offset = 0
            for i, taken in zip(chosen, room, strict=True):
                view = buffer[offset : offset + parameters[i].numel()]
                view.copy_(parameters[i].detach().reshape(-1))
                parameters[i].data = _with_own_storage(view).view(parameters[i].shape)
                self._place[i] = _WHERE[parameters[i]] = (buffer, offset)
                offset += taken
        # Of none on a backend whose tensors have no addresses, where it cannot be told whether they were moved.
        self._addresses = [(p, p.data_ptr(), i) for i, p in enumerate(parameters) if i in self._place and p.data_ptr()]

    @property
    def cuda_device(self) -> torch.device | None:
        """Returns the one GPU on which all trained parameters are; None if they are elsewhere, or on several."""
        trained = zip(self.layout.variables, self.parameters, strict=True)
        devices = {p.device for v, p in trained if v.group != CONSTANT}
        return next(iter(devices)) if len(devices) == 1 and next(iter(devices)).type == "cuda" else None

    def flat_gradients(self) -> FlatGradients | None:
        """Makes room for all gradients in one piece, laid out as the parameters are; None where that is not possible."""
        if self.gradients is None and len(self._place) == len(self.parameters):
            self.gradients = FlatGradients(self.parameters, self._place)
        return self.gradients

    def trained_runs(self) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """Returns the parameters of each group in few pieces, with their gradients' room beside them."""
        assert self.gradients is not None
        if self._trained is None:
            self._trained = []
            spans: dict[tuple[int, int], list[int]] = {}
            for i, (buffer, offset) in self._place.items():
                if (group := self.layout.variables[i].group) != CONSTANT:
                    span = spans.setdefault((id(buffer), group), [offset, offset, i])
                    span[0], span[1] = min(span[0], offset), max(span[1], offset + self.parameters[i].numel())
            for (_, group), (start, stop, i) in spans.items():
                mine, theirs = self._place[i][0], self.gradients.place[i][0]
                self._trained.append((mine[start:stop], theirs[start:stop], group))
        return self._trained

    def addresses(self) -> tuple[list[nn.Parameter], list[int]]:
        """Returns the parameters that lie in the buffers, and where each lies: other addresses are for `replaced` to look at."""
        return [p for p, _, _ in self._addresses], [address for _, address, _ in self._addresses]

    def replaced(self) -> list[int]:
        """Returns the parameters that the program has given other memory, as `p.data = ...` does.

        Raises:
            ConfigError: One has another device, dtype or shape now.
        """
        found = []
        for parameter, address, i in self._addresses:
            if parameter.data_ptr() != address:
                variable, (buffer, _) = self.layout.variables[i], self._place[i]
                now = (parameter.device, parameter.dtype, tuple(parameter.shape))
                if now != (buffer.device, buffer.dtype, tuple(variable.shape)):
                    raise ConfigError(
                        f"parameter {variable.name} was moved after tq.Session began; move the model to its device and dtype "
                        "before"
                    )
                found.append(i)
        return found

    def take_back(self) -> None:
        """Returns parameters that the program has given other memory to their place, with what they hold now."""
        for i in self.replaced():
            parameter, (buffer, offset) = self.parameters[i], self._place[i]
            view = buffer[offset : offset + parameter.numel()]
            view.copy_(parameter.detach().reshape(-1))
            parameter.data = _with_own_storage(view).view(parameter.shape)

    def memory(self) -> list[tuple[torch.Tensor, list[tuple[int, int, int]]]]:
        """Returns the memory of the trained parameters, flat, with where each begins in it and how many elements it has.

        Only of the host and of CUDA devices, and of parameters whose elements lie one after the other.
        """
        found: dict[int, tuple[torch.Tensor, list[tuple[int, int, int]]]] = {}
        for i, parameter in enumerate(self.parameters):
            variable, device = self.layout.variables[i], parameter.device.type
            if variable.group == CONSTANT or device not in ("cpu", "cuda") or not parameter.numel():
                continue
            if i in self._place:
                buffer, offset = self._place[i]
                found.setdefault(id(buffer), (buffer, []))[1].append((i, offset, parameter.numel()))
            elif parameter.untyped_storage().nbytes() == parameter.nbytes:  # a memory format of its own
                whole = parameter.detach().as_strided((parameter.numel(),), (1,))
                found[id(parameter)] = whole, [(i, 0, parameter.numel())]
        return list(found.values())

    def release(self) -> None:
        """Gives every parameter memory of its own again, outside of the flat buffers."""
        with suppress(torch.OutOfMemoryError):  # then the rest stays where it is, which serves as well
            for i in self._place:
                self.parameters[i].data = self.parameters[i].data.clone()
                _WHERE.pop(self.parameters[i], None)

    def memory_of(self, region: Region) -> list[memoryview] | None:
        """Returns the memory of the parameters in the order of a region; None if it is not theirs, byte for byte."""
        at, found = 0, []
        for section, values in zip(region.sections, _places(region), strict=True):
            one = Region(sections=(section,), size_bytes=section.size_bytes)
            if section.start_byte != at:
                return None
            for ours, theirs in self.runs(one, [values]):
                if theirs.dim() != 1:
                    return None  # a parameter with a memory format of its own
                begin = section.start_byte + int(theirs[0]) * ours.element_size()
                if begin != at or ours.device.type != "cpu" or not ours.is_contiguous() or not ours.numel():
                    return None
                flat = ours.detach().reshape(-1).view(torch.uint8)
                found.append(memoryview(flat.numpy()))  # pyright: ignore[reportArgumentType]
                at = begin + flat.numel()
        return found if found and at == region.size_bytes and len(found) <= MOST_PIECES else None

    def load(self, region: Region, sections: Sequence[torch.Tensor]) -> None:
        """Copies a shard's memory into the parameters."""
        for ours, theirs in self.runs(region, sections):
            ours.copy_(theirs)

    def store(self, region: Region, sections: Sequence[torch.Tensor]) -> None:
        """Copies the parameters into a shard's memory."""
        for ours, theirs in self.runs(region, sections):
            theirs.copy_(ours)

    def runs(
        self, region: Region, sections: Sequence[torch.Tensor], place: BufferPlaces | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the pieces of the parameters, or of what lies at another place, beside those of a shard's memory."""
        places = self._place if place is None else place
        runs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for section, theirs in zip(region.sections, sections, strict=True):
            merged: list[list[int]] = []
            buffers: list[torch.Tensor] = []
            for piece in section.pieces:
                if piece.variable not in places:
                    parameter = self.parameters[piece.variable]
                    there = theirs[piece.offset : piece.offset + piece.numel]
                    runs.append((parameter.data, there.view(parameter.shape)))
                    continue
                buffer, offset = places[piece.variable]
                here = offset + piece.start
                whole = piece.numel == self.parameters[piece.variable].numel()
                room = padded(piece.numel, section.dtype) if whole else piece.numel
                last = merged[-1] if merged and buffers[-1] is buffer else [-1, -1, 0]
                if (last[0] + last[2], last[1] + last[2]) == (here, piece.offset):
                    last[2] += room
                else:
                    merged.append([here, piece.offset, room])
                    buffers.append(buffer)
            for buffer, (here, there, count) in zip(buffers, merged, strict=True):
                runs.append((buffer[here : here + count], theirs[there : there + count]))
        return runs


def as_part(parameter: nn.Parameter) -> torch.Tensor:
    """Returns a parameter as a part of the buffer that a session has moved it into, or as it is if none has."""
    buffer, offset = _WHERE.get(parameter, (None, 0))
    if buffer is None or buffer[offset:].data_ptr() != parameter.data_ptr():
        return parameter.detach()
    return buffer[offset : offset + parameter.numel()].view(parameter.shape)


def is_in_a_session(parameter: torch.Tensor) -> bool:
    """Whether a session that runs has moved this parameter into its buffers."""
    return parameter in _WHERE


def _with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as a tensor whose storage is no larger: torch.save writes a tensor's whole storage."""
    return torch.from_dlpack(view) if view.device.type in ("cpu", "cuda") else view


def _places(region: Region) -> list[torch.Tensor]:
    """Returns sections of a region in which every element says where it stands, so that pieces can be told apart."""
    return [torch.arange(section.numel) for section in region.sections]


class FlatGradients:
    """Room for the gradients, laid out as the parameters are; the code that fills it makes its views the parameters' gradients.

    Attributes:
        views: Of each parameter, its room.
        place: Where they lie.
        norms: Of each buffer, the norm of what was filled in last, in memory of the host; None if nobody has looked.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], place: BufferPlaces) -> None:
        self._parameters = parameters
        buffers = {id(buffer): torch.zeros_like(buffer) for buffer, _ in place.values()}
        self.buffers = list(buffers.values())
        self.place: BufferPlaces = {i: (buffers[id(buffer)], offset) for i, (buffer, offset) in place.items()}
        self.views: list[torch.Tensor] = []
        for i, parameter in enumerate(parameters):
            buffer, offset = self.place[i]
            self.views.append(buffer[offset : offset + parameter.numel()].view(parameter.shape))
        self.norms: npt.NDArray[np.float32] | None = None

    def in_use(self) -> bool:
        """Whether the parameters' gradients are the ones here."""
        return all(p.grad is view for p, view in zip(self._parameters, self.views, strict=True))

    def norm(self) -> float:
        """Returns their norm: finite if, and only if, all of them are."""
        known = math.hypot(*self.norms.tolist()) if self.norms is not None else math.inf
        return known if math.isfinite(known) else norm_of(self.buffers)


class Puller:
    """Copies one slot of a shard into the parameters, or back; the pairs of views are made once."""

    def __init__(self, flat: FlatParameters, region: Region, sections: Sequence[torch.Tensor]) -> None:
        self._runs = flat.runs(region, sections)
        self._unblocked = flat.cuda_device is not None

    def __call__(self) -> None:
        """Copies; from memory that a GPU can reach by itself, this only begins."""
        for ours, theirs in self._runs:
            ours.copy_(theirs, non_blocking=self._unblocked)

    def back(self) -> None:
        """Copies the parameters into the slot, likewise."""
        for ours, theirs in self._runs:
            theirs.copy_(ours, non_blocking=self._unblocked)


class Pusher:
    """Copies the parameters' gradients into one gradient slot of a shard.

    Attributes:
        entries: Of each piece of the slot, the parameter, which variable it is, its place, and which part of it goes there.
    """

    def __init__(self, flat: FlatParameters, region: Region, sections: Sequence[torch.Tensor]) -> None:
        self._flat, self._region, self._all = flat, region, sections
        self._unblocked = flat.cuda_device is not None
        self._whole: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._parts: list[torch.Tensor] = []  # the gradients that were looked at where they are, instead of copied
        self._begins: list[int] = []
        self._shapes: list[tuple[nn.Parameter, type[ctypes.Array[ctypes.c_char]], memoryview | None]] | None = None
        self.entries: list[tuple[nn.Parameter, int, torch.Tensor, slice | None]] = []
        self._sections = list(sections)
        for section, theirs in zip(region.sections, sections, strict=True):
            for piece in section.pieces:
                parameter = flat.parameters[piece.variable]
                target = theirs[piece.offset : piece.offset + piece.numel]
                self._begins.append(section.start_byte + piece.offset * theirs.element_size())
                whole = piece.numel == parameter.numel()
                self.entries.append(
                    (
                        parameter,
                        piece.variable,
                        target.view(parameter.shape) if whole else target,
                        None if whole else slice(piece.start, piece.stop),
                    )
                )

    def in_pieces(self) -> Pieces | None:
        """Returns the gradients' own memory in the order of the slot, instead of copying them; None where that cannot be."""
        if self._shapes is None:
            self._shapes = self._lie_whole()
        found, self._parts = Pieces(), []
        for parameter, room, padding in self._shapes:
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided or not gradient.is_cpu:
                return None
            if not gradient.is_contiguous() or gradient.dtype != parameter.dtype:
                return None
            self._parts.append(gradient)  # which keeps its memory, too
            found.append(memoryview(room.from_address(gradient.data_ptr())).cast("B"))
            if padding is not None:
                found.append(padding)
        return found if found else None

    def _lie_whole(self) -> list[tuple[nn.Parameter, type[ctypes.Array[ctypes.c_char]], memoryview | None]]:
        """Returns each gradient with what its bytes are to the system, and the zeros that follow it; none if one is cut."""
        found = []
        if not self.entries:  # more ps tasks than variables: this one holds none
            return found
        ends = [*self._begins[1:], self._region.size_bytes]
        for (parameter, _, _, part), begin, end in zip(self.entries, self._begins, ends, strict=True):
            size = parameter.numel() * parameter.element_size()
            if part is not None or not size or self._begins[0] != 0:
                return []
            padding = memoryview(bytes(end - begin - size)) if begin + size < end else None
            found.append((parameter, ctypes.c_char * size, padding))
        return found

    @property
    def whole(self) -> bool:
        """Whether what was copied last lay in one piece: in `FlatParameters.gradients`."""
        return self._whole is not None

    def norm(self) -> float:
        """Returns the norm of what was copied last; reads it once, while it is still in the cache."""
        there = self._lie_there() if self._unblocked else []
        return norm_of(there or self._parts or self._sections)

    @property
    def on_host(self) -> list[torch.Tensor]:
        """Returns what was copied last, or looked at where it is, in the host's memory."""
        return self._parts or self._sections

    def _lie_there(self) -> list[torch.Tensor]:
        """Returns the gradients on the GPU, as they were copied; none if they were copied otherwise."""
        given = [(p, p.grad, part) for p, _, _, part in self.entries if p.grad is not None and p.is_floating_point()]
        if any(g.layout != torch.strided or g.dtype != p.dtype for p, g, _ in given):
            return []
        return [g if part is None else g.reshape(-1)[part] for _, g, part in given]

    def __call__(self, held: frozenset[int] = frozenset()) -> list[int]:
        """Copies, and returns the variables that have no gradient; their place is filled with zeros.

        From a GPU this only begins: `Exchange.settle` waits. Variables whose gradients are held there already are left out.
        """
        gradients, self._parts = self._flat.gradients, []
        if gradients is not None and gradients.in_use():
            if self._whole is None:
                self._whole = self._flat.runs(self._region, self._all, gradients.place)
            missing = any(variable not in held for _, variable, _, _ in self.entries)
            for ours, theirs in self._whole if missing else ():
                theirs.copy_(ours, non_blocking=self._unblocked)
            return []
        self._whole = None
        absent = []
        for parameter, variable, target, part in self.entries:
            if variable in held:
                continue
            gradient = parameter.grad
            if gradient is None:
                absent.append(variable)
                target.zero_()
                continue
            if gradient.layout != torch.strided:
                gradient = gradient.to_dense()
            target.copy_(gradient if part is None else gradient.reshape(-1)[part], non_blocking=self._unblocked)
        return absent
