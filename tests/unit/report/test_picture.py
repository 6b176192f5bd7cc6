from torchquorum.report.charts import WIDTH, Axis, ChartBar, bar_chart
from torchquorum.report.picture import GAP, picture
from torchquorum.report.scene import Text


def test_charts_stand_in_rows_below_the_sentences() -> None:
    bars = [ChartBar(name="a", parts=[(1.0, "c0", "")])]
    charts = [bar_chart(f"chart {i}", bars, Axis(name="x")) for i in range(4)]
    scene = picture(charts, "title", "below", ["one sentence.", "another."], columns=3)
    places = {item.text: (item.x, item.y) for item in scene.items if isinstance(item, Text)}
    assert scene.width == 3 * WIDTH + 4 * GAP
    assert places["chart 1"][0] - places["chart 0"][0] == WIDTH + GAP and places["chart 1"][1] == places["chart 0"][1]
    assert places["chart 3"][0] == places["chart 0"][0] and places["chart 3"][1] > places["chart 0"][1]
    assert places["title"][1] < places["one sentence."][1] < places["another."][1] < places["chart 0"][1] < scene.height
