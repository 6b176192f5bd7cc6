"""`torchquorum train` with devices, as a user runs it."""

from pathlib import Path

import pytest

from tests.process.tasks import run


def test_train_says_where_everything_runs_and_takes_the_cpu_for_a_missing_gpu(tmp_path: Path) -> None:
    done = run(
        "train", "--steps=20", "--ps=2", f"--logdir={tmp_path}", "--device=/gpu:99", "--allow-soft-placement",
        "--log_device_placement", "--gpu-memory-fraction=0.2",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for worker in (0, 1):
        said = f"[worker {worker}] torchquorum: model MLP: there is no device /job:worker/task:{worker}/device:CUDA:99"
        assert done.stdout.count(said) == 1, done.stdout
        line = f"[worker {worker}] addmm: (aten.addmm.default): /job:worker/task:{worker}/device:CPU:0\n"
        assert done.stdout.count(line) == 1
    lines = (tmp_path / "placement.txt").read_text().splitlines()
    assert lines.count("fc1.weight: (Parameter): /job:ps/task:0/device:CPU:0") == 1
    assert lines.count("fc1.bias: (Parameter): /job:ps/task:1/device:CPU:0") == 1
    assert (tmp_path / "placement-worker-1.txt").is_file()


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--device=/gup:0", "did you mean gpu?"),
        ("--device=meta", "nothing can be trained"),
        ("--device=/job:worker/task:0/gpu:1", "must not name a task; write /device:CUDA:1"),
        ("--gpu-memory-fraction=1.5", "--gpu-memory-fraction 1.5: must be more than 0 and at most 1"),
    ],
)
def test_train_refuses_a_device_that_makes_no_sense_before_anything_starts(option: str, expected: str) -> None:
    done = run("train", option)
    assert done.returncode != 0 and expected in done.stderr and "Traceback" not in done.stderr, done.stderr
