"""One trainer of the recommender's work: prints examples per second.

    python rows_loop.py table|embedding|sparse|fbgemm SECONDS [SEED [FOLDER OF FBGEMM]]

`table`: tq.Table with row-wise Adagrad; `embedding`: 26 nn.EmbeddingBag(sparse=True) with Adagrad; both as tasks of torchquorum, async.
`sparse` and `fbgemm` share nothing with anybody: the same modules with torch.optim.Adagrad, and fbgemm-gpu-cpu's tables with fused
row-wise Adagrad, the fastest known on a CPU.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from family import Window
from rows_work import BATCH, DIM, FEATURES, IDS, WARM_UP, Interaction, batches
from torch import nn

import torchquorum as tq

LookUp = Callable[[torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """The tables and the dense part."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dense, self.kind = Interaction(), kind
        if kind == "table":
            made = tq.rows.RowwiseAdagrad(lr=0.02)
            self.table = tq.Table(DIM, init=tq.rows.Uniform(-0.01, 0.01), optimizer=made)
            self.register_buffer("first", torch.arange(FEATURES) << 32, persistent=False)
        elif kind != "fbgemm":
            self.tables = nn.ModuleList(nn.EmbeddingBag(IDS, DIM, mode="sum", sparse=True) for _ in range(FEATURES))
            for table in self.tables:
                nn.init.uniform_(table.weight, -0.01, 0.01)
        else:
            self.look_up = fused()

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Returns a logit for each example."""
        if self.kind == "table":
            rows = self.table(ids + self.first)
        elif self.kind == "fbgemm":
            rows = self.look_up(ids)
        else:
            rows = torch.stack([table(ids[:, f : f + 1]) for f, table in enumerate(self.tables)], 1)
        return self.dense(numbers, rows)


def fused() -> LookUp:
    """Returns a look-up in tables of fbgemm-gpu-cpu, which update themselves in the backward pass."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(IDS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)] * FEATURES,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.02,
        eps=1e-8,
    )
    for weight in tables.split_embedding_weights():
        weight.data.uniform_(-0.01, 0.01)
    offsets = torch.arange(FEATURES * BATCH + 1)
    return lambda ids: tables(ids.t().reshape(-1), offsets).view(BATCH, FEATURES, DIM)


def train(model: Model, optimizer: torch.optim.Optimizer, seed: int, seconds: float) -> str:
    """Trains for so long; returns the line that the harness reads."""
    data, step, window = batches(seed), 0, Window()
    while step <= WARM_UP or window.seconds < seconds:
        numbers, ids, labels = data[step % len(data)]
        loss = nn.functional.binary_cross_entropy_with_logits(model(numbers, ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step == WARM_UP:
            window = Window()
    return window.line((step - WARM_UP) * BATCH)


def main() -> None:
    """Trains alone, or as a task."""
    kind, seconds = sys.argv[1], float(sys.argv[2])
    sys.path += [folder for folder in sys.argv[4:] if folder]
    task = tq.join() if kind in ("table", "embedding") else None
    torch.set_num_threads(1)
    model = Model(kind)
    plain = torch.optim.Adagrad(model.parameters(), lr=0.02)
    if task is None:
        line = train(model, plain, int(sys.argv[3]), seconds)
    else:
        optimizer = tq.Optimizer(plain, rule=tq.Async())
        with tq.Session(task, model, optimizer):
            line = train(model, optimizer, task.index, seconds)
    print(line, end="", flush=True)


if __name__ == "__main__":
    main()
