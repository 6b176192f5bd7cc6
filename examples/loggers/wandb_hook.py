"""MNIST with its curves in Weights & Biases: a hook that gives them to `wandb`. `pip install wandb` first.

torchquorum run --workers 2 examples/loggers/wandb_hook.py                # offline: `wandb sync FOLDER` uploads it later
torchquorum run --workers 2 examples/loggers/wandb_hook.py --mode online  # after `wandb login`
"""

import argparse

import torch
import wandb  # pyright: ignore[reportMissingImports]

import torchquorum as tq
from torchquorum.jobs.models import MLP, evaluate


class WandbHook(tq.Hook):
    """Logs loss, rate and local step of the chief under the global step, and at the end what the program has recorded."""

    def __init__(self, every: int = 10, **init: object) -> None:
        self.every, self.init, self.run, self.next = every, init, None, 0

    def after_create_session(self, session: tq.hooks.HookSession) -> None:
        if session.task.is_chief and self.run is None:  # it is called again after a recovery
            config = {"rule": str(session.optimizer.rule), "workers": session.task.num_workers}
            self.run = wandb.init(config=config, **self.init)

    def after_run(self, session: tq.hooks.HookSession, ran: tq.hooks.Ran) -> None:
        if self.run is None or ran.step.version < self.next:
            return
        self.next = ran.step.version + self.every
        values = {"learning_rate": session.optimizer.used_lr[0], "local_step": ran.step.local_step}
        self.run.log(values | ({} if ran.loss is None else {"loss": ran.loss}), step=ran.step.version)

    def end(self, session: tq.hooks.HookSession) -> None:
        if self.run is not None:
            self.run.summary.update({f"final/{name}": value for name, value in session.results.items()})
            self.run.finish()  # after an exception there is no `end`: wandb marks the run as crashed by itself


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="updates of the model (default: %(default)s)")
    parser.add_argument("--mode", default="offline", help="offline or online (default: %(default)s)")
    task = tq.join(parser=parser)
    flags = task.flags

    mnist = tq.data.load_mnist()
    batches = tq.Batches(mnist.train, 100, worker=task.index, workers=task.num_workers)
    torch.manual_seed(0)
    model = MLP()
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.2), rule=tq.Sync())
    hook = WandbHook(project="torchquorum", mode=flags.mode, dir=".")
    with tq.Session(
        task, model, optimizer, logdir="runs/wandb", last_step=flags.steps, data=batches, hooks=[hook]
    ) as session:
        while not session.should_stop():
            x, y = next(batches)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(loss=loss)
        if task.is_chief:
            _, accuracy = evaluate(model, mnist.test)
            session.record(accuracy=accuracy)


if __name__ == "__main__":
    main()
