"""Scenes as SVG inside a page: colours are the page's CSS variables, so that they follow its light or dark theme."""

from __future__ import annotations

from dataclasses import asdict
from html import escape

import msgspec

from torchquorum.report.scene import Area, Dot, Item, Polyline, Rect, Scene, Text


def to_svg(scene: Scene) -> str:
    """Returns the scene as one `<svg>` element, which scales with its width."""
    axes = ""
    if scene.axes is not None:
        data = msgspec.json.encode([asdict(axis) for axis in scene.axes]).decode()
        axes = f' data-axes="{escape(data)}"'
    head = f'<svg viewBox="0 0 {scene.width:g} {scene.height:g}" role="img" aria-label="{escape(scene.alt)}"{axes}>'
    return "\n".join([head, *map(_element, scene.items), "</svg>"])


def _element(item: Item) -> str:
    match item:
        case Polyline():
            dash = f' stroke-dasharray="{" ".join(f"{d:g}" for d in item.dash)}"' if item.dash else ""
            name = f' data-name="{escape(item.name)}"' if item.name else ""
            look = f'fill="none" stroke="var(--{item.colour})" stroke-width="{item.width:g}"'
            return f'<polyline points="{_points(item.points)}" {look} stroke-linejoin="round"{dash}{name}/>'
        case Area():
            return f'<polygon points="{_points(item.points)}" fill="var(--{item.colour})" opacity="{item.opacity:g}"/>'
        case Rect():
            place = f'x="{item.x:.1f}" y="{item.y:.1f}" width="{item.width:.1f}" height="{item.height:.1f}"'
            look = f'fill="var(--{item.colour})"' + (f' opacity="{item.opacity:g}"' if item.opacity < 1 else "")
            return f'<rect {place} {look} rx="1.5">{_title(item.title)}</rect>'
        case Dot():
            place = f'cx="{item.x:.1f}" cy="{item.y:.1f}" r="{item.radius:g}"'
            return f'<circle {place} fill="var(--{item.colour})">{_title(item.title)}</circle>'
        case Text():
            look = f'font-size="{item.size:g}" text-anchor="{item.anchor}" fill="var(--{item.colour})"'
            weight = ' font-weight="600"' if item.bold else ""
            return f'<text x="{item.x:.1f}" y="{item.y:.1f}" {look}{weight}>{escape(item.text)}</text>'


def _points(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
