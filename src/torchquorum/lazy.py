"""Public names that are loaded when they are first used.

Called by `torchquorum` itself and by its namespaces (`torchquorum.data`, `torchquorum.hooks`, ...). What always holds: the list
of public names of a module is the imports of its `if TYPE_CHECKING:` block, and stands nowhere else. Type checkers read that
block as imports; this module reads it from the source and imports what is asked for. So `torchquorum --help` and imports of
internal modules do not pay for torch or for names that they do not use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_ROOT = "torchquorum"


def load_when_used(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a module whose `if TYPE_CHECKING:` block lists its public names."""

    def load(name: str) -> Any:
        if name == "__all__":
            return list(listed_names(module))
        home = None if name.startswith("__") else listed_names(module).get(name)
        if home is None:
            text = f"module {module!r} has no attribute {name!r}{_hint(module, name)}"
            raise AttributeError(text, name=name, obj=sys.modules[module])
        return import_module(f"{home}.{name}") if home == module else getattr(import_module(home), name)

    def list_names() -> list[str]:
        own = [name for name in vars(sys.modules[module]) if name.startswith("__")]
        return [*own, *listed_names(module)]

    return load, list_names


@cache
def listed_names(module: str) -> dict[str, str]:
    """Returns the public names of a module, each with the module that it is imported from."""
    import ast  # here, since it takes milliseconds and most commands do not need it

    spec = find_spec(module)
    read_source: Callable[[str], str | None] | None = getattr(spec and spec.loader, "get_source", None)
    source = read_source(module) if read_source is not None else None
    if source is None:
        raise ImportError(f"{module}: its source is needed to find its public names, and is not there")
    blocks = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names if node.module}


def namespaces() -> list[str]:
    """Returns the modules that hold the public names, `torchquorum` first."""
    inner = [f"{_ROOT}.{name}" for name, home in listed_names(_ROOT).items() if home == _ROOT]
    return [_ROOT, *inner]


def _hint(module: str, name: str) -> str:
    """Returns where else a name is public, "" if nowhere.

    `from torchquorum import env` asks for the attribute before it imports the submodule: that must not cost a search.
    """
    if name.startswith("_") or (hasattr(sys.modules[module], "__path__") and find_spec(f"{module}.{name}")):
        return ""
    for other in namespaces():
        if other != module and name in dir(import_module(other)):
            return f": use {other.replace(_ROOT, 'tq', 1)}.{name}"
    return ""
