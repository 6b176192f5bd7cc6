"""Scenes as SVG."""

from xml.etree import ElementTree

from torchquorum.report.charts import Axis, Series, line_chart
from torchquorum.report.svg import to_svg

X, Y = Axis(name="time", unit="s", from_zero=True), Axis(name="loss")


def test_a_picture_is_well_formed_svg_and_names_from_outside_are_escaped() -> None:
    series = Series(name='<b a="&">', x=[0, 1], y=[1, 2], colour="c0")
    root = ElementTree.fromstring(to_svg(line_chart("<script>", [series], X, Y)))
    assert root.find("script") is None and '<b a="&">' in [e.text for e in root.iter("text")]
