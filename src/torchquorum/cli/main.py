"""`torchquorum ...`: the commands, and how their errors look.

Imports no torch, and no command before it is called, so that help comes at once. A mistake of the user ends with a message
and exit code 2, never a traceback.
"""

from __future__ import annotations

import sys
from typing import Any

import click

import torchquorum
from torchquorum.cli.shape import Group
from torchquorum.errors import TorchQuorumError

# In the order in which people need them: what it does on the right, its module on the left.
COMMANDS = {
    "train": ("torchquorum.cli.train", "Train MNIST on a local cluster, with live progress."),
    "run": ("torchquorum.cli.run", "Start a local cluster of your own script."),
    "join": ("torchquorum.cli.join", "Be one task of a cluster, without a program of your own."),
    "hello": ("torchquorum.cli.hello", "Greet from the two smallest clusters."),
    "secret": ("torchquorum.cli.secret", "Make the secret that keeps strangers out of a cluster."),
    "status": ("torchquorum.cli.status", "Show how a running cluster is doing."),
    "scale": ("torchquorum.cli.scale", "Say how many workers a run shall have, while it goes on."),
    "report": ("torchquorum.cli.report", "Write a page with the pictures of a run."),
    "compare": ("torchquorum.cli.compare", "Train with several rules and put them side by side."),
    "board": ("torchquorum.cli.board", "Show a run in TensorBoard."),
    "checkpoints": ("torchquorum.cli.checkpoints", "List the checkpoints of a run."),
    "export": ("torchquorum.cli.checkpoints", "Write a plain state_dict from a run's newest checkpoint."),
    "data": ("torchquorum.cli.data", "Write MNIST as TFRecord files, and look into such files."),
    "doctor": ("torchquorum.cli.doctor", "Check this machine, and the way to a cluster's hosts."),
}


def _normalise(name: str) -> str:
    """--ps_hosts is --ps-hosts."""
    return name.replace("_", "-")


SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": _normalise,
    "max_content_width": 100,
}


HELP = """\b
A parameter server for PyTorch. `torchquorum COMMAND --help` says more. Examples:
  torchquorum train                MNIST on 1 ps and 2 workers of this machine
  torchquorum run script.py --my-flag 3
"""


@click.group(cls=Group, lazy=COMMANDS, context_settings=SETTINGS, help=HELP)
@click.version_option(torchquorum.__version__, prog_name="torchquorum")
def commands() -> None:
    """All commands."""


def main() -> None:
    """Runs the command line; the entry point of the `torchquorum` program."""
    try:
        code = commands.main(prog_name="torchquorum", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except TorchQuorumError as error:
        click.echo(f"torchquorum: error: {error}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # `torchquorum ... | head`: nobody reads on, and that is no mistake
        sys.exit(141)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
