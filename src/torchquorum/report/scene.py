"""The elements of a picture: lines, areas, rectangles, dots and texts, with colours by role.

`charts` builds scenes; `svg` and `png` draw them, so page and PNG show the same. Imports only the standard library. What always
holds: a scene names colours by role only (`ink`, `dim`, `grid`, `c0` .. `c7`); the page's themes and the PNG define them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Point = tuple[float, float]

# Distinguishable with the common colour-vision deficiencies (after Okabe and Ito), each with a contrast of at least 3:1.
LIGHT = {
    "surface": "#ffffff", "page": "#f6f7f9", "ink": "#1b2330", "dim": "#5b6675", "grid": "#e3e7ec", "line": "#c3cad3",
    "c0": "#0b66a8", "c1": "#c9510c", "c2": "#00806a", "c3": "#a2418c", "c4": "#8a6a00", "c5": "#2f93d1", "c6": "#6d7480",
    "c7": "#7b3f1d",
}  # fmt: skip
DARK = {
    "surface": "#171c24", "page": "#0f1319", "ink": "#e8ecf1", "dim": "#9aa6b5", "grid": "#29313c", "line": "#45505e",
    "c0": "#5aaeea", "c1": "#ff9152", "c2": "#35c3a5", "c3": "#de84c8", "c4": "#dcb63c", "c5": "#9bd4ff", "c6": "#a4adb9",
    "c7": "#d59a78",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Polyline:
    """A line through points; `name` is shown at the pointer."""

    points: list[Point]
    colour: str
    width: float = 1.0
    dash: tuple[float, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class Area:
    """A filled polygon."""

    points: list[Point]
    colour: str
    opacity: float = 0.16


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle; `title` is shown at the pointer."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    opacity: float = 1.0
    title: str = ""


@dataclass(frozen=True, slots=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    radius: float
    colour: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A text whose baseline starts, is centred or ends at a point."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: str = "start"
    colour: str = "ink"
    bold: bool = False


Item = Polyline | Area | Rect | Dot | Text


@dataclass(frozen=True, slots=True)
class AxisScale:
    """How values map to pixels along one axis; the page inverts it at the pointer."""

    low: float
    high: float
    start: float
    end: float
    kind: str = "linear"
    unit: str = ""


@dataclass(slots=True)
class Scene:
    """A picture of `width` by `height` pixels. `alt` describes it in words; `axes` is set where the pointer shows values."""

    width: float
    height: float
    alt: str
    items: list[Item] = field(default_factory=list)
    axes: tuple[AxisScale, AxisScale] | None = None

    def add(self, *items: Item) -> None:
        """Adds items in front of the others."""
        self.items += items


_NARROW, _WIDE = set("iljtfrI.,:;'|!() "), set("mwMW@%")


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Returns an upper estimate of the width of a text in a sans-serif font."""
    units = sum(
        0.32 if c in _NARROW else 0.88 if c in _WIDE else 0.58 if c.islower() or c.isdigit() else 0.68 for c in text
    )
    return units * size * (1.06 if bold else 1.0)
