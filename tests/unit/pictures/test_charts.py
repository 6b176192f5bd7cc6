"""Axes, charts, pages and the PNG: what they hold, and that names do not overlap."""

import math
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from tests.unit.pictures.runs import write_async, write_sync
from torchquorum.pictures import scales
from torchquorum.pictures.charts import Axis, Bar, Series, bar_chart, line_chart, spread
from torchquorum.pictures.compare_page import as_json, compare_page, compare_picture, compared
from torchquorum.pictures.history import read_history
from torchquorum.pictures.png import write_png
from torchquorum.pictures.reading import read_comparison
from torchquorum.pictures.run_page import run_page
from torchquorum.pictures.scene import Dot, Scale, Text
from torchquorum.pictures.svg import to_svg

X, Y = Axis(name="time", unit="s", from_zero=True), Axis(name="loss")


@example("share", [0.99999], 1.0)
@given(
    st.sampled_from(["linear", "log", "share"]),
    st.lists(st.floats(1e-6, 0.99999), min_size=1, max_size=20),
    st.floats(1e-3, 1e6),
)
def test_marks_lie_inside_their_axis_and_are_few(kind: str, values: list[float], factor: float) -> None:
    given_values = values if kind == "share" else [v * factor for v in values]
    low, high = scales.bounds(kind, given_values)
    marks = scales.ticks(Scale(low, high, 0, 100, kind), 6)
    assert low < high and 1 <= len(marks) <= 8
    for mark in marks:
        assert -0.5 <= scales.place(Scale(low, high, 0, 100, kind), mark) <= 100.5


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
    bars = bar_chart("Bars", [Bar(name="a", parts=[(0.0, "c0", "")])], X, empty="nothing")
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


def test_a_picture_is_well_formed_svg_and_names_from_outside_are_escaped() -> None:
    series = Series(name='<b a="&">', x=[0, 1], y=[1, 2], colour="c0")
    root = ElementTree.fromstring(to_svg(line_chart("<script>", [series], X, Y)))
    assert root.find("script") is None and '<b a="&">' in [e.text for e in root.iter("text")]


def test_a_page_fetches_nothing_and_holds_the_run(tmp_path: Path) -> None:
    write_sync(tmp_path / "run")
    text = run_page(read_history(tmp_path / "run"))
    assert not re.search(r"(?:src|href)=\"(?!data:)", text) and "@import" not in text and "url(" not in text
    assert text.count("<svg") >= 10
    for words in ("Loss over time", "Accuracy over steps", "Staleness of used gradients", "Computing and waiting"):
        assert words in text
    assert "Worker 1 is the straggler: a batch takes it 3.0 times as long" in text
    assert "Sync()" in text and "model.ckpt-40" in text


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a&b'\"c", "ünï-✓"])
def test_a_folder_with_an_odd_name_does_no_harm(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name.replace("/", "_")
    write_sync(folder)
    assert "<script>alert" not in run_page(read_history(folder))


def test_a_comparison_has_one_colour_per_run_and_reads_itself(tmp_path: Path) -> None:
    write_sync(tmp_path / "sync", rounds=60)
    write_async(tmp_path / "async", gradients=120)
    write_async(tmp_path / "again", gradients=60)
    runs = compared([(n, read_history(tmp_path / n)) for n in ("sync", "async", "again")])
    assert len({r.colour for r in runs}) == 3 and [r.colour for r in runs][:2] == ["c0", "c1"]
    said = " ".join(read_comparison(runs))
    assert "Worker 1 was the slow one: a batch took it 3.0 times as long" in said
    assert "sync was most accurate, 95.00 %" in said and "async: its gradients were" in said
    text = compare_page(runs, "sync and async", "below")
    assert "Accuracy by the clock" in text and "What became of the batches" in text and text.count("<svg") == 9
    figures = as_json(runs)
    assert figures[0]["updates"] == 60 and figures[1]["wasted"] == 0 and figures[0]["waiting_share"] > 0.3


def test_the_png_is_a_picture_of_the_comparison(tmp_path: Path) -> None:
    write_sync(tmp_path / "a", rounds=30)
    write_async(tmp_path / "b", gradients=40)
    runs = compared([(n, read_history(tmp_path / n)) for n in ("a", "b")])
    target = tmp_path / "compare.png"
    write_png(compare_picture(runs, "a and b", "two runs"), target)
    with Image.open(target) as image:
        assert image.format == "PNG" and image.width > 2000 and image.height > 1000
        colours = image.convert("RGB").getcolors(1 << 24)
    assert colours is not None and len(colours) > 20
    assert target.stat().st_size < 600_000
    assert not list(tmp_path.glob("*.partial"))
