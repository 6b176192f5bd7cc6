"""Draws the pictures of docs/images that come from runs: the live view, a report, a comparison.

    python docs/images/draw.py OUTPUT       trains for a few minutes into the new folder OUTPUT, then draws

live-view.svg is the live part of `torchquorum train` as it stood in the middle of a real run. The screenshots need Chromium;
without it they are left as they are.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from torchquorum.cli.live_view import View
from torchquorum.cli.train import job_cluster, run_job
from torchquorum.jobs.mnist_job import MnistOptions
from torchquorum.launcher.launched import LaunchOptions

HERE = Path(__file__).parent
COMMAND = "torchquorum train --workers 3 --slow worker1:3x --steps 1500"


class Kept(View):
    """A view that keeps the picture of the moment when most of the run is over."""

    kept: Any = None

    def show(self, status: dict[str, Any]) -> None:
        """Shows a status, and keeps it."""
        super().show(status)
        if status.get("global_step", 0) < 1000 and status.get("per_worker"):
            self.kept = self.render(status)


def draw_live_view(folder: Path) -> None:
    """Trains and exports the live part."""
    view = Kept(Console())
    options = MnistOptions(steps=1500, slow="worker1:3x", logdir=str(folder / "live"))
    assert run_job(job_cluster(options, LaunchOptions(command=[], workers=3), view), view) == 0
    console = Console(record=True, width=104, height=24, force_terminal=True, highlight=False, file=io.StringIO())
    console.print(f"$ {COMMAND}")
    console.print(view.kept)
    text = console.export_svg(title="torchquorum", font_aspect_ratio=0.61)
    text = re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)  # a picture fetches nothing
    (HERE / "live-view.svg").write_text(text)


def shoot(page: Path, target: Path, width: int, height: int) -> None:
    """Takes a screenshot of a page."""
    chromium = shutil.which("chromium")
    if chromium is None:
        print(f"no Chromium: {target} is left as it is")
        return
    raw = target.with_suffix(".raw.png")
    size, shot = f"--window-size={width},{height}", f"--screenshot={raw}"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    subprocess.run(
        [chromium, *flags, size, shot, page.resolve().as_uri()], check=True, capture_output=True, timeout=120
    )
    with Image.open(raw) as image:
        image.convert("RGB").quantize(colors=128).save(target, optimize=True)
    raw.unlink()


def main() -> None:
    """Trains and draws everything."""
    folder = Path(sys.argv[1])
    torchquorum = [sys.executable, "-m", "torchquorum.cli.main"]
    draw_live_view(folder)
    subprocess.run(
        [*torchquorum, "compare", "--seconds=30", "--rounds=3", f"--output={folder / 'compare'}"], check=True
    )
    shutil.copy(folder / "compare" / "compare.png", HERE / "compare.png")
    with Image.open(HERE / "compare.png") as image:
        image.convert("RGB").resize((image.width * 2 // 3, image.height * 2 // 3), Image.Resampling.LANCZOS).quantize(
            colors=96
        ).save(HERE / "compare.png", optimize=True)
    subprocess.run([*torchquorum, "report", str(folder / "compare" / "sync")], check=True)
    shoot(folder / "compare" / "sync" / "report.html", HERE / "report.png", 1340, 1760)


if __name__ == "__main__":
    main()
