"""A graph on its way: what can be exported, what is written down, and what is refused on arrival."""

import contextlib
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchquorum as tq
from torchquorum.cluster import TaskId
from torchquorum.errors import GraphError
from torchquorum.transport import graph_messages as g
from torchquorum.transport.codec import WireError
from torchquorum.transport.tensors import pack, unpack
from torchquorum.worker import graph_ops
from torchquorum.worker.graph_runner import Program, check_batch, placement_lines

CPU = torch.device("cpu")
X, Y = torch.randn(4, 3), torch.randint(0, 2, (4,))


def travel(graph: tq.Graph) -> Program:
    """A graph as it arrives: through msgpack and raw frames."""
    spec = msgspec.msgpack.decode(msgspec.msgpack.encode(graph.spec), type=g.GraphSpec)
    _, frames = pack(graph.values, copy=True)
    named = dict(graph.model.named_parameters())
    variables = {n: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in named.items()}
    program = Program(spec, [bytes(f) for f in frames], CPU, variables)
    with torch.no_grad():
        for name, parameter in program.variables.named_parameters():
            parameter.copy_(named[name])
    return program


def assert_same_gradients(
    model: nn.Module, graph: tq.Graph, batch: tuple[torch.Tensor, ...], loss: torch.Tensor
) -> None:
    loss.backward()
    program = travel(graph)
    torch.manual_seed(0)
    (ours,) = program(batch)
    ours.backward()
    assert torch.equal(ours, loss)
    for name, parameter in program.variables.named_parameters():
        theirs = dict(model.named_parameters())[name].grad
        assert (parameter.grad is None) == (theirs is None), name
        assert parameter.grad is None or theirs is None or torch.equal(parameter.grad, theirs), name


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True, num_layers=2, dropout=0.1)
        self.attend = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
        self.out = nn.Linear(6, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.attend(self.lstm(self.words(x))[0])).transpose(1, 2)


class Odd(nn.Module):
    """Sizes in arithmetic, a block without gradients, constants, an unused parameter, work in place on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.unused = nn.Parameter(torch.ones(2))
        self.table = torch.arange(6.0).view(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            middle = self.linear(x).mean(0)
        half = x.shape[0] // 2
        y = self.linear(x.add_(1.0)) - middle + x @ self.table
        return torch.cat([y[:half], y[half:] * 2]) + torch.arange(x.shape[0]).sum() / x.shape[0]


def test_a_recurrent_model_with_attention_gives_the_same_gradients_after_its_journey() -> None:
    model, x = Recurrent(), torch.randint(0, 11, (3, 5))
    graph = tq.Graph(model, F.cross_entropy, example_inputs=(torch.randint(0, 11, (4, 5)),) * 2)
    torch.manual_seed(0)
    assert_same_gradients(model, graph, (x, x), F.cross_entropy(model(x), x))


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_sizes_constants_and_blocks_without_gradients_survive_the_journey(rows: int) -> None:
    model, x, y = Odd(), torch.randn(rows, 3), torch.randint(0, 2, (rows,))
    graph = tq.Graph(model, F.cross_entropy, example_inputs=(X.clone(), Y))
    assert_same_gradients(model, graph, (x.clone(), y), F.cross_entropy(model(x.clone()), y))
    assert travel(graph).writes_in_place


def test_a_model_may_return_its_own_loss_and_a_loss_may_look_at_the_model() -> None:
    model = nn.Linear(3, 2)
    regularize = tq.l2_regularizer(0.1)

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y) + regularize(model)

    graph = tq.Graph(model, loss_fn, example_inputs=(X, Y))
    assert_same_gradients(model, graph, (X, Y), loss_fn(model(X), Y))

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().mean()

    own = Own()
    assert_same_gradients(own, tq.Graph(own, example_inputs=(X,)), (X,), own(X))


def test_an_example_batch_of_one_still_leaves_the_batch_size_open() -> None:
    graph = tq.Graph(nn.Linear(3, 2), F.cross_entropy, example_inputs=(X[:1], Y[:1]))
    assert [i.shape for i in graph.inputs] == [[graph.inputs[0].shape[0], 3], [graph.inputs[0].shape[0]]]
    assert isinstance(graph.inputs[0].shape[0], str)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() if x.sum() > 0 else x.std()


class Untraceable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.shape[0] > 3, lambda v: v.mean(), lambda v: v.std(), (x,))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tq.Graph(Branches(), example_inputs=(X,)), "no branches that depend on their values"),
        (lambda: tq.Graph(nn.Linear(3, 2), example_inputs=(X,)), "must be one floating-point number"),
        (lambda: tq.Graph(nn.Linear(3, 2), F.cross_entropy, example_inputs=(X,)), "needs two"),
        (lambda: tq.Graph(nn.Linear(3, 2), F.cross_entropy, example_inputs=()), "tuple of tensors"),
        (lambda: tq.Graph(F.relu, example_inputs=(X,)), "give it an nn.Module"),  # type: ignore[arg-type]
        (lambda: tq.Graph(nn.Linear(3, 2), nn.PReLU(), example_inputs=(X, Y)), "parameters of its own"),
    ],
)
def test_what_cannot_be_a_graph_is_refused_where_it_is_made(make: Any, says: str) -> None:
    with pytest.raises(GraphError, match=says):
        make()


def test_an_operation_that_is_not_torchs_own_is_refused_on_the_client() -> None:
    @torch.library.custom_op("torchquorum_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Custom(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return twice(x).mean()

    with pytest.raises(GraphError, match=r"twice.*compute tasks do not run"):
        tq.Graph(Custom(), example_inputs=(X,))


# -- what a stranger may send ---------------------------------------------------------------------------------------------


def spec_of(
    *nodes: g.NodeSpec, inputs: list[g.InputSpec] | None = None, outputs: list[Any] | None = None
) -> g.GraphSpec:
    given = inputs if inputs is not None else [g.InputSpec("input", "x", "float32", ["n"])]
    last = {"ref": len(given) + len(nodes) - 1}
    return g.GraphSpec("hostile", given, list(nodes), [last] if outputs is None else outputs)


@pytest.mark.parametrize(
    "op",
    [
        "os.system",
        "builtins.eval",
        "posix.system",
        "torch.load",
        "torch.ops.load_library",
        "aten.from_file.default",
        "aten.save.default",
        "aten.set_.source_Tensor",
        "aten.resize_.default",
        "aten._foobar.default",
        "aten.add.out",
        "aten.add.Tensor_out_of_thin_air",
        "aten.__class__.default",
        "aten.add.__call__",
        "aten.fbgemm_pack_gemm_matrix_fp16.default",
        "aten.sparse_coo_tensor.indices",
        "higher_order.cond",
        "operator.attrgetter",
        "operator.methodcaller",
        "prim.Print.default",
        "quantized.add.default",
        "aten.add",
        "",
    ],
)
def test_an_operation_that_is_not_on_the_list_is_refused(op: str) -> None:
    with pytest.raises(GraphError, match="not one that a compute task runs|does not have it"):
        Program(spec_of(g.NodeSpec("bad", op, [{"ref": 0}], {})), [], CPU)


@pytest.mark.parametrize(
    "argument",
    [
        {"ref": 1},
        {"ref": -1},
        {"ref": True},
        {"ref": "0"},
        {"dtype": "__class__"},
        {"dtype": "float32; import os"},
        {"memory_format": "load"},
        {"layout": "sparse_coo"},
        {"complex": ["1", 2]},
        {"eval": "1"},
        {"ref": 0, "dtype": "float32"},
        {},
        b"\x80\x04K\x01.",
        [[[[[[[[[[[1]]]]]]]]]]],
        "x" * 300,
    ],
)
def test_an_argument_that_is_no_plain_value_is_refused(argument: Any) -> None:
    with pytest.raises(GraphError):
        Program(spec_of(g.NodeSpec("add", "aten.add.Tensor", [{"ref": 0}, argument], {})), [], CPU)


@pytest.mark.parametrize(
    "inputs",
    [
        [g.InputSpec("secret", "x", "float32", [1])],
        [g.InputSpec("buffer", "x", "float32", ["n"])],
        [g.InputSpec("buffer", "x", "float32", [1 << 40])],
        [g.InputSpec("buffer", "x", "object", [1])],
        [g.InputSpec("buffer", "x\0", "float32", [1])],
        [g.InputSpec("parameter", "not.in.plan", "float32", [1])],
    ],
)
def test_an_input_that_makes_no_sense_is_refused(inputs: list[g.InputSpec]) -> None:
    frames = [b"1234"] * sum(i.kind == "buffer" for i in inputs)
    with pytest.raises(GraphError):
        Program(spec_of(inputs=inputs, outputs=[{"ref": 0}]), frames, CPU)


class Touch:
    """A pickle of it creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


def evil_archive(path: Path) -> bytes:
    """What torch.export.save writes, with a pickle in the place of the sample inputs, which torch.export.load runs."""
    exported = torch.export.export(nn.Linear(3, 2), (X,))
    good, evil = io.BytesIO(), io.BytesIO()
    torch.export.save(exported, good)
    payload = io.BytesIO()
    torch.save(Touch(path), payload)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(evil, "w") as target:
        for name in source.namelist():
            content = payload.getvalue() if "sample_inputs" in name else source.read(name)
            target.writestr(name, content)
    return evil.getvalue()


def test_the_archive_of_torch_export_runs_a_strangers_pickle_which_is_why_it_is_not_used(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    with contextlib.suppress(Exception):  # what it loaded is no example input, but by then it has run
        torch.export.load(io.BytesIO(evil_archive(touched)))
    assert touched.exists(), "torch.export.load has become safe: docs/adr/0013 can be thought over"


def test_a_pickle_or_an_archive_in_any_place_is_refused_and_not_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    archive, evil = evil_archive(touched), pickle.dumps(Touch(touched))
    held = [g.InputSpec("buffer", "b", "float32", [4]), g.InputSpec("constant", "c", "uint8", [len(evil)])]
    for bad in (archive, evil, b"", b"\x93NUMPY"):
        with pytest.raises(WireError):
            g.split([bad])
        with pytest.raises(WireError):
            g.split([msgspec.msgpack.encode(["Train", "run", "client", bad, None, None])])
        with pytest.raises(GraphError, match="tensor frame of"):
            Program(spec_of(inputs=held, outputs=[{"ref": 0}]), [bad, evil], CPU)
    # As the bytes of a constant of just that size a pickle is what any bytes are: numbers.
    program = Program(spec_of(inputs=held, outputs=[{"ref": 1}]), [bytes(16), evil], CPU)
    assert bytes(program([])[0].tolist()) == evil
    assert not touched.exists()


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(), lambda s: st.lists(s)).map(
        msgspec.msgpack.encode
    )
)
def test_any_bytes_are_a_message_or_a_wire_error(header: bytes) -> None:
    try:
        answer = type(g.split([header])[0])
    except WireError as error:  # any other goes through
        answer = type(error)
    assert answer in {*get_args(g.AnyGraphMessage), WireError}


def test_a_graph_of_too_many_operations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchquorum.worker.graph_runner.MAX_NODES", 3)
    nodes = [g.NodeSpec("add", "aten.add.Tensor", [{"ref": 0}, 1], {})] * 4
    with pytest.raises(GraphError, match="at most 3"):
        Program(spec_of(*nodes), [], CPU)


def test_an_error_in_a_graph_names_the_operation() -> None:
    program = Program(spec_of(g.NodeSpec("add_7", "aten.add.Tensor", [{"ref": 0}, [1, 2]], {})), [], CPU)
    with pytest.raises(GraphError, match=r"add_7 \(aten.add.Tensor\)"):
        program([torch.ones(2)])


# -- batches --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "fits"),
    [
        ((torch.ones(9, 3), torch.ones(9, dtype=torch.long)), True),
        ((torch.ones(1, 3), torch.ones(1, dtype=torch.long)), True),
        ((torch.ones(9, 3), torch.ones(8, dtype=torch.long)), False),
        ((torch.ones(9, 4), torch.ones(9, dtype=torch.long)), False),
        ((torch.ones(9, 3).double(), torch.ones(9, dtype=torch.long)), False),
        ((torch.ones(9, 3), torch.ones(9)), False),
        ((torch.ones(9, 3),), False),
        ((torch.ones(9), torch.ones(9, dtype=torch.long)), False),
    ],
)
def test_a_batch_must_look_like_the_example_but_for_its_size(batch: tuple[torch.Tensor, ...], fits: bool) -> None:
    graph = tq.Graph(nn.Linear(3, 2), F.cross_entropy, example_inputs=(X, Y))
    specs, _ = pack(batch, copy=False)
    if fits:
        check_batch(graph.inputs, specs)
        return
    with pytest.raises(GraphError, match="the graph takes"):
        check_batch(graph.inputs, specs)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.uint8, torch.int64]
)
def test_tensors_of_every_kind_travel_unchanged(dtype: torch.dtype) -> None:
    tensors = [torch.randn(3, 4).to(dtype).t(), torch.ones((), dtype=dtype), torch.empty(0, 2, dtype=dtype)]
    specs, frames = pack(tensors, copy=True)
    for ours, theirs in zip(unpack(specs, [bytes(f) for f in frames]), tensors, strict=True):
        assert ours.dtype == dtype and torch.equal(ours, theirs)


def test_a_packed_copy_does_not_follow_its_tensor() -> None:
    x = torch.zeros(4)
    specs, frames = pack([x], copy=True)
    x.fill_(1.0)
    assert not unpack(specs, frames)[0].any()


def test_placement_lines_say_what_ran_where() -> None:
    program = Program(spec_of(g.NodeSpec("sum_1", "aten.sum.default", [{"ref": 0}], {})), [], CPU)
    assert placement_lines(program, TaskId("worker", 1)) == [
        "sum_1: (aten.sum.default): /job:worker/task:1/device:CPU:0"
    ]


def test_every_name_on_the_list_of_operations_exists() -> None:
    assert not [name for name in graph_ops._ATEN if not hasattr(torch.ops.aten, name)]
