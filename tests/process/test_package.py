"""The wheel and the sdist work where nothing else of the project is. `make package`, which leaves them in dist/."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"


def run(*command: str | Path, cwd: Path) -> str:
    words, env = [str(word) for word in command], {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    """Built as a packager builds it: the sdist from the tree, the wheel from the sdist."""
    for old in DIST.glob("torchquorum-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT, cwd=ROOT)
    (made,) = DIST.glob("torchquorum-*.whl")
    return made


@pytest.mark.packages
def test_wheel_and_sdist_hold_the_package_and_its_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    here = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "torchquorum").rglob("*.py")}
    assert here <= set(names)
    assert "torchquorum/py.typed" in names and any(name.startswith("torchquorum/data/files/") for name in names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "tools"))]
    (sdist,) = DIST.glob("torchquorum-*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "src/torchquorum/py.typed"} <= inside


@pytest.mark.packages
@pytest.mark.timeout(1800)  # the environment has a torch of its own
def test_the_wheel_trains_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    empty = tmp_path / "elsewhere"
    empty.mkdir()
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, cwd=empty)
    assert "finished at 100" in run(tmp_path / "env" / "bin" / "torchquorum", "train", "--steps=100", cwd=empty)
    where = run(python, "-I", "-c", "import torchquorum; print(torchquorum.__file__)", cwd=empty)
    assert where.startswith(str(tmp_path)), where
    assert run(python, "-I", "-m", "torchquorum", "--version", cwd=empty).startswith("torchquorum, version ")
