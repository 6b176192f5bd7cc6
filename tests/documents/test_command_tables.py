"""The tables of commands have every command, and options in the text are options of the program that they belong to."""

import re
from pathlib import Path

import click
import pytest

from tests.documents.commands import flags_of, torchquorum_commands
from tests.documents.markdown import ROOT, documents, linking_documents, prose, tables
from torchquorum import env
from torchquorum.cli.command_list import COMMANDS
from torchquorum.cluster.flags import FIELDS

CLUSTER = {field.replace("_", "-") for field in FIELDS}
PROGRAMS = [path for folder in ("examples", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
WRONG_ON_PURPOSE = {"taske-id"}  # a misspelling of the tutorials, whose error message is shown
_SPAN = re.compile(r"`([^`\n]+)`")
_OPTION = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)")


@pytest.mark.parametrize(
    ("page", "heading"), [("README.md", "Commands"), ("README.zh-CN.md", "命令"), ("docs/cli.md", "The command line")]
)
def test_a_table_of_commands_has_every_command(page: str, heading: str) -> None:
    table = tables(ROOT / page, heading)[0]
    listed = [name for row in table[1:] for name in re.findall(r"`(?:torchquorum )?([a-z]+)[^`]*`", row[0])]
    assert sorted(listed) == sorted(COMMANDS)


def options() -> dict[str, set[str]]:
    """Returns the options of every command, by `train` or `data inspect`, without their hyphens."""
    found: dict[str, set[str]] = {}

    def add(command: click.Command, name: str) -> None:
        given = [opt for param in command.params for opt in (*param.opts, *param.secondary_opts)]
        found[name] = {opt.lstrip("-").replace("_", "-") for opt in given} | {"help"}
        if isinstance(command, click.Group):
            context = click.Context(command)
            for inner in command.list_commands(context):
                below = command.get_command(context, inner)
                assert below is not None
                add(below, f"{name} {inner}".strip())

    add(torchquorum_commands(), "")
    found[""].add("version")
    return found


OPTIONS = options()
ALL_OPTIONS = {*CLUSTER, "version"}.union(*OPTIONS.values(), *(flags_of(program) for program in PROGRAMS))


def faults_of(text: str) -> list[str]:
    """Returns the options in the code spans of a text that the program they stand after does not have."""
    faults = []
    for span in _SPAN.findall(text):
        allowed = _allowed(span.split())
        # What follows a script is the script's.
        given = [option.replace("_", "-") for option in _OPTION.findall(re.split(r"\.py\b|SCRIPT", span)[0])]
        faults += [f"`{span}`: no option --{o}" for o in given if allowed and o not in allowed | WRONG_ON_PURPOSE]
    return faults


def _allowed(words: list[str]) -> set[str]:
    """Returns the options that a code span may have; none where it is another program's."""
    if words and words[0].startswith("--"):
        return ALL_OPTIONS
    if words[:1] != ["torchquorum"]:
        return set()
    name = ""
    for word in words[1:]:
        if f"{name} {word}".strip() not in OPTIONS:
            break
        name = f"{name} {word}".strip()
    # A word in capitals stands for any command.
    is_open = not name and any(word.isupper() for word in words)
    return ALL_OPTIONS if is_open else OPTIONS[name] | CLUSTER


@pytest.mark.parametrize(
    "path",
    [path for path in linking_documents() if path.parent.name != "adr" and path.name != "CHANGELOG.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_options_in_the_text_exist(path: Path) -> None:
    assert not faults_of(prose(path))


def test_an_option_that_does_not_exist_is_found() -> None:
    assert faults_of("use `--rulle` or `torchquorum train --watch`, not `torchquorum status --watch`") == [
        "`--rulle`: no option --rulle",
        "`torchquorum train --watch`: no option --watch",
    ]
    assert not faults_of(
        "`--issync=1`, `torchquorum COMMAND --help`, `sbatch --requeue`, `torchquorum run x.py --my-flag`"
    )


def test_variables_of_the_environment_in_the_text_exist() -> None:
    known = {value for value in vars(env).values() if isinstance(value, str)}
    known |= set(re.findall(r"TORCHQUORUM_[A-Z_]+", Path(env.__file__).read_text(encoding="utf-8")))
    for path in documents():
        unknown = set(re.findall(r"\bTORCHQUORUM_[A-Z_]+", path.read_text(encoding="utf-8"))) - known
        assert not unknown, f"{path.name}: {sorted(unknown)}"
