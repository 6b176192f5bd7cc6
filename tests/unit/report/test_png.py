"""Scenes as PNG."""

from pathlib import Path

from PIL import Image

from tests.unit.report.runs import write_async, write_sync
from torchquorum.report.compare_page import compare_picture
from torchquorum.report.comparison import compare_runs
from torchquorum.report.history import read_history
from torchquorum.report.png import write_png


def test_the_png_is_a_picture_of_the_comparison(tmp_path: Path) -> None:
    write_sync(tmp_path / "a", rounds=30)
    write_async(tmp_path / "b", gradients=40)
    runs = compare_runs([(n, read_history(tmp_path / n)) for n in ("a", "b")])
    target = tmp_path / "compare.png"
    write_png(compare_picture(runs, "a and b", "two runs"), target)
    with Image.open(target) as image:
        assert image.format == "PNG" and image.width > 2000 and image.height > 1000
        colours = image.convert("RGB").getcolors(1 << 24)
    assert colours is not None and len(colours) > 20
    assert target.stat().st_size < 600_000
    assert not list(tmp_path.glob("*.partial"))
