"""The same training in a framework, plain on whole batches or by two workers on a half of each; prints the parameters at the end."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from typing import Any

import torch
from torch.nn.functional import cross_entropy, softplus
from torch.utils.data import DataLoader, SequentialSampler, Subset, TensorDataset

import torchquorum as tq

warnings.filterwarnings("ignore")
X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X.sum(1) > 0).long())
BATCH, EPOCHS = 8, 2


def lightning(task: Any, *, gan: bool) -> torch.nn.Module:
    import lightning as L

    from torchquorum.lightning import QuorumStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not gan
            self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            if not gan:
                return cross_entropy(self.two(torch.tanh(self.one(x))), y)
            first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
            second.zero_grad()
            self.manual_backward((softplus(-self.two(x)) + softplus(self.two(self.one(x).detach()))).mean())
            second.step()
            first.zero_grad()
            self.manual_backward(softplus(-self.two(self.one(x))).mean())
            first.step()
            return None

        def configure_optimizers(self) -> Any:
            if not gan:
                return torch.optim.AdamW(self.parameters(), lr=0.05)
            return torch.optim.Adam(self.one.parameters(), lr=0.05), torch.optim.SGD(self.two.parameters(), lr=0.1)

    strategy: dict[str, Any] = {"strategy": QuorumStrategy(task=task)} if task is not None else {}
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        accumulate_grad_batches=1 if gan else 2,
        gradient_clip_val=None if gan else 10.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **strategy,
    )
    model = Module()
    trainer.fit(model, DataLoader(DATA, BATCH if task is None else BATCH // 2))
    return model


def accelerate(task: Any) -> torch.nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = torch.nn.Linear(4, 2)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(DATA, BATCH)
    if task is not None:
        optimizer = tq.Optimizer(optimizer)
        loader = DataLoader(DATA, BATCH // 2, sampler=tq.data.Sampler(DATA, task, shuffle=False))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def epoch() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                optimizer.zero_grad()

    if task is None:
        for _ in range(EPOCHS):
            epoch()
        return model
    with tq.Session(task, model, optimizer) as session:
        for _ in session.epochs(EPOCHS):
            epoch()
    return model


def transformers(task: Any) -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from torchquorum.transformers import QuorumCallback

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)  # pyright: ignore[reportArgumentType]

    rows: Any = [{"input_ids": (torch.arange(8) * (i % 7)) % 50, "labels": torch.tensor(i % 2)} for i in range(64)]
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model: Any = BertForSequenceClassification(
        BertConfig(vocab_size=50, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if task is not None:
        optimizer = tq.Optimizer(optimizer)
        rows = Subset(rows, range(task.index, len(rows), 2))
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH if task is None else BATCH // 2,
            gradient_accumulation_steps=2,
            max_grad_norm=10.0,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        InOrder(
            model,
            arguments,
            train_dataset=rows,
            optimizers=(optimizer, scheduler),
            callbacks=[QuorumCallback(task)] if task is not None else [],
        ).train()
    return model


def main() -> None:
    name, plain = sys.argv.pop(1), "--plain" in sys.argv
    if plain:
        sys.argv.remove("--plain")
    task = None if plain else tq.join()
    torch.manual_seed(3)
    programs: dict[str, Any] = {
        "lightning": lambda: lightning(task, gan=False),
        "lightning-gan": lambda: lightning(task, gan=True),
        "accelerate": lambda: accelerate(task),
        "transformers": lambda: transformers(task),
    }
    model = programs[name]()
    print("ended with", json.dumps(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()), flush=True)


if __name__ == "__main__":
    main()
