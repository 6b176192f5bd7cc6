"""The options of the command line do not change by accident."""

import subprocess
import sys

import pytest

from tests.unit.cli.freeze import OPTIONS, describe_options
from torchquorum.cli.command_list import COMMANDS

REFRESH = "if that is meant, run: python tests/unit/cli/freeze.py"


def test_the_options_of_the_command_line_are_the_frozen_ones() -> None:
    assert describe_options() == OPTIONS.read_text(), REFRESH


@pytest.mark.parametrize(
    "arguments", [[], ["train"], ["compare"], ["report"], ["doctor"], ["status"], ["run"], ["simulate"]]
)
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from torchquorum.cli import main\n"
        f"sys.argv = ['torchquorum', *{arguments!r}, '--help']\n"
        "try:\n    main.main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'tensorboard', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: torchquorum" in done.stdout


def test_the_list_of_commands_imports_none_of_them() -> None:
    program = (
        "import sys\n"
        "from torchquorum.cli import main\n"
        "sys.argv = ['torchquorum', '--help']\n"
        "try:\n    main.main()\n"
        "except SystemExit:\n    pass\n"
        "print({'rich', 'ssl', 'torchquorum.cli.train'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.rstrip().endswith("set()"), done.stdout + done.stderr
    assert all(name in done.stdout for name in COMMANDS)
