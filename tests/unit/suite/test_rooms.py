"""The package as a house: a file and a class are found by their names, a file is read in one sitting, and the clock is an argument."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import torchquorum

PACKAGE = Path(torchquorum.__file__).parent
MOST_LINES = 600
TIMES = {"time", "monotonic", "perf_counter", "sleep", "time_ns", "monotonic_ns", "perf_counter_ns"}


@cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_two_files_have_one_name_but_a_command_and_what_it_is_about() -> None:
    places = defaultdict[str, list[str]](list)
    for path in trees():
        folder, _, name = path.rpartition("/")
        if name != "__init__.py" and folder != "cli":
            places[name].append(path)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict[str, list[str]](list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_file_is_longer_than_a_sitting() -> None:
    assert [path for path in trees() if len((PACKAGE / path).read_text().splitlines()) > MOST_LINES] == []


def test_only_the_clock_asks_what_time_it_is() -> None:
    asks = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "time" and TIMES & {n.name for n in node.names}:
                asks.append(path)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                asks += [path] * (node.value.id == "time" and node.attr in TIMES)
    assert sorted(set(asks)) == ["clock.py"]
