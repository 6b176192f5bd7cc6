"""The entry of the `torchquorum` program: how errors and Ctrl-C end it.

What always holds: a user's mistake ends with a message and exit code 2, and Ctrl-C, also while modules are imported, with a line and
exit code 130; neither with a traceback.
"""

import sys

from torchquorum.cli.ctrl_c import INTERRUPTED, end_at_once, was_interrupted


def main() -> None:
    """Runs the command line; the entry point of the `torchquorum` program."""
    end_at_once()
    import click

    from torchquorum.cli.command_list import commands
    from torchquorum.errors import TorchQuorumError

    try:
        code = commands.main(prog_name="torchquorum", standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"torchquorum: error: {say_as_ours(error.format_message())}", err=True)
        if isinstance(error, click.UsageError) and error.ctx is not None:
            click.echo(f"see {error.ctx.command_path} --help", err=True)
        sys.exit(error.exit_code)
    except TorchQuorumError as error:
        click.echo(f"torchquorum: error: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()  # `torchquorum ... | head`: the reader has gone, which is no error
        sys.exit(141)
    except (click.Abort, KeyboardInterrupt, Exception) as error:
        if not isinstance(error, click.Abort) and not was_interrupted(error):
            raise
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def say_as_ours(text: str) -> str:
    """Returns an error of click in the form of ours: no capital at its beginning, no full stop at its end."""
    text = text.removesuffix(".")
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


if __name__ == "__main__":
    main()
