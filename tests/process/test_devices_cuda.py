"""Placement on a real GPU. Skipped where there is none; `tests/process/test_second_device.py` checks the same without one."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.devices import inventory as devices
from torchquorum.session.join import Task

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
    pytest.mark.library_keeps_sockets,  # of pipes and sockets: those that CUDA opens once
]

CUDA, CPU = "/job:worker/task:0/device:CUDA:0", "/job:worker/task:0/device:CPU:0"
MISSING = "/gpu:99"


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(devices, "said_keys", set())
    yield
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 3))


def train(placement: Any, **session: Any) -> list[float]:
    def work(task: Task) -> list[float]:
        model = net()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y, losses = torch.randn(12, 8), torch.randint(0, 3, (12,)), []
        with tq.Session(
            task, model, optimizer, last_step=6, patience=PATIENCE, placement=placement, **session
        ) as running:
            while not running.should_stop():
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step(loss=loss)
                losses.append(loss.item())
        return losses

    return Cluster().run(work)[0]


@pytest.mark.parametrize(
    "name", ["/gpu:0", "cuda", "cuda:0", "/device:GPU:0", "/job:worker/replica:0/task:0/device:CUDA:0"]
)
def test_a_gpu_by_any_name(name: str) -> None:
    a = torch.ones(3)
    with tq.devices.device(name):
        made, module, total = torch.zeros(2), nn.Linear(2, 2), a + a
    assert {str(t.device) for t in (made, module.weight, total)} == {"cuda:0"} and total.tolist() == [2.0] * 3


def test_a_missing_gpu_lists_the_one_there_is() -> None:
    with (
        pytest.raises(tq.errors.DeviceError, match=f"operation add: .*CUDA:99.*Available: {CPU}, {CUDA}"),
        tq.devices.device(MISSING),
    ):
        torch.ones(2, device="cpu").add(1)


def test_running_statistics_come_back_to_the_cpu() -> None:
    norm = nn.BatchNorm1d(2)
    with tq.devices.device("/gpu:0"):
        out = norm(torch.full((4, 2), 3.0, device="cpu"))
    assert out.is_cuda and norm.running_mean is not None and norm.running_mean.tolist() == pytest.approx([0.3, 0.3])


def test_a_model_in_parts_computes_what_it_computes_in_one() -> None:
    model, x = net().eval(), torch.randn(5, 8)
    expected, parameters = model(x).detach(), list(model.parameters())
    tq.devices.place(model, {"*": "/gpu:0", "3": "/cpu:0"})
    out = model(x)
    assert out.device.type == "cpu" and torch.allclose(out, expected, atol=1e-5)
    assert model[0].weight.is_cuda and not model[3].weight.is_cuda
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    out.sum().backward()
    assert [p.grad.is_cuda for p in parameters if p.grad is not None] == [p.is_cuda for p in parameters]
    assert model(x.cuda()).is_cuda


@pytest.mark.parametrize("placement", ["/gpu:0", {"0": "cuda:0"}, {"3": "/gpu:0", "2": "/gpu:0"}])
def test_a_session_trains_alike_wherever_the_parts_are(placement: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on_cpu = train(None)
    assert train(placement, log_device_placement=True) == pytest.approx(on_cpu, rel=1e-3)
    out = capsys.readouterr().out
    assert f"{CUDA} -> device: 0, name: {torch.cuda.get_device_name(0)}" in out
    assert "0.weight: (Parameter): /job:ps/task:0/device:CPU:0\n" in out and f"(Copy): {CUDA}\n" in out
    backward = [line for line in out.splitlines() if "backward" in line or ": (aten.mm.default)" in line]
    assert any(line.endswith(CUDA) for line in backward), out  # autograd runs these on a thread of its own


def test_an_operation_without_a_kernel_or_dtype_on_the_gpu_is_an_error_that_names_it() -> None:
    whole = torch.ones(2, 2, dtype=torch.long)
    expected = rf"cannot run on {CUDA} for dtype Long.*allow_soft_placement=True"
    with pytest.raises(tq.errors.DeviceError, match=expected), tq.devices.device("/gpu:0"):
        torch.mm(whole, whole)
    expected = rf"operation torchquorum_test::cpu_only.*cannot run on {CUDA}"
    with pytest.raises(tq.errors.DeviceError, match=expected), tq.devices.device("/gpu:0"):
        cpu_only()(torch.ones(2))


def test_with_soft_placement_the_cpu_runs_it(capfd: pytest.CaptureFixture[str]) -> None:
    whole, weight = torch.ones(2, 2, dtype=torch.long), torch.ones(2, requires_grad=True)
    with tq.devices.device("/gpu:0", allow_soft_placement=True):
        product, more = whole @ whole, cpu_only()(weight.detach() * 1.0)
        product = whole @ whole
        (weight * 2).sum().backward()
    assert product.is_cuda and product.tolist() == [[2, 2], [2, 2]] and more.is_cuda and more.tolist() == [2.0, 2.0]
    said = capfd.readouterr().err
    assert said.count("operation aten.mm.default cannot run on") == 1 and said.count("cpu_only") <= 3 and CUDA in said


def cpu_only() -> Any:
    library = torch.library.Library("torchquorum_test", "FRAGMENT")
    if not hasattr(torch.ops.torchquorum_test, "cpu_only"):
        library.define("cpu_only(Tensor x) -> Tensor")
        library.impl("cpu_only", lambda x: x + 1, "CPU")
        _kept.append(library)
    return torch.ops.torchquorum_test.cpu_only


_kept: list[Any] = []


def test_a_share_of_memory_is_a_limit_that_holds() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    train(None, gpu_memory_fraction=0.05)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(int(total * 0.06), dtype=torch.uint8, device="cuda:0")
    torch.empty(int(total * 0.01), dtype=torch.uint8, device="cuda:0")


def test_two_workers_share_one_gpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable, "-m", "torchquorum.cli.main", "train", "--steps=60", "--device=/gpu:0", "--log-device-placement",
        "--gpu-memory-fraction=0.2", f"--logdir={tmp_path / 'run'}", f"--report={report}", "--l2=1e-4",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(report.read_text())["accuracy"] > 0.7
    for name, worker in (("placement.txt", 0), ("placement-worker-1.txt", 1)):
        lines = (tmp_path / "run" / name).read_text().splitlines()
        assert f"addmm: (aten.addmm.default): /job:worker/task:{worker}/device:CUDA:0" in lines
