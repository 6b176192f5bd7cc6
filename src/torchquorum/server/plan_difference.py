"""What differs between the chief's plan and the one that another task brings, in words.

Called by the shard when a worker joins and when a chief comes back. What always holds: all that differs is named at once,
with both values, and what is equal is not shown.
"""

from __future__ import annotations

from typing import Any

import msgspec

from torchquorum.errors import RefusedError
from torchquorum.placement.layout import check_same_variables
from torchquorum.wire.messages import OptimizerSpec, Plan, ScheduleSpec

_COMPARED = (
    "optimizer",
    "schedule",
    "average",
    "after_update",
    "rule",
    "compress",
    "placement",
    "slice_bytes",
    "num_workers",
    "num_shards",
    "tables",
)
_SHOWN = 8


def check_same_plan(ours: Plan, theirs: Plan, who: str) -> None:
    """Raises RefusedError, naming every difference, if a task comes with another model, optimizer, rule or placement."""
    if ours.names != theirs.names:
        raise RefusedError(
            f"{who} has other optimizers than the chief: {_list(theirs.names)}, the chief's are {_list(ours.names)}.\n"
            "Start every task with the same program and the same arguments."
        )
    for here, there in zip(ours.tracks(), theirs.tracks(), strict=True):
        _check_same_track(here, there, who)


def _list(names: list[str]) -> str:
    return ", ".join(names) if len(names) > 1 else "one"


def _check_same_track(ours: Plan, theirs: Plan, who: str) -> None:
    check_same_variables(ours.variables, theirs.variables, who)
    unequal = [what for what in _COMPARED if getattr(ours, what) != getattr(theirs, what)]
    if not unequal:
        return
    named = ", ".join(unequal)
    lines: list[str] = []
    for what in unequal:
        lines += _differences(what, getattr(ours, what), getattr(theirs, what))
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise RefusedError(
        f"{who} has another {named}{f' of {ours.name}' if ours.name else ''} than the chief:\n"
        + "\n".join([*lines[:_SHOWN], *more])
        + "\nStart every task with the same program and the same arguments."
    )


def _differences(what: str, ours: Any, theirs: Any) -> list[str]:
    """Returns a line for each thing that differs."""
    if isinstance(ours, OptimizerSpec) and isinstance(theirs, OptimizerSpec) and ours.name == theirs.name:
        if len(ours.groups) != len(theirs.groups):
            return [_line(f"{what}'s parameter groups", len(ours.groups), len(theirs.groups))]
        found: list[str] = []
        for number, (here, there) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
            place = f"{what} {ours.name}" + (f", group {number}" if len(ours.groups) > 1 else "")
            found += _unequal(place, here, there)
        return found
    if isinstance(ours, ScheduleSpec) and isinstance(theirs, ScheduleSpec) and ours.name == theirs.name:
        return _unequal(f"{what} {ours.name}", ours.arguments, theirs.arguments)
    if isinstance(ours, list) and isinstance(theirs, list) and what == "tables":
        return [_line("tables", [_show(table) for table in ours], [_show(table) for table in theirs])]
    return [_line(what, _show(ours), _show(theirs))]


def _unequal(place: str, here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    keys = [k for k in {**here, **there} if here.get(k, "nothing") != there.get(k, "nothing")]
    return [_line(f"{place}, {k}", here.get(k, "nothing"), there.get(k, "nothing")) for k in keys]


def _line(what: str, ours: Any, theirs: Any) -> str:
    return f"  {what}: {theirs}, the chief's is {ours}"


def _show(value: Any) -> Any:
    if isinstance(value, OptimizerSpec | ScheduleSpec):
        return value.name
    if isinstance(value, msgspec.Struct):
        return ", ".join(f"{k}={v}" for k, v in msgspec.structs.asdict(value).items())
    return value
