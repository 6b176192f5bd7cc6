"""`torchquorum ...`: the list of commands.

Imports no torch, and a command's module only when it is called, so that help appears at once.
"""

from __future__ import annotations

from typing import Any

import click

import torchquorum
from torchquorum.cli.command import Group

# By name, in the order in which users need them: the module, and the line in the list.
COMMANDS = {
    "train": ("torchquorum.cli.train", "Train MNIST on a local cluster, with live progress."),
    "run": ("torchquorum.cli.run", "Run your own script on a local cluster, or on Ray."),
    "join": ("torchquorum.cli.join", "Join a cluster as a ps or compute task, without a script."),
    "hello": ("torchquorum.cli.hello", "Run the two smallest clusters, as a demo."),
    "secret": ("torchquorum.cli.secret", "Create the secret that protects a cluster."),
    "status": ("torchquorum.cli.status", "Show the status of a running cluster."),
    "scale": ("torchquorum.cli.scale", "Change the number of workers of a running job."),
    "report": ("torchquorum.cli.report", "Write an HTML page with the charts of a run."),
    "compare": ("torchquorum.cli.compare", "Train MNIST with several rules and compare them."),
    "simulate": ("torchquorum.cli.simulate", "Simulate rules: what they would do with these workers."),
    "replay": ("torchquorum.cli.replay", "Make a recorded run again, bit for bit."),
    "board": ("torchquorum.cli.tensorboard", "Show a run in TensorBoard."),
    "dashboard": ("torchquorum.cli.dashboard", "Show running clusters on a live page."),
    "checkpoints": ("torchquorum.cli.checkpoints", "List the checkpoints of a run."),
    "tables": ("torchquorum.cli.tables", "Show or export the tables of rows of a run."),
    "export": ("torchquorum.cli.checkpoints", "Export a plain state_dict from a checkpoint."),
    "data": ("torchquorum.cli.data", "Write MNIST as TFRecord files, and inspect such files."),
    "doctor": ("torchquorum.cli.doctor", "Check this machine and the connections to a cluster."),
}


def _normalise(name: str) -> str:
    """Makes --ps_hosts the same as --ps-hosts."""
    return name.replace("_", "-")


SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": _normalise,
    "max_content_width": 100,
}


HELP = """\b
A parameter server for PyTorch. See also `torchquorum COMMAND --help`. Examples:
  torchquorum train        torchquorum run script.py --my-flag 3
"""


@click.group(cls=Group, lazy=COMMANDS, context_settings=SETTINGS, help=HELP)
@click.version_option(torchquorum.__version__, prog_name="torchquorum")
def commands() -> None:
    """All commands."""
