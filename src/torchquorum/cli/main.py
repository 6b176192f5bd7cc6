"""`torchquorum ...`: the commands, their options and their errors.

Imports no torch, so that help comes at once. A mistake of the user ends with a message and exit code 2, never a traceback.
"""

from __future__ import annotations

import difflib
import sys
from typing import Any

import click

import torchquorum
from torchquorum.errors import TorchQuorumError


class Group(click.Group):
    """A group of commands that suggests the nearest name for a misspelt one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Finds the command, or says which one may have been meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(error.message + hint, ctx) from None


def _normalise(name: str) -> str:
    """--ps_hosts is --ps-hosts."""
    return name.replace("_", "-")


SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": _normalise,
    "max_content_width": 100,
}


@click.group(cls=Group, context_settings=SETTINGS)
@click.version_option(torchquorum.__version__, prog_name="torchquorum")
def commands() -> None:
    """A parameter server for PyTorch.

    \b
    Examples:
      torchquorum train                          MNIST on 1 ps and 2 workers of this machine
      torchquorum train --rule async --workers 4
      torchquorum run --ps 1 --workers 2 script.py --my-flag 3
    """


def main() -> None:
    """Runs the command line; the entry point of the `torchquorum` program."""
    from torchquorum.cli import board, checkpoints, data, hello, join, run, status, train

    commands.add_command(train.train)
    commands.add_command(run.run)
    commands.add_command(join.join)
    commands.add_command(hello.hello)
    commands.add_command(status.status)
    commands.add_command(checkpoints.checkpoints)
    commands.add_command(checkpoints.export)
    commands.add_command(board.board)
    commands.add_command(data.data)
    try:
        code = commands.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except TorchQuorumError as error:
        click.echo(f"torchquorum: error: {error}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
