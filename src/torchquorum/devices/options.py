"""Options about devices: keywords of `tq.Session` and `tq.join`, or TensorFlow's ConfigProto with the same meaning.

Read by the session and by `tq.join`. What always holds: a value that is not allowed, or a keyword that contradicts the
ConfigProto, is an error before anything has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchquorum.errors import ConfigError


@dataclass(kw_only=True)
class GPUOptions:
    """As tf.GPUOptions, as far as it means something here.

    Attributes:
        per_process_gpu_memory_fraction: The share of each GPU's memory that this process may take, above 0 and up to 1.
        allow_growth: Without effect: torch takes memory only as it needs it.
    """

    per_process_gpu_memory_fraction: float | None = None
    allow_growth: bool = False


@dataclass(kw_only=True)
class ConfigProto:
    """As tf.ConfigProto, as far as it means something here; `tq.Session` and `tq.join` take it as `config=`.

    Attributes:
        log_device_placement: Print where every variable lives and every operation of the first step runs.
        allow_soft_placement: Use the CPU for a device that is not there or cannot run an operation.
        gpu_options: How much of a GPU's memory this process may take.
        device_filters: Without effect: a task waits for the ps tasks and the chief only.
    """

    log_device_placement: bool | None = None
    allow_soft_placement: bool | None = None
    gpu_options: GPUOptions = field(default_factory=GPUOptions)
    device_filters: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The options about devices; None where none was given.

    Attributes:
        log: Whether to print the placement log.
        soft: Whether the CPU may be used instead of another device.
        memory_fraction: The share of each GPU's memory for this process.
    """

    log: bool = False
    soft: bool | None = None
    memory_fraction: float | None = None


def read_device_options(
    config: ConfigProto | None,
    *,
    log_device_placement: bool | None = None,
    allow_soft_placement: bool | None = None,
    gpu_memory_fraction: float | None = None,
) -> DeviceOptions:
    """Combines keywords and a ConfigProto.

    Raises:
        ConfigError: A value is not allowed, or the two contradict each other.
    """
    if config is not None and not isinstance(config, ConfigProto):
        raise ConfigError(f"config={config!r}: must be a tq.tensorflow.ConfigProto(allow_soft_placement=True, ...)")
    given = config or ConfigProto()
    fraction = _agree(
        "gpu_memory_fraction",
        gpu_memory_fraction,
        "gpu_options.per_process_gpu_memory_fraction",
        given.gpu_options.per_process_gpu_memory_fraction,
    )
    for name, value in (("log_device_placement", log_device_placement), ("allow_soft_placement", allow_soft_placement)):
        for said in (value, getattr(given, name)):
            if said is not None and not isinstance(said, bool):
                raise ConfigError(f"{name}={said!r}: must be True or False")
    return DeviceOptions(
        log=bool(_agree("log_device_placement", log_device_placement, "config", given.log_device_placement)),
        soft=_agree("allow_soft_placement", allow_soft_placement, "config", given.allow_soft_placement),
        memory_fraction=None if fraction is None else check_fraction(fraction),
    )


def check_fraction(fraction: Any, *, label: str = "gpu_memory_fraction=") -> float:
    """Returns the fraction if it is one, above 0 and up to 1."""
    number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
    if not number or not 0 < fraction <= 1:
        raise ConfigError(
            f"{label}{fraction!r}: must be more than 0 and at most 1, such as 0.4; leave it out for no limit"
        )
    return float(fraction)


def _agree(name: str, keyword: Any, other: str, configured: Any) -> Any:
    if keyword is not None and configured is not None and keyword != configured:
        raise ConfigError(f"{name}={keyword!r} and {other} says {configured!r}: they must agree; keep one of the two")
    return configured if keyword is None else keyword
