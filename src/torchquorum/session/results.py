"""What a worker notes about its run: final results for the report, and numbers measured along the way.

Owned by the session, on the thread of the training loop. What always holds: a folder that cannot be written to costs a line, never the
run; one worker writes the file, the chief or the worker that stands in for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchquorum.errors import ConfigError
from torchquorum.formats.measures import Measure, append_measures
from torchquorum.formats.storage import locate
from torchquorum.session.config import Setup
from torchquorum.session.hooks.hook import Hook, give_scalar


class Results:
    """The results of one session.

    Attributes:
        recorded: This worker's final `loss` and `accuracy`, as far as they are known.
    """

    def __init__(self, setup: Setup, hooks: list[Hook]) -> None:
        self._setup, self._hooks = setup, hooks
        self.recorded: dict[str, float] = {}

    def record(self, results: Mapping[str, Any]) -> None:
        """Notes final results for the report."""
        unknown = set(results) - {"loss", "accuracy"}
        if unknown:
            raise ConfigError(f"session.record({', '.join(sorted(unknown))}=...): allowed are loss and accuracy")
        self.recorded.update({k: float(v) for k, v in results.items()})

    def measure(self, step: int, values: Mapping[str, float], *, write: bool) -> None:
        """Gives numbers to the hooks that take some, and with `write` to the run's folder."""
        for name, value in values.items():
            give_scalar(self._hooks, name, float(value), step)
        logdir, now = self._setup.logdir, self._setup.clock.wall()
        if logdir is None or not write:
            return
        try:
            append_measures(locate(logdir), [Measure(n, float(v), step, now) for n, v in values.items()])
        except OSError as error:
            self._setup.say(f"{', '.join(values)} could not be noted in {logdir}: {error.strerror}")
