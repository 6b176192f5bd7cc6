"""`make mutate`: changes src/torchquorum/rules in one place at a time and asks the tests of the rules whether they notice.

    python tools/mutate.py                             all mutants, two at a time
    python tools/mutate.py --only quorum.py:120        those of one line

A mutant is one change of the syntax tree: an operator, a comparison, a constant, a condition, a boolean word, a return value
or a statement left out. It is imported from memory in a fork; no file is written. Survivors that no test can tell from the
original are explained in tests/mutation/equivalent.txt, one line each, by the text of the changed line. It ends with 1 if a
mutant survives that is not explained, and if an explanation is stale: its line is gone, or a test notices its mutant.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "torchquorum" / "rules"
EXPLAINED = ROOT / "tests" / "mutation" / "equivalent.txt"
# All tests of the rules, the quick ones first: most mutants go no further.
_SLOW = ("test_batch_pool.py", "test_quorum_properties.py")
TESTS = sorted(
    (str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "unit" / "rules").glob("test_*.py")),
    key=lambda path: (path.endswith(_SLOW), path),
)
# A mutant that needs more is one that never ends; all tests together take 30 s of processor time and 200 MiB.
LIMIT_CPU_S, LIMIT_S, LIMIT_BYTES = 150, 1200, 4 << 30
REPORT_S = 30.0

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
        name: What the explanations call it: the file, the changed line as it stands, the change in words.
        node: Which node of the syntax tree is changed, in the order of `ast.walk`.
        variant: Which of the changes that it allows.
    """

    file: Path
    line: int
    name: str
    node: int
    variant: int

    def tree(self) -> ast.Module:
        """Returns the changed module."""
        tree = ast.parse(self.file.read_text(encoding="utf-8"))
        node = _placed(tree)[self.node]
        _replace(tree, node, _changed(node, self.variant)[1])
        return ast.fix_missing_locations(tree)


def mutants(file: Path) -> Iterator[Mutant]:
    """Yields every mutant of a module."""
    source = file.read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    skipped = _not_behaviour(tree)
    names: Counter[str] = Counter()
    for index, node in enumerate(_placed(tree)):
        for variant in range(0 if id(node) in skipped else _variants(node)):
            if what := _changed(copy.deepcopy(node), variant)[0]:
                line: int = node.lineno  # type: ignore[attr-defined]
                name = f"{file.name} | {lines[line - 1].strip()} | {what}"
                names[name] += 1
                if names[name] > 1:  # the same change of another place that reads the same
                    name += f", place {names[name]}"
                yield Mutant(file, line, name, index, variant)


def _placed(tree: ast.Module) -> list[ast.AST]:
    return [node for node in ast.walk(tree) if hasattr(node, "lineno")]


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


def _changed(node: ast.AST, variant: int) -> tuple[str, ast.AST]:
    """Returns the change in words, "" where there is nothing to change, and what stands in the place of the node then."""
    match node:
        case ast.Compare() if variant < len(node.ops) and type(node.ops[variant]) in COMPARISONS:
            old = node.ops[variant]
            node.ops[variant] = COMPARISONS[type(old)]()
            return f"{type(old).__name__} -> {type(node.ops[variant]).__name__} ({variant})", node
        case ast.BinOp() if type(node.op) in OPERATORS:
            old_name = type(node.op).__name__
            node.op = OPERATORS[type(node.op)]()
            return f"{old_name} -> {type(node.op).__name__}", node
        case ast.BoolOp():
            was = isinstance(node.op, ast.And)
            node.op = ast.Or() if was else ast.And()
            return ("and -> or" if was else "or -> and"), node
        case ast.UnaryOp(op=ast.Not()):
            return "not left out", node.operand
        case ast.Constant(value=bool()) if variant == 0:
            node.value = not node.value
            return f"{not node.value} -> {node.value}", node
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            old_value = node.value
            node.value = old_value + 1 if variant == 0 else old_value - 1  # type: ignore[operator]
            return f"{old_value} -> {node.value}", node
        case ast.Constant(value=str()) if variant == 0 and node.value:
            node.value += "x"
            return "a text changed", node
        case ast.Return() if node.value is not None and not _is_none(node.value):
            node.value = ast.Constant(None)
            return "returns None", node
        case ast.IfExp():
            return "always the else", node.orelse
        case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break() | ast.Raise():
            return "statement left out", ast.Pass()
    return "", node


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _replace(tree: ast.Module, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, ast.copy_location(new, old))
            elif isinstance(value, list):
                value[:] = [ast.copy_location(new, old) if v is old else v for v in value]


class _Loader:
    """Gives the import system the changed module in place of the one on disk."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = f"torchquorum.rules.{mutant.file.stem}".removesuffix(".__init__")

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """As the import system asks."""
        from importlib.util import spec_from_loader

        if name != self._name:
            return None
        package = self._mutant.file.name == "__init__.py"
        spec = spec_from_loader(name, self, origin=str(self._mutant.file), is_package=package)  # type: ignore[arg-type]
        if package and spec is not None:
            spec.submodule_search_locations = [str(PACKAGE)]
        return spec

    def create_module(self, spec: object) -> None:
        """An ordinary module."""

    def exec_module(self, module: object) -> None:
        """Runs the changed tree."""
        exec(compile(self._mutant.tree(), str(self._mutant.file), "exec"), vars(module))


def start(mutant: Mutant | None, tests: list[str]) -> int:
    """Runs tests on a mutant, or on the rules as they are, in a fork; returns its number. A hang is noticed too."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.alarm(LIMIT_S)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S, LIMIT_CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        for name in [n for n in sys.modules if n.startswith(("torchquorum", "tests"))]:
            del sys.modules[name]
        if mutant is not None:
            sys.meta_path.insert(0, _Loader(mutant))  # type: ignore[arg-type]
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", "--no-header"]
        code = int(pytest.main([*options, *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code & 0xFF)


def stages(mutant: Mutant) -> list[list[str]]:
    """Returns the tests in the order in which a mutant meets them: most are noticed by those of their own module."""
    own = [
        test for test in TESTS if f"/test_{mutant.file.stem}" in test and test != TESTS[-1]
    ]  # the properties take long
    return [tests for tests in (own, [test for test in TESTS if test not in own]) if tests]


def survivors(found: list[Mutant], jobs: int) -> list[Mutant]:
    """Tries the mutants, some at a time, says how far it is, and returns those that no test noticed."""
    left = [(mutant, stages(mutant)) for mutant in reversed(found)]
    running, survive = dict[int, tuple[Mutant, list[list[str]]]](), list[Mutant]()
    said = time.monotonic()
    while left or running:
        while left and len(running) < jobs:
            mutant, (first, *later) = left.pop()
            running[start(mutant, first)] = mutant, later
        child, status = os.wait()
        mutant, later = running.pop(child)
        if status == 0 and later:
            left.append((mutant, later))
        elif status == 0:
            survive.append(mutant)
            print(f"survives: line {mutant.line} of {mutant.name}", flush=True)
        if time.monotonic() - said > REPORT_S:
            said = time.monotonic()
            tried = len(found) - len(left) - len(running)
            print(f"{tried} of {len(found)} tried, {len(survive)} survive", flush=True)
    return survive


def explanations() -> set[str]:
    """Returns the names of the mutants that are explained; an explanation without a reason is none."""
    lines = EXPLAINED.read_text(encoding="utf-8").splitlines() if EXPLAINED.is_file() else []
    parts = [line.rpartition(" | ") for line in lines if line and not line.startswith("#")]
    return {name for name, _, reason in parts if reason.strip()}


def main() -> int:
    """Tries every mutant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="file.py or file.py:line")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    args = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    import hypothesis.stateful  # noqa: F401  (once, not in every fork)
    import numpy  # noqa: F401
    import pytest  # noqa: F401

    begun = time.monotonic()
    found = [mutant for file in sorted(PACKAGE.glob("*.py")) for mutant in mutants(file)]
    if args.only:
        name, _, line = args.only.partition(":")
        found = [x for x in found if x.file.name == name and (not line or x.line == int(line))]
    print(f"{len(found)} mutants", flush=True)
    if os.waitpid(start(None, TESTS), 0)[1] != 0:
        print("the tests fail on the rules as they are; mend that first")
        return 1
    survive, explained = {mutant.name for mutant in survivors(found, args.jobs)}, explanations()
    stale = explained - survive if not args.only else explained & {mutant.name for mutant in found} - survive
    for name in sorted(survive - explained):
        print(f"not explained: {name}")
    for name in sorted(stale):
        print(f"stale, as the line is gone or a test notices: {name}")
    print(
        f"{len(found)} mutants: {len(found) - len(survive)} noticed, {len(survive & explained)} equivalent and explained, "
        f"{len(survive - explained)} survive; {time.monotonic() - begun:.0f} s"
    )
    return int(bool(survive - explained or stale))


if __name__ == "__main__":
    sys.exit(main())
