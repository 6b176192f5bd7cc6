"""Charts: what they show, and that names do not overlap."""

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchquorum.report.charts import Axis, ChartBar, Series, bar_chart, line_chart, spread
from torchquorum.report.scene import Dot, Text
from torchquorum.report.svg import to_svg

X, Y = Axis(name="time", unit="s", from_zero=True), Axis(name="loss")


@given(st.lists(st.floats(0, 200), min_size=1, max_size=12))
def test_names_are_pushed_apart_and_keep_their_order(places: list[float]) -> None:
    places.sort()
    moved = spread(places, 14, 0, 200)
    assert all(b - a >= 14 - 1e-6 for a, b in pairwise(moved))


@pytest.mark.parametrize("count", [1, 2, 6])
def test_a_line_is_named_at_its_end_and_no_two_names_overlap(count: int) -> None:
    lines = [Series(name=f"rule {i}", x=[0, 1, 2], y=[2, 1, 0.5 + i / 1000], colour=f"c{i}") for i in range(count)]
    scene = line_chart("Loss", lines, X, Y)
    names = [t for t in scene.items if isinstance(t, Text) and t.text.startswith("rule ")]
    heights = sorted(t.y for t in names)
    assert len(names) == count and all(b - a >= 13 for a, b in pairwise(heights))
    assert all(t.x < scene.width and 0 < t.y < scene.height for t in names)


def test_a_chart_says_its_axes_with_units_and_an_empty_one_says_why() -> None:
    texts = [
        t.text
        for t in line_chart("Loss", [Series(name="", x=[0, 9], y=[1, 2], colour="c0")], X, Y).items
        if isinstance(t, Text)
    ]
    assert "time (s)" in texts and "loss" in texts
    nothing = line_chart("Loss", [Series(name="a", x=[], y=[], colour="c0")], X, Y, empty="no loss recorded")
    assert any(isinstance(t, Text) and t.text == "no loss recorded" for t in nothing.items)
    bars = bar_chart("Bars", [ChartBar(name="a", parts=[(0.0, "c0", "")])], X, empty="nothing")
    assert any(isinstance(t, Text) and t.text == "nothing" for t in bars.items)


@pytest.mark.parametrize("values", [[1.0, 1.0], [0.0, 0.0], [-3.0, 5.0], [1e-9, 1e9], [math.nan, 2.0]])
@pytest.mark.parametrize("kind", ["linear", "log"])
def test_odd_values_are_drawn_inside_the_axes_and_what_is_no_number_is_left_out(values: list[float], kind: str) -> None:
    series = Series(name="n", x=[0.0, 1.0], y=values, colour="c0", dots=True)
    scene = line_chart("t", [series], X, Axis(name="y", kind=kind))
    assert scene.axes is not None
    across, up = scene.axes
    dots = [item for item in scene.items if isinstance(item, Dot)]
    assert len(dots) == sum(math.isfinite(v) for v in values)
    assert all(across.start <= dot.x <= across.end and up.end <= dot.y <= up.start for dot in dots)
    assert len(list(ElementTree.fromstring(to_svg(scene)).iter("circle"))) == len(dots)
