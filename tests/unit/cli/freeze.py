"""What the command line promises, as text: compared by test_frozen.py with the file beside it.

Refresh it, and look at the difference before you commit it:

    python tests/unit/cli/freeze.py
"""

from __future__ import annotations

from pathlib import Path

import click

from torchquorum.cli.command import Named
from torchquorum.cli.command_list import COMMANDS, commands

OPTIONS = Path(__file__).parent / "options.txt"


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


if __name__ == "__main__":
    OPTIONS.write_text(describe_options())
    print(f"wrote {OPTIONS}: {len(COMMANDS)} commands")
