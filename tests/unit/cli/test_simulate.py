"""`torchquorum simulate` as users call it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.unit.report.runs import write_sync
from torchquorum.cli.simulate import simulate
from torchquorum.errors import ConfigError


def run(*arguments: str) -> str:
    done = CliRunner().invoke(simulate, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_it_writes_a_page_a_picture_and_the_figures(tmp_path: Path) -> None:
    said = run("--workers", "3", "--times", "1", "--slow", "worker1:3x", "--updates", "20", "-o", str(tmp_path / "out"))
    assert said.startswith(
        "3 workers, step times 1, worker 1 3 times as long, 20 updates, seed 0\n- sync: 0.333 updates/s"
    )
    found = json.loads((tmp_path / "out" / "simulate.json").read_text())
    assert found["rules"][0]["updates_per_s"] == pytest.approx(1 / 3)
    assert (tmp_path / "out" / "simulate.html").exists() and (tmp_path / "out" / "simulate.png").exists()


def test_a_sweep_of_a_run_says_how_near_the_simulation_comes(tmp_path: Path) -> None:
    write_sync(tmp_path / "run", rounds=100, times=(0.01, 0.03, 0.01))
    said = run("--from", str(tmp_path / "run"), "--sweep", "sync,sync:2of3,sync:auto", "-o", str(tmp_path / "out"))
    assert "- The run made 33" in said and "updates/s with Sync(); the simulation of the same makes 33" in said
    assert "The best number to wait for is 2 of 3, 1 backup workers" in said
    alone = run("--from", str(tmp_path / "run"), "--workers", "5", "-o", str(tmp_path / "out"))
    assert "The run that the times come from made 33" in alone


def test_everything_that_can_go_wrong_is_part_of_the_words(tmp_path: Path) -> None:
    said = run(
        *[
            "--workers",
            "2:4",
            "--arrive-every",
            "5s",
            "--fail-every",
            "1m",
            "--restart-after",
            "3s",
            "--latency",
            "1ms",
        ],
        *["--bytes", "10MB", "--bandwidth", "1Gbit", "--ps", "2", "--slow", "10s:worker1:2x", "--noise", "4"],
        *["--seconds", "30", "--times", "100ms", "--rule", "async", "--quiet"],
        "-o",
        str(tmp_path),
    )
    assert said.startswith("page ")
    words = json.loads((tmp_path / "simulate.json").read_text())["scenario"]
    assert words == (
        "2 to 4 workers, step times 100ms, worker 1 2 times as long from 10 s on, 10 MB over 1 Gbit/s, 2 ps, a failure every 60 s "
        "per worker, an arrival every 5 s, noise scale 4, 30 s, seed 0"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rule sync --sweep sync,async", "give one of them"),
        ("--workers 2:4", "give --arrive-every too"),
        ("--bandwidth 1Gbit", "--bytes and --bandwidth belong together"),
        ("--bytes 1MB", "--bytes and --bandwidth belong together"),
        ("--ps 2", "has an effect with --bytes only"),
        ("--slow worker9:2x", "there is no worker 9"),
        ("--slow 5s:fast", "must look like worker1:3x"),
        ("--restart-after 5s", "no worker fails"),
    ],
)
def test_what_would_have_no_effect_is_an_error(arguments: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*arguments.split(), "-o", str(tmp_path))


def test_the_times_of_a_run_and_other_times_exclude_each_other(tmp_path: Path) -> None:
    write_sync(tmp_path / "run", rounds=100)
    with pytest.raises(ConfigError, match="the run has its own times"):
        run("--from", str(tmp_path / "run"), "--times", "1")
