"""Lightning's Trainer: torchquorum run --workers 2 examples/lightning/train.py."""

import argparse
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import torchquorum as tq
from torchquorum.lightning import QuorumStrategy


class Classifier(L.LightningModule):
    """As for any Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3, help="epochs of the run (default: %(default)s)")
    parser.add_argument("--logdir", default="runs/lightning", help="folder of the checkpoints (default: %(default)s)")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    strategy = QuorumStrategy(rule=tq.Sync(), task=tq.join(parser=parser))  # a ps serves in join until the job ends
    args = strategy.task.flags

    L.seed_everything(0, verbose=False)
    x = torch.randn(128, 4)
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=[ModelCheckpoint(args.logdir, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    model = Classifier()
    trainer.fit(model, DataLoader(dataset, 4, shuffle=True), DataLoader(dataset, 64), ckpt_path=args.resume)
    if strategy.task.is_chief:
        print(f"step {trainer.global_step}, val_loss {trainer.callback_metrics['val_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
