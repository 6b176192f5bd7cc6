"""Every `tq.NAME` that is written anywhere exists: in documents, docstrings and messages, examples and notebooks."""

import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

import torchquorum as tq
from tests.documents.markdown import ROOT, linking_documents

_NAME = re.compile(r"(?<![\w.])tq\.((?:\w+\.)*\w+)")


def _files() -> list[Path]:
    # Decisions and the changelog may speak of names that are gone.
    pages = [path for path in linking_documents() if path.parent.name != "adr" and path.name != "CHANGELOG.md"]
    programs = [path for folder in ("src", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    notebooks = [path for path in (ROOT / "examples").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts]
    return [*pages, *programs, *notebooks]


def missing_of(text: str) -> list[str]:
    """Returns the names of a text that are not public, or are no member of what they are written after."""
    return [f"tq.{dotted}" for dotted in sorted(set(_NAME.findall(text))) if not _exists(dotted.split("."))]


def _exists(parts: list[str]) -> bool:
    found: Any = tq
    for part in parts:
        public = part in dir(found) if inspect.ismodule(found) else _has_member(found, part)
        if not public or part.startswith("_"):
            return False
        found = getattr(found, part, None)
        if not (inspect.ismodule(found) or inspect.isclass(found)):
            return True  # what follows belongs to a value
    return True


def _has_member(kind: type, name: str) -> bool:
    if hasattr(kind, name) or (is_dataclass(kind) and name in kind.__dataclass_fields__):
        return True
    return f"self.{name}" in inspect.getsource(kind)


def test_every_name_exists() -> None:
    files = _files()
    missing = {str(path.relative_to(ROOT)): missing_of(path.read_text(encoding="utf-8")) for path in files}
    assert len(files) > 200
    assert not {path: names for path, names in missing.items() if names}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`tq.Session(task)` and tq.data.load_mnist()", []),
        ("tq.Sesion", ["tq.Sesion"]),
        ("tq.ConfigProto, tq.data.Batches", ["tq.ConfigProto", "tq.data.Batches"]),
        ("tq.data.mnist is a module, not a public name", ["tq.data.mnist"]),
        ("tq.Session.share, tq.Session.lend", ["tq.Session.lend"]),
    ],
)
def test_a_name_that_is_not_public_is_found(text: str, missing: list[str]) -> None:
    assert missing_of(text) == missing
