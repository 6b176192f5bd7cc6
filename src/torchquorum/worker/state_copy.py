"""The optimizer's state as a program reads it inside a session: a copy of what the ps tasks hold, and what is written to it is noticed.

Owned by `torchquorum.worker.attached`, on the worker's thread. What always holds: every tensor that was given is compared whole at the next
step; those that the program still has after that are looked at by torch's version counters, and all others are let go.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from torchquorum.errors import ConfigError

OURS = 2  # references to a tensor that nobody else has: a variable, and the argument of the question
_ADVICE = (
    "a copy inside a session, as the state lives on the ps tasks, so what is written to it has no effect. Take optimizer.state_dict(), "
    "change that, and give it to optimizer.load_state_dict(), on all workers at the same place"
)


class StateCopy(dict[Any, Any]):
    """A state by parameter, or that of one parameter, to be read; a parameter without one has an empty one, as in torch.optim."""

    def __missing__(self, key: Any) -> StateCopy:
        if isinstance(key, torch.Tensor):
            return StateCopy()
        raise KeyError(key)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return {k: {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in s.items()} for k, s in self.items()}

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"optimizer.state is {_ADVICE}")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse  # pyright: ignore


class StateElsewhere(StateCopy):
    """There is no session any more, or none that is asked for a state: whoever looks a parameter up is told so."""

    def __missing__(self, key: Any) -> NoReturn:
        raise ConfigError(
            "optimizer.state outside of `with tq.Session(...)`: the optimizer's state lives on the ps tasks; read it inside"
        )


class GivenStates:
    """What a program was given of an optimizer's state."""

    def __init__(self) -> None:
        self._now: tuple[Any, StateCopy] | None = None
        self._new: list[tuple[str, torch.Tensor, int]] = []  # with the sum of what was in it
        self._kept: list[tuple[str, torch.Tensor, int]] = []  # with torch's version counter

    def at(self, place: Any) -> StateCopy | None:
        """Returns what was given at this place, if that was the last time."""
        return self._now[1] if self._now is not None and self._now[0] == place else None

    def give(self, place: Any, states: Mapping[Any, Mapping[str, Any]], names: Mapping[Any, str]) -> StateCopy:
        """Returns a state by parameter, as the ps tasks have it at a place.

        Args:
            place: Where this worker stands; as long as that is the same, the same copy serves.
            states: The state of each parameter.
            names: What the parameters are called.
        """
        for parameter, state in states.items():
            found = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            self._new += [(f"{name} of {names[parameter]}", value, _sum(value)) for name, value in found.items()]
        copy = StateCopy({parameter: StateCopy(state) for parameter, state in states.items()})
        self._now = place, copy
        return copy

    def look(self) -> None:
        """A step begins: raises ConfigError if the program has written to what it was given."""
        if not self._new and not self._kept:
            return
        written = self.written()
        if written:
            raise ConfigError(f"{written} in optimizer.state: written to. That is {_ADVICE}")

    def written(self) -> str:
        """Returns the name of what the program has written to, empty for nothing; it is not named again."""
        new, kept, self._now, self._new, self._kept = self._new, self._kept, None, [], []
        found = ""
        while new:
            name, value, before = new.pop()
            found = name if _sum(value) != before else found
            kept.append((name, value, value._version))
        while kept:
            name, value, version = kept.pop()
            found = name if value._version != version else found
            if sys.getrefcount(value) > OURS:  # the program still has it
                self._kept.append((name, value, value._version))
        return found


def _sum(tensor: torch.Tensor) -> int:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(values.view(torch.uint8).numpy()) if values.numel() else 0  # pyright: ignore[reportArgumentType]
