"""What the program has written into its optimizer's parameter groups: learning rates, weight decay, betas and the like.

Owned by `tq.Optimizer`, on the worker's thread, and looked at once per step, so it has to be cheap. What always holds: `now` is what the
groups held at the last look, as it travels; it is the same object as long as nothing has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from torchquorum.errors import ConfigError
from torchquorum.wire.settings import RATE, Settings, changes, decode, encode, is_like

# What torch, and its scheduler objects, keep in a group besides the optimizer's options.
NOT_SETTINGS = frozenset(
    [
        "params",
        "param_names",
        "initial_lr",
        "max_lr",
        "min_lr",
        "max_momentum",
        "base_momentum",
        "swa_lr",
    ]
)


class ProgramSettings:
    """The settings of one program.

    Args:
        optimizer: The optimizer whose groups the program writes to; its defaults name the settings.
        more: Whether options that its class does not name are settings, too, as a class of one's own may read them.

    Attributes:
        now: What the groups held at the last look.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, more: bool = False) -> None:
        self._optimizer, self._more = optimizer, more
        self._parameters: list[tuple[list[Any], list[int]]] = []  # the list of each group, and what was in it
        self._seen: list[dict[str, Any]] = []
        self.now: Settings = []
        self._at_push: Settings = []
        self.begin()

    def begin(self, without: Collection[str] = ()) -> None:
        """Looks at all groups as if for the first time; options of these names are not looked at."""
        self._parameters = [(group["params"], list(map(id, group["params"]))) for group in self._optimizer.param_groups]
        named = self._optimizer.defaults.keys()
        self._seen = [
            {
                name: _held(value)
                for name, value in group.items()
                if name not in without and (name in named or (self._more and name not in NOT_SETTINGS))
            }
            for group in self._optimizer.param_groups
        ]
        self.now = [{name: encode(value) for name, value in group.items()} for group in self._seen]

    def look(self) -> Settings:
        """Returns what the groups hold now.

        Raises:
            ConfigError: A group has lost an option, got a value that cannot travel or of another kind, or other parameters.
        """
        groups, found = self._optimizer.param_groups, False
        if len(groups) != len(self._seen):
            raise ConfigError(
                f"the optimizer has {len(groups)} parameter groups, and had {len(self._seen)} when the run began: groups cannot be "
                "added or removed inside it"
            )
        for number, (group, seen) in enumerate(zip(groups, self._seen, strict=True)):
            parameters, ids = self._parameters[number]
            if group["params"] is not parameters or len(parameters) != len(ids):
                _check_parameters(number, group["params"], ids)
            for name, before in seen.items():
                try:
                    value = group[name]
                except KeyError:
                    raise ConfigError(f"param_groups[{number}] has no {name!r} any more; set it instead") from None
                if value is before and type(value) is not torch.Tensor:
                    continue
                if type(value) is type(before) and bool(value == before):
                    continue
                now = encode(value)
                if not is_like(now, encode(before)):
                    raise ConfigError(
                        f"param_groups[{number}][{name!r}] = {value!r}: give a value such as {before!r}, which it had"
                    )
                seen[name], found = _held(value), True
        if found:
            self.now = [{name: encode(value) for name, value in group.items()} for group in self._seen]
        return self.now

    def look_at_push(self) -> Settings:
        """Returns what the groups hold now, when a gradient is about to be pushed."""
        self._at_push = self.look()
        return self._at_push

    def written_since_push(self) -> Settings:
        """Returns what the program has written since its last push, as a scheduler object does after a step."""
        return changes(self._at_push, self.look()) if self._at_push else []

    def take(self, settings: Settings) -> None:
        """Writes the run's settings, if any are known; only what the program changes afterwards counts."""
        if settings:
            self.write(settings)
            self._at_push = self.now

    def write(self, settings: Settings) -> None:
        """Writes settings of the run into the groups, where they are others; what stands there then was not written by the program."""
        for group, seen, now, wanted in zip(
            self._optimizer.param_groups, self._seen, self.look(), settings, strict=True
        ):
            for name, value in wanted.items():
                if name in now and now[name] != value:
                    if name == RATE:
                        group.setdefault("initial_lr", group[RATE])  # what a scheduler made later starts from
                    group[name] = decode(value)
                    seen[name] = _held(group[name])
        self.now = [{name: encode(value) for name, value in group.items()} for group in self._seen]


def _check_parameters(number: int, parameters: Sequence[Any], ids: list[int]) -> None:
    """Raises ConfigError unless a parameter group has the parameters that it had."""
    if list(map(id, parameters)) != ids:
        raise ConfigError(
            f"param_groups[{number}]['params'] has {len(parameters)} parameters, and others than the {len(ids)} when the run began: the ps "
            "tasks would train those further. To leave a parameter as it is, call requires_grad_(False) and set its .grad to None; for "
            "other parameters end the session and begin another"
        )


def _held(value: Any) -> Any:
    """Returns a value that does not change with the group's own, as a tensor would."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
