"""What Ray prints by itself."""

import pytest

from torchquorum.launcher.ray_lines import shorten


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Raylet is terminated. Termination is unexpected. Last 20 lines:\n  [state-dump] a\n", None),
        (
            "The node with node id: fb01 and address: 10.0.0.3 and node name: x has been marked dead because\n(1) raylet",
            "Ray has lost the machine 10.0.0.3",
        ),
        ("Error: No available node types can fulfil it\nmore", "Ray: Error: No available node types can fulfil it"),
        ("", None),
    ],
)
def test_of_what_ray_prints_only_what_helps_is_kept(message: str, line: str | None):
    assert shorten(message) == line
