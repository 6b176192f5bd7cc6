"""What the command line and the API promise, as text: compared by test_frozen.py with the two files beside it.

Refresh them, and look at the difference before you commit it:

    python tests/unit/cli/freeze.py
"""

from __future__ import annotations

from pathlib import Path

import click

import torchquorum
from torchquorum.cli.main import COMMANDS, commands
from torchquorum.cli.shape import Named

OPTIONS = Path(__file__).parent / "options.txt"
NAMES = Path(__file__).parent / "names.txt"


def describe_options() -> str:
    """Returns a line per option of every command: its names, type, default, and whether it is a flag."""
    lines = []
    context = click.Context(commands)
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        assert command is not None
        for param in command.params:
            # Older and newer versions of click say "no default" differently.
            default = param.default if isinstance(param.default, bool | int | float | str) else None
            kind = "flag" if getattr(param, "is_flag", False) else param.type.name
            kind += f" of {', '.join(param.type.names)}" if isinstance(param.type, Named) else ""
            names = " ".join([*param.opts, *param.secondary_opts])
            lines.append(f"{name}: {param.param_type_name} {names}: {kind}, {default!r}, nargs {param.nargs}")
    return "\n".join(lines) + "\n"


def describe_names() -> str:
    """Returns the names of the API, one per line."""
    return "\n".join(sorted(torchquorum.__all__)) + "\n"


if __name__ == "__main__":
    OPTIONS.write_text(describe_options())
    NAMES.write_text(describe_names())
    print(f"wrote {OPTIONS} and {NAMES}: {len(COMMANDS)} commands, {len(torchquorum.__all__)} names")
