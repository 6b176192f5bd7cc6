import copy

import pytest
import torch
from torch import nn

import torchquorum as tq
from torchquorum.devices import inventory as devices
from torchquorum.devices.names import DeviceName
from torchquorum.devices.scope import is_inside_a_block


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 4), nn.Linear(4, 4)
        self.head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        h = self.fc1(x)
        h = h + self.fc2(h)
        return self.head(h if scale is None else h * scale)


def where(model: nn.Module) -> dict[str, str]:
    return {n: t.device.type for n, t in [*model.named_parameters(), *model.named_buffers()] if t.device.type != "cpu"}


def test_a_mapping_puts_modules_with_everything_inside_on_a_device() -> None:
    model = tq.devices.place(Net(), {"head": "meta"})
    assert set(where(model)) == {n for n in dict(model.named_parameters()) if n.startswith("head")} | {
        "head.0.running_mean",
        "head.0.running_var",
        "head.0.num_batches_tracked",
    }


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({"*": "cpu", "fc1": "meta"}, {"fc1.weight", "fc1.bias"}),
        ({"fc1": "meta", "*": "cpu"}, {"fc1.weight", "fc1.bias"}),
        ({"fc?": "meta", "fc2": "cpu"}, {"fc1.weight", "fc1.bias"}),
        ({"fc1": "meta", "fc1.bias": "cpu"}, {"fc1.weight"}),
        ({"fc[12].bias": "meta"}, {"fc1.bias", "fc2.bias"}),
        ({"*": "meta", "head.*": "cpu", "fc*.bias": "cpu"}, {"fc1.weight", "fc2.weight"}),
        (
            lambda name, thing: "meta" if isinstance(thing, nn.Linear) and name == "fc2" else None,
            {"fc2.weight", "fc2.bias"},
        ),
        (lambda name, thing: "meta" if name == "fc2.bias" else None, {"fc2.bias"}),
    ],
)
def test_the_entry_that_says_more_decides(placement: object, expected: set[str]) -> None:
    assert set(where(tq.devices.place(Net(), placement))) == expected  # type: ignore[arg-type]


def test_one_device_is_for_the_whole_model_and_parameters_keep_their_identity() -> None:
    model = Net()
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert tq.devices.place(model, torch.device("meta")) is model
    assert len(where(model)) == len(before) + 3
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.is_meta and isinstance(p, nn.Parameter) for p in optimizer.param_groups[0]["params"])


def test_inputs_follow_and_a_model_in_parts_runs() -> None:
    model = tq.devices.place(Net(), {"fc2": "meta", "head": "meta"})
    assert model(torch.ones(5, 3)).is_meta and model(torch.ones(5, 3), scale=torch.ones(4)).is_meta
    assert not is_inside_a_block()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(5, 7))
    assert not is_inside_a_block()
    assert copy.deepcopy(model)(torch.ones(2, 3)).is_meta


def test_a_part_that_was_placed_keeps_its_device_inside_a_block_of_another() -> None:
    model = tq.devices.place(Net(), {"fc2": "meta", "head": "meta"})
    model.fc1.register_forward_hook(lambda module, args, output: seen.append(output.device.type))
    seen: list[str] = []
    with tq.devices.device("cpu"):
        assert model(torch.ones(5, 3)).is_meta
    with tq.devices.device("meta"):
        tq.devices.place(model, {"fc1": "cpu"})
        model.fc1(torch.ones(5, 3, device="cpu"))
    assert seen == ["cpu", "cpu"]


def test_a_parameter_apart_from_its_module_comes_along() -> None:
    model = tq.devices.place(nn.Linear(3, 2), {"bias": "meta"})
    assert model(torch.ones(1, 3)).is_meta


def test_placing_again_replaces_the_first_placement() -> None:
    model = tq.devices.place(Net(), {"fc1": "cpu", "fc2": "meta", "head": "meta"})
    hooks = len(model._forward_pre_hooks) + len(model.fc2._forward_pre_hooks)
    tq.devices.place(model, {"fc2": "meta"})
    assert len(model._forward_pre_hooks) + len(model.fc2._forward_pre_hooks) == hooks == 2


def test_a_model_that_stays_on_the_cpu_computes_the_same() -> None:
    model = Net()
    x = torch.randn(5, 3)
    expected = copy.deepcopy(model)(x)
    assert torch.equal(tq.devices.place(model, {"fc*": "/cpu:0"})(x), expected)


def test_recurrent_and_tied_modules_can_be_placed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.rnn, self.decoder = nn.Embedding(5, 4), nn.LSTM(4, 4), nn.Linear(4, 5)
            self.decoder.weight = self.encoder.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decoder(self.rnn(self.encoder(x))[0])

    model = tq.devices.place(Tied(), {"*": "meta"})
    assert model.decoder.weight is model.encoder.weight and model.encoder.weight.is_meta
    assert model(torch.zeros(2, 1, dtype=torch.long)).shape == (2, 1, 5)
    with pytest.raises(tq.errors.DeviceError, match="encoder.weight and decoder.weight are one tensor"):
        tq.devices.place(Tied(), {"encoder": "cpu", "decoder": "meta"})


def test_a_real_part_after_one_without_data_is_an_error() -> None:
    model = tq.devices.place(Net(), {"fc1": "meta"})
    with pytest.raises(tq.errors.DeviceError, match="module Linear: is on cpu, but its input is on meta"):
        model(torch.ones(5, 3))


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({"fc3": "cpu"}, "'fc3' matches no module.*did you mean fc[12]"),
        (
            {"fc1": "/gpu:99"},
            r"^module fc1 \(Linear\): was put on .*/device:CUDA:99, but there is no such device. Available: .*CPU:0",
        ),
        ({"head.1.bias": "/gpu:99"}, r"^parameter head.1.bias \(Parameter\): was put on"),
        ("/gpu:99", r"^model Net: was put on"),
        ({"fc1": "gup:0"}, "did you mean gpu"),
        ({"fc1": "/job:ps/task:0"}, "belongs to another task"),
        ({1: "cpu"}, "must be the name"),
        (5, "must be a device, a mapping"),
    ],
)
def test_a_placement_that_makes_no_sense_is_an_error(placement: object, expected: str) -> None:
    with pytest.raises(tq.errors.DeviceError, match=expected):
        tq.devices.place(Net(), placement)  # type: ignore[arg-type]


def test_soft_placement_uses_the_cpu(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "said_keys", set())  # an earlier test may have asked for the same device
    model = tq.devices.place(Net(), {"fc1": "/gpu:98", "fc2": "/gpu:98"}, allow_soft_placement=True)
    assert where(model) == {}
    said = capfd.readouterr().err
    assert said.count("module fc1 (Linear): there is no device") == 1 and said.count("\n") == 1


def test_a_layout_of_ps_tasks_is_another_thing() -> None:
    assert str(DeviceName.parse("cpu")) == "/device:CPU:0"
    with pytest.raises(tq.errors.DeviceError, match="must name|none of|is none"):
        tq.devices.place(Net(), "round_robin")
