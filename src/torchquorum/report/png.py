"""Scenes as PNG, drawn by Pillow: no browser, no display, no system font.

Pillow comes with tensorboard and includes a font. What always holds: the picture is drawn larger and scaled down, so that
lines are smooth; it always uses the light theme.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchquorum.report.scene import LIGHT, Area, Dot, Item, Point, Polyline, Rect, Scene, Text

SCALE = 2  # pixels of the file per unit of the scene
_SMOOTH = 2  # drawn this many times larger, then scaled down


def write_png(scene: Scene, path: Path) -> None:
    """Draws a scene into a file, atomically.

    Raises:
        OSError: It cannot be written.
    """
    from PIL import Image, ImageDraw

    factor = SCALE * _SMOOTH
    size = (math.ceil(scene.width * factor), math.ceil(scene.height * factor))
    image = Image.new("RGB", size, LIGHT["page"])
    brush = _Brush(ImageDraw.Draw(image), factor)
    for item in scene.items:
        brush.draw(item)
    image = image.resize((size[0] // _SMOOTH, size[1] // _SMOOTH), Image.Resampling.LANCZOS)
    small = image.quantize(colors=128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    partial = path.with_name(path.name + ".partial")
    small.save(partial, format="PNG", optimize=True)
    partial.replace(path)


class _Brush:
    def __init__(self, draw: Any, factor: float) -> None:
        self._draw, self._factor = draw, factor
        self._fonts: dict[float, Any] = {}

    def draw(self, item: Item) -> None:
        """Draws one item."""
        match item:
            case Polyline():
                self._line(item)
            case Area():
                self._draw.polygon(self._scaled(item.points), fill=_mixed(item.colour, item.opacity))
            case Rect():
                corner = self._scaled([(item.x, item.y), (item.x + item.width, item.y + item.height)])
                self._draw.rectangle(corner, fill=_mixed(item.colour, item.opacity))
            case Dot():
                r = item.radius
                self._draw.ellipse(
                    self._scaled([(item.x - r, item.y - r), (item.x + r, item.y + r)]), LIGHT[item.colour]
                )
            case Text():
                self._text(item)

    def _scaled(self, points: list[Point]) -> list[Point]:
        return [(x * self._factor, y * self._factor) for x, y in points]

    def _line(self, line: Polyline) -> None:
        width = max(1, round(line.width * self._factor))
        for points in _dashes(line.points, line.dash) if line.dash else [line.points]:
            self._draw.line(self._scaled(points), fill=LIGHT[line.colour], width=width, joint="curve")

    def _text(self, text: Text) -> None:
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[text.anchor]
        stroke = 0.35 * self._factor if text.bold else 0
        where = (text.x * self._factor, text.y * self._factor)
        colour = LIGHT[text.colour]
        self._draw.text(
            where, text.text, colour, self._font(text.size), anchor, stroke_width=stroke, stroke_fill=colour
        )

    def _font(self, size: float) -> Any:
        from PIL import ImageFont

        if size not in self._fonts:
            self._fonts[size] = ImageFont.load_default(size * self._factor)
        return self._fonts[size]


def _mixed(colour: str, opacity: float) -> tuple[int, ...]:
    """Returns the colour blended with the surface: real transparency would need a second image in Pillow."""
    over, under = (_rgb(LIGHT[c]) for c in (colour, "surface"))
    return tuple(round(opacity * a + (1 - opacity) * b) for a, b in zip(over, under, strict=True))


def _rgb(text: str) -> tuple[int, int, int]:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def _dashes(points: list[Point], pattern: tuple[float, ...]) -> list[list[Point]]:
    """Splits a line into its dashes."""
    drawn: list[list[Point]] = [[points[0]]] if points else []
    on, left, turn = True, pattern[0], 0
    for start, end in pairwise(points):
        length = math.dist(start, end)
        done = 0.0
        while length - done > left:
            done += left
            spot = (start[0] + (end[0] - start[0]) * done / length, start[1] + (end[1] - start[1]) * done / length)
            if on:
                drawn[-1].append(spot)
            else:
                drawn.append([spot])
            on, turn = not on, turn + 1
            left = pattern[turn % len(pattern)]
        left -= length - done
        if on:
            drawn[-1].append(end)
    return [part for part in drawn if len(part) > 1]
