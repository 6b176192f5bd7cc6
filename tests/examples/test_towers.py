"""The tutorials' multi-GPU program, as a user starts it."""

import re
import runpy
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import torchquorum as tq
from tests.process.tasks import Started
from torchquorum.formats.checkpoint import list_checkpoints
from torchquorum.formats.checkpoint_write import export

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
    infos = list_checkpoints(tmp_path)
    assert {info.step for info in infos} == {0, 30} and all(info.problem is None for info in infos)
    info = max(infos, key=lambda info: info.step)
    assert list(tmp_path.glob("events.out.tfevents.*"))
    events = EventAccumulator(str(tmp_path), {"histograms": 0})
    events.Reload()
    tags = events.Tags()
    assert {"layer1.weight", "gradients_on_average/layer1.weight"} <= set(tags["histograms"]) and tags["graph"]
    assert [e.step for e in events.Histograms("layer1.weight")] == [10, 20, 30]
    assert any(("/device:CPU:0" in line and "MatMul" in line) or "addmm" in line for line in program.lines), (
        program.tail()
    )
    export(info.path, tmp_path / "mlp.safetensors", averages=True)
    model = runpy.run_path(str(PROGRAM.parents[1] / "mnist_inference.py"))["Inference"]()
    model.load_state_dict(load_file(tmp_path / "mlp.safetensors"))
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
