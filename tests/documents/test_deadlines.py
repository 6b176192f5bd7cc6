"""The tables of deadlines say what the code has: each constant is where it is said to be, with that value."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType

import torchquorum
from tests.documents.markdown import ROOT
from torchquorum.wire.rpc import Patience

ROW = re.compile(r"^\|[^|]*\| `(?P<module>\w+)\.(?P<constant>[A-Z_]+)` \| (?P<value>[\d.]+) s", re.M)
PATIENCE = re.compile(r"`Patience\.(?P<field>\w+)`[^|]*\| (?P<value>[\d.]+) s")
DOCUMENT = "faults.md"


def modules(name: str) -> Iterator[ModuleType]:
    """The modules, or the packages' parts, that a document may mean by a short name."""
    for found in pkgutil.walk_packages(torchquorum.__path__, "torchquorum."):
        if name in found.name.split("."):
            yield importlib.import_module(found.name)


def test_every_deadline_of_a_table_is_in_the_code_with_that_value() -> None:
    rows = list(ROW.finditer((ROOT / "docs" / DOCUMENT).read_text()))
    assert len(rows) >= 8
    wrong = []
    for row in rows:
        values = {getattr(module, row["constant"], None) for module in modules(row["module"])}
        if float(row["value"]) not in values:
            wrong.append(f"{row['module']}.{row['constant']} is {row['value']} s in {DOCUMENT}, in the code {values}")
    assert not wrong, "\n".join(wrong)


def test_the_patience_of_a_worker_is_what_the_table_says() -> None:
    known = {field.name: field.default for field in fields(Patience)}
    rows = [(row["field"], float(row["value"])) for row in PATIENCE.finditer((ROOT / "docs" / DOCUMENT).read_text())]
    assert len({name for name, _ in rows}) >= 3
    assert all(value == known[name] for name, value in rows), rows
