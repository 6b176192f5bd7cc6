"""`torchquorum train`: the built-in MNIST job, on a local cluster or as one task of a cluster that is started by hand."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from torchquorum.cli.before_training import check_device, check_optimizer, check_run_folder
from torchquorum.cli.command import Checked, ClusterCommand, Named, Workers, durable_option, option
from torchquorum.cli.dashboard import dashboard_beside
from torchquorum.cli.live_view import View
from torchquorum.cli.run_end import program, report_of_run, show_end, typed_command
from torchquorum.cli.run_folder import new_run_folder
from torchquorum.cluster import TaskId, WorkerRange
from torchquorum.cluster.flags import TRANSPORTS
from torchquorum.errors import ConfigError
from torchquorum.jobs.mnist_job import MODEL_NAMES, MnistOptions
from torchquorum.jobs.slow import parse_slow
from torchquorum.launcher.launched import LaunchOptions
from torchquorum.launcher.local import LocalCluster
from torchquorum.launcher.outcome import INTERRUPTED
from torchquorum.launcher.watch import Watcher
from torchquorum.placement.layout import STRATEGIES
from torchquorum.rules import parse_rule

DEFAULTS = MnistOptions()
RULE, SLOW = Checked(parse_rule), Checked(parse_slow)
TRAINING, CLUSTER = "Training [default]", "Cluster and run [default]"
# One paragraph, so that the long list of options still fits a screen.
HELP = """\b
Train MNIST on a local cluster, or as one task of a cluster started by hand.
Examples:
  torchquorum train --model cnn --rule async --workers 4
  torchquorum train --job_name=ps --task_id=0 --ps_hosts=a:22 --worker_hosts=b:22
"""
HAND = "One task of a cluster started by hand"


@click.command(cls=ClusterCommand, help=HELP)
@option("--model", type=Named(*MODEL_NAMES), default=DEFAULTS.model, section=TRAINING, help="softmax, mlp or cnn")
@option("--data", metavar="DIR", section=TRAINING, help="folder with MNIST's idx files; default: packaged")
@option(
    "--rule",
    type=RULE,
    default=DEFAULTS.rule,
    metavar="RULE",
    section=TRAINING,
    help="sync, sync:2of3, sync:auto, async, bounded:3",
)
@option("--steps", type=int, metavar="N", section=TRAINING, help="stop at this global step; 3000 if no limit is given")
@option("--epochs", type=int, metavar="N", section=TRAINING, help="stop after this many epochs")
@option("--seconds", type=float, metavar="S", section=TRAINING, help="stop after this many seconds")
@option("--batch-size", default=DEFAULTS.batch_size, metavar="N", section=TRAINING, help="images per batch and worker")
@option(
    "--optimizer",
    default=DEFAULTS.optimizer,
    metavar="NAME",
    section=TRAINING,
    help="a class of torch.optim; runs on the ps",
)
@option("--lr", default=DEFAULTS.lr, metavar="X", section=TRAINING, help="learning rate")
@option("--momentum", default=DEFAULTS.momentum, metavar="X", section=TRAINING, help="for SGD and RMSprop")
@option(
    "--decay-rate",
    default=DEFAULTS.decay_rate,
    metavar="X",
    section=TRAINING,
    help="decay factor of the learning rate; 1 for none",
)
@option("--decay-steps", default=DEFAULTS.decay_steps, metavar="X", section=TRAINING, help="global steps per decay")
@option("--staircase", is_flag=True, section=TRAINING, help="decay in steps instead of continuously")
@option("--l2", default=DEFAULTS.l2, metavar="X", section=TRAINING, help="add l2 * sum(w^2) / 2 to the loss")
@option(
    "--average",
    default=DEFAULTS.average,
    metavar="X",
    section=TRAINING,
    help="decay of moving averages, e.g. 0.99; 0: none",
)
@option("--compress", metavar="NAME", section=TRAINING, hidden=True, help="fewer bytes: int8, int4, topk:64/4096+2bit")
@option("--seed", default=DEFAULTS.seed, metavar="N", section=TRAINING, help="seed of weights and data order")
@option("--ps", default=1, metavar="N", section=CLUSTER, help="number of ps tasks")
@option("--workers", type=Workers(), default=2, section=CLUSTER, help="number of workers, or a range MIN:MAX")
@option("--slow", type=SLOW, default="", metavar="W", section=CLUSTER, help="slow workers down: worker1:3x,worker2:2x")
@option(
    "--placement", type=Named(*STRATEGIES), default=DEFAULTS.placement, section=CLUSTER, help="round_robin or greedy"
)
@option("--slice-bytes", type=int, metavar="N", section=CLUSTER, help="split larger variables over all ps tasks")
@option("--device", metavar="NAME", section=CLUSTER, help="device of the workers: cuda:0, /gpu:0; default: cpu")
@option("--log-device-placement", is_flag=True, section=CLUSTER, help="print the device of variables and operations")
@option("--allow-soft-placement", is_flag=True, section=CLUSTER, help="use the CPU if a device is missing")
@option(
    "--gpu-memory-fraction", type=float, metavar="X", section=CLUSTER, help="share of GPU memory per worker, e.g. 0.4"
)
@option("--transport", type=Named(*TRANSPORTS), default="auto", section=CLUSTER, help="auto, shm or tcp")
@option("--link", metavar="RATE", section=CLUSTER, hidden=True, help="each worker behind a line, e.g. 20mbit (root)")
@option("--secret-file", metavar="FILE", section=CLUSTER, help="encrypt connections with the secret in this file")
@option("--insecure", is_flag=True, section=HAND, help="let a ps listen for other hosts without a secret")
@option("--logdir", metavar="DIR", section=CLUSTER, help="run folder; default: runs/mnist-DATE")
@durable_option("--durable", section=CLUSTER)
@option("--start-afresh", is_flag=True, section=CLUSTER, help="begin at step 0 if nothing can be restored")
@option("--accept-loss", is_flag=True, section=CLUSTER, help="durable: go on although updates are lost")
@option("--record", is_flag=True, section=CLUSTER, help="record the run, for `torchquorum replay`")
@option("--report", metavar="FILE", section=CLUSTER, help="write the final report to this file, as JSON")
@option("--dashboard", is_flag=True, section=CLUSTER, help="serve a live page of the run for a browser")
@option("--quiet", is_flag=True, section=CLUSTER, help="print only the result")
@option("--job-name", metavar="JOB", section=HAND, help="ps or worker")
@option(
    "--task-id",
    "--task-index",
    "task_id",
    metavar="N",
    section=HAND,
    help="index of the task in its job (or --task-index)",
)
@option("--ps-hosts", "--ps-host", "ps_hosts", metavar="HOSTS", section=HAND, help="host:port,... of the ps tasks")
@option(
    "--worker-hosts",
    "--worker-host",
    "worker_hosts",
    metavar="HOSTS",
    section=HAND,
    help="host:port,... of the workers",
)
@option("--min-workers", metavar="N", section=HAND, hidden=True, help="MIN of --workers MIN:MAX")
def train(**given: Any) -> int:
    """Trains MNIST."""
    place = {k: given.pop(k) for k in ("job_name", "task_id", "ps_hosts", "worker_hosts", "min_workers")}
    secret_file, insecure = given.pop("secret_file"), given.pop("insecure")
    transport, report, quiet = given.pop("transport"), given.pop("report"), given.pop("quiet")
    dashboard = given.pop("dashboard")
    ps, workers, link = given.pop("ps"), given.pop("workers"), given.pop("link")
    if given["steps"] is None and given["seconds"] is None and given["epochs"] is None:
        given["steps"] = DEFAULTS.steps
    options = MnistOptions(**given)
    if options.data is not None and not Path(options.data).is_dir():
        raise ConfigError(f"--data {options.data}: no such folder; give one with MNIST's idx files")
    if any(value is not None for value in place.values()):
        if workers.elastic and place["min_workers"] is None:
            place["min_workers"] = str(workers.least)
        if dashboard:
            raise ConfigError(
                "--dashboard: is for a whole cluster; call `torchquorum dashboard` with the address of ps task 0"
            )
        place |= {"secret_file": secret_file, "insecure": "true" if insecure else None}
        return _one_task(options, place, transport, report)
    check_workers(options, workers)
    if options.compress is not None:
        from torchquorum.compress.compressor import read_compressor

        read_compressor(options.compress)
    check_optimizer(options.optimizer)
    if options.device is not None and not options.allow_soft_placement:
        check_device(options.device)
    if options.logdir is not None:
        check_run_folder(options.logdir, options.steps)
    again = "the same command goes on"
    if options.logdir is None:
        options.logdir = new_run_folder("mnist")
        again = f"the same command with --logdir {options.logdir} goes on"
    cluster = LaunchOptions(command=[], ps=ps, workers=workers, transport=transport, secret_file=secret_file, link=link)
    cluster.record, cluster.typed = options.record, typed_command()
    return _cluster(options, cluster, report, again, quiet=quiet, dashboard=dashboard)


def check_workers(options: MnistOptions, workers: WorkerRange) -> None:
    """Checks the options that depend on the number of workers.

    Raises:
        ConfigError: The rule or a slowed worker does not fit that number.
    """
    parse_rule(options.rule, workers.most)
    parse_slow(options.slow, workers.most)


def _one_task(options: MnistOptions, place: dict[str, Any], transport: str, report: str | None) -> int:
    from torchquorum.jobs.mnist_job import train as train_task

    argv = [f"--{name}={value}" for name, value in place.items() if value is not None]
    train_task(options, [*argv, f"--transport={transport}"], report)
    return 0


def job_cluster(options: MnistOptions, cluster: LaunchOptions, view: View) -> LocalCluster:
    """Returns a local cluster for the built-in job, not started yet, whose lines go to `view`."""
    cluster.command = [sys.executable, "-m", "torchquorum.jobs.mnist_job", options.to_json()]
    return LocalCluster(
        cluster,
        lambda task, line: view.line(f"[{task.job} {task.index}] {line}"),
        lambda line: view.note(f"torchquorum: {line}"),
    )


def run_job(local: LocalCluster, view: View, *, dashboard: bool = False) -> int:
    """Runs the built-in job on a local cluster, with its progress in `view`; returns its exit code."""
    with view:
        watcher = Watcher(local.cluster.address(TaskId("ps", 0)), access=local.access)
        try:
            local.start()
            with dashboard_beside(dashboard, local, view.note):
                return local.wait(lambda: view.show(watcher.status) if watcher.poll() else view.wait())
        except KeyboardInterrupt:  # before all tasks were started
            return INTERRUPTED
        finally:
            watcher.close()
            local.stop(signal.SIGTERM)


def _cluster(
    options: MnistOptions, cluster: LaunchOptions, report: str | None, again: str, *, quiet: bool, dashboard: bool
) -> int:
    console = Console(highlight=False)
    with report_of_run(report) as found:
        cluster.report = str(found.path)
        if not quiet:
            ends = [f"{options.steps} steps"] if options.steps is not None else []
            ends += [f"{options.epochs} epoch{'s' if options.epochs > 1 else ''}"] if options.epochs is not None else []
            ends += [f"{options.seconds:g} s"] if options.seconds is not None and not ends else []
            length = " or ".join(ends)
            tasks = f"{cluster.ps} ps, {cluster.range} {'worker' if cluster.range.most == 1 else 'workers'}"
            slow = f", slow: {options.slow}" if options.slow else ""
            console.print(f"training {options.model} on MNIST: {tasks}, {options.rule}, {length}{slow}", soft_wrap=True)
        view = View(console, quiet=quiet, seconds=options.seconds)
        local = job_cluster(options, cluster, view)
        code = run_job(local, view, dashboard=dashboard)
        result = found.read()
    if code == 0 and result is None:
        console.print("torchquorum: the run ended without a report")
        return 1
    show_end(console, code, result, local, folder=options.logdir, again=again)
    if code == 0:
        other = "sync" if options.rule.startswith("async") else "async"
        console.print(f"try next      {program()} train --rule {other}", soft_wrap=True)
    return code
