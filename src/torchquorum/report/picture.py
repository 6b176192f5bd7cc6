"""All charts of a page as one scene, for its PNG.

Called by the pages of comparisons and simulations. What always holds: page and PNG show the same scenes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchquorum.report.charts import WIDTH, wrap
from torchquorum.report.scene import Area, Dot, Item, Polyline, Rect, Scene, Text

GAP = 14.0


def picture(scenes: Sequence[Scene], title: str, below: str, sentences: Sequence[str], *, columns: int = 3) -> Scene:
    """Returns a title, sentences and charts in rows."""
    width = columns * WIDTH + (columns + 1) * GAP
    scene = Scene(width, 0.0, title)
    scene.add(Text(GAP + 2, 34, title, 20, bold=True), Text(GAP + 2, 55, below, 12.5, colour="dim"))
    y = 70.0
    for sentence in sentences:
        for i, line in enumerate(wrap(sentence, width - 60, 13)):
            scene.add(Text(GAP + 16, y + 8, line, 13))
            if i == 0:
                scene.add(Dot(GAP + 6, y + 4, 2, "ink"))
            y += 19
    y += 6
    for start in range(0, len(scenes), columns):
        row = scenes[start : start + columns]
        height = max(s.height for s in row)
        for i, chart in enumerate(row):
            x = GAP + i * (WIDTH + GAP)
            scene.add(Rect(x, y, WIDTH, height, "surface"))
            scene.add(Polyline([(x, y), (x + WIDTH, y), (x + WIDTH, y + height), (x, y + height), (x, y)], "grid"))
            scene.add(*(_moved(item, x, y) for item in chart.items))
        y += height + GAP
    scene.height = y
    return scene


def _moved(item: Item, x: float, y: float) -> Item:
    """Returns an item, shifted."""
    if isinstance(item, Polyline | Area):
        return replace(item, points=[(px + x, py + y) for px, py in item.points])
    return replace(item, x=item.x + x, y=item.y + y)
