"""What towers do with odd batches, buffers, modes, failures and devices that are not there."""

import re
import threading
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchquorum as tq
from tests.unit.session.runs import Line
from torchquorum.devices.inventory import setting
from torchquorum.errors import ConfigError, TorchQuorumError
from torchquorum.towers import towers as towers_module
from torchquorum.towers.replica import Replica

CPU_1, CPU_2 = torch.device("cpu", 1), torch.device("cpu", 2)
BOTH = pytest.mark.parametrize("devices", [["/cpu:0", "/cpu:0"], ["/cpu:0", CPU_1], [CPU_1, CPU_2]], ids=str)
X, Y = torch.randn(12, 3), torch.randn(12, 2)


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(x), y)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def plain(model: nn.Module, *parts: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    torch.stack([loss_fn(model, *part) for part in parts]).mean().backward()
    found = gradients(model)
    model.zero_grad()
    return found


def test_uneven_batches_count_the_same_or_by_their_examples() -> None:
    model = Line()
    uneven = [(X[:2], Y[:2]), (X[2:], Y[2:])]
    expected, joined = plain(model, *uneven), plain(model, (X, Y))
    tq.Towers(model, num_towers=2).backward(loss_fn, uneven)
    torch.testing.assert_close(gradients(model), expected)
    model.zero_grad()
    loss = tq.Towers(model, num_towers=2, weighted=True).backward(loss_fn, uneven)
    torch.testing.assert_close(gradients(model), joined)
    torch.testing.assert_close(loss, loss_fn(model, X, Y).detach())


@pytest.mark.parametrize("nothing", [None, (X[:0], Y[:0])], ids=["none", "no rows"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_tower_without_a_batch_sits_the_step_out(nothing: Any, weighted: bool) -> None:
    model = Line()
    expected = plain(model, (X[:4], Y[:4]), (X[4:8], Y[4:8]))
    towers = tq.Towers(model, num_towers=3, weighted=weighted)
    loss = towers.backward(loss_fn, [(X[:4], Y[:4]), nothing, (X[4:8], Y[4:8])])
    torch.testing.assert_close(gradients(model), expected)
    assert towers.examples == 8 and towers.losses[1] is None and bool(torch.isfinite(loss))
    with pytest.raises(ConfigError, match="every tower's batch is empty"):
        towers.backward(loss_fn, [nothing] * 3)


def test_an_iterator_is_asked_for_one_batch_per_tower() -> None:
    model, batches = Line(), tq.Batches((X, Y), 2)
    towers = tq.Towers(model, num_towers=3)
    towers.backward(loss_fn, batches)
    assert (batches.step_in_epoch, towers.examples) == (3, 6)
    ending = iter([(X[:4], Y[:4])])
    towers.backward(loss_fn, ending)
    assert towers.examples == 4
    with pytest.raises(StopIteration):
        towers.backward(loss_fn, ending)


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("batch", "function"),
    [
        (X, lambda model, x: model(x).sum()),
        ({"x": X, "more": [Y]}, lambda model, b: model(b["x"]).sum() + b["more"][0].sum()),
        (Pair(X, Y), loss_fn),
        ([X, Y], loss_fn),
        ((X, Y, "a word"), lambda model, x, y, word: loss_fn(model, x, y) * len(word)),
    ],
    ids=["a tensor", "a mapping", "a named tuple", "a list", "with more than tensors"],
)
@BOTH
def test_batches_of_any_form(batch: Any, function: Any, devices: list[Any]) -> None:
    model = Line()
    expected = function(model, *batch) if isinstance(batch, tuple | list) else function(model, batch)
    towers = tq.Towers(model, devices)
    torch.testing.assert_close(towers.backward(function, [batch, batch]), expected.detach())
    assert towers.examples == 24


def test_gradients_are_added_to_those_that_are_there() -> None:
    model = Line()
    expected = [2 * g for g in plain(model, (X, Y))]
    towers = tq.Towers(model, num_towers=2)
    for _ in range(2):
        towers.backward(loss_fn, towers.split(X, Y))
    torch.testing.assert_close(gradients(model), expected)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: torch.Tensor
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1  # another tensor each time, as some modules do
        return self.norm(self.fc(x)) * self.factor


@BOTH
def test_the_model_keeps_the_buffers_of_tower_0(devices: list[Any]) -> None:
    torch.manual_seed(0)
    model, first = Norm(), Norm()
    first.load_state_dict(model.state_dict())
    towers = tq.Towers(model, devices)
    for step in range(3):
        x, y = X + step, Y
        towers.backward(loss_fn, [(x[:6], y[:6]), (x[6:], y[6:])])
        loss_fn(first, x[:6], y[:6])
    for (name, ours), theirs in zip(model.named_buffers(), first.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    assert model.norm.num_batches_tracked == 3 and model.calls == 3


@BOTH
def test_towers_follow_the_mode_the_frozen_parameters_and_the_attributes_of_the_model(devices: list[Any]) -> None:
    model = Norm()
    towers = tq.Towers(model, devices)
    seen: list[tuple[bool, float, bool]] = []

    def look(net: Norm, x: torch.Tensor) -> torch.Tensor:
        seen.append((net.norm.training, net.factor, net.fc.bias.requires_grad))
        return net(x).sum()

    towers.backward(look, [X, X])
    model.eval()
    model.factor = 3.0
    model.fc.bias.requires_grad_(False)
    model.zero_grad()
    towers.backward(look, [X, X])
    assert seen == [(True, 1.0, True)] * 2 + [(False, 3.0, False)] * 2
    assert model.fc.bias.grad is None and model.fc.weight.grad is not None


@BOTH
def test_a_failing_tower_is_named_and_changes_no_gradient(devices: list[Any]) -> None:
    model = Line()
    towers = tq.Towers(model, devices)
    towers.backward(loss_fn, towers.split(X, Y))
    before = gradients(model)

    def fail(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if len(x) == 5:
            raise ZeroDivisionError("told to fail")
        return loss_fn(net, x, y)

    with pytest.raises(ZeroDivisionError, match="told to fail") as caught:
        towers.backward(fail, [(X[:4], Y[:4]), (X[:5], Y[:5])])
    assert caught.value.__notes__ == [f"in tower 1 on {towers.devices[1]}"]
    torch.testing.assert_close(gradients(model), before)
    towers.backward(loss_fn, towers.split(X, Y))
    torch.testing.assert_close(gradients(model), [2 * g for g in before])


def test_devices_that_work_side_by_side_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs have a thread each; here copies on the CPU stand for them."""
    model = Norm()
    towers = tq.Towers(model, [CPU_1, CPU_2, CPU_1, "/cpu:0"])
    threads: set[str] = set()
    casts: set[torch.dtype] = set()

    def look(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        threads.add(threading.current_thread().name)
        loss = functional.mse_loss(net(x), y)
        casts.add(torch.mm(x, x.T).dtype)
        return loss

    towers.backward(look, towers.split(X, Y))
    expected, buffers = gradients(model), [b.clone() for b in model.buffers()]
    assert len(threads) == 1
    model.zero_grad()
    model.norm.reset_running_stats()
    model.calls.zero_()
    monkeypatch.setattr(towers_module, "CONCURRENT", ("cpu",))
    with torch.no_grad():
        towers.backward(look, towers.split(X, Y))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert {"torchquorum-tower-1", "torchquorum-tower-3"} < threads
    casts.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        towers.backward(look, towers.split(X, Y))
    assert casts == {torch.bfloat16}

    def fail(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError(threading.current_thread().name)

    with pytest.raises(ZeroDivisionError) as caught:
        towers.backward(fail, towers.split(X, Y))
    assert caught.value.__notes__ == ["in tower 0 on cpu:1"]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda model, x, y: model(x), "a tensor of shape [6, 2]"),
        (lambda model, x, y: 1.0, "the loss is float"),
        (lambda model, x, y: None, "the loss is NoneType"),
    ],
)
def test_a_loss_that_is_no_number_is_refused(function: Any, expected: str) -> None:
    towers = tq.Towers(Line(), num_towers=2)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        towers.backward(function, towers.split(X, Y))


def test_what_cannot_be_is_refused_with_what_to_do() -> None:
    model = Line()
    towers = tq.Towers(model, num_towers=2)
    with pytest.raises(ConfigError, match="more than 2 batches for 2 towers"):
        towers.backward(loss_fn, [(X, Y)] * 3)
    with pytest.raises(ConfigError, match="1 batches for 2 towers"):
        towers.backward(loss_fn, [(X, Y)])
    with pytest.raises(ConfigError, match="give a function of the tower's model and its batch"):
        towers.backward(nn.MSELoss(), [(X, Y)] * 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give a list with one batch per tower"):
        towers.backward(loss_fn, X)
    for devices, count, expected in (
        ([], None, "name a device per tower"),
        (None, 0, "num_towers=0"),
        (None, True, "num_towers=True"),
        (["/cpu:0", "/cpu:0"], 1, "num_towers=1 and 2 devices"),
        (
            ["/cpu:0", "/gpu:99"],
            None,
            "tower 1: was put on /job:worker/task:0/device:CUDA:99, but there is no such device",
        ),
        (["/cpu:1"], None, "there is no such device"),
        (["/tpu:0"], None, "tpu"),
        (["meta"], None, "has no data"),
    ):
        with pytest.raises(TorchQuorumError, match=re.escape(expected)):
            tq.Towers(model, devices, num_towers=count)
    unknown = tq.Towers(model, num_towers=2, weighted=True)
    with pytest.raises(ConfigError, match="no tensor whose rows could be counted"):
        unknown.backward(lambda net, word: net(X).sum(), ["a", "b"])


@pytest.mark.parametrize(
    "name", ["cpu", "/cpu:0", "cpu:0", "CPU:0", "/device:CPU:0", "/job:worker/replica:0/task:0/device:cpu:0", "/task:0"]
)
def test_the_cpu_has_many_names(name: str) -> None:
    assert tq.Towers(Line(), name).devices == [torch.device("cpu")]


def test_with_soft_placement_a_gpu_that_is_not_there_is_the_cpu() -> None:
    with setting(soft=True):
        assert tq.Towers(Line(), ["/gpu:98", "/gpu:99"]).devices == [torch.device("cpu")] * 2


def test_one_device_for_several_towers() -> None:
    assert len(tq.Towers(Line(), "/cpu:0", num_towers=4)) == 4
    assert tq.Towers(Line(), [torch.device("cpu", 0), torch.device("cpu")]).devices == [torch.device("cpu")] * 2
    assert [d.index for d in tq.Towers(Line(), [CPU_1, CPU_2], num_towers=3).devices] == [1, 2, 1]


def test_a_copy_takes_the_parameters_of_a_session_in_one_piece_per_dtype() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5), nn.Linear(5, 5).double())
    replica = Replica(model, torch.device("cpu", 1))
    replica.refresh()
    assert len(replica.runs) == 6
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with tq.Session(tq.join([]), model, optimizer, last_step=1):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        replica.refresh()
        assert len(replica.runs) == 2
        for ours, theirs in zip(replica.module.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()


def test_the_line_of_the_tutorials(capsys: pytest.CaptureFixture[str]) -> None:
    model = Line()
    towers = tq.Towers(model, num_towers=2)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with tq.Session(tq.join([]), model, optimizer, last_step=25, hooks=[tq.hooks.TowerLogHook(towers)]) as session:
        while not session.should_stop():
            optimizer.zero_grad()
            optimizer.step(loss=towers.backward(loss_fn, towers.split(X, Y)))
    lines = capsys.readouterr().out.splitlines()
    form = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: step (\d+), loss = \d+\.\d\d \(\d+\.\d examples/sec; \d+\.\d{3} sec/batch\)"
    assert [int(re.fullmatch(form, line)[1]) for line in lines] == [10, 20]  # type: ignore[index]
    with pytest.raises(ConfigError, match="every=0"):
        tq.hooks.TowerLogHook(towers, every=0)
    with pytest.raises(ConfigError, match="give it the tq.Towers"):
        tq.hooks.TowerLogHook(model)  # type: ignore[arg-type]
