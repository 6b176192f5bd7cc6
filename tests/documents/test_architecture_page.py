"""Facts of docs/ARCHITECTURE.md, compared with the code: the stack of folders, the threads, the number of slots."""

import ast
import re
import tomllib

import pytest

from tests.documents.markdown import ROOT, read_blocks, tables
from torchquorum.placement.layout import Region
from torchquorum.server.versions import Versions

PAGE = ROOT / "docs" / "ARCHITECTURE.md"
SOURCES = sorted((ROOT / "src").rglob("*.py"))
ANYTHING = "\0"  # in the name of a thread, what is filled in


def test_the_stack_is_that_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    block = next(block for block in read_blocks(PAGE) if block.text.startswith(f"{layers[0]} "))
    # A line is a layer, two spaces or more, and what it is.
    assert [re.split(r"\s{2,}", line)[0] for line in block.text.splitlines()] == layers


def test_the_number_of_version_slots_is_that_of_the_code() -> None:
    stated = re.search(r"`(\d+) \* workers \+ (\d+)` of them", PAGE.read_text(encoding="utf-8"))
    assert stated is not None
    per_worker, more = map(int, stated.groups())
    for workers in (1, 2, 7):
        versions = Versions(Region((), 0), workers)
        try:
            assert len(versions.slots) == per_worker * workers + more
        finally:
            versions.close()


def test_every_thread_is_in_the_table_and_the_other_way_round() -> None:
    named = {name for path in SOURCES for name in thread_names(path.read_text(encoding="utf-8"), str(path))}
    assert len(named) > 10
    listed = set(re.findall(r"`(torchquorum-[^`]+)`", "\n".join(" ".join(row) for row in tables(PAGE, "Threads")[0])))
    patterns = {name: re.compile(re.escape(name).replace(re.escape(ANYTHING), ".+")) for name in named}
    missing = [name for name, pattern in patterns.items() if not any(map(pattern.fullmatch, listed))]
    assert not missing, f"not in the table of threads: {[name.replace(ANYTHING, 'N') for name in missing]}"
    unknown = [name for name in listed if not any(pattern.fullmatch(name) for pattern in patterns.values())]
    assert not unknown, f"in the table, but no such thread is started: {unknown}"


def thread_names(source: str, where: str) -> list[str]:
    """Returns the names of the threads that a module starts, each a text that says which kind it is.

    Raises:
        AssertionError: A thread has no name, or one that does not begin with `torchquorum-` and a word.
    """
    tree = ast.parse(source)
    values = {
        target.id: node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in _names(node)
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        argument = {
            "Thread": "name",
            "thread": "name",
            "Timer": "name",
            "ThreadPoolExecutor": "thread_name_prefix",
        }.get(_called(node))
        if argument is None:
            continue
        given = next((keyword.value for keyword in node.keywords if keyword.arg == argument), None)
        given = values.get(given.id, given) if isinstance(given, ast.Name) else given
        name = _text(given) + ("-" + ANYTHING if argument == "thread_name_prefix" else "")
        assert re.match(r"torchquorum-[a-z]", name), f"{where}:{node.lineno}: a thread without a name of its kind"
        found.append(name)
    return found


def _names(node: ast.Assign) -> list[ast.Name]:
    return [target for target in node.targets if isinstance(target, ast.Name)]


def _called(node: ast.Call) -> str:
    called = node.func
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else ANYTHING for part in node.values)
    return ""


@pytest.mark.parametrize(
    "source",
    [
        "Thread(target=f)",
        "threading.Thread(target=f, name=name)",
        "Thread(target=f, name='keeper')",
        "ThreadPoolExecutor(3)",
    ],
)
def test_a_thread_without_a_name_is_found(source: str) -> None:
    with pytest.raises(AssertionError, match="here:1: a thread without a name"):
        thread_names(source, "here")


def test_names_of_threads_are_read_from_the_source() -> None:
    source = "name = f'torchquorum-reader-{n}'\nThread(target=f, name=name)\nThread(name='torchquorum-beat')\n"
    assert thread_names(source, "here") == [f"torchquorum-reader-{ANYTHING}", "torchquorum-beat"]
    assert thread_names("ThreadPoolExecutor(3, thread_name_prefix='torchquorum-doctor')", "") == [
        f"torchquorum-doctor-{ANYTHING}"
    ]
