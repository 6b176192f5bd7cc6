"""Every module has a test file of its own name, or a row in tests/README.md that says where it is tested."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "torchquorum"
ROWS = re.findall(r"^\| (`.*?) \| (.*?) \|$", (ROOT / "tests" / "README.md").read_text(), re.M)


def modules() -> set[str]:
    found = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    return {str(module) for module in found}


def has_its_own(module: str) -> bool:
    path = Path(module)
    return (ROOT / "tests" / "unit" / path.parent / f"test_{path.name}.py").exists()


def test_every_module_has_a_test_file_or_a_row() -> None:
    listed = [name for row, _ in ROWS for name in re.findall(r"`([^`]+)`", row)]
    without = {module for module in modules() if not has_its_own(module)}
    assert sorted(without - set(listed)) == [], "add tests/unit/<folder>/test_<module>.py, or a row to tests/README.md"
    assert sorted(set(listed) - without) == [], "these have a test file of their own, or are gone: remove them"
    assert len(listed) == len(set(listed))


def test_the_files_that_the_rows_name_are_there() -> None:
    named = [name for _, where in ROWS for name in re.findall(r"`(tests/[^`]+)`", where)]
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
