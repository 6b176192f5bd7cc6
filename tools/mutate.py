"""`make mutate`: changes src/torchquorum/rules in one place at a time and asks the tests of the rules whether they notice.

    python tools/mutate.py                    all mutants; ends with 1 if one survives that is not explained
    python tools/mutate.py --only quorum.py:120        those of one line

A mutant is one change of the syntax tree: an operator, a comparison, a constant, a condition, a boolean word, a return value
or a statement left out. It is imported from memory in a fork; no file is written. Survivors that no test can tell from the
original are explained in tests/mutation/equivalent.txt, one line each, by the text of the changed line, so that the
explanation goes when the line does.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "torchquorum" / "rules"
EXPLAINED = ROOT / "tests" / "mutation" / "equivalent.txt"
# The quick ones first: most mutants go no further.
_TESTED_BY = ("quorum", "quorum_lives", "quorum_end", "presets", "against_tensorflow", "quorum_properties")
TESTS = [f"tests/unit/rules/test_{name}.py" for name in _TESTED_BY]
LIMIT_S = 60

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        file: The module's file.
        line: Where, from 1.
        what: The change in words.
        text: The changed line as it stands.
        tree: The changed module.
    """

    file: Path
    line: int
    what: str
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Returns what the explanations call it."""
        return f"{self.file.name} | {self.text} | {self.what}"


def mutants(file: Path) -> Iterator[Mutant]:
    """Yields every mutant of a module."""
    source = file.read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
    skipped = _not_behaviour(tree)
    for index, node in enumerate(nodes):
        if id(node) in skipped:
            continue
        for variant in range(_variants(node)):
            changed = ast.parse(source)
            target = [n for n in ast.walk(changed) if hasattr(n, "lineno")][index]
            what = _change(changed, target, variant)
            if what:
                line: int = node.lineno  # type: ignore[attr-defined]
                yield Mutant(file, line, what, lines[line - 1].strip(), ast.fix_missing_locations(changed))


def _not_behaviour(tree: ast.Module) -> set[int]:
    """Returns what says nothing to a machine: docstrings, annotations, messages of errors, decorators, imports."""
    skipped: set[int] = set()

    def skip(part: ast.AST | None) -> None:
        if part is not None:
            skipped.update(id(n) for n in ast.walk(part))

    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            skip(node)
        elif isinstance(node, ast.FunctionDef):
            skip(node.returns)
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                skip(argument.annotation)
            for decorator in node.decorator_list:
                skip(decorator)
        elif isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                skip(decorator)
        elif isinstance(node, ast.AnnAssign):
            skip(node.annotation)
            skipped.add(id(node))
        elif isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Assert):
            skip(node)
    return skipped


def _variants(node: ast.AST) -> int:
    return 2 if isinstance(node, ast.Constant | ast.Compare) else 1


def _change(tree: ast.Module, node: ast.AST, variant: int) -> str:
    """Changes a node in place; returns the change in words, "" where there is nothing to change."""
    match node:
        case ast.Compare() if variant < len(node.ops) and type(node.ops[variant]) in COMPARISONS:
            old = node.ops[variant]
            node.ops[variant] = COMPARISONS[type(old)]()
            return f"{type(old).__name__} -> {type(node.ops[variant]).__name__} ({variant})"
        case ast.BinOp() if type(node.op) in OPERATORS:
            old_name = type(node.op).__name__
            node.op = OPERATORS[type(node.op)]()
            return f"{old_name} -> {type(node.op).__name__}"
        case ast.BoolOp():
            was = isinstance(node.op, ast.And)
            node.op = ast.Or() if was else ast.And()
            return "and -> or" if was else "or -> and"
        case ast.UnaryOp(op=ast.Not()):
            return _replace(tree, node, node.operand, "not left out")
        case ast.Constant(value=bool()) if variant == 0:
            node.value = not node.value
            return f"{not node.value} -> {node.value}"
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            old_value = node.value
            node.value = old_value + 1 if variant == 0 else old_value - 1  # type: ignore[operator]
            return f"{old_value} -> {node.value}"
        case ast.Constant(value=str()) if variant == 0 and node.value:
            node.value += "x"
            return "a text changed"
        case ast.Return() if node.value is not None and not _is_none(node.value):
            node.value = ast.Constant(None)
            return "returns None"
        case ast.IfExp():
            return _replace(tree, node, node.orelse, "always the else")
        case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break() | ast.Raise():
            return _replace(tree, node, ast.Pass(), "statement left out")
    return ""


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _replace(tree: ast.Module, old: ast.AST, new: ast.AST, what: str) -> str:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, ast.copy_location(new, old))
                return what
            if isinstance(value, list) and any(v is old for v in value):
                value[next(i for i, v in enumerate(value) if v is old)] = ast.copy_location(new, old)
                return what
    return ""


class _Loader:
    """Gives the import system the changed module in place of the one on disk."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = f"torchquorum.rules.{mutant.file.stem}".removesuffix(".__init__")

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """As the import system asks."""
        from importlib.util import spec_from_loader

        return spec_from_loader(name, self, origin=str(self._mutant.file)) if name == self._name else None

    def create_module(self, spec: object) -> None:
        """An ordinary module."""

    def exec_module(self, module: object) -> None:
        """Runs the changed tree."""
        exec(compile(self._mutant.tree, str(self._mutant.file), "exec"), vars(module))


def is_noticed(mutant: Mutant) -> bool:
    """Runs the tests on a mutant, in a fork; a hang is noticed too."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            signal.alarm(LIMIT_S)
            for name in [n for n in sys.modules if n.startswith(("torchquorum", "tests"))]:
                del sys.modules[name]
            sys.meta_path.insert(0, _Loader(mutant))  # type: ignore[arg-type]
            import pytest

            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", *TESTS]))
        finally:
            os._exit(code & 0xFF)
    return os.waitpid(child, 0)[1] != 0


def main() -> int:
    """Tries every mutant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="file.py or file.py:line")
    parser.add_argument("--jobs", default="0/1", metavar="K/N", help="the K-th of N parts, from 0")
    args = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    import hypothesis.strategies  # noqa: F401  (once, not in every fork)
    import pytest  # noqa: F401

    found = [mutant for file in sorted(PACKAGE.glob("*.py")) for mutant in mutants(file)]
    if args.only:
        name, _, line = args.only.partition(":")
        found = [x for x in found if x.file.name == name and (not line or x.line == int(line))]
    part, parts = map(int, args.jobs.split("/"))
    found = found[part::parts]
    lines = EXPLAINED.read_text(encoding="utf-8").splitlines() if EXPLAINED.is_file() else []
    explained = {line.rpartition(" | ")[0] for line in lines if line and not line.startswith("#")}
    begun, survivors, known = time.monotonic(), [], 0
    for mutant in found:
        if not is_noticed(mutant):
            known += mutant.name in explained
            if mutant.name not in explained:
                survivors.append(mutant)
                print(f"survives: {mutant.file.name}:{mutant.line} | {mutant.text} | {mutant.what}", flush=True)
    noticed = len(found) - known - len(survivors)
    print(
        f"{len(found)} mutants: {noticed} noticed, {known} equivalent and explained, {len(survivors)} survive; "
        f"{time.monotonic() - begun:.0f} s"
    )
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
