"""What holds on a second device, checked in a process of its own; prints one JSON line with what failed, by check."""

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.second_device import register
from torchquorum.devices import inventory as devices
from torchquorum.errors import ConfigError

SIM, CPU = "/job:worker/task:0/device:SIM:0", "/job:worker/task:0/device:CPU:0"


def fails(what: Callable[[], object]) -> str:
    with pytest.raises(tq.errors.DeviceError) as caught:
        what()
    return str(caught.value)


def said(what: Callable[[], object]) -> list[str]:
    devices.said_keys.clear()
    with redirect_stderr(StringIO()) as text:
        what()
    return text.getvalue().splitlines()


def a_gpu_by_any_name_is_the_accelerator_that_there_is() -> None:
    for name in ("/gpu:0", "sim", "/device:SIM:0", "/job:worker/task:0/device:GPU:0"):
        with tq.devices.device(name):
            made = torch.ones(2, 3)
        assert made.device == torch.device("sim:0")
    assert CPU in fails(lambda: tq.devices.place(nn.Linear(2, 2), "/gpu:1")) and SIM in fails(
        lambda: tq.devices.place(nn.Linear(2, 2), "/gpu:1")
    )


def an_operation_takes_its_inputs_along() -> None:
    a, b = tq.tensorflow.constant([1.0, 2.0], name="a"), torch.ones(2, requires_grad=True)
    with tq.devices.device("/gpu:0"):
        c = a + b
    assert c.device.type == "sim" and c.cpu().tolist() == [2.0, 3.0]
    c.sum().backward()
    assert b.grad is not None and b.grad.device.type == "cpu" and b.grad.tolist() == [1.0, 1.0]


def running_statistics_come_back() -> None:
    norm = nn.BatchNorm1d(2)
    with tq.devices.device("/gpu:0"), torch.no_grad():
        out = norm(torch.full((4, 2), 3.0, device="cpu"))
    assert out.device.type == "sim" and norm.running_mean is not None
    assert [round(x, 4) for x in norm.running_mean.tolist()] == [0.3, 0.3]


def backward_runs_on_another_thread_and_is_in_the_log() -> None:
    threads: set[int] = set()
    weight = torch.ones(4, 3, requires_grad=True)
    there = weight.to("sim")
    product = torch.ones(2, 3).to("sim").mm(there.t())
    product.register_hook(lambda gradient: threads.add(threading.get_ident()))
    lines: list[str] = []
    with tq.tensorflow.log_device_placement(write=lines.append):
        product.sum().backward()
    assert threads and threading.get_ident() not in threads
    assert f"mm: (aten.mm.default): {SIM}" in lines and weight.grad is not None and weight.grad.tolist()[0] == [2.0] * 3


def a_missing_kernel_is_an_error_that_names_operation_device_and_module() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(x)

    def run() -> None:
        with tq.devices.device("/gpu:0"):
            Net()(torch.ones(2))

    text = fails(run)
    assert "operation aten::exp" in text and "of module Net" in text and f"cannot run on {SIM}" in text
    assert f"Available: {CPU}, {SIM}" in text and "allow_soft_placement=True" in text


def a_missing_dtype_is_an_error_that_names_it() -> None:
    def run() -> None:
        whole = torch.ones(2, 2, dtype=torch.long)
        with tq.devices.device("/gpu:0"):
            torch.mm(whole, whole)

    text = fails(run)
    assert "for dtype Long" in text and "another operation or dtype" in text and SIM in text


def with_soft_placement_the_cpu_runs_it_and_says_so_once_per_operation() -> None:
    def run() -> None:
        weight = torch.ones(3, requires_grad=True)
        whole = torch.full((2, 2), 2, dtype=torch.long).to("sim")
        with tq.tensorflow.allow_soft_placement():
            for _ in range(3):
                power = weight.to("sim").exp()
                assert power.device.type == "sim"
                power.sum().backward()
                assert (whole @ whole).cpu().tolist() == [[8, 8], [8, 8]] and (whole @ whole).device.type == "sim"
            sized = torch.zeros(2).to("sim")
            again = sized.cos_()
            assert sized.cpu().tolist() == [1.0, 1.0] and again is sized
        assert weight.grad is not None and abs(weight.grad[0].item() - 3 * 2.71828) < 1e-3

    lines = said(run)
    assert [line.split()[2] for line in lines] == ["aten.exp.default", "aten.mm.default", "aten.cos_.default"], lines
    assert all(f"cannot run on {SIM}" in line and f"running it on {CPU} instead" in line for line in lines)


def an_operation_of_the_backward_pass_can_run_on_the_cpu_too() -> None:
    def run() -> None:
        weight = torch.full((2,), 0.5, requires_grad=True)
        with tq.devices.device("/gpu:0", allow_soft_placement=True):
            torch.sigmoid(weight).sum().backward()
        assert weight.grad is not None and abs(weight.grad[0].item() - 0.2350) < 1e-3

    assert any("sigmoid_backward" in line for line in said(run))


def what_no_device_can_run_is_torchs_own_error() -> None:
    with tq.tensorflow.allow_soft_placement(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(torch.ones(2, 2).to("sim"), torch.ones(3, 3).to("sim"))


def the_log_says_that_the_cpu_ran_it() -> None:
    lines: list[str] = []
    with tq.tensorflow.allow_soft_placement(), tq.tensorflow.log_device_placement(write=lines.append):
        torch.ones(2).to("sim").exp()
    assert f"exp: (aten.exp.default): {CPU}" in lines


def a_model_in_parts_computes_what_it_computes_in_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x, parameters = torch.randn(5, 3), list(model.parameters())
    with torch.no_grad():
        expected = model(x)
    tq.devices.place(model, {"2": "/gpu:0"})
    out = model(x)
    assert out.device.type == "cpu" and torch.allclose(out, expected) and model[2].weight.device.type == "sim"
    out.sum().backward()
    gradients = [p.grad.device.type for p in model.parameters() if p.grad is not None]
    assert gradients == ["cpu", "cpu", "sim", "sim"]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def a_session_trains_a_model_in_parts(folder: str = "") -> None:
    def train(placement: Any, logdir: str | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y, losses = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0]), []
        with tq.Session(
            tq.join([]), model, optimizer, last_step=5, placement=placement, logdir=logdir, log_device_placement=bool(logdir)
        ) as session:  # fmt: skip
            while not session.should_stop():
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step(loss=loss)
                losses.append(loss.item())
        return losses

    alone = train(None, None)
    assert len(alone) == 5, alone
    assert torch.allclose(torch.tensor(train({"2": "/gpu:0"}, folder)), torch.tensor(alone))
    lines = (Path(folder) / "placement.txt").read_text().splitlines()
    for line in (
        f"{SIM} -> device: 0",
        "2.weight: (Parameter): /job:ps/task:0/device:CPU:0",
        f"2.weight: (Copy): {SIM}",
        f"addmm: (aten.addmm.default): {CPU}",
        f"addmm_1: (aten.addmm.default): {SIM}",
    ):
        assert line in lines, (line, lines)


def a_session_without_soft_placement_names_the_module_that_failed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def run() -> None:
        with tq.Session(tq.join([]), model, optimizer, last_step=2, placement="/gpu:0"):
            model(torch.ones(2, 3))

    text = fails(run)
    assert "operation aten::tanh" in text and "of module 1 (Tanh)" in text and SIM in text


def a_process_that_has_computed_gradients_there_is_not_forked() -> None:
    torch.ones(2, 3, requires_grad=True).to("sim").sum().backward()
    with pytest.raises(ConfigError, match="has computed gradients on a machine with a GPU"):
        tq.launch(print)


CHECKS = {
    check.__name__: check
    for check in list(globals().values())
    if callable(check) and getattr(check, "__module__", "") == __name__ and check.__name__ not in ("fails", "said")
}

if __name__ == "__main__":
    register()
    failed: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            check(sys.argv[1]) if name == "a_session_trains_a_model_in_parts" else check()
        except BaseException:
            failed[name] = traceback.format_exc()
    print(f"\n{json.dumps(failed)}", flush=True)
    os._exit(0)
