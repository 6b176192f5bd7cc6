"""Trains the same model with a framework, plain and with torchquorum alone in its process, and prints both as hashes of their bits."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchquorum as tq

warnings.filterwarnings("ignore")
X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X.sum(1) > 0).long())


def digest(model: torch.nn.Module) -> str:
    return hashlib.sha1(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def with_accelerate(task: Any) -> tuple[int, str]:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = torch.nn.Linear(4, 2)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    if task is not None:
        optimizer = tq.Optimizer(optimizer)
    loader = DataLoader(TensorDataset(*DATA.tensors[:2]), batch_size=4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def train() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    if task is None:
        train()
        return 4, digest(model)
    with tq.Session(task, model, optimizer) as session:
        train()
        return session.global_step, digest(model)


def with_lightning(task: Any) -> tuple[int, str]:
    import lightning as L

    from torchquorum.lightning import QuorumStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with tempfile.TemporaryDirectory() as folder:
        path = None
        for epochs in (1, 3):  # the second goes on from the checkpoint of the first
            strategy: dict[str, Any] = {"strategy": QuorumStrategy(task=task)} if task is not None else {}
            trainer = L.Trainer(
                accelerator="cpu",
                max_epochs=epochs,
                gradient_clip_val=0.5,
                accumulate_grad_batches=2,
                default_root_dir=folder,
                **quiet,
                **strategy,
            )
            model = Module()
            trainer.fit(model, DataLoader(DATA, 4, shuffle=True), DataLoader(DATA, 16), ckpt_path=path)
            if epochs == 1:
                path = trainer.checkpoint_callback.best_model_path  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        return trainer.global_step, digest(model)


def with_lightning_gan(task: Any) -> tuple[int, str]:
    """Manual optimization: two optimizers, accumulation, clipping and schedulers by hand; global_step counts the updates of both."""
    import lightning as L

    from torchquorum.lightning import QuorumStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> None:
            generate, discriminate = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
            loss_of, real = torch.nn.functional.softplus, batch[0]
            noise = torch.randn(len(real), 3)
            self.toggle_optimizer(discriminate)
            fake = self.generator(noise).detach()
            loss = (loss_of(-self.discriminator(real)) + loss_of(self.discriminator(fake))).mean()
            self.manual_backward(loss / 2)
            if index % 2:
                self.clip_gradients(discriminate, gradient_clip_val=0.5, gradient_clip_algorithm="norm")  # pyright: ignore[reportArgumentType]
                discriminate.step()
                discriminate.zero_grad()
            self.untoggle_optimizer(discriminate)
            self.toggle_optimizer(generate)
            generate.zero_grad()
            self.manual_backward(loss_of(-self.discriminator(self.generator(noise))).mean())
            generate.step()
            self.untoggle_optimizer(generate)
            self.log("steps", float(self.trainer.global_step))

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.discriminator(batch[0]).mean())

        def on_train_epoch_end(self) -> None:
            for scheduler in self.lr_schedulers():  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
                scheduler.step()  # pyright: ignore[reportCallIssue]

        def configure_optimizers(self) -> Any:
            generate = torch.optim.Adam(self.generator.parameters(), lr=0.02)
            discriminate = torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9)
            step = torch.optim.lr_scheduler.StepLR
            return [generate, discriminate], [step(generate, 1, 0.5), step(discriminate, 1, 0.5)]

    with tempfile.TemporaryDirectory() as folder:
        path = None
        for epochs in (1, 3):
            strategy: dict[str, Any] = {"strategy": QuorumStrategy(task=task)} if task is not None else {}
            trainer = L.Trainer(
                accelerator="cpu",
                max_epochs=epochs,
                default_root_dir=folder,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                **strategy,
            )
            model = Module()
            trainer.fit(model, DataLoader(DATA, 4, shuffle=True), DataLoader(DATA, 16), ckpt_path=path)
            if epochs == 1:
                path = trainer.checkpoint_callback.best_model_path  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        return trainer.global_step, digest(model)


def with_lightning_callbacks(task: Any) -> tuple[int, str]:
    """Callbacks that write to the model, a search for a learning rate, and a checkpoint made after the training."""
    import lightning as L
    from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.tuner import Tuner

    from torchquorum.lightning import QuorumStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.lr = (
                torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)),
                0.01,
            )

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    steps, digests = 0, ""
    with tempfile.TemporaryDirectory() as folder:

        def trainer(epochs: int, *callbacks: Any) -> L.Trainer:
            strategy: dict[str, Any] = {"strategy": QuorumStrategy(task=task)} if task is not None else {}
            quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
            return L.Trainer(
                accelerator="cpu",
                max_epochs=epochs,
                default_root_dir=folder,
                callbacks=[*callbacks],
                **quiet,
                **strategy,
            )

        data = DataLoader(DATA, 4), DataLoader(DATA, 16)
        for callback in (StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1), WeightAveraging(), None):
            model = Module()
            if callback is None:
                callback = EarlyStopping("val_loss", min_delta=0.1, patience=0)
                Tuner(trainer(2)).lr_find(model, data[0], num_training=20)
            first = trainer(3, callback)
            first.fit(model, *data)
            steps, digests = steps + first.global_step, digests + digest(model)
        first.save_checkpoint(path := f"{folder}/after.ckpt")
        second = trainer(first.current_epoch + 2)
        second.fit(model, *data, ckpt_path=path)
        return steps + second.global_step, digests + digest(model)


def with_trainer_best(task: Any) -> tuple[int, str]:
    """A Trainer that ends early and loads the best of its checkpoints."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        EarlyStoppingCallback,
        Trainer,
        TrainingArguments,
    )

    from torchquorum.transformers import QuorumCallback

    rows = [{"input_ids": torch.arange(8) * (i % 7), "labels": torch.tensor(i % 2)} for i in range(32)]
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model: Any = BertForSequenceClassification(BertConfig(vocab_size=50, hidden_size=16, **sizes))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.3)
    if task is not None:
        optimizer = tq.Optimizer(optimizer)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=6,
            per_device_train_batch_size=4,
            eval_strategy="steps",
            eval_steps=2,
            save_steps=2,
            load_best_model_at_end=True,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        callbacks: list[Any] = [EarlyStoppingCallback(1), *([QuorumCallback(task)] if task is not None else [])]
        trainer = Trainer(
            model,
            arguments,
            train_dataset=rows,
            eval_dataset=rows[:8],
            optimizers=(optimizer, None),  # pyright: ignore[reportArgumentType]
            callbacks=callbacks,
        )
        trainer.train()
        assert (trainer.state.best_global_step or 0) < trainer.state.global_step
        return trainer.state.global_step, digest(model)


def with_trainer(task: Any) -> tuple[int, str]:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
    from transformers import get_linear_schedule_with_warmup as linear

    from torchquorum.transformers import QuorumCallback

    rows = [{"input_ids": torch.arange(8) * (i % 7), "labels": torch.tensor(i % 2)} for i in range(32)]
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    with tempfile.TemporaryDirectory() as folder:
        for last in (None, f"{folder}/checkpoint-2"):
            torch.manual_seed(1)
            model: Any = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3)
            if task is not None:
                optimizer = tq.Optimizer(optimizer)
            arguments = TrainingArguments(
                folder,
                max_steps=4,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                save_steps=2,
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
            )
            callbacks: list[Any] = [QuorumCallback(task)] if task is not None else []
            scheduler = linear(optimizer, 1, 4)
            trainer = Trainer(
                model,
                arguments,
                train_dataset=rows,
                optimizers=(optimizer, scheduler),
                callbacks=callbacks,  # pyright: ignore[reportArgumentType]
            )
            trainer.train(resume_from_checkpoint=last)
        return trainer.state.global_step, digest(model)


PROGRAMS = {
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "lightning-gan": with_lightning_gan,
    "lightning-callbacks": with_lightning_callbacks,
    "transformers": with_trainer,
    "transformers-best": with_trainer_best,
}


def main() -> None:
    program = PROGRAMS[sys.argv.pop(1)]
    task = tq.join()
    for given in (None, task):
        torch.manual_seed(3)
        print("trained", *program(given), flush=True)


if __name__ == "__main__":
    main()
