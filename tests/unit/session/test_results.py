"""Results for the report, and numbers along the way."""

from pathlib import Path

import pytest

from tests.unit.session.test_config import setup, task
from torchquorum.errors import ConfigError
from torchquorum.formats.measures import read_measures
from torchquorum.session.hooks.hook import Hook
from torchquorum.session.results import Results


class Sink(Hook):
    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def scalar(self, name: str, value: float, global_step: int) -> None:
        self.seen.append((name, value, global_step))


def test_only_loss_and_accuracy_are_recorded() -> None:
    results = Results(setup(task()), [])
    results.record({"loss": 1})
    results.record({"accuracy": 0.5, "loss": 2})
    with pytest.raises(ConfigError, match=r"session.record\(speed=...\): allowed are loss and accuracy"):
        results.record({"speed": 1})
    assert results.recorded == {"loss": 2.0, "accuracy": 0.5}


def test_numbers_go_to_hooks_that_take_them_and_to_the_folder_if_this_worker_writes(tmp_path: Path) -> None:
    sink = Sink()
    results = Results(setup(task(), logdir=str(tmp_path)), [Hook(), sink])
    results.measure(7, {"accuracy": 0.5}, write=False)
    results.measure(8, {"accuracy": 0.75}, write=True)
    assert sink.seen == [("accuracy", 0.5, 7), ("accuracy", 0.75, 8)]
    measures = read_measures(tmp_path)
    assert [(each.name, each.value, each.global_step) for each in measures] == [("accuracy", 0.75, 8)]


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    Results(setup(task(), logdir=str(tmp_path / "file")), []).measure(1, {"accuracy": 1.0}, write=True)
    assert "/job:worker/task:0: accuracy could not be noted in" in capsys.readouterr().err
