"""Notices that the program has put another parameter or another layer into the model inside a run, which would train nothing.

Owned by a worker's session. What always holds: no line of Python is run for each parameter unless
something has changed; a parameter that the optimizers do not know is the program's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import getitem
from typing import Any

import torch
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.worker.variable_names import plain_names

AT_A_STEP = 64  # as many places are looked at on average, in some microseconds
AT_FIRST = 3  # steps at which all are


class ParameterPlaces:
    """Where in a model the trained parameters are.

    Args:
        module: The model.
        trained: The parameters that its optimizers know.
    """

    def __init__(self, module: nn.Module, trained: Iterable[torch.Tensor]) -> None:
        known, plain = {id(p) for p in trained}, plain_names(module)
        self._within: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._ids: list[int] = []
        self._names: list[str] = []
        found: dict[str, nn.Module] = {}
        for path, each in module.named_modules():
            own = {name: p for name, p in each._parameters.items() if id(p) in known}
            for name, parameter in own.items():
                self._add(each._parameters, name, parameter, f"parameter {plain(f'{path}.{name}' if path else name)}")
            if own:
                found[path] = each
        self._kept = [module, *found.values()]  # so that no id is used again
        for path in {leaf[:end] for leaf in found for end in _ends(leaf)} - {""}:
            parent, _, name = path.rpartition(".")
            children: Any = module.get_submodule(parent)._modules
            self._kept.append(children[name])
            self._add(children, name, children[name], f"layer {plain(path)}")
        self._steps, self._every = 0, 1 + len(self._ids) // AT_A_STEP

    def _add(self, within: Any, key: str, value: object, name: str) -> None:
        self._within.append(within)
        self._keys.append(key)
        self._ids.append(id(value))
        self._names.append(name)

    def check(self) -> None:
        """Raises ConfigError if one of them is no longer there; called at every step, of which a large model needs some for one look."""
        self._steps += 1
        if self._steps > AT_FIRST and self._steps % self._every:
            return
        try:
            if list(map(id, map(getitem, self._within, self._keys))) == self._ids:
                return
        except KeyError:
            pass
        places = zip(self._within, self._keys, self._ids, self._names, strict=True)
        name = next(name for within, key, was, name in places if id(within.get(key)) != was)
        raise ConfigError(
            f"{name} of the model is another one than when the session began, or is gone, so that its updates would reach nothing: "
            "this is done by a new layer, load_state_dict(assign=True), pruning and parametrizations. Do that before the session "
            "begins; inside it, write other values into the parameters that are there and call session.assign()"
        )


def _ends(path: str) -> list[int]:
    """Returns where the path of each module above, and of this one, ends."""
    return [*(i for i, letter in enumerate(path) if letter == "."), len(path)]
