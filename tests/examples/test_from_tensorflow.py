"""docs/from-tensorflow.md answers for every name of TensorFlow in the tutorials, and for every example."""

import re
from pathlib import Path

import pytest

from tests.examples.tensorflow_names import ARGUMENTS, FLAGS, METHODS, NAMES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "from-tensorflow.md").read_text()
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ")]
INDEX = (ROOT / "examples" / "README.md").read_text()


@pytest.mark.parametrize("names", [NAMES, METHODS, FLAGS, ARGUMENTS], ids=["names", "methods", "flags", "arguments"])
def test_every_name_of_the_tutorials_has_a_row(names: list[str]) -> None:
    left_cells = "\n".join(row.split(" | ")[0] for row in ROWS)
    known = set(re.findall(r"`([^`(=]+)[^`]*`", left_cells))
    assert not [name for name in names if name not in known]


def test_every_program_of_the_examples_is_in_the_index_and_on_the_page() -> None:
    found = [*(ROOT / "examples").rglob("*.py"), *(ROOT / "examples").rglob("*.ipynb")]
    programs = {p.relative_to(ROOT / "examples").as_posix() for p in found if ".ipynb_checkpoints" not in p.parts}
    assert not [program for program in programs if program not in INDEX]
    others = (
        "mnist/",
        "notebook/",
        "gpt/",
        "annealing/",
        "epochs/",
        "recommender/",
        "gan/",
        "muon/",
        "lightning/",
        "trainer/",
        "accelerate/",
        "loggers/",
        "serving/",
        "actors/",
    )
    tutorials = {p for p in programs if not p.startswith(others)}
    assert not [program for program in tutorials if program not in TEXT]


def test_every_link_leads_somewhere() -> None:
    for page, text in ((ROOT / "docs", TEXT), (ROOT / "examples", INDEX)):
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert target.startswith("http") or (page / target).exists(), target
