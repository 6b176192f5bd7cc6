"""A graph on arrival: what is refused, whatever a peer sends, and how a checked one runs."""

import contextlib
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchquorum as tq
from torchquorum.cluster import TaskId
from torchquorum.errors import GraphError
from torchquorum.graph import graph_messages as g
from torchquorum.graph.runner import Program, check_batch, placement_lines
from torchquorum.graph.tensors import pack
from torchquorum.wire.codec import WireError

CPU = torch.device("cpu")
X, Y = torch.randn(4, 3), torch.randint(0, 2, (4,))


def spec_of(
    *nodes: g.NodeSpec, inputs: list[g.InputSpec] | None = None, outputs: list[Any] | None = None
) -> g.GraphSpec:
    given = inputs if inputs is not None else [g.InputSpec("input", "x", "float32", ["n"])]
    last = {"ref": len(given) + len(nodes) - 1}
    return g.GraphSpec("hostile", given, list(nodes), [last] if outputs is None else outputs)


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


def test_a_graph_of_too_many_operations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchquorum.graph.runner.MAX_NODES", 3)
    nodes = [g.NodeSpec("add", "aten.add.Tensor", [{"ref": 0}, 1], {})] * 4
    with pytest.raises(GraphError, match="at most 3"):
        Program(spec_of(*nodes), [], CPU)


def test_an_error_in_a_graph_names_the_operation() -> None:
    program = Program(spec_of(g.NodeSpec("add_7", "aten.add.Tensor", [{"ref": 0}, [1, 2]], {})), [], CPU)
    with pytest.raises(GraphError, match=r"add_7 \(aten.add.Tensor\)"):
        program([torch.ones(2)])


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
    graph = tq.graph.Graph(nn.Linear(3, 2), F.cross_entropy, example_inputs=(X, Y))
    specs, _ = pack(batch, copy=False)
    if fits:
        check_batch(graph.inputs, specs)
        return
    with pytest.raises(GraphError, match="the graph takes"):
        check_batch(graph.inputs, specs)


def test_placement_lines_say_what_ran_where() -> None:
    program = Program(spec_of(g.NodeSpec("sum_1", "aten.sum.default", [{"ref": 0}], {})), [], CPU)
    assert placement_lines(program, TaskId("worker", 1)) == [
        "sum_1: (aten.sum.default): /job:worker/task:1/device:CPU:0"
    ]


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
