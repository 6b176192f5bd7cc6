"""Writes docs/api.md, the API reference, from the signatures and docstrings of what `torchquorum` exports.

    python tools/api_reference.py            writes docs/api.md
    python tools/api_reference.py --check    says whether it is up to date, with exit code 1 if not

Tests call `render` and `public_names`. What always holds: every public name is on the page, once. Signatures are taken from
the source as it is written, so that every version of Python renders the same page. A new name needs nothing here: it stands
under its namespace, or under the theme of its module, and under "More" if no theme has that module.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"

# Themes of `tq` in reading order; a name goes to the theme with the longest module that its own module begins with.
THEMES = {
    "Tasks and clusters": ("session.join", "cluster"),
    "Training": ("session.session", "worker.optimizer", "worker.capture"),
    "Reading a run": ("reader.reader",),
    "Rules": ("rules",),
    "Towers": ("towers.towers",),
    "Data": ("data",),
    "Hooks, evaluation, summaries": ("session.hooks",),
    "Launching": ("launcher",),
    "Simulation": ("simulation",),
    "Errors": ("errors",),
}
MORE = "More"
HEAD = """\
<!-- Made by `python tools/api_reference.py` from the docstrings. Do not edit it here: change the docstring and run that again. -->

# API reference

Every name of `import torchquorum as tq` and of its namespaces, with its signature and docstring. The page is made from the sources
(`python tools/api_reference.py`), and a test compares the two.
"""

_SECTIONS = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note):\s*$")
_ENTRY = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}\w+)*)(?: \(([^)]*)\))?: (.*)$")


def public_names() -> dict[str, Any]:
    """Returns everything that is public, by the name to write it with: `tq.Session`, `tq.data.load_mnist`."""
    from torchquorum.lazy import namespaces

    found: dict[str, Any] = {}
    for module in map(import_module, namespaces()):
        for name in filter(str.isidentifier, dir(module)):
            value = getattr(module, name)
            # Errors are defined in their namespace, so that those of `tq` itself are met twice.
            if not name.startswith("_") and not inspect.ismodule(value) and value not in found.values():
                found[f"{module.__name__.replace('torchquorum', 'tq', 1)}.{name}"] = value
    return found


def render() -> str:
    """Returns the page."""
    themes: dict[str, list[str]] = {}
    public = public_names()
    for name in sorted(public, key=lambda name: (name.lower(), name)):
        themes.setdefault(theme_of(name, public[name]), []).append(name)
    order = [theme for theme in (*THEMES, MORE) if theme in themes]
    order += sorted(themes.keys() - set(order))
    parts = [HEAD]
    for theme in order:
        listed = ", ".join(f"[`{name.rpartition('.')[2]}`](#{anchor(name)})" for name in themes[theme])
        parts.append(f"- **{theme}**: {listed}")
    for theme in order:
        parts.append(f"\n## {theme}")
        if theme not in (*THEMES, MORE):
            module = import_module(theme.strip("`").replace("tq", "torchquorum", 1))
            parts.append(f"\n{_first_sentence(module.__doc__)}")
        parts.extend(describe(name, public[name]) for name in themes[theme])
    return "\n".join(parts).rstrip() + "\n"


def _first_sentence(text: str | None) -> str:
    """Returns what a namespace holds, as the head of its module says it."""
    line = (text or "").splitlines()[0]
    sentence = re.split(r"(?<=\.) ", re.sub(r"^`[\w.]+`: ", "", line))[0]
    return sentence[:1].upper() + sentence[1:]


def anchor(name: str) -> str:
    """Returns the anchor of a name's heading, as GitHub makes it."""
    return name.lower().replace(".", "")


def theme_of(name: str, found: Any) -> str:
    """Returns the theme that a name belongs to: its namespace, or one of the themes of `tq`."""
    namespace = name.rpartition(".")[0]
    if namespace != "tq":
        return f"`{namespace}`"
    module = str(getattr(found, "__module__", "")).removeprefix("torchquorum.")
    fits = [
        (len(prefix), theme)
        for theme, prefixes in THEMES.items()
        for prefix in prefixes
        if f"{module}.".startswith(f"{prefix}.")
    ]
    return max(fits)[1] if fits else MORE


def describe(name: str, found: Any) -> str:
    """Returns the part of the page about one name."""
    lines = [f"\n### {name}\n"]
    name = name.rpartition(".")[2]
    node = _source_of(found)
    if isinstance(node, ast.ClassDef):
        lines += _describe_class(name, node)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        lines += [_fence(_signature(name, node)), "", render_docstring(ast.get_docstring(node))]
    else:
        lines += [_fence(f"{name} = {found!r}" if not callable(found) else name), ""]
        lines.append(render_docstring(inspect.getdoc(found) if callable(found) else None))
    return "\n".join(lines).rstrip()


def _describe_class(name: str, node: ast.ClassDef) -> list[str]:
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    if "__init__" in methods:
        opening = _signature(f"class {name}", methods["__init__"], skip=1, returns=False)
    elif fields := _fields(node):
        opening = _lay_out(f"class {name}", fields, "")
    else:
        opening = f"class {name}({bases})" if bases else f"class {name}"
    lines = [_fence(opening), "", render_docstring(ast.get_docstring(node))]
    if "__init__" in methods and (more := ast.get_docstring(methods["__init__"])):
        lines += ["", render_docstring(more)]
    for method in methods.values():
        if not method.name.startswith("_"):
            lines += ["", _describe_method(name, method)]
    return lines


def _describe_method(owner: str, node: ast.FunctionDef) -> str:
    decorators = [ast.unparse(each) for each in node.decorator_list]
    if any(each.endswith((".setter", ".deleter")) for each in decorators):
        return ""
    if "property" in decorators or any(each.endswith("cached_property") for each in decorators):
        returns = f": {_annotation(node.returns)}" if node.returns is not None else ""
        opening = f"{owner}.{node.name}{returns}"
    else:
        opening = _signature(f"{owner}.{node.name}", node, skip=0 if "staticmethod" in decorators else 1)
    return f"{_fence(opening)}\n\n{render_docstring(ast.get_docstring(node))}"


def _source_of(found: Any) -> ast.stmt | None:
    # What a decorator has wrapped is described as it was written.
    found = inspect.unwrap(found) if callable(found) else found
    if not isinstance(found, type | FunctionType):
        return None
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None


def _fields(node: ast.ClassDef) -> list[str]:
    """Returns the fields of a dataclass or struct as arguments."""
    decorated = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    if not decorated and not any("Struct" in ast.unparse(base) for base in node.bases):
        return []
    fields = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_":
            default = f" = {ast.unparse(item.value)}" if item.value is not None else ""
            if default and "init=False" in default.replace(" ", ""):
                continue
            fields.append(f"{item.target.id}: {_annotation(item.annotation)}{default}")
    return fields


def _signature(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, skip: int = 0, returns: bool = True) -> str:
    arguments = node.args
    given = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(given) - len(arguments.defaults)) + list(arguments.defaults)
    parts = [_argument(each, default) for each, default in zip(given, defaults, strict=True)]
    if arguments.posonlyargs:
        parts.insert(len(arguments.posonlyargs), "/")
    parts = parts[skip:]
    if arguments.vararg is not None:
        parts.append("*" + _argument(arguments.vararg, None))
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [_argument(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg is not None:
        parts.append("**" + _argument(arguments.kwarg, None))
    arrow = f" -> {_annotation(node.returns)}" if returns and node.returns is not None else ""
    return _lay_out(name, parts, arrow)


def _lay_out(name: str, parts: list[str], arrow: str) -> str:
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    hint = f": {_annotation(argument.annotation)}" if argument.annotation is not None else ""
    if default is None:
        return f"{argument.arg}{hint}"
    return f"{argument.arg}{hint} = {ast.unparse(default)}" if hint else f"{argument.arg}={ast.unparse(default)}"


def _annotation(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return "" if node is None else ast.unparse(node)


def _fence(text: str) -> str:
    return f"```python\n{text}\n```"


def render_docstring(text: str | None) -> str:
    """Returns a Google-style docstring as Markdown: its sections as lists."""
    if not text:
        return ""
    lines, out, at = text.splitlines(), [], 0
    while at < len(lines):
        section = _SECTIONS.match(lines[at])
        if section is None:
            out.append(lines[at])
            at += 1
            continue
        end = at + 1
        while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
            end += 1
        body = textwrap.dedent("\n".join(lines[at + 1 : end])).strip("\n")
        out += [f"*{section[1]}*", "", *_render_section(section[1], body), ""]
        at = end
    return "\n".join(out).strip()


def _render_section(kind: str, body: str) -> list[str]:
    if kind in ("Example", "Examples"):
        return [_fence(body)]
    if kind in ("Returns", "Yields", "Note"):
        return [body]
    out: list[str] = []
    for line in body.splitlines():
        entry = _ENTRY.match(line)
        if entry is not None:
            hint = f" ({entry[2]})" if entry[2] else ""
            out.append(f"- `{entry[1]}`{hint}: {entry[3]}")
        else:
            out.append(f"  {line.strip()}" if line.strip() else "")
    return out


def main() -> int:
    """Writes the page, or compares it."""
    text = render()
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print("docs/api.md is up to date" if same else "docs/api.md is out of date; run python tools/api_reference.py")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}: {text.count(chr(10))} lines")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main())
