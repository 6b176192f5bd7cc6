"""accelerate, with gradients of two micro-batches in an update: torchquorum run --workers 2 examples/accelerate/train.py."""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import torchquorum as tq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2, help="epochs of the run (default: %(default)s)")
    task = tq.join(parser=parser)

    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    x = torch.randn(64, 4)
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    loader = DataLoader(dataset, batch_size=4, sampler=tq.data.Sampler(dataset, task))
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = tq.Optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), rule=tq.Sync())  # before prepare
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    with tq.Session(task, model, optimizer) as session:
        for epoch in session.epochs(task.flags.epochs):
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            if task.is_chief:
                print(f"epoch {epoch}: step {session.global_step}", flush=True)


if __name__ == "__main__":
    main()
