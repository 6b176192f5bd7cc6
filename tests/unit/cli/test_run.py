"""The options of `torchquorum run` that it refuses; tests/process/test_commands.py runs it."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from torchquorum.cli.run import run
from torchquorum.errors import ConfigError


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("")
    return path


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--address", "auto"], "--address auto: applies only to Ray; add --on ray"),
        (["--gpus-per-worker", "1"], "--gpus-per-worker 1: applies only to Ray"),
        (["--on", "ray", "--cpus-per-worker", "-1"], "cpus_per_worker=-1: must be 0 or more"),
        (
            ["--on", "ray", "--gpus-per-worker", "1.5"],
            "gpus_per_worker=1.5: above 1 Ray allows whole numbers only; use 1",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], text: str, script: Path):
    outcome = CliRunner().invoke(run, [*arguments, str(script)])
    assert isinstance(outcome.exception, ConfigError) and text in str(outcome.exception)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, script: Path):
    monkeypatch.setitem(sys.modules, "ray", None)
    outcome = CliRunner().invoke(run, ["--on", "ray", str(script)])
    assert "pip install 'torchquorum[ray]'" in str(outcome.exception)
