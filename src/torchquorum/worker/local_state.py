"""What a worker under `tq.Local` keeps for itself: its inner optimizer's state, its inner step, and its residual, in a file of its own.

Used by `tq.Optimizer` on the worker's thread. These do not cross the network: the file lies in the run's folder where that can be
written to, else below the current folder. What always holds: a file is complete from the moment it exists; it is named after the version
that the worker had just been given; state is captured when a version comes, and written only for a checkpoint.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from torchquorum.clock import SYSTEM, Clock
from torchquorum.formats.storage import locate

FOLDER, ELSEWHERE, SUFFIX, RESTORED = "local", "torchquorum-local", ".safetensors", "restored-"
CAPTURED = 2  # versions: a checkpoint may be asked for when the next version is here already


@dataclass(frozen=True)
class LocalState:
    """The state at one version.

    Attributes:
        inner: What `state_dict()` of the inner optimizer returns.
        inner_step: How many inner steps had been made.
        residuals: What had been computed and not yet given, by variable.
        since: How many of the inner steps came after the version that the parameters had been given.
        own: What the parameters held, by variable, where that was not the version itself.
        losses: The sum of the losses of these steps.
    """

    inner: dict[str, Any]
    inner_step: int
    residuals: Mapping[str, torch.Tensor]
    since: int = 0
    own: Mapping[str, torch.Tensor] = field(default_factory=dict)
    losses: float = 0.0


class LocalStates:
    """The files of one worker.

    Args:
        logdir: The run's folder.
        name: The worker's.
        keep: How many files are kept.
        say: Prints a line for people.
        clock: Tells the time to object stores.
    """

    def __init__(self, logdir: str, name: str, keep: int, say: Callable[[str], None], clock: Clock = SYSTEM) -> None:
        self.name, self._say, self._keep = name, say, max(keep, CAPTURED)
        self._captured: dict[int, LocalState] = {}
        self.folder = self._find_folder(logdir, name, clock)

    def _find_folder(self, logdir: str, name: str, clock: Clock) -> Path:
        home = locate(logdir, clock)
        if isinstance(home, Path):
            with suppress(OSError):
                (home / FOLDER / name).mkdir(parents=True, exist_ok=True)
                if os.access(home / FOLDER / name, os.W_OK):
                    return home / FOLDER / name
        here = Path(ELSEWHERE) / (home.name or "run") / name
        here.mkdir(parents=True, exist_ok=True)
        self._say(f"keeps its inner optimizer's state in {here.resolve()}: it cannot write to {logdir} itself")
        return here

    def capture(self, version: int, state: LocalState) -> None:
        """Keeps the state at a version for a while; it replaces what was written of that version."""
        residuals, own = _copied(dict(state.residuals)), _copied(dict(state.own))
        self._captured[version] = replace(state, inner=_copied(state.inner), residuals=residuals, own=own)
        while len(self._captured) > CAPTURED:
            del self._captured[min(self._captured)]
        if (self.folder / f"{version}{SUFFIX}").exists():
            self.write(version)

    def forget(self) -> None:
        """Another generation begins: what was captured belongs to the one before."""
        self._captured.clear()

    def write(self, version: int) -> None:
        """Writes the state at a version, if it has been captured and is still kept."""
        if (state := self._captured.get(version)) is not None:
            self._write(state, self.folder / f"{version}{SUFFIX}", f"at step {version}")
            self._prune()

    def keep_restored(self, life: str, state: LocalState) -> None:
        """A life of this worker that is recorded goes on with this state: a replay of it has to find the same."""
        self._write(state, self.folder / f"{RESTORED}{life}{SUFFIX}", "that it goes on with")

    def _write(self, state: LocalState, path: Path, which: str) -> None:
        tensors: dict[str, torch.Tensor] = {}
        shape: dict[str, Any] = {"inner": _without_tensors(state.inner, tensors), "inner_step": state.inner_step}
        shape |= {"since": state.since, "losses": state.losses}
        tensors |= {f"residual/{name}": values for name, values in state.residuals.items()}
        tensors |= {f"own/{name}": values for name, values in state.own.items()}
        hidden = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file({k: v.contiguous().clone() for k, v in tensors.items()}, hidden, {"state": json.dumps(shape)})
            os.replace(hidden, path)
        except (OSError, SafetensorError) as error:
            self._say(f"its inner optimizer's state {which} is not saved: {error}")
        finally:
            hidden.unlink(missing_ok=True)

    def _versions(self) -> list[int]:
        found = (path.stem for path in self.folder.glob(f"*{SUFFIX}"))
        return sorted(int(stem) for stem in found if stem.isdigit())

    def _prune(self) -> None:
        for version in self._versions()[: -self._keep]:
            (self.folder / f"{version}{SUFFIX}").unlink(missing_ok=True)

    def read(self, version: int) -> LocalState | None:
        """Returns the state at a version; of an older one without its residual, as that has been given since; None for none."""
        for found in reversed([v for v in self._versions() if v <= version]):
            path = self.folder / f"{found}{SUFFIX}"
            try:
                state = _read(path)
            except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
                self._say(f"{path} cannot be read: {error}")
                continue
            if found == version:
                return state
            self._say(f"goes on at global step {version} with its inner optimizer's state of step {found}")
            return LocalState(state.inner, state.inner_step, {})  # its own values were of another version
        return None


def read_restored(logdir: str, name: str, life: str) -> LocalState | None:
    """Returns the state that a recorded life of a worker, which has this name, went on with; None if there was none."""
    home = locate(logdir)
    folders = [home / FOLDER / name] if isinstance(home, Path) else []
    for folder in (*folders, Path(ELSEWHERE) / (home.name or "run") / name):
        if (path := folder / f"{RESTORED}{life}{SUFFIX}").exists():
            return _read(path)
    return None


def _read(path: Path) -> LocalState:
    with safe_open(path, framework="pt") as file:
        shape = json.loads((file.metadata() or {})["state"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    residuals, own = (
        {n.removeprefix(w): v for n, v in tensors.items() if n.startswith(w)} for w in ("residual/", "own/")
    )
    inner, since = _with_tensors(shape["inner"], tensors), int(shape.get("since", 0))
    return LocalState(inner, int(shape["inner_step"]), residuals, since, own, float(shape.get("losses", 0.0)))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(v) for v in value)
    return copy.copy(value)


def _without_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns a state as JSON values, with the name of each tensor in its place."""
    if isinstance(value, torch.Tensor):
        name = f"state/{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"items": [[_without_tensors(k, tensors), _without_tensors(v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_without_tensors(v, tensors) for v in value]}
    return value if value is None or isinstance(value, bool | int | float | str) else None


def _with_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Returns what `_without_tensors` was given."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "items" in value:
        return {_with_tensors(k, tensors): _with_tensors(v, tensors) for k, v in value["items"]}
    kind = "list" if "list" in value else "tuple"
    return (list if kind == "list" else tuple)(_with_tensors(v, tensors) for v in value[kind])
