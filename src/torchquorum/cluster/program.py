"""The flags of a user's program, besides those that name the task.

`tq.join(parser=...)` calls it with the program's own argparse parser, which may declare the cluster's flags too: they then
appear in its `--help`, and their defaults describe a cluster where no other source does. What always holds: the returned values
are those of the task, whatever their source; an unknown flag is an error with a suggestion.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from torchquorum.cluster.environment import takes_ps
from torchquorum.cluster.flags import FIELDS, ClusterFlags, parse_flags
from torchquorum.cluster.sources import Resolved
from torchquorum.cluster.spec import suggest
from torchquorum.errors import FlagError

_LISTED = 12


def own_flags(parser: argparse.ArgumentParser | None) -> list[str]:
    """Returns the flags that belong to the program here: `--ps`, if its parser declares it, or outside torchrun and srun."""
    declared = [action.dest for action in parser._actions if action.dest == "ps"] if parser is not None else []
    return declared if takes_ps() else ["ps"]


def read_program_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, ClusterFlags | None]:
    """Reads a program's own flags; `--help` prints the parser's help and ends the program, as usual.

    Args:
        parser: The program's parser.
        argv: The program's arguments, without its name.

    Returns:
        The values, and the cluster of the parser's defaults; None if they name none.

    Raises:
        FlagError: A flag is unknown, or a default of the parser is not allowed.
    """
    own = own_flags(parser)
    names = [name for name in FIELDS if name not in own]
    for action in parser._actions:
        if action.dest in names:
            action.required = False  # `parse_flags` reads these, so argparse does not see them
    values, unknown = parser.parse_known_args(parse_flags(argv, own=own)[1])
    if unknown:
        raise FlagError(_explain_unknown(parser, unknown[0]))
    given = [f"--{name}={default}" for name in names if (default := parser.get_default(name)) is not None]
    return values, parse_flags(given)[0] if given else None


def fill_in(values: argparse.Namespace, found: Resolved | None) -> None:
    """Sets the values of the cluster's flags to those of the task, whatever their source."""
    truth: dict[str, Any] = {"job_name": "worker", "task_index": 0, "ps_hosts": "", "worker_hosts": ""}
    if found is not None:
        cluster = found.cluster.as_dict()
        hosts = {f"{job}_hosts": ",".join(addresses) for job, addresses in cluster.items()}
        truth = {"job_name": found.task.job, "task_index": found.task.index, **hosts}
    for name, field in FIELDS.items():
        if field in truth and (hasattr(values, name) or not name.endswith("_host")):
            setattr(values, name, truth[field])


def _explain_unknown(parser: argparse.ArgumentParser, token: str) -> str:
    known = [option.lstrip("-") for action in parser._actions for option in action.option_strings[-1:]]
    listed = ", ".join(f"--{name}" for name in known[:_LISTED]) + (", ..." if len(known) > _LISTED else "")
    if not token.startswith("-"):
        return f"{token}: the program takes no argument without a flag; its flags are {listed}"
    hint = suggest(token.partition("=")[0].lstrip("-"), known)
    change = hint.replace("mean ", "mean --") if hint else "python program.py --help explains them"
    return f"{token.partition('=')[0]}: no such flag; this program has {listed}; {change}"
