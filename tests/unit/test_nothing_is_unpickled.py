"""No pickle is ever loaded, from the wire or from disk, and no text that came is run."""

import ast
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import torchquorum
from torchquorum.errors import TorchQuorumError
from torchquorum.formats.checkpoint import CheckpointReader, load_manifest
from torchquorum.formats.tfrecord import read_records
from torchquorum.graph import graph_messages as g
from torchquorum.wire import codec

SOURCE = Path(torchquorum.__file__).parent
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec"}


class Bomb:
    """What makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "exploded"


@pytest.fixture
def bombs(mark: Path, tmp_path: Path) -> list[bytes]:
    saved = tmp_path / "bomb.pt"
    torch.save({"x": Bomb(mark)}, saved)
    return [*(pickle.dumps(Bomb(mark), protocol) for protocol in range(6)), saved.read_bytes()]


def test_the_bomb_is_one(mark: Path, bombs: list[bytes]) -> None:
    pickle.loads(bombs[0])
    assert mark.is_dir()


def test_a_pickle_on_the_wire_is_no_message(mark: Path, bombs: list[bytes]) -> None:
    for bomb in bombs:
        for split in (codec.split, g.split):
            with pytest.raises(codec.WireError):
                split([bomb])
    assert not mark.exists()


def test_a_pickle_is_no_record(mark: Path, bombs: list[bytes], tmp_path: Path) -> None:
    for number, bomb in enumerate(bombs):
        path = tmp_path / f"{number}.tfrecords"
        path.write_bytes(bomb)
        with pytest.raises(TorchQuorumError):
            list(read_records(path))
    assert not mark.exists()


def test_a_pickle_is_no_checkpoint(mark: Path, bombs: list[bytes], tmp_path: Path) -> None:
    for number, bomb in enumerate(bombs):
        folder = tmp_path / f"model.ckpt-{number}"
        folder.mkdir()
        for name in ("manifest.json", "checkpoint.json", "part-00000.safetensors", "shard-0.safetensors"):
            (folder / name).write_bytes(bomb)
        with pytest.raises(TorchQuorumError), CheckpointReader(folder, load_manifest(folder)):
            pass
    assert not mark.exists()


def test_an_array_of_objects_is_refused_by_numpy_as_we_call_it(mark: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.array([Bomb(mark)], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        np.load(path)
    assert not mark.exists()


def forbidden(tree: ast.AST) -> list[str]:
    """Returns what in a module could load a pickle or run a text."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            words = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if name in FORBIDDEN_CALLS or name.endswith(("pickle.loads", "pickle.load")):
                found.append(name)
            if name == "torch.load" and words.get("weights_only") != "True":
                found.append("torch.load without weights_only=True")
            if name.endswith(("np.load", "numpy.load")) and words.get("allow_pickle", "False") != "False":
                found.append("np.load with allow_pickle")
    return found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from yaml import load",
        "eval('1')",
        "torch.load(f)",
        "np.load(f, allow_pickle=True)",
        "exec(x)",
    ],
)
def test_the_check_finds_what_it_forbids(text: str) -> None:
    assert forbidden(ast.parse(text))


def test_no_module_of_ours_can_load_a_pickle_or_run_a_text() -> None:
    found = {str(path.relative_to(SOURCE)): forbidden(ast.parse(path.read_text())) for path in SOURCE.rglob("*.py")}
    assert len(found) > 100
    assert {path: what for path, what in found.items() if what} == {}
