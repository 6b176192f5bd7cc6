"""Charts as scenes: lines over an axis, bars, stacked bars, a timeline.

Called by the pages. What always holds: every axis has a name and a unit, a line has its name at its end and not in a legend,
names never overlap, and bars start at zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchquorum.report import scales
from torchquorum.report.scene import Area, AxisScale, Dot, Point, Polyline, Rect, Scene, Text, text_width

WIDTH = 430.0
HEIGHT = 270.0
SIZE = 11.5
LINE_HEIGHT = 14.0
WIDEST_COLUMN = 44.0
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (2, 2), (8, 3, 2, 3))


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: its name, points, colour by role, and, if known, a band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dash: tuple[float, ...] = ()
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis: its name, its unit and its scale: linear, log or share (for values near 100 %)."""

    name: str
    unit: str = ""
    kind: str = "linear"
    from_zero: bool = False

    @property
    def title(self) -> str:
        """Returns the label of the axis."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis, *, empty: str = "nothing recorded") -> Scene:
    """Draws lines. Each has its name at its right end; a series without points is left out."""
    shown = [s for s in series if any(map(math.isfinite, s.y))]
    scene = Scene(WIDTH, HEIGHT, f"{title}: {y.title} against {x.title}")
    _title(scene, title)
    if not shown:
        return _nothing(scene, empty)
    names = [s.name for s in shown if s.name]
    right = WIDTH - 10 - (max(text_width(n, SIZE, bold=True) for n in names) + 8 if names else 8)
    xs = [float(v) for s in shown for v in s.x]
    ys = [float(v) for s in shown for band in (s.y, s.low or (), s.high or ()) for v in band]
    low, high = scales.bounds(y.kind, ys, from_zero=y.from_zero)
    vertical = AxisScale(low, high, HEIGHT - 44, 50, y.kind, y.unit)
    marks = scales.ticks(vertical, 6)
    left = 14 + max(text_width(scales.label(m, y.kind), SIZE) for m in marks) + 4
    first, last = min(xs), max(xs)
    start, end = min(first, 0.0) if x.from_zero else first, last if last > first else first + 1
    horizontal = AxisScale(start, end, left, right, x.kind, x.unit or x.name)
    scene.axes = (horizontal, vertical)
    _axes(scene, horizontal, vertical, marks, x, y)
    for s in shown:
        _draw(scene, s, horizontal, vertical)
    _name_ends(scene, shown, horizontal, vertical)
    return scene


def _title(scene: Scene, title: str) -> None:
    scene.add(Text(10, 20, title, 13.5, bold=True))


def _nothing(scene: Scene, why: str) -> Scene:
    for i, line in enumerate(wrap(why, scene.width - 60, SIZE)):
        scene.add(Text(scene.width / 2, scene.height / 2 + LINE_HEIGHT * i, line, SIZE, "middle", "dim"))
    return scene


def _axes(scene: Scene, horizontal: AxisScale, vertical: AxisScale, marks: Sequence[float], x: Axis, y: Axis) -> None:
    left, right, bottom = horizontal.start, horizontal.end, vertical.start
    scene.add(Text(10, 38, y.title, SIZE, colour="dim"))
    for mark in marks:
        at = scales.place(vertical, mark)
        scene.add(Polyline([(left, at), (right, at)], "grid"))
        scene.add(Text(left - 5, at + 4, scales.label(mark, y.kind), SIZE, "end", "dim"))
    scene.add(Polyline([(left, bottom), (right, bottom)], "line"))
    for mark in scales.ticks(horizontal, 5):
        at = scales.place(horizontal, mark)
        scene.add(Polyline([(at, bottom), (at, bottom + 4)], "line"))
        scene.add(Text(at, bottom + 16, scales.label(mark), SIZE, "middle", "dim"))
    scene.add(Text((left + right) / 2, bottom + 34, x.title, SIZE, "middle", "dim"))


def _draw(scene: Scene, s: Series, horizontal: AxisScale, vertical: AxisScale) -> None:
    def spot(x: float, y: float) -> Point:
        return scales.place(horizontal, x), scales.place(vertical, y)

    if s.low is not None and s.high is not None and len(s.x) > 1:
        over = [spot(x, v) for x, v in zip(s.x, s.high, strict=True) if math.isfinite(v)]
        under = [spot(x, v) for x, v in zip(s.x, s.low, strict=True) if math.isfinite(v)]
        scene.add(Area([*over, *reversed(under)], s.colour))
    points = [spot(x, v) for x, v in zip(s.x, s.y, strict=True) if math.isfinite(v)]
    if len(points) > 1:
        scene.add(Polyline(points, s.colour, 1.9, s.dash, s.name or "value"))
    if s.dots or len(points) == 1:
        scene.add(*(Dot(px, py, 2.4, s.colour) for px, py in points))


def _name_ends(scene: Scene, series: Sequence[Series], horizontal: AxisScale, vertical: AxisScale) -> None:
    """Writes each line's name beside its end, moved apart where they would overlap."""
    named = []
    for s in series:
        ends = [(x, v) for x, v in zip(s.x, s.y, strict=True) if math.isfinite(v)]
        if s.name:
            named.append((scales.place(vertical, ends[-1][1]), scales.place(horizontal, ends[-1][0]), s))
    named.sort(key=lambda n: n[0])
    spots = spread([n[0] for n in named], LINE_HEIGHT, vertical.end, vertical.start)
    for (end_y, end_x, s), spot in zip(named, spots, strict=True):
        if abs(spot - end_y) > 3 or horizontal.end - end_x > 3:
            scene.add(Polyline([(end_x, end_y), (horizontal.end + 5, spot)], s.colour, 0.7, (1.5, 2)))
        scene.add(Text(horizontal.end + 8, spot + 4, s.name, SIZE, colour=s.colour, bold=True))


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Moves sorted positions apart so that neighbours are at least `gap` apart, within `low`..`high` if they fit."""
    groups: list[list[float]] = []  # [sum of wanted starts, count]
    for i, place in enumerate(wanted):
        groups.append([place - i * gap, 1.0])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1][0] += total
            groups[-1][1] += count
    places: list[float] = []
    for total, count in groups:
        places += [total / count + (len(places) + k) * gap for k in range(int(count))]
    room = high - low - gap * (len(places) - 1)
    if places and room >= 0:
        shift = max(0.0, low - places[0]) - max(0.0, places[-1] - high)
        places = [p + shift for p in places]
    return places


@dataclass(frozen=True, kw_only=True)
class ChartBar:
    """A row of a bar chart: its parts as (value, colour, meaning), drawn one after another, and a note at its end."""

    name: str
    parts: Sequence[tuple[float, str, str]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class LegendEntry:
    """The meaning of a colour in a stacked chart."""

    name: str
    colour: str


def bar_chart(
    title: str,
    bars: Sequence[ChartBar],
    x: Axis,
    *,
    keys: Sequence[LegendEntry] = (),
    empty: str = "nothing recorded",
    height: float = 0.0,
) -> Scene:
    """Draws one horizontal bar per row; the legend above names the parts."""
    top = 46.0 if keys else 34.0
    row = max(24.0, min(42.0, (height - top - 46) / max(1, len(bars))))
    height = max(120.0, height, top + row * len(bars) + 46)
    scene = Scene(WIDTH, height, f"{title}: {x.title} for {', '.join(b.name for b in bars)}")
    _title(scene, title)
    if not bars or not any(sum(v for v, *_ in b.parts) > 0 for b in bars):
        return _nothing(scene, empty)
    _keys(scene, keys)
    left = 14 + min(120.0, max(text_width(b.name, SIZE) for b in bars))
    notes = max(text_width(b.note, SIZE) for b in bars)
    high = scales.bounds("linear", [sum(v for v, *_ in b.parts) for b in bars] + [0.0], from_zero=True)[1]
    scale = AxisScale(0.0, high, left, WIDTH - 14 - notes)
    bottom = top + row * len(bars) + 4
    for mark in scales.ticks(scale, 4):
        at = scales.place(scale, mark)
        scene.add(Polyline([(at, top), (at, bottom)], "grid"))
        scene.add(Text(at, bottom + 14, scales.label(mark), SIZE, "middle", "dim"))
    scene.add(Text((scale.start + scale.end) / 2, bottom + 31, x.title, SIZE, "middle", "dim"))
    for i, bar in enumerate(bars):
        y, at = top + row * i, 0.0
        middle = y + row / 2 + 4
        scene.add(Text(left - 6, middle, shorten(bar.name, 118), SIZE, "end"))
        for value, colour, what in bar.parts:
            if value > 0:
                start, end = scales.place(scale, at), scales.place(scale, at + value)
                said = f"{bar.name}: {what + ' ' if what else ''}{scales.number(value)} {x.unit}".strip()
                scene.add(Rect(start, y + 4, max(end - start, 0.75), row - 8, colour, title=said))
                at += value
        scene.add(Text(scales.place(scale, at) + 5, middle, bar.note, SIZE, colour="dim"))
    return scene


def _keys(scene: Scene, keys: Sequence[LegendEntry]) -> None:
    at = 10.0
    for key in keys:
        scene.add(Rect(at, 30, 10, 10, key.colour), Text(at + 14, 39, key.name, SIZE, colour="dim"))
        at += 26 + text_width(key.name, SIZE)


def column_chart(
    title: str, columns: Sequence[tuple[str, float]], x: Axis, y: Axis, colour: str, note: str = ""
) -> Scene:
    """Draws vertical columns, as for a histogram."""
    scene = Scene(WIDTH, HEIGHT, f"{title}: {y.title} by {x.title}")
    _title(scene, title)
    if not any(v > 0 for _, v in columns):
        return _nothing(scene, "no gradients recorded")
    high = scales.bounds("linear", [v for _, v in columns] + [0.0], from_zero=True)[1]
    vertical = AxisScale(0.0, high, HEIGHT - 44, 50)
    marks = scales.ticks(vertical, 5)
    left = 14 + max(text_width(scales.label(m), SIZE) for m in marks) + 4
    right, bottom = WIDTH - 12, vertical.start
    scene.add(Text(10, 38, y.title, SIZE, colour="dim"), Text(right, 20, note, SIZE, "end", "dim"))
    for mark in marks:
        at = scales.place(vertical, mark)
        scene.add(Polyline([(left, at), (right, at)], "grid"))
        scene.add(Text(left - 5, at + 4, scales.label(mark), SIZE, "end", "dim"))
    width = (right - left) / len(columns)
    widest = max(text_width(name, SIZE) for name, _ in columns) + 6
    every = max(1, math.ceil(widest / width))
    for i, (name, value) in enumerate(columns):
        at, x0 = scales.place(vertical, value), left + i * width
        gap = max(min(3.0, width * 0.12), (width - WIDEST_COLUMN) / 2)
        if value > 0:
            said = f"{x.name} {name}: {scales.number(value)} {y.unit}".strip()
            scene.add(
                Rect(x0 + gap, min(at, bottom - 0.75), width - 2 * gap, max(bottom - at, 0.75), colour, title=said)
            )
        if i % every == 0:
            scene.add(Text(x0 + width / 2, bottom + 16, name, SIZE, "middle", "dim"))
    scene.add(Polyline([(left, bottom), (right, bottom)], "line"))
    scene.add(Text((left + right) / 2, bottom + 34, x.title, SIZE, "middle", "dim"))
    return scene


@dataclass(kw_only=True)
class TimelineRow:
    """A row of a timeline: the spans when it was alive, and its events as (at, colour, text)."""

    name: str
    spans: list[tuple[float, float]] = field(default_factory=list)
    marks: list[tuple[float, str, str]] = field(default_factory=list)


def timeline(title: str, entries: Sequence[TimelineRow], end_s: float, keys: Sequence[LegendEntry]) -> Scene:
    """Draws which workers were alive when; an event is a dot in the colour of its legend entry."""
    row, top = 22.0, 48.0
    scene = Scene(
        WIDTH, max(120.0, top + row * len(entries) + 46), f"{title}: {', '.join(entry.name for entry in entries)}"
    )
    _title(scene, title)
    if not entries or end_s <= 0:
        return _nothing(scene, "the ledger has no events of workers")
    _keys(scene, keys)
    left = 14 + max(text_width(entry.name, SIZE) for entry in entries)
    scale = AxisScale(0.0, end_s, left, WIDTH - 16)
    bottom = top + row * len(entries)
    for mark in scales.ticks(scale, 5):
        at = scales.place(scale, mark)
        scene.add(
            Polyline([(at, top), (at, bottom)], "grid"),
            Text(at, bottom + 15, scales.label(mark), SIZE, "middle", "dim"),
        )
    scene.add(Text((left + WIDTH - 16) / 2, bottom + 32, "time (s)", SIZE, "middle", "dim"))
    for i, entry in enumerate(entries):
        y = top + row * i
        scene.add(Text(left - 6, y + 15, entry.name, SIZE, "end"))
        for start, end in entry.spans:
            from_x, to_x = scales.place(scale, start), scales.place(scale, end)
            scene.add(
                Rect(from_x, y + 8, max(to_x - from_x, 1), 6, "c0", 0.45, f"{entry.name}: {start:.1f} to {end:.1f} s")
            )
        for at, colour, words in entry.marks:
            scene.add(Dot(scales.place(scale, at), y + 11, 4, colour, f"{at:.1f} s: {words}"))
    return scene


def wrap(text: str, width: float, size: float) -> list[str]:
    """Splits a text into lines of at most `width`."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def shorten(text: str, width: float) -> str:
    """Shortens a text that is wider than `width`."""
    while len(text) > 4 and text_width(text, SIZE) > width:
        text = text[:-2] + "…"
    return text
