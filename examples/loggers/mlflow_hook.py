"""MNIST with its curves in MLflow: a hook that gives them to `mlflow`. `pip install mlflow` first.

torchquorum run --workers 2 examples/loggers/mlflow_hook.py               # into the file mlflow.db, without a server
torchquorum run --workers 2 examples/loggers/mlflow_hook.py --tracking_uri http://localhost:5000
"""

import argparse

import mlflow  # pyright: ignore[reportMissingImports]
import torch

import torchquorum as tq
from torchquorum.jobs.models import MLP, evaluate


class MlflowHook(tq.Hook):
    """Logs loss and rate of the chief under the global step, and at the end what the program has recorded."""

    def __init__(self, every: int = 10, experiment: str = "torchquorum") -> None:
        self.every, self.experiment, self.began, self.next = every, experiment, False, 0

    def after_create_session(self, session: tq.hooks.HookSession) -> None:
        if session.task.is_chief and not self.began:  # it is called again after a recovery
            self.began = True
            mlflow.set_experiment(self.experiment)
            mlflow.start_run()
            mlflow.log_params({"rule": str(session.optimizer.rule), "workers": session.task.num_workers})

    def after_run(self, session: tq.hooks.HookSession, ran: tq.hooks.Ran) -> None:
        if not self.began or ran.step.version < self.next:
            return
        self.next = ran.step.version + self.every
        values = {"learning_rate": session.optimizer.used_lr[0]} | ({} if ran.loss is None else {"loss": ran.loss})
        mlflow.log_metrics(values, step=ran.step.version)

    def end(self, session: tq.hooks.HookSession) -> None:
        if self.began:
            mlflow.log_metrics({f"final_{k}": v for k, v in session.results.items()}, step=session.global_step)
            mlflow.end_run()  # after an exception there is no `end`: the run stays as not finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="updates of the model (default: %(default)s)")
    parser.add_argument(
        "--tracking_uri", default="sqlite:///mlflow.db", help="where MLflow keeps it (default: %(default)s)"
    )
    task = tq.join(parser=parser)
    flags = task.flags

    mlflow.set_tracking_uri(flags.tracking_uri)
    mnist = tq.data.load_mnist()
    batches = tq.Batches(mnist.train, 100, worker=task.index, workers=task.num_workers)
    torch.manual_seed(0)
    model = MLP()
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.2), rule=tq.Sync())
    hooks = [MlflowHook()]
    with tq.Session(
        task, model, optimizer, logdir="runs/mlflow", last_step=flags.steps, data=batches, hooks=hooks
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
