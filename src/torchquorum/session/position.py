"""A worker's position: how far it is in its data, and the state of its random number generators, as JSON values.

Captured whenever the worker first holds a new version, restored when a run continues from a checkpoint. What always holds: a worker that
continues from a position draws the same batches and the same random numbers as it did then.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import torch

from torchquorum.errors import ConfigError
from torchquorum.session import scheduler_state
from torchquorum.worker.local_buffers import CapturedBuffers, LocalBuffers
from torchquorum.worker.local_steps import LocalSteps


class Resumable(Protocol):
    """A data source with a position: `tq.Batches`, a `tq.data.Prefetcher`, or your own."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Goes to a position."""
        ...


def encode_state(state: torch.Tensor) -> str:
    """Returns the state of a generator of torch as text."""
    return base64.b64encode(state.numpy().tobytes()).decode()


def decode_state(text: str) -> torch.Tensor:
    """Returns the state that `encode_state` was given."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Generators:
    """The states of the random number generators of this process."""

    torch: torch.Tensor
    cuda: list[torch.Tensor]
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls) -> Generators:
        """Returns the states as they are."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state(legacy=True))

    def restore(self) -> None:
        """Puts them back."""
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@dataclass(slots=True)
class Captured:
    """A position as captured at every step, which has to be cheap; `encode` turns it into JSON values when one is needed.

    `late` are the schedulers, by name, whose state is captured when the program has asked them; `settings` returns what stands in the
    optimizer's parameter groups then. What `local` has is captured then, too, and stays with the worker.
    """

    data: dict[str, dict[str, Any]]
    torch: torch.Tensor
    cuda: list[torch.Tensor]
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    buffers: CapturedBuffers | None = None
    late: Mapping[str, Resumable] = field(default_factory=dict)
    settings: Callable[[], Any] = lambda: None
    late_states: dict[str, Any] = field(default_factory=dict)
    local: Sequence[LocalSteps] = ()

    @property
    def is_late(self) -> bool:
        """Whether there are schedulers, or a worker's own optimizer."""
        return bool(self.late) or bool(self.local)

    def capture_late(self) -> None:
        """Captures the state of the schedulers, and the settings that they have made."""
        states = {name: source.state_dict() for name, source in self.late.items()}
        self.late_states = {"schedulers": states, "settings": self.settings()} if self.late else {}
        for local in self.local:
            local.capture()

    def save_beside(self, version: int) -> None:
        """Saves what stays with the worker, at the version of this position."""
        for local in self.local:
            local.save(version)

    def encode(self) -> dict[str, Any]:
        """Returns the position as JSON values."""
        version, internal, gauss = self.python
        kind, keys, at, has_gauss, cached = self.numpy
        return {
            "data": self.data,
            **({name: scheduler_state.pack(state) for name, state in self.late_states.items()}),
            "torch": encode_state(self.torch),
            "cuda": [encode_state(state) for state in self.cuda],
            "python": [version, base64.b64encode(np.asarray(internal, np.uint32).tobytes()).decode(), gauss],
            "numpy": [kind, base64.b64encode(np.asarray(keys, np.uint32).tobytes()).decode(), at, has_gauss, cached],
        }


def capture(
    data: Mapping[str, Resumable],
    buffers: LocalBuffers | None = None,
    settings: Callable[[], Any] = lambda: None,
    local: Sequence[LocalSteps] = (),
) -> Captured:
    """Captures the position of the data, the generators of torch, Python and NumPy in this process, and the buffers.

    Args:
        data: The sources; schedulers among them are captured later.
        buffers: The model's buffers.
        settings: Returns what stands in the optimizer's parameter groups.
        local: The worker's local steps, of each optimizer that has some; their state is saved beside.
    """
    late = {name: source for name, source in data.items() if scheduler_state.is_late(source)}
    return Captured(
        late=late,
        settings=settings,
        data={
            n: source.state_dict() for n, source in data.items() if n not in late and getattr(source, "in_use", True)
        },
        torch=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        python=random.getstate(),
        numpy=cast(Any, np.random.get_state(legacy=True)),
        buffers=buffers.capture() if buffers is not None else None,
        local=local,
    )


def restore(body: Mapping[str, Any], data: Mapping[str, Resumable], say: Callable[[str], None]) -> None:
    """Restores a position; what it does not contain stays as it is, and so does data that cannot be moved there."""
    saved = {**body.get("data", {}), **(scheduler_state.unpack(body["schedulers"]) if "schedulers" in body else {})}
    for name, source in data.items():
        if name in saved:
            try:
                source.load_state_dict(saved[name])
            except (ConfigError, ValueError, KeyError, TypeError) as error:
                say(f"the saved position in the data cannot be taken up, so it starts from its beginning: {error}")
    if "torch" in body:
        torch.set_rng_state(decode_state(body["torch"]))
    if body.get("cuda") and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([decode_state(state) for state in body["cuda"]])
    if "python" in body:
        version, internal, gauss = body["python"]
        words = np.frombuffer(base64.b64decode(internal), np.uint32)
        random.setstate((version, tuple(int(word) for word in words), gauss))
    if "numpy" in body:
        kind, keys, at, has_gauss, cached = body["numpy"]
        words = np.frombuffer(base64.b64decode(keys), np.uint32)
        np.random.set_state((kind, words, at, has_gauss, cached))
