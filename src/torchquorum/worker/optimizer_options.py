"""The options of a `tq.Optimizer` beside the optimizer that it wraps, checked when it is made.

Read by the session, which makes the run's plan from them. What always holds: they are good, each and together, and never change.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchquorum.compress.compressor import read_compressor
from torchquorum.errors import ConfigError
from torchquorum.rules import Rule
from torchquorum.wire.messages import AverageSpec, ScheduleSpec
from torchquorum.wire.plan import AfterSpec


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """What `tq.Optimizer` was given, as it travels; the docstring there says what each means."""

    rule: Rule
    schedule: ScheduleSpec | None = None
    placement: str = "round_robin"
    slice_bytes: int | None = None
    average: AverageSpec | None = None
    after_update: list[AfterSpec] = field(default_factory=list)
    compress: str | None = None
    allow_nonfinite: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"rule={self.rule!r}: give tq.Sync(), tq.Async(), tq.Bounded(s) or tq.Buffered(k), with parentheses"
            )
        if self.compress is not None:
            read_compressor(self.compress)
            if self.allow_nonfinite:
                raise ConfigError(
                    "compress= and allow_nonfinite=True: NaN and infinity cannot be compressed; leave one of them out"
                )
        if not isinstance(self.name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"name={self.name!r}: must be a text, such as 'generator'")
