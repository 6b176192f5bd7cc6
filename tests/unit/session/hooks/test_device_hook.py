import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from tests.unit.session.runs import Line
from torchquorum.devices import inventory as devices
from torchquorum.errors import ConfigError
from torchquorum.session.join import Task

LINE = re.compile(
    r"^[\w.]+: \([\w.]+\): (/job:\w+/task:\d+/device:[A-Z]+:\d+)(, /job:\w+/task:\d+/device:[A-Z]+:\d+)*$"
)


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "said_keys", set())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Linear(40, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.norm(self.fc1(x)))


def train(*, ps: int = 1, workers: int = 1, steps: int = 3, slice_bytes: int | None = None, **session: Any) -> None:
    def work(task: Task) -> None:
        model = Normed()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), slice_bytes=slice_bytes)
        with tq.Session(
            task, model, optimizer, last_step=steps, patience=PATIENCE, wait_for_workers=workers, **session
        ) as running:
            while not running.should_stop():
                optimizer.zero_grad()
                model(torch.ones(4, 3)).square().mean().backward()
                optimizer.step()
            if not torch.cuda.is_available() or not session.get("allow_soft_placement"):
                assert _get_current_dispatch_mode() is None  # soft placement has to watch where there is another device

    Cluster(ps=ps, workers=workers).run(*[work] * workers)


def make(**session: Any) -> tq.Session:
    """A session that has not begun, of a cluster that nobody started."""
    model = Normed()
    cluster = tq.ClusterSpec({"ps": ["localhost:1"], "worker": ["localhost:2"]})
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    return tq.Session(Task(cluster=cluster, id=tq.types.TaskId("worker", 0)), model, optimizer, **session)


def test_the_log_has_every_variable_and_every_operation_of_the_first_step_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    train(ps=2, log_device_placement=True, logdir=tmp_path, steps=4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Device mapping:" and lines[1].startswith("/job:worker/task:0/device:CPU:0 -> ")
    told = [line for line in lines if ": (" in line]
    assert all(LINE.match(line) for line in told)
    for line in (
        "fc1.weight: (Parameter): /job:ps/task:0/device:CPU:0",
        "fc1.bias: (Parameter): /job:ps/task:1/device:CPU:0",
        "norm.running_mean: (Buffer): /job:worker/task:0/device:CPU:0",
        "addmm: (aten.addmm.default): /job:worker/task:0/device:CPU:0",
        "addmm_1: (aten.addmm.default): /job:worker/task:0/device:CPU:0",
        "native_batch_norm_backward: (aten.native_batch_norm_backward.default): /job:worker/task:0/device:CPU:0",
    ):
        assert told.count(line) == 1, (line, told)
    assert sum("(Parameter)" in line for line in told) == 6 and not any("addmm_2" in line for line in told)
    assert (tmp_path / "placement.txt").read_text().splitlines() == lines


def test_a_sliced_variable_lists_its_shards(capsys: pytest.CaptureFixture[str]) -> None:
    train(ps=2, log_device_placement=True, slice_bytes=200)
    out = capsys.readouterr().out
    assert "\nfc1.weight: (Parameter): /job:ps/task:0/device:CPU:0, /job:ps/task:1/device:CPU:0\n" in out


def test_each_worker_has_a_file_of_its_own(tmp_path: Path) -> None:
    train(workers=2, log_device_placement=True, logdir=tmp_path)
    for name, task in (("placement.txt", 0), ("placement-worker-1.txt", 1)):
        assert f"addmm: (aten.addmm.default): /job:worker/task:{task}/device:CPU:0\n" in (tmp_path / name).read_text()


def test_without_being_asked_nothing_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    train(logdir=tmp_path)
    assert capsys.readouterr().out == "" and not list(tmp_path.glob("placement*"))


def test_a_first_step_that_fails_still_prints_what_ran(capsys: pytest.CaptureFixture[str]) -> None:
    def work(task: Task) -> None:
        model = Line()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        with tq.Session(task, model, optimizer, log_device_placement=True, patience=PATIENCE):
            model(torch.ones(4, 3))
            raise ValueError("told to fail")

    with pytest.raises(ValueError, match="told to fail"):
        Cluster().run(work)
    assert "addmm: (aten.addmm.default)" in capsys.readouterr().out


def test_the_log_ends_although_somebodys_mode_lies_on_top(capsys: pytest.CaptureFixture[str]) -> None:
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def work(task: Task) -> None:
        model = Line()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        with tq.Session(task, model, optimizer, last_step=3, log_device_placement=True, patience=PATIENCE):
            with Passing():
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            assert _get_current_dispatch_mode() is None
            optimizer.step()

    Cluster().run(work)
    out = capsys.readouterr().out
    assert out.count("addmm: ") == 1 and "addmm_1" not in out and out.count("Device mapping:") == 1


def test_a_missing_device_is_an_error_that_names_the_module_or_a_line_with_soft_placement(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(tq.errors.DeviceError, match=r"module fc2 \(Linear\): was put on .*CUDA:99.*Available: .*CPU:0"):
        make(placement={"fc2": "/gpu:99"})
    train(placement={"fc2": "/gpu:99"}, config=tq.tensorflow.ConfigProto(allow_soft_placement=True))
    assert capfd.readouterr().err.count("there is no device /job:worker/task:0/device:CUDA:99") == 1


def test_names_in_the_loop_mean_the_sessions_task() -> None:
    def work(task: Task) -> str:
        model = Line()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        with tq.Session(task, model, optimizer, last_step=1, patience=PATIENCE, wait_for_workers=2):
            with tq.devices.device(f"/job:worker/task:{task.index}/cpu:0") as name:
                model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        return str(name)

    expected = ["/job:worker/task:0/device:CPU:0", "/job:worker/task:1/device:CPU:0"]
    assert Cluster(workers=2).run(work, work) == expected


def test_soft_placement_of_a_session_holds_inside_its_block(capfd: pytest.CaptureFixture[str]) -> None:
    def work(task: Task) -> None:
        model = Line()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        with (
            tq.Session(task, model, optimizer, last_step=1, patience=PATIENCE, allow_soft_placement=True),
            tq.devices.device("/gpu:99"),
        ):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        with pytest.raises(tq.errors.DeviceError), tq.devices.device("/gpu:99"):
            torch.ones(2)

    Cluster().run(work)
    assert capfd.readouterr().err.count("CUDA:99") == 1


def test_a_model_without_data_cannot_be_trained() -> None:
    with pytest.raises(tq.errors.DeviceError, match="fc1.weight is on the device meta"):
        make(placement="meta").__enter__()


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, "half", True, float("nan")])
def test_a_share_of_memory_is_above_0_and_at_most_1(fraction: Any) -> None:
    with pytest.raises(ConfigError, match="more than 0 and at most 1"):
        make(gpu_memory_fraction=fraction)
    with pytest.raises(ConfigError, match="more than 0 and at most 1"):
        tq.join(
            [],
            config=tq.tensorflow.ConfigProto(
                gpu_options=tq.tensorflow.GPUOptions(per_process_gpu_memory_fraction=fraction)
            ),
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, where the share has an effect")
def test_without_cuda_a_share_of_memory_says_once_that_it_has_no_effect(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        make(gpu_memory_fraction=0.2)
    assert capfd.readouterr().err.count("gpu_memory_fraction=0.2 has no effect: there is no CUDA device here") == 1


def test_a_config_in_tensorflows_manner_means_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    config = tq.tensorflow.ConfigProto(log_device_placement=True, device_filters=["/job:ps"])
    config.gpu_options.allow_growth = True
    train(config=config)
    assert "Device mapping:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"config": {"allow_soft_placement": True}}, "must be a tq.tensorflow.ConfigProto"),
        ({"config": tq.tensorflow.ConfigProto(allow_soft_placement=True), "allow_soft_placement": False}, "must agree"),
        ({"log_device_placement": "yes"}, "must be True or False"),
        ({"config": tq.tensorflow.ConfigProto(allow_soft_placement=1)}, "must be True or False"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_contradict_or_make_no_sense_are_errors(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make(**arguments)
