"""A graph that came over the wire: checked completely, then run, one operation after another.

Used by compute tasks. It interprets a list of operations: nothing is compiled, unpickled or evaluated. What always holds: when a
`Program` has been made, every operation is one of `torchquorum.graph.ops`, every argument is a number, a string, a list or a value
that was computed before, and every tensor had exactly the bytes that its shape and dtype need.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchquorum.cluster.spec import TaskId
from torchquorum.devices.inventory import name_of
from torchquorum.errors import GraphError
from torchquorum.graph import graph_messages as g
from torchquorum.graph import ops as graph_ops
from torchquorum.graph.tensors import find_dtype, unpack
from torchquorum.wire.codec import Frame, WireError

MAX_NODES = 200_000
MAX_DEPTH = 8
_NAME = re.compile(r"[\w.\-/+ ]{1,500}")
Shapes = dict[str, tuple[tuple[int, ...], str]]
_KINDS = ("parameter", "buffer", "constant", "input")
_FORMATS = ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")


class _Ref(int):
    """An argument that is the value with this number."""


class _Node:
    """A checked operation: what to call, with which arguments, and which values are not needed afterwards."""

    __slots__ = ("args", "forget", "function", "kwargs", "name", "op", "plain")

    def __init__(self, spec: g.NodeSpec, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
        self.name, self.op, self.function, self.args, self.kwargs = spec.name, spec.op, function, args, kwargs
        self.plain = not any(isinstance(v, list) for v in (*args, *kwargs.values()))
        self.forget: list[int] = []


class GraphVariables(nn.Module):
    """The parameters and buffers of a graph under their names in the user's model, which have dots."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], buffers: dict[str, torch.Tensor], not_saved: Collection[str] = ()
    ) -> None:
        super().__init__()
        self._by_name = parameters
        # Straight into the module's own table: register_buffer refuses names with dots.
        self._buffers.update(buffers)
        self._non_persistent_buffers_set.update(not_saved)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters in the order of the plan."""
        yield from self._by_name.items()


class Program:
    """A checked graph, ready to run on one device.

    Args:
        spec: The graph, as received.
        frames: The values of its buffers and constants, as received.
        device: Where to run it, whatever devices the graph names.
        parameters: The variables by name, in the order of the plan, as (shape, dtype); None for a graph without any.
        buffers: Likewise the run's buffers.

    Raises:
        GraphError: The graph is not one that may be run.
    """

    def __init__(
        self,
        spec: g.GraphSpec,
        frames: Sequence[Frame],
        device: torch.device,
        parameters: Shapes | None = None,
        buffers: Shapes | None = None,
    ) -> None:
        self.name, self.device = spec.name[:200], device
        if len(spec.nodes) > MAX_NODES:
            raise GraphError(f"a graph of {len(spec.nodes)} operations: at most {MAX_NODES} are allowed")
        self.inputs = [s for s in spec.inputs if s.kind == "input"]
        self._num_inputs = len(spec.inputs)
        self._values = self._make_tensors(spec.inputs, frames, parameters or {}, buffers or {})
        self._places = [i for i, s in enumerate(spec.inputs) if s.kind == "input"]
        self._nodes = [self._check(node, len(spec.inputs) + i) for i, node in enumerate(spec.nodes)]
        last = len(spec.inputs) + len(spec.nodes)
        self._outputs = [self._argument(v, last, 0) for v in spec.outputs]
        self._plan_memory()
        own = {i for i, s in enumerate(spec.inputs) if s.kind == "buffer"}
        self.writes_in_place = any(_in_place(n) and not _first_in(n, own) for n in self._nodes)

    # -- checking -----------------------------------------------------------------------------------------------------

    def _make_tensors(
        self, inputs: Sequence[g.InputSpec], frames: Sequence[Frame], parameters: Shapes, buffers: Shapes
    ) -> list[torch.Tensor | None]:
        """Makes the tensors that the graph begins with, None for each input of a batch."""
        for spec in inputs:
            if spec.kind not in _KINDS or not _NAME.fullmatch(spec.name) or len(spec.shape) > 64:
                raise GraphError(f"input {spec.name[:80]!r} of kind {spec.kind[:20]!r}: not an input of a graph")
            if spec.kind != "input" and not all(isinstance(d, int) and d >= 0 for d in spec.shape):
                raise GraphError(f"{spec.kind} {spec.name!r}: must have a fixed shape")
        sent = [s for s in inputs if s.kind in ("buffer", "constant")]
        trained = {s.name for s in inputs if s.kind == "parameter" and s.trained}
        try:
            specs = [g.TensorSpec(s.dtype, [int(d) for d in s.shape]) for s in sent]
            came = iter([t.clone().to(self.device) for t in unpack(specs, frames)])
            made = {name: nn.Parameter(self._zeros(shape), name in trained) for name, shape in parameters.items()}
            # A buffer of the run that the graph does not use is there all the same: every worker has the same ones.
            named = {name: self._zeros(shape) for name, shape in buffers.items()}
        except WireError as error:
            raise GraphError(f"the graph's tensors: {error}") from None
        values: list[torch.Tensor | None] = []
        for spec in inputs:
            known = parameters if spec.kind == "parameter" else buffers if spec.kind == "buffer" else {}
            if (spec.kind == "parameter" and spec.name not in known) or _differs(spec, known.get(spec.name)):
                raise GraphError(f"{spec.kind} {spec.name!r} of the graph is not as the plan has it")
            if spec.kind == "parameter":
                values.append(made[spec.name])
                continue
            value = None if spec.kind == "input" else next(came)
            values.append(value)
            if spec.kind == "buffer" and value is not None:
                named[spec.name] = value
        self.variables = GraphVariables(made, named, {s.name for s in sent if not s.persistent})
        return values

    def _zeros(self, shape: tuple[tuple[int, ...], str]) -> torch.Tensor:
        return torch.zeros(shape[0], dtype=find_dtype(shape[1]), device=self.device)

    def _check(self, spec: g.NodeSpec, place: int) -> _Node:
        if not _NAME.fullmatch(spec.name):
            raise GraphError(f"operation called {spec.name[:80]!r}: not a name")
        args = [self._argument(v, place, 0) for v in spec.args]
        kwargs = {str(k): self._argument(v, place, 0) for k, v in spec.kwargs.items()}
        if spec.op == graph_ops.SET_GRAD_ENABLED:
            if len(args) != 1 or not isinstance(args[0], bool) or kwargs:
                raise GraphError(f"{spec.op}: takes True or False")
            return _Node(spec, torch._C._set_grad_enabled, args, {})
        return _Node(spec, graph_ops.find(spec.op), args, kwargs)

    def _argument(self, value: Any, place: int, depth: int) -> Any:
        """Returns an argument as operations take it; `place` is the number of the value being computed."""
        if value is None or isinstance(value, bool | int | float | str):
            if isinstance(value, str) and len(value) > 200:
                raise GraphError(f"a string of {len(value)} characters as an argument: at most 200 are allowed")
            return value
        if depth > MAX_DEPTH:
            raise GraphError(f"arguments nested more than {MAX_DEPTH} deep")
        if isinstance(value, list):
            return [self._argument(v, place, depth + 1) for v in value]
        if isinstance(value, dict) and len(value) == 1:
            ((kind, inside),) = value.items()
            match kind, inside:
                case "ref", int() if 0 <= inside < place and not isinstance(inside, bool):
                    return _Ref(inside)
                case "dtype", str():
                    return _find_dtype(inside)
                case "device", str():
                    return self.device
                case "layout", "strided":
                    return torch.strided
                case "memory_format", str() if inside in _FORMATS:
                    return getattr(torch, inside)
                case "complex", [int() | float() as real, int() | float() as imaginary]:
                    return complex(real, imaginary)
        raise GraphError(f"argument {str(value)[:80]}: not a number, a string, a list or a value computed before")

    def _plan_memory(self) -> None:
        """Notes after which operation each value is not needed any more, so that its memory is freed early."""
        needed = set(_refs(self._outputs))
        for node in reversed(self._nodes):
            for ref in _refs([*node.args, *node.kwargs.values()]):
                if ref not in needed and ref >= self._num_inputs:
                    node.forget.append(ref)
                needed.add(ref)

    # -- running ------------------------------------------------------------------------------------------------------

    def check_batch(self, tensors: Sequence[g.TensorSpec]) -> None:
        """Raises GraphError unless tensors of these shapes and dtypes are what the graph takes."""
        check_batch(self.inputs, tensors)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Runs the graph on checked inputs."""
        values: list[Any] = [*self._values, *([None] * len(self._nodes))]
        for place, tensor in zip(self._places, inputs, strict=True):
            values[place] = tensor
        before = torch.is_grad_enabled()
        try:
            for place, node in enumerate(self._nodes, self._num_inputs):
                if node.plain:
                    args = [values[v] if type(v) is _Ref else v for v in node.args]
                    kwargs = {k: values[v] if type(v) is _Ref else v for k, v in node.kwargs.items()}
                else:
                    args = [_resolve(v, values) for v in node.args]
                    kwargs = {k: _resolve(v, values) for k, v in node.kwargs.items()}
                try:
                    values[place] = node.function(*args, **kwargs)
                except Exception as error:
                    raise GraphError(f"{node.name} ({node.op}): {type(error).__name__}: {error}") from error
                for spent in node.forget:
                    values[spent] = None
        finally:
            torch._C._set_grad_enabled(before)
        return [_resolve(v, values) for v in self._outputs]

    def operations(self) -> list[tuple[str, str]]:
        """Returns the name and the kind of each operation, in the order they run."""
        return [(node.name, node.op) for node in self._nodes]


def placement_lines(program: Program, task: TaskId) -> list[str]:
    """Returns a line per operation that says which task and device ran it, as the placement log writes it."""
    where = name_of(program.device, task)
    return [f"{name}: ({op}): {where}" for name, op in program.operations()]


def check_batch(inputs: Sequence[g.InputSpec], tensors: Sequence[g.TensorSpec]) -> None:
    """Raises GraphError unless tensors of these shapes and dtypes fit the inputs of a graph."""
    if len(tensors) != len(inputs):
        raise GraphError(f"a batch of {len(tensors)} tensors: the graph takes {len(inputs)}")
    sizes: dict[str, int] = {}
    for number, (spec, tensor) in enumerate(zip(inputs, tensors, strict=True)):
        fits = len(spec.shape) == len(tensor.shape) and spec.dtype == tensor.dtype
        for wanted, size in zip(spec.shape, tensor.shape, strict=False):
            expected = sizes.setdefault(wanted, size) if isinstance(wanted, str) and wanted else wanted
            fits = fits and expected in ("", size)
        if not fits:
            wanted = [sizes.get(d, d) if isinstance(d, str) else d for d in spec.shape]
            shape = ", ".join("any" if d == "" else str(d) for d in wanted)
            raise GraphError(
                f"tensor {number} of the batch is {tensor.dtype} {tensor.shape}: the graph takes {spec.dtype} [{shape}]; "
                "only the first dimension may change, and it is the same for all tensors of a batch that share it"
            )


def _differs(spec: g.InputSpec, known: tuple[tuple[int, ...], str] | None) -> bool:
    return known is not None and known != (tuple(spec.shape), spec.dtype)


def _in_place(node: _Node) -> bool:
    """Whether an operation writes into its first argument."""
    return node.op.startswith("aten.") and node.op.split(".")[1].endswith("_")


def _first_in(node: _Node, places: set[int]) -> bool:
    return bool(node.args) and isinstance(node.args[0], _Ref) and int(node.args[0]) in places


def _find_dtype(name: str) -> torch.dtype:
    try:
        return find_dtype(name)
    except WireError as error:
        raise GraphError(str(error)) from None


def _refs(values: Sequence[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, _Ref):
            yield int(value)
        elif isinstance(value, list):
            yield from _refs(value)


def _resolve(value: Any, values: list[Any]) -> Any:
    if type(value) is _Ref:
        return values[value]
    return [_resolve(v, values) for v in value] if isinstance(value, list) else value
