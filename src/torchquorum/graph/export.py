"""`tq.graph.Graph`: a model and its loss, exported with torch.export, as it travels to compute tasks.

Made by the client, which has the user's code. The archive of torch.export is not used: reading one may run pickles and
evaluate expressions (docs/adr/0013), so the exported nodes are written in a plain format of our own. What always holds: a
Graph holds only operations that compute tasks run; its parameters have the names that they have in the model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind

from torchquorum.errors import GraphError
from torchquorum.graph import graph_messages as g
from torchquorum.graph import ops as graph_ops
from torchquorum.graph.tensors import dtype_name
from torchquorum.worker.table_module import Table

_NUMBER = bool | int | float
_FORMATS = {torch.contiguous_format: "contiguous_format", torch.channels_last: "channels_last"}
_FORMATS |= {torch.channels_last_3d: "channels_last_3d", torch.preserve_format: "preserve_format"}
_INPUTS = "loss_fn(model(*inputs[:-1]), inputs[-1])"


class _WithLoss(nn.Module):
    """A model and its loss as one module, so that both are exported."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *inputs: torch.Tensor) -> Any:
        if self.loss_fn is None:
            return self.model(*inputs)
        return self.loss_fn(self.model(*inputs[:-1]), inputs[-1])


class Graph:
    """A model with its loss, exported, so that tasks which have none of its code can train it.

    The batch is the first dimension of every example input and may have any size later. The model is exported as it is:
    in training mode dropout drops and batch norm learns.

    Args:
        model: The module to train; its parameters become the variables.
        loss_fn: Called as loss_fn(model(*inputs[:-1]), inputs[-1]). None: the model itself returns the loss.
        example_inputs: One batch, as `GraphSession.run` will get them; only shapes and dtypes matter.
        name: What to call the graph in logs.

    Raises:
        GraphError: torch.export cannot export the model, or it uses operations that compute tasks do not run.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        example_inputs: Sequence[torch.Tensor],
        name: str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise GraphError(f"tq.graph.Graph({type(model).__name__}): give it an nn.Module")
        inputs = tuple(example_inputs) if isinstance(example_inputs, list | tuple) else (example_inputs,)
        if not inputs or not all(isinstance(x, torch.Tensor) for x in inputs):
            raise GraphError("example_inputs must be a tuple of tensors, one batch of data, such as (x, y)")
        if loss_fn is not None and len(inputs) < 2:
            raise GraphError(f"example_inputs has one tensor: with a loss_fn it needs two, for {_INPUTS}")
        if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
            raise GraphError(
                "loss_fn has parameters of its own: make it a part of the model, which then returns the loss"
            )
        _check_whole(model)
        self.model = model
        self.name = name or type(model).__name__
        exported = export_program(_WithLoss(model, loss_fn), inputs, batch=True)
        self.spec, self.values = write_graph(exported, self.name, _names_in(model))
        _check_loss(exported)

    @property
    def inputs(self) -> list[g.InputSpec]:
        """Returns what a batch has to look like."""
        return [spec for spec in self.spec.inputs if spec.kind == "input"]

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.spec.nodes)} operations, {len(self.inputs)} inputs)"


def _check_whole(model: nn.Module) -> None:
    """Raises GraphError if rows of a model are to be pulled by key: a compute task gets whole variables."""
    for name, module in model.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if sparse or isinstance(module, Table):
            what = f"{type(module).__name__}({'sparse=True' if sparse else '...'})"
            advice = "use sparse=False, or train between-graph" if sparse else "train between-graph"
            raise GraphError(
                f"{name or 'the model'} is a {what}: in-graph training sends whole variables, and no rows; {advice}, where each "
                "worker pulls the rows of its batch"
            )


def export_program(module: nn.Module, inputs: tuple[Any, ...], *, batch: bool) -> torch.export.ExportedProgram:
    """Exports a module; with `batch` the first dimension of every input may have any size."""
    shapes: Any = None
    if batch:
        # torch.export takes a size of 1 for a constant, so a batch of one is exported as two of the same.
        inputs = tuple(torch.cat([x, x]) if x.dim() and x.shape[0] == 1 else x for x in inputs)
        shapes = (tuple({0: torch.export.Dim.DYNAMIC} if x.dim() else None for x in inputs),)
    try:
        return torch.export.export(module, inputs, dynamic_shapes=shapes)
    except Exception as error:  # the exporter raises many kinds, errors of the user's code among them
        text = str(error).strip()
        shown = text if len(text) < 2000 else text[:2000] + " ..."
        raise GraphError(
            f"torch.export cannot export the model: {type(error).__name__}: {shown}\nUse operations of torch on tensors, and "
            "no branches that depend on their values; or train between-graph, where every worker has your code"
        ) from error


def write_graph(
    exported: torch.export.ExportedProgram, name: str, names: dict[int, str] | None = None
) -> tuple[g.GraphSpec, list[torch.Tensor]]:
    """Returns an exported program as a GraphSpec, and the values of its buffers and constants."""
    writer = _Writer(exported, names or {})
    return g.GraphSpec(name, writer.inputs, writer.nodes, writer.outputs), writer.values


def _names_in(model: nn.Module) -> dict[int, str]:
    """Returns the name of each parameter by its identity; a tied parameter has its first name."""
    return {id(p): name for name, p in model.named_parameters()}


def _check_loss(exported: torch.export.ExportedProgram) -> None:
    outputs = exported.graph_signature.user_outputs
    node = exported.graph.output_node().args[0][0] if len(outputs) == 1 else None  # pyright: ignore
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.dtype.is_floating_point:
        came = f"{len(outputs)} values" if value is None else f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
        raise GraphError(f"the loss is {came}: it must be one floating-point number; take its mean, for example")


class _Writer:
    """Walks over an exported program once."""

    def __init__(self, exported: torch.export.ExportedProgram, names: dict[int, str]) -> None:
        self.inputs: list[g.InputSpec] = []
        self.nodes: list[g.NodeSpec] = []
        self.values: list[torch.Tensor] = []
        self._known: dict[torch.fx.Node, Any] = {}
        self._exported, self._names = exported, names
        self._grad_enabled = True
        for output in exported.graph_signature.output_specs:
            if output.kind not in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT):
                raise GraphError(f"the model's graph has an output of kind {output.kind.name}, which cannot travel")
        by_name = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
        for node in exported.graph.nodes:
            if node.op == "placeholder":
                self._input(node, by_name[node.name])
        self.outputs = self._walk(exported.graph_module)

    def _input(self, node: torch.fx.Node, spec: Any) -> None:
        self._known[node] = {"ref": len(self.inputs)}
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise GraphError(f"input {node.name} is {type(value).__name__}: a graph begins with tensors only")
        kinds = {
            InputKind.PARAMETER: "parameter",
            InputKind.BUFFER: "buffer",
            InputKind.CONSTANT_TENSOR: "constant",
            InputKind.USER_INPUT: "input",
        }
        if spec.kind not in kinds:
            raise GraphError(f"input {node.name} is of kind {spec.kind.name}, which cannot travel")
        kind, target = kinds[spec.kind], str(spec.target or node.name)
        shape = [d if isinstance(d, int) else _dimension(d) for d in value.shape]
        trained = False
        if kind == "parameter":
            parameter = self._exported.state_dict[target]
            target, trained = self._name_parameter(target), bool(parameter.requires_grad)
        elif kind in ("buffer", "constant"):
            held = self._exported.state_dict.get(target)
            held = self._exported.constants[target] if held is None else held
            if not isinstance(held, torch.Tensor):
                raise GraphError(f"constant {target} is {type(held).__name__}: only tensors can travel")
            target = target.removeprefix("model.")
            self.values.append(held.detach().clone())
        persistent = spec.persistent is not False
        self.inputs.append(g.InputSpec(kind, target, dtype_name(value.dtype), shape, trained, persistent))

    def _name_parameter(self, target: str) -> str:
        """Returns the name of a parameter in the user's model; a tied parameter is one variable."""
        return self._names.get(id(self._exported.state_dict[target]), target.removeprefix("model."))

    def _walk(self, module: torch.fx.GraphModule) -> list[Any]:
        for node in module.graph.nodes:
            if node.op == "output":
                outputs = node.args[0]
                return [self._value(v) for v in (outputs if isinstance(outputs, list | tuple) else [outputs])]
            if node.op == "call_function":
                self._call(module, node)
            elif node.op not in ("placeholder", "get_attr"):
                raise GraphError(f"the exported graph holds {node.op} {node.target}, which cannot travel")
        raise GraphError("the exported graph has no output")

    def _call(self, module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
        if getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled":
            self._inline(module, node)
            return
        if node.target is operator.getitem and isinstance(self._known.get(node.args[0]), list):  # pyright: ignore
            self._known[node] = self._known[node.args[0]][node.args[1]]  # pyright: ignore
            return
        args = [self._value(v) for v in node.args]
        kwargs = {k: self._value(v) for k, v in node.kwargs.items()}
        self._known[node] = self._append(node.name, graph_ops.name_of(node.target), args, kwargs)

    def _append(self, name: str, op: str, args: list[Any], kwargs: dict[str, Any]) -> dict[str, int]:
        self.nodes.append(g.NodeSpec(name, op, args, kwargs))
        return {"ref": len(self.inputs) + len(self.nodes) - 1}

    def _inline(self, module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
        """`with torch.no_grad():` is a graph inside the graph: its nodes go between two operations that set and reset the mode."""
        enabled, inner, *inputs = node.args
        assert isinstance(inner, torch.fx.Node) and isinstance(enabled, bool)
        inside = getattr(module, str(inner.target))
        places = [n for n in inside.graph.nodes if n.op == "placeholder"]
        for place, value in zip(places, inputs, strict=True):
            self._known[place] = self._value(value)
        before, self._grad_enabled = self._grad_enabled, enabled
        self._append(f"{node.name}_begin", graph_ops.SET_GRAD_ENABLED, [enabled], {})
        self._known[node] = self._walk(inside)
        self._grad_enabled = before
        self._append(f"{node.name}_end", graph_ops.SET_GRAD_ENABLED, [before], {})

    def _value(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            if value not in self._known:
                raise GraphError(f"the exported graph uses {value.name}, which is not a tensor operation")
            return self._known[value]
        if value is None or isinstance(value, _NUMBER | str):
            return value
        if isinstance(value, list | tuple):
            return [self._value(v) for v in value]
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": value.type}
        if isinstance(value, torch.memory_format) and value in _FORMATS:
            return {"memory_format": _FORMATS[value]}
        if isinstance(value, torch.layout) and value is torch.strided:
            return {"layout": "strided"}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        raise GraphError(f"the exported graph holds {value!r} ({type(value).__name__}), which cannot travel")


def _dimension(size: Any) -> str:
    """Returns a name for a dimension of any size; one that follows from others is not checked."""
    return str(size) if str(size).isidentifier() else ""
