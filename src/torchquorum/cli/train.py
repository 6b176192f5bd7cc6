"""`torchquorum train`: the built-in MNIST job, on a local cluster or as one task of a cluster started by hand."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from torchquorum.cli.view import View
from torchquorum.cluster import TaskId
from torchquorum.errors import ConfigError
from torchquorum.jobs.mnist import MnistOptions
from torchquorum.launcher.local import LocalCluster, Options
from torchquorum.launcher.watch import Watcher

DEFAULTS = MnistOptions()


@click.command(short_help="Train MNIST on a local cluster, with live progress.")
@click.option("--model", default=DEFAULTS.model, show_default=True, help="softmax, mlp (784-500-10) or cnn.")
@click.option(
    "--rule",
    default=DEFAULTS.rule,
    show_default=True,
    help="sync, sync:K, async, async:pipeline, bounded:S, buffered:K.",
)
@click.option("--ps", default=1, show_default=True, help="Number of ps tasks.")
@click.option("--workers", default=2, show_default=True, help="Number of workers.")
@click.option("--steps", default=DEFAULTS.steps, show_default=True, help="Global step at which the run is over.")
@click.option("--batch-size", default=DEFAULTS.batch_size, show_default=True, help="Images per batch and worker.")
@click.option(
    "--optimizer", default=DEFAULTS.optimizer, show_default=True, help="A class of torch.optim; it runs on the ps."
)
@click.option("--lr", default=DEFAULTS.lr, show_default=True, help="Learning rate.")
@click.option("--momentum", default=DEFAULTS.momentum, help="For SGD and RMSprop.")
@click.option("--decay-rate", default=DEFAULTS.decay_rate, help="Exponential decay of the learning rate, 1 for none.")
@click.option("--decay-steps", default=DEFAULTS.decay_steps, show_default=True, help="Global steps per decay.")
@click.option("--staircase", is_flag=True, help="Decay in steps instead of smoothly.")
@click.option("--l2", default=DEFAULTS.l2, help="Adds l2 * sum(w^2) / 2 over the weights to the loss.")
@click.option(
    "--average", default=DEFAULTS.average, help="Decay of moving averages on the ps, such as 0.99; 0 for none."
)
@click.option("--seed", default=DEFAULTS.seed, show_default=True, help="Of weights and data order.")
@click.option("--data", help="Folder with MNIST's idx files, plain or gzip; the packaged ones by default.")
@click.option(
    "--placement", default=DEFAULTS.placement, show_default=True, help="round_robin or greedy, for several ps."
)
@click.option("--slice-bytes", type=int, help="Slice variables of more bytes over all ps tasks.")
@click.option("--device", help="Where the workers compute: cuda:0, /gpu:0 or the CPU, which is the default.")
@click.option("--log-device-placement", is_flag=True, help="Print where variables live and operations run, once.")
@click.option("--allow-soft-placement", is_flag=True, help="Use the CPU for a device that is missing or cannot do it.")
@click.option("--gpu-memory-fraction", type=float, help="Share of a GPU's memory for each worker, such as 0.4.")
@click.option("--transport", default="auto", show_default=True, help="auto, shm or tcp.")
@click.option("--logdir", help="The run's folder; runs/mnist-DATE by default.")
@click.option("--report", help="Write the report as JSON to this file.")
@click.option("--quiet", is_flag=True, help="Only the result.")
@click.option("--job-name", help="Be one task of a cluster started by hand: ps or worker.")
@click.option("--task-id", "--task-index", "task_id", help="Which task of that job.")
@click.option("--ps-hosts", "--ps-host", "ps_hosts", help="host:port,... of the ps tasks.")
@click.option("--worker-hosts", "--worker-host", "worker_hosts", help="host:port,... of the workers.")
def train(**given: Any) -> int:
    """Train MNIST on a local cluster, with live progress; or be one task of a cluster started by hand.

    \b
    Examples:
      torchquorum train
      torchquorum train --model cnn --rule async --workers 4 --report report.json
      torchquorum train --job_name=ps --task_id=0 --ps_hosts=localhost:2222 --worker_hosts=localhost:2223
    """
    place = {k: given.pop(k) for k in ("job_name", "task_id", "ps_hosts", "worker_hosts")}
    transport, report, quiet = given.pop("transport"), given.pop("report"), given.pop("quiet")
    ps, workers = given.pop("ps"), given.pop("workers")
    options = MnistOptions(**given)
    _check(options, transport)
    if any(value is not None for value in place.values()):
        return _one_task(options, place, transport, report)
    options.logdir = options.logdir or f"runs/mnist-{time.strftime('%Y%m%d-%H%M%S')}"
    return _cluster(options, ps, workers, transport, report, quiet)


def _check(options: MnistOptions, transport: str) -> None:
    from torchquorum.cluster.flags import check_transport
    from torchquorum.placement.layout import STRATEGIES

    check_transport(transport, label="--transport")
    if options.placement not in STRATEGIES:
        raise ConfigError(f"--placement {options.placement}: allowed are {', '.join(STRATEGIES)}")
    if options.data is not None and not Path(options.data).is_dir():
        raise ConfigError(f"--data {options.data}: there is no such folder; give one with MNIST's idx files")


def _one_task(options: MnistOptions, place: dict[str, Any], transport: str, report: str | None) -> int:
    from torchquorum.jobs.mnist import train as train_task

    argv = [f"--{name}={value}" for name, value in place.items() if value is not None]
    train_task(options, [*argv, f"--transport={transport}"], report)
    return 0


def _cluster(options: MnistOptions, ps: int, workers: int, transport: str, report: str | None, quiet: bool) -> int:
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="torchquorum-") as folder:
        scratch = Path(folder) / "report.json"
        where = Path(report) if report else scratch
        cluster = LocalCluster(
            Options(
                command=[sys.executable, "-m", "torchquorum.jobs.mnist", options.to_json()],
                ps=ps,
                workers=workers,
                transport=transport,
                report=str(where.absolute()),
            ),
            lambda task, line: view.line(f"[{task.job} {task.index}] {line}"),
            lambda line: view.note(f"torchquorum: {line}"),
        )
        if not quiet:
            console.print(
                f"training {options.model} on MNIST: {ps} ps, {workers} workers, {options.rule}, {options.steps} steps"
            )
        with View(console, quiet=quiet) as view:
            watcher = Watcher(cluster.cluster.address(TaskId("ps", 0)))
            try:
                cluster.start()
                code = cluster.wait(lambda: view.show(watcher.status) if watcher.poll() else None)
            finally:
                watcher.close()
        result = json.loads(where.read_text()) if where.is_file() else None
    if code == 0 and result is not None:
        _summary(console, result, options)
    elif code == 0:
        console.print("torchquorum: the run ended without a report")
        code = 1
    return code


def _summary(console: Console, result: dict[str, Any], options: MnistOptions) -> None:
    accuracy = result["accuracy"]
    shown = f"{100 * accuracy:.2f} %" if accuracy is not None else "unknown"
    console.print(f"test accuracy {shown}", style="bold")
    console.print(
        f"{result['updates']} updates from {result['batches']} batches in {result['seconds']:.1f} s "
        f"({result['batches_per_s']:.0f} batches/s), {result['refused']} gradients refused, "
        f"staleness {result['staleness_mean']:.2f} on average, {result['staleness_max']} at most"
    )
    console.print(f"run folder    {options.logdir}")
    other = "sync" if options.rule.startswith("async") else "async"
    console.print(f"try next      {_program()} train --rule {other}", soft_wrap=True)


def _program() -> str:
    """How to call torchquorum from here: by its name if the shell finds it, else as it was called now."""
    called = Path(sys.argv[0])
    if shutil.which("torchquorum") or called.name != "torchquorum":
        return "torchquorum"
    return os.path.relpath(called)
