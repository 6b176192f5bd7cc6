"""Hugging Face Trainer on a tiny BERT: torchquorum run --workers 2 examples/trainer/train.py."""

import argparse
from typing import Any

import torch
from torch.utils.data import Dataset, Subset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
    set_seed,
)

import torchquorum as tq
from torchquorum.transformers import QuorumCallback


class Sums(Dataset[dict[str, torch.Tensor]]):
    """Is the sum of the tokens even?"""

    def __init__(self, rows: int) -> None:
        self.tokens = torch.randint(0, 50, (rows, 8))
        self.labels = self.tokens.sum(1) % 2

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="updates of the run (default: %(default)s)")
    parser.add_argument("--logdir", default="runs/trainer", help="folder of the checkpoints (default: %(default)s)")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    task = tq.join(parser=parser)
    args = task.flags

    set_seed(0)
    dataset = Sums(128)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = BertForSequenceClassification(BertConfig(vocab_size=50, intermediate_size=16, **sizes))
    optimizer = tq.Optimizer(torch.optim.AdamW(model.parameters(), lr=5e-3), rule=tq.Sync())
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, args.steps)
    trainer = Trainer(
        model,
        TrainingArguments(
            args.logdir,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            save_steps=4,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Subset(dataset, range(task.index, len(dataset), task.num_workers)),  # this worker's part
        optimizers=(optimizer, scheduler),
        callbacks=[QuorumCallback(task)],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    if task.is_chief:
        model.save_pretrained(f"{args.logdir}/final")
        print(f"step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()
