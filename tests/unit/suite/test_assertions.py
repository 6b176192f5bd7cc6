"""Every test says what must hold: one that only calls something can fail by an error alone, and tells its reader nothing."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[2]
EXPECTING = {"raises", "warns", "fail"}


def called(node: ast.AST) -> Iterator[str]:
    """The names of what is called in a piece of code, without what stands before a dot."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            match call.func:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    yield name


def asserts(test: ast.AST) -> bool:
    """Whether a test has an assertion of its own, or calls something whose name says that it is one."""
    if any(isinstance(node, ast.Assert) for node in ast.walk(test)):
        return True
    return any(name in EXPECTING or name.startswith("assert_") for name in called(test))


def silent(text: str) -> list[str]:
    """The names of the tests in a file that assert nothing."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return [test.name for test in found if test.name.startswith("test_") and not asserts(test)]


def test_every_test_asserts_something() -> None:
    files = sorted(TESTS.rglob("test_*.py"))
    assert len(files) > 100
    assert {path.relative_to(TESTS): names for path in files if (names := silent(path.read_text()))} == {}


def test_a_test_that_only_calls_something_is_found() -> None:
    assert silent("def test_a():\n    f()\ndef test_b():\n    with raises(E):\n        f()\n") == ["test_a"]
    assert silent("def test_c():\n    assert_same(1)\ndef test_d(x):\n    x.helper(assert_=1)\n") == ["test_d"]
