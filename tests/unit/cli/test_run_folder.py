"""The folder of a run that was given none: its own, also if another began in the same second."""

from pathlib import Path

import pytest

from torchquorum.cli.run_folder import new_run_folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20261116-103402")


def test_runs_of_one_second_get_folders_of_their_own() -> None:
    names = [new_run_folder("mnist") for _ in range(3)]
    assert names == [f"runs/mnist-20261116-103402{end}" for end in ("", "-2", "-3")]
    assert all(Path(name).is_dir() for name in names)


def test_where_none_can_be_made_the_name_is_left_to_whoever_writes_there() -> None:
    Path("runs").write_text("a file")
    assert new_run_folder("mnist") == "runs/mnist-20261116-103402"
