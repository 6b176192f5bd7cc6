"""Rows of tables on a real GPU. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.session.join import Task
from torchquorum.worker.row_transfer import HostCopy, on_host, to_device

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
    pytest.mark.library_keeps_sockets,
]


def test_a_gradient_that_changes_after_its_copy_began_is_copied_again() -> None:
    source = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    early = HostCopy.begin(source)
    assert torch.equal(on_host([source], [early])[0], source.cpu())
    source.mul_(0.5)
    assert torch.equal(on_host([source], [early])[0], source.cpu())
    assert torch.equal(to_device(source.cpu(), source.device), source)


@pytest.mark.parametrize("clips", [False, True])
def test_rows_on_a_gpu_are_trained_as_on_the_cpu(clips: bool) -> None:
    def train(device: str) -> torch.Tensor:
        def work(task: Task) -> torch.Tensor:
            torch.manual_seed(0)
            table, words = tq.Table(8, mode="sum", seed=3), nn.Embedding(50, 8, sparse=True, device=device)
            nn.init.constant_(words.weight, 0.5)
            top = nn.Linear(8, 1).to(device)
            model = nn.ModuleList([table, words, top])
            optimizer = tq.Optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
            with tq.Session(task, model, optimizer, last_step=8, patience=PATIENCE) as session:
                while not session.should_stop():
                    ids = torch.randint(0, 50, (64, 3), generator=torch.Generator().manual_seed(session.global_step))
                    ids = ids.to(device)
                    optimizer.zero_grad()
                    loss = top(table(ids * (1 << 40)) + words(ids).mean(1)).square().mean()
                    loss.backward()
                    if clips:
                        nn.utils.clip_grad_norm_(table.parameters(), 0.01)
                    optimizer.step()
                return table(torch.arange(50, device=device)[:, None] * (1 << 40)).detach().cpu()

        return Cluster(ps=1, workers=1).run(work)[0]

    assert torch.allclose(train("cuda"), train("cpu"), rtol=1e-4, atol=1e-5)
