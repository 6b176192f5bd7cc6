"""The example notebook, run by a real kernel from its first cell to its last."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbformat and nbclient (the extra dev)")
NotebookClient = pytest.importorskip("nbclient", reason="needs nbclient (the extra dev)").NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "launch.ipynb"


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    kernels = tmp_path / "data" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernels / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "Python 3", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    asyncio.run(client.async_execute())
    shown = ["".join(o.get("text", "") for o in cell.get("outputs", [])) for cell in notebook.cells]
    text = "\n".join(shown)
    assert "[worker 0] 300 batches, last loss" in text and "[worker 1] 300 batches, last loss" in text
    accuracy = float(text.split("test accuracy ")[1].split()[0])
    assert accuracy > 0.9
    both = [int(line.split()[2]) for line in text.splitlines() if "batches, last loss" in line][2:]
    assert 600 <= sum(both) <= 601  # a gradient beyond the last step is refused
