"""What the project's Python files import, read from their source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def nodes_at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING``."""
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        for node in tree.orelse:
            yield from nodes_at_run_time(node)
        return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from nodes_at_run_time(child)


@functools.cache
def imports_of(path: Path, functions: bool = True, types: bool = False) -> tuple[tuple[int, str], ...]:
    """(line, full name) of everything that a file imports; ``path`` is relative to the root, relative names are made absolute.

    Without ``functions``: what it imports when it is itself imported. With ``types``: under ``TYPE_CHECKING``, too.
    """
    found = []
    tree = ast.parse((ROOT / path).read_text())
    if not functions:
        tree.body = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for node in ast.walk(tree) if types else nodes_at_run_time(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = list(path.with_suffix("").parts[: -node.level]) if node.level else []
            module = ".".join([*package, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return tuple(found)
