"""Axis scales and tick marks: linear, logarithmic, and for shares near 100 %.

Pure; called by `charts`. What always holds: ticks lie inside the axis, at round values, and are few enough to read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchquorum.report.scene import AxisScale

# Ticks of `share`, whose scale is logarithmic in the distance from 100 %.
_SHARES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999)
_LEAST_MISSING = 1e-4


def forward(kind: str, value: float) -> float:
    """Transforms a value so that the axis becomes linear."""
    if kind == "log":
        return math.log10(max(value, 1e-12))
    if kind == "share":
        return -math.log10(max(1.0 - value, _LEAST_MISSING))
    return value


def place(scale: AxisScale, value: float) -> float:
    """Returns the pixel of a value; a logarithmic axis shows smaller values, such as zero, at its lower end."""
    value = max(value, scale.low) if scale.kind == "log" else value
    low, high = forward(scale.kind, scale.low), forward(scale.kind, scale.high)
    part = (forward(scale.kind, value) - low) / (high - low) if high > low else 0.5
    return scale.start + part * (scale.end - scale.start)


def nice_step(span: float, most: int) -> float:
    """Returns a round step that divides a span into at most `most` parts."""
    raw = span / max(1, most)
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)


def bounds(kind: str, values: Sequence[float], *, from_zero: bool = False) -> tuple[float, float]:
    """Returns the limits of an axis that shows all values."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    if kind == "log":
        low = max(low, high * 1e-6, 1e-9)
        return low * 0.9, max(high * 1.1, low * 1.5)
    if kind == "share":
        under = [s for s in _SHARES[:-1] if s <= low]  # the last is only an upper limit
        over = [s for s in _SHARES if s >= min(high, _SHARES[-1])]
        bottom, top = (under[-1] if under else 0.0), (over[0] if over else _SHARES[-1])
        return bottom, top if top > bottom else _SHARES[_SHARES.index(bottom) + 1]
    low = 0.0 if from_zero and low >= 0 else low
    if high <= low:
        high = low + (abs(low) * 0.1 or 1.0)
    step = nice_step(high - low, 5)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def ticks(scale: AxisScale, most: int) -> list[float]:
    """Returns the values of the ticks."""
    low, high = scale.low, scale.high
    if scale.kind == "share":
        return _thin([s for s in _SHARES if low - 1e-9 <= s <= high + 1e-9], most)
    if scale.kind == "log":
        for mantissas in ((1, 2, 5), (1, 3), (1,)):
            first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
            found = [m * 10.0**p for p in range(first, last + 1) for m in mantissas if low <= m * 10.0**p <= high]
            if len(found) <= most:
                break
        if len(found) >= 2:
            return _thin(found, most)
    step = nice_step(high - low, most)
    count = math.floor((high - low) / step + 1e-6)
    start = math.ceil(low / step - 1e-9) * step
    return [v for i in range(count + 1) if (v := start + i * step) <= high + 1e-9 * step]


def _thin(values: list[float], most: int) -> list[float]:
    step = max(1, math.ceil(len(values) / max(1, most)))
    return values[::step]


def label(value: float, kind: str = "linear") -> str:
    """Returns the label of a tick."""
    if kind == "share":
        return f"{100 * value:.6g}"
    return number(value)


def number(value: float | None) -> str:
    """Returns a number with about three digits, thousands with a comma."""
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 10_000_000:
        return f"{value / 1e6:.3g}M"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}"
