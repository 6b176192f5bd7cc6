"""Two workers in sync mode against what TensorFlow's SyncReplicasOptimizer computed (tests/golden/README.md)."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster, train
from torchquorum.session.join import Task

GOLDEN = Path(__file__).parent.parent / "golden"
WEIGHTS, RATE = 5e-7, 2e-9


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name) as archive:
        return dict(archive)


def load_batches() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the images, their labels, and the rows of each worker's batches by step."""
    data = load("data.npz")
    images = torch.from_numpy(data["pool_images"]).float() / 255
    labels, rows = (torch.from_numpy(data[name].astype(np.int64)) for name in ("pool_labels", "idx_sync"))
    return images, labels, rows


class Golden(nn.Module):
    """TensorFlow's layout: x @ w + b."""

    w1: nn.Parameter
    b1: nn.Parameter
    w2: nn.Parameter
    b2: nn.Parameter

    def __init__(self, init: dict[str, np.ndarray]) -> None:
        super().__init__()
        for name in ("w1", "b1", "w2", "b2"):
            self.register_parameter(name, nn.Parameter(torch.from_numpy(init[name].copy())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.w1 + self.b1) @ self.w2 + self.b2


@pytest.mark.parametrize("ps", [1, 2])
def test_moving_averages_equal_tensorflow(ps: int) -> None:
    init, golden = load("init.npz"), load("ema.npz")
    images, labels, rows = load_batches()
    steps = rows.shape[1]
    regularize = tq.tensorflow.l2_regularizer(1e-4)
    cluster = Cluster(ps=ps, workers=2)
    all_in = threading.Barrier(2)
    followed: list[dict[str, np.ndarray]] = []

    def work(task: Task) -> None:
        model = Golden(init)
        optimizer = tq.Optimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            schedule=tq.ExponentialDecay(decay_steps=550, decay_rate=0.99),
            average=tq.ExponentialMovingAverage(0.99),
        )
        with tq.Session(task, model, optimizer, last_step=steps, patience=PATIENCE) as session:
            all_in.wait(20)
            while not session.should_stop():
                batch = rows[task.index, session.local_step]
                optimizer.zero_grad()
                (nn.functional.cross_entropy(model(images[batch]), labels[batch]) + regularize(model)).backward()
                optimizer.step()
                if task.is_chief:
                    variables = model.w2.detach().clone()
                    with session.averaged():
                        followed.append({n: p.detach().numpy().copy() for n, p in model.named_parameters()})
                    assert torch.equal(model.w2, variables)
                all_in.wait(20)

    cluster.run(work, work)
    for k, averages in enumerate(followed, 1):
        np.testing.assert_allclose(averages["b1"], golden["ema_b1_steps"][k], atol=WEIGHTS, rtol=0)
        np.testing.assert_allclose(averages["b2"], golden["ema_b2_steps"][k], atol=WEIGHTS, rtol=0)
        sample = averages["w1"].reshape(-1)[init["w1_sample_flat"]]
        np.testing.assert_allclose(sample, golden["ema_w1_sample_steps"][k], atol=WEIGHTS, rtol=0)
    for name in [n for n in golden if n.startswith("ema_w2_step")]:
        step = int(name.removeprefix("ema_w2_step"))
        np.testing.assert_allclose(followed[step - 1]["w2"], golden[name], atol=WEIGHTS, rtol=0)


@pytest.mark.parametrize("ps", [1, 2])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_sync_equals_tensorflow(ps: int, transport: str) -> None:
    init, golden = load("init.npz"), load("sync2.npz")
    images, labels, rows = load_batches()
    steps = rows.shape[1]
    regularize = tq.tensorflow.l2_regularizer(1e-4)
    losses = np.zeros(golden["loss"].shape)
    followed: list[dict[str, np.ndarray]] = []

    def backward(model: nn.Module, worker: int, step: int) -> None:
        if worker == 0:
            followed.append({n: p.detach().numpy().copy() for n, p in model.named_parameters()})
        batch = rows[worker, step]
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch]) + regularize(model)
        losses[worker, step] = loss.item()
        loss.backward()

    final, seen = train(
        lambda: Golden(init),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
        backward,
        steps=steps,
        ps=ps,
        workers=2,
        transport=transport,
        schedule=tq.ExponentialDecay(decay_steps=550, decay_rate=0.99),
    )
    followed.append(dict(zip(("w1", "b1", "w2", "b2"), (p.numpy() for p in final), strict=True)))
    np.testing.assert_allclose(losses, golden["loss"], atol=1e-5)
    np.testing.assert_allclose([0.01, *(s.lr for s in seen)][:steps], golden["lr"][0], atol=RATE, rtol=0)
    assert [s.version for s in seen] == list(range(1, steps + 1))
    for k, weights in enumerate(followed):
        np.testing.assert_allclose(weights["b1"], golden["b1_steps"][k], atol=WEIGHTS, rtol=0)
        np.testing.assert_allclose(weights["b2"], golden["b2_steps"][k], atol=WEIGHTS, rtol=0)
        sample = weights["w1"].reshape(-1)[init["w1_sample_flat"]]
        np.testing.assert_allclose(sample, golden["w1_sample_steps"][k], atol=WEIGHTS, rtol=0)
    for name in [n for n in golden if n.startswith("w2_step")]:
        step = int(name.removeprefix("w2_step"))
        np.testing.assert_allclose(followed[step]["w2"], golden[name], atol=WEIGHTS, rtol=0)
    for name, value in zip(("w1", "b1", "w2", "b2"), final, strict=True):
        if f"{name}_final" in golden:
            np.testing.assert_allclose(value.numpy(), golden[f"{name}_final"], atol=WEIGHTS, rtol=0)
