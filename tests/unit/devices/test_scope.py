import threading

import pytest
import torch
from torch import nn

import torchquorum as tq
from torchquorum.cluster import TaskId
from torchquorum.devices import inventory as devices

MISSING = "/gpu:99"  # on no machine


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "said_keys", set())


def test_tensors_and_modules_made_inside_the_block_are_there() -> None:
    with tq.devices.device("meta"):
        made, module, fixed = torch.zeros(2), nn.Linear(2, 3), torch.ones(2, device="cpu")
    assert made.is_meta and module.weight.is_meta and module.bias.is_meta
    assert fixed.device.type == "cpu" and torch.zeros(2).device.type == "cpu"


def test_an_operation_takes_its_inputs_along_as_in_tensorflow() -> None:
    a, b = torch.ones(2), torch.ones(2)
    with tq.devices.device("meta"):
        assert (a + b).is_meta and torch.stack([a, b]).is_meta and nn.functional.relu(a).is_meta and a.matmul(b).is_meta
        assert (2.0 - a).is_meta and torch.einsum("i,i->", a, b).is_meta
    assert (a + b).tolist() == [2.0, 2.0]


def test_views_and_in_place_operations_stay_with_their_tensor() -> None:
    a = torch.zeros(2, 2)
    with tq.devices.device("meta"):
        a.add_(1.0)
        a[0] = 5.0
        a[1].mul_(3.0)
        a.view(4)[3] = 7.0
        torch.add(torch.ones(2, 2, device="cpu"), 1.0, out=a[:2])
        assert a.T.device.type == "cpu" and a.detach().device.type == "cpu" and a.tolist()
    assert a.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_names_merge_from_outside_in_and_none_forgets() -> None:
    with tq.devices.device("/job:worker/task:0"), tq.devices.device("/device:meta:0") as name:
        assert str(name) == "/job:worker/task:0/device:META:0" and torch.zeros(1).is_meta
        with tq.devices.device("cpu"):
            assert not torch.zeros(1).is_meta
            with tq.devices.device("meta"):
                assert torch.zeros(1).is_meta
        with tq.devices.device(None) as forgotten:
            assert str(forgotten) == "" and not torch.zeros(1).is_meta
        with torch.device("cpu"):
            assert not torch.zeros(1).is_meta
        assert torch.zeros(1).is_meta
    with torch.device("meta"), tq.devices.device("cpu"):
        assert not torch.zeros(1).is_meta


def test_one_block_can_be_entered_often_and_used_as_a_decorator() -> None:
    block = tq.devices.device(torch.device("meta"))
    for _ in range(2):
        with block, block:
            assert torch.zeros(1).is_meta
    assert block(lambda: torch.zeros(1))().is_meta
    assert not torch.zeros(1).is_meta


def test_a_block_belongs_to_its_thread() -> None:
    seen: list[str] = []
    with tq.devices.device("meta"):
        thread = threading.Thread(target=lambda: seen.append(torch.zeros(1).device.type))
        thread.start()
        thread.join()
    assert seen == ["cpu"]


def test_running_statistics_come_back_from_where_they_were_computed() -> None:
    seen = []
    norm = nn.BatchNorm1d(2)
    with tq.devices.device("cpu"):
        norm(torch.ones(4, 2))
    with tq.devices.device("meta"):
        seen.append(norm(torch.ones(4, 2)).is_meta)
    assert seen == [True] and norm.running_mean is not None and norm.running_mean.tolist() == pytest.approx([0.1, 0.1])


def test_a_device_that_is_not_there_is_an_error_that_names_the_operation() -> None:
    a = torch.ones(2)
    with tq.devices.device(MISSING):
        pass  # nothing was put there
    with pytest.raises(tq.errors.DeviceError) as caught, tq.devices.device(MISSING):
        a.add(a)
    text = str(caught.value)
    assert text.startswith("operation add: was put on /job:worker/task:0/device:CUDA:99, but there is no such device")
    assert "Available: /job:worker/task:0/device:CPU:0" in text and "allow_soft_placement=True" in text


def test_a_device_that_is_not_there_is_an_error_that_names_the_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

    with (
        pytest.raises(tq.errors.DeviceError, match=r"^operation empty of module Net: was put on .*CUDA:99"),
        tq.devices.device(MISSING),
    ):
        Net()


def test_with_soft_placement_the_cpu_is_used_and_one_line_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    a = torch.ones(2)
    with tq.tensorflow.allow_soft_placement():
        for _ in range(3):
            with tq.devices.device(MISSING):
                assert (a + a).device.type == "cpu" and nn.Linear(2, 2).weight.device.type == "cpu"
    with tq.devices.device("/cpu:1", allow_soft_placement=True):
        assert torch.zeros(2).device == torch.device("cpu")
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert "operation add: there is no device /job:worker/task:0/device:CUDA:99" in said[0]
    assert "using /job:worker/task:0/device:CPU:0 instead" in said[0] and "CPU:1" in said[1]
    with (
        pytest.raises(tq.errors.DeviceError),
        tq.tensorflow.allow_soft_placement(),
        tq.tensorflow.allow_soft_placement(False),
        tq.devices.device(MISSING),
    ):
        torch.zeros(2)


def test_a_device_of_another_task_is_an_error_that_says_what_to_write() -> None:
    with pytest.raises(
        tq.errors.DeviceError, match="/job:ps/task:0/device:CPU:0, which belongs to another task.*tq.Optimizer"
    ):
        tq.devices.device("/job:ps/task:0/cpu:0").__enter__()
    with pytest.raises(tq.errors.DeviceError, match="this one, /job:worker/task:0.*write /device:CUDA:0"):
        tq.devices.device("/job:worker/task:1/gpu:0").__enter__()
    with devices.setting(task=TaskId("worker", 1)), tq.devices.device("/job:worker/task:1/cpu:0") as name:
        assert str(name) == "/job:worker/task:1/device:CPU:0"


def test_an_operation_without_a_kernel_there_is_an_error_that_names_it_and_the_module() -> None:
    library = torch.library.Library("torchquorum_test", "FRAGMENT")
    library.define("only_cpu(Tensor x) -> Tensor")
    library.impl("only_cpu", lambda x: x + 1, "CPU")

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.torchquorum_test.only_cpu(x)

    assert Net()(torch.ones(1)).item() == 2.0
    with pytest.raises(tq.errors.DeviceError) as caught, tq.devices.device("meta"):
        Net()(torch.ones(1))
    text = str(caught.value)
    assert text.startswith(
        "operation torchquorum_test::only_cpu of module Net: cannot run on /job:worker/task:0/device:META:0"
    )
    assert "Available: /job:worker/task:0/device:CPU:0" in text and isinstance(
        caught.value.__cause__, NotImplementedError
    )


def test_errors_about_something_else_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="shape"), tq.devices.device("cpu"):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(NotImplementedError, match="mine"), tq.devices.device("meta"):
        raise NotImplementedError("mine")


def test_a_misspelt_device_is_told_at_once() -> None:
    with pytest.raises(tq.errors.DeviceError, match="did you mean gpu"):
        tq.devices.device("/gup:0")
