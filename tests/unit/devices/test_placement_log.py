from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import torchquorum as tq
from torchquorum.errors import ConfigError

CPU = "/job:worker/task:0/device:CPU:0"


def logged() -> tuple[list[str], AbstractContextManager[None]]:
    lines: list[str] = []
    return lines, tq.tensorflow.log_device_placement(write=lines.append)


def test_the_tutorials_program_prints_its_constants_and_its_operation(capsys: pytest.CaptureFixture[str]) -> None:
    a = tq.tensorflow.constant([1.0, 2.0, 3.0], shape=[3], name="a")
    b = tq.tensorflow.constant([1.0, 2.0, 3.0], shape=[3], name="b")
    with tq.tensorflow.log_device_placement():
        c = a + b
        print(c)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "Device mapping:" and out[1].startswith(f"{CPU} -> ")
    assert out[-4:] == [
        f"a: (Const): {CPU}",
        f"b: (Const): {CPU}",
        f"add: (aten.add.Tensor): {CPU}",
        "tensor([2., 4., 6.])",
    ]


def test_names_are_numbered_as_tensorflow_does() -> None:
    lines, block = logged()
    with block:
        x = tq.tensorflow.constant(1.0)
        y = tq.tensorflow.constant(2.0)
        _ = (x + y) + (x + y) * y
    names = [line.partition(":")[0] for line in lines if "(" in line and "->" not in line]
    assert names == ["Const", "Const_1", "add", "add_1", "mul", "add_2"]


def test_forward_and_backward_are_there_and_every_line_has_one_form() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x, y = torch.ones(2, 3), torch.tensor([0, 1])
    lines, block = logged()
    with block:
        nn.functional.cross_entropy(model(x), y).backward()
    operations = [line for line in lines if "->" not in line][1:]
    kinds = [line.split(": ")[1] for line in operations]
    assert all(line.count(": ") == 2 and line.endswith(f": {CPU}") for line in operations)
    assert {
        "(aten.addmm.default)",
        "(aten.relu.default)",
        "(aten.nll_loss_backward.default)",
        "(aten.mm.default)",
    } <= set(kinds)
    assert kinds.index("(aten.addmm.default)") < kinds.index("(aten.mm.default)")
    assert not any("detach" in kind or "profiler" in kind for kind in kinds)


def test_an_operation_is_logged_where_its_result_is() -> None:
    lines, block = logged()
    with block, tq.devices.device("meta"):
        torch.ones(2, device="cpu").add(1)
    assert lines[-1] == "add: (aten.add.Tensor): /job:worker/task:0/device:META:0"
    assert "to_copy: (aten._to_copy.default): /job:worker/task:0/device:META:0" in lines


def test_nothing_is_logged_outside_of_the_block_or_when_it_is_switched_off() -> None:
    lines, block = logged()
    with block:
        torch.ones(2).add(1)
    count = len(lines)
    torch.ones(2).add(1)
    with tq.tensorflow.log_device_placement(False, write=lines.append):
        torch.ones(2).add(1)
    assert len(lines) == count


def test_what_the_log_kept_from_being_compiled_is_compiled_afterwards() -> None:
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda x: x * 2 + 1, backend=backend)  # type: ignore[arg-type]
    lines, block = logged()
    with block:
        double(torch.ones(2))
    assert f"mul: (aten.mul.Tensor): {CPU}" in lines
    assert double(torch.ones(2)).tolist() == [3.0, 3.0] and len(compiled) == 1


def test_a_constant_repeats_its_last_value_to_fill_its_shape() -> None:
    assert tq.tensorflow.constant([1.0, 2.0], shape=[2, 2]).tolist() == [[1.0, 2.0], [2.0, 2.0]]
    assert tq.tensorflow.constant(7, dtype=torch.float64, shape=(3,)).dtype == torch.float64
    assert tq.tensorflow.constant([[1, 2], [3, 4]], shape=[4]).tolist() == [1, 2, 3, 4]
    with tq.devices.device("meta"):
        assert tq.tensorflow.constant([1.0], shape=[3]).is_meta


@pytest.mark.parametrize(
    ("value", "shape", "expected"),
    [
        ([1.0, 2.0, 3.0], [2], "3 values do not make"),
        ("hello", None, "number or lists of numbers"),
        ([], [2], "0 values"),
    ],
)
def test_a_constant_that_cannot_be_is_an_error(value: object, shape: list[int] | None, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        tq.tensorflow.constant(value, shape=shape, name="x")
