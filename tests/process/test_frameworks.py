"""Lightning, the Hugging Face Trainer and accelerate themselves: the plain bits, updates of two workers, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXTRAS = ["accelerate", "lightning", "transformers"]


def run(*arguments: str, timeout_s: float = 110.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)


def need(extra: str) -> None:
    if importlib.util.find_spec(extra) is None:
        pytest.skip(f"needs the extra {extra!r}: pip install 'torchquorum[{extra}]'")


MORE = [pytest.param(name, marks=pytest.mark.frameworks) for name in ("lightning-callbacks", "transformers-best")]


@pytest.mark.parametrize("program", [*EXTRAS, "lightning-gan", *MORE])
def test_one_worker_has_the_bits_of_the_plain_framework_also_after_its_checkpoint(program: str) -> None:
    need(program.partition("-")[0])
    done = run(sys.executable, "-m", "tests.process.frameworks_program", program)
    plain, ours = re.findall(r"trained (\d+ \w+)", done.stdout) or pytest.fail(done.stdout + done.stderr)
    assert plain == ours


EXAMPLES = [
    ("accelerate", "examples/accelerate/train.py", (), "epoch 1: step 8"),
    ("lightning", "examples/lightning/train.py", ("--logdir",), "step 24, val_loss"),
    ("transformers", "examples/trainer/train.py", ("--logdir",), "step 8"),
]


@pytest.mark.frameworks
@pytest.mark.parametrize(("extra", "program", "folder", "says"), EXAMPLES, ids=EXTRAS)
def test_two_workers_make_the_updates_of_their_joined_batches(
    extra: str, program: str, folder: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    need(extra)
    where = [*folder, str(tmp_path / "run")] if folder else []
    done = run(str(Path(sys.executable).with_name("torchquorum")), "run", "--workers", "2", program, *where)
    assert done.returncode == 0 and says in done.stdout, done.stdout + done.stderr


WRONG = """
import torch, torchquorum as tq
from accelerate import Accelerator
task, accelerator = tq.join(), Accelerator(gradient_accumulation_steps=2, cpu=True)
model = torch.nn.Linear(2, 1)
optimizer = {optimizer}
with tq.Session(task, model, optimizer):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
"""
REFUSED = [
    ("tq.Optimizer(torch.optim.SGD(model.parameters()))", "the optimizer was not prepared"),
    ("tq.Optimizer(accelerator.prepare(torch.optim.SGD(model.parameters())))", "before accelerator.prepare()"),
]


@pytest.mark.frameworks
@pytest.mark.parametrize(("optimizer", "says"), REFUSED)
def test_accumulation_that_would_be_ignored_is_an_error_before_the_first_update(optimizer: str, says: str) -> None:
    need("accelerate")
    done = run(sys.executable, "-c", WRONG.format(optimizer=optimizer))
    assert done.returncode != 0 and says in done.stderr and "Traceback" not in done.stderr


def ended_with(done: subprocess.CompletedProcess[str]) -> list[torch.Tensor]:
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"ended with (\[.*\])", done.stdout)
    return [torch.tensor(json.loads(numbers)) for numbers in found]


@pytest.mark.frameworks
@pytest.mark.parametrize("program", [*EXTRAS, "lightning-gan"])
def test_two_workers_under_sync_equal_the_joined_batch(program: str) -> None:
    need(program.partition("-")[0])
    path = "tests/process/joined_program.py"
    (whole,) = ended_with(run(sys.executable, path, program, "--plain"))
    torchquorum = str(Path(sys.executable).with_name("torchquorum"))
    one, two = ended_with(run(torchquorum, "run", "--workers", "2", path, program))
    assert torch.equal(one, two)
    torch.testing.assert_close(one, whole, atol=2e-5, rtol=1e-4)
