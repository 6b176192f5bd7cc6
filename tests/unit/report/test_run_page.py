"""The page of one run."""

import re
from pathlib import Path

import pytest

from tests.unit.report.runs import write_gan, write_sync
from torchquorum.formats.ledger import Event
from torchquorum.formats.ledger_write import LedgerWriter
from torchquorum.report.history import read_history
from torchquorum.report.run_page import run_page


def test_a_page_fetches_nothing_and_holds_the_run(tmp_path: Path) -> None:
    write_sync(tmp_path / "run")
    text = run_page(read_history(tmp_path / "run"))
    assert not re.search(r"(?:src|href)=\"(?!data:)", text) and "@import" not in text and "url(" not in text
    assert text.count("<svg") >= 10
    for words in (
        "Loss over time",
        "Validation accuracy over steps",
        "Staleness of used gradients",
        "Computing and waiting",
    ):
        assert words in text
    assert "Worker 1 is the straggler: a batch takes it 3.0 times as long" in text
    assert "Sync()" in text and "model.ckpt-40" in text


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a&b'\"c", "ünï-✓"])
def test_a_folder_with_an_odd_name_does_no_harm(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name.replace("/", "_")
    write_sync(folder)
    assert "<script>alert" not in run_page(read_history(folder))


def test_the_numbers_that_auto_chose_are_drawn(tmp_path: Path) -> None:
    end = write_sync(tmp_path, ended=False)
    writer = LedgerWriter(tmp_path)
    for at, number in ((end - 1.0, 2), (end - 0.5, 3)):
        writer.write(Event("chose", at, 20, values={"aggregate": number, "live": 3, "round_s": 0.01}))
    writer.close()
    text = run_page(read_history(tmp_path))
    assert "Gradients waited for" in text
    assert "The rule chose 2 times how many gradients make an update: 2 at least, 3 at most, 3 at the end." in text


def test_several_optimizers_are_told_apart(tmp_path: Path) -> None:
    write_gan(tmp_path)
    text = run_page(read_history(tmp_path))
    assert "G Sync(), D Async(), 2 workers" in text
    assert "Optimizer by optimizer" in text and "updates of D" in text and "Loss over updates" in text
    for cells in (["G", "Sync()", "30"], ["D", "Async()", "180"]):
        assert "".join(f"<td>{cell}</td>" for cell in cells[1:]) in text and f"</span>{cells[0]}</td>" in text
    assert "D: optimizer" in text and "SGD(lr=0.1)" in text and "G: model" in text
    assert "are in no line" not in text and "computed again after a restore" not in text
