"""The tutorials' multi-GPU program, as a user starts it."""

import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import torchquorum as tq
from tests.process.tasks import Started
from torchquorum.formats.checkpoint import list_checkpoints
from torchquorum.formats.checkpoint_write import export
from torchquorum.jobs.models import MLP

PROGRAM = Path(__file__).parents[2] / "examples" / "towers" / "train.py"
LINE = re.compile(r"\S+ \S+: step (\d+), loss = \d+\.\d\d \(\d+\.\d examples/sec; \d+\.\d{3} sec/batch\)")


def test_the_multi_gpu_program_prints_saves_and_draws(tmp_path: Path) -> None:
    test = tq.data.load_mnist().test
    with tq.data.TFRecordWriter(tmp_path / "output.tfrecords") as writer:
        for image, label in zip(test.images[:500], test.labels[:500].tolist(), strict=True):
            writer.write(tq.data.Example({"image_raw": image.numpy().tobytes(), "pixels": 784, "label": label}))
    flags = ["--training_steps=30", "--batch_size=20", "--n_gpu=3", f"--model_save_path={tmp_path}"]
    flags.append(f"--data_path={tmp_path / 'output.tfrecords'}")
    program = Started([sys.executable, str(PROGRAM), *flags], forked=True)
    try:
        assert program.wait() == 0, program.tail()
    finally:
        program.end()
    steps = [int(match[1]) for line in program.lines if (match := LINE.fullmatch(line))]
    assert steps == [10, 20, 30], program.tail()
    assert any("test accuracy of the moving averages" in line for line in program.lines), program.tail()
    [info] = list_checkpoints(tmp_path)
    assert info.step == 30 and info.problem is None
    assert list(tmp_path.glob("events.out.tfevents.*"))
    export(info.path, tmp_path / "mlp.safetensors", averages=True)
    model = MLP()
    model.load_state_dict(load_file(tmp_path / "mlp.safetensors"))
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
