"""Two rules for docstrings that a program can hold: ``python -m tests.docstrings`` prints what breaks them, for ``make lint``."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.imports import ROOT

RELATIVE = re.compile(r"(?:What|Whatever|Whether|Those|Who|Whoever|Whom|Whose|Which|Whichever|How)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def broken(text: str) -> Iterator[tuple[int, str]]:
    """The line of each docstring in a file's ``text`` that breaks a rule, and the rule."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, DOCUMENTED) or not (told := ast.get_docstring(node)):
            continue
        line = node.body[0].lineno
        if RELATIVE.match(told):
            yield line, f"begins with a relative clause ({told.split()[0]}): begin with the subject, or with a verb"
        name = getattr(node, "name", "")
        private = name.startswith("_") and not name.startswith("__") and not isinstance(node, ast.ClassDef)
        if private and len(told.split()) < len(name.strip("_").split("_")):
            yield line, f"has fewer words than the name {name}: delete it, or say why"


def main() -> int:
    """Print what breaks a rule in the package; returns how many do."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {rule}"
        for path in sorted(Path(ROOT, "waterflow").rglob("*.py")) for line, rule in broken(path.read_text())
    ]  # fmt: skip
    print(*found, sep="\n", end="\n" if found else "")
    return len(found)


if __name__ == "__main__":
    sys.exit(main() > 0)
