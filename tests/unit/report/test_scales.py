"""Axes: where their marks lie."""

from hypothesis import example, given
from hypothesis import strategies as st

from torchquorum.report import scales
from torchquorum.report.scene import AxisScale


@example("share", [0.99999], 1.0)
@given(
    st.sampled_from(["linear", "log", "share"]),
    st.lists(st.floats(1e-6, 0.99999), min_size=1, max_size=20),
    st.floats(1e-3, 1e6),
)
def test_marks_lie_inside_their_axis_and_are_few(kind: str, values: list[float], factor: float) -> None:
    given_values = values if kind == "share" else [v * factor for v in values]
    low, high = scales.bounds(kind, given_values)
    marks = scales.ticks(AxisScale(low, high, 0, 100, kind), 6)
    assert low < high and 1 <= len(marks) <= 8
    for mark in marks:
        assert -0.5 <= scales.place(AxisScale(low, high, 0, 100, kind), mark) <= 100.5
