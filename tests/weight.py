"""How much code the package has: ``python -m tests.weight``, lines by folder without blanks, comments and docstrings."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter

from tests.imports import ROOT

BUDGET = 43_146
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def python_lines(text: str) -> int:
    """Lines of Python that hold code."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in _SILENT
        for line in range(token.start[0], token.end[0] + 1)
    }  # fmt: skip
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def native_lines(text: str) -> int:
    """Lines of C++ that hold code. Comments within strings do not occur."""
    without = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    return sum(bool(re.sub(r"//.*", "", line).strip()) for line in without.splitlines())


def weights() -> dict[str, Counter[str]]:
    """For each folder of the package, its lines by language."""
    found: dict[str, Counter[str]] = {}
    for path in sorted((ROOT / "waterflow").rglob("*")):
        count = {".py": python_lines, ".cpp": native_lines, ".h": native_lines}.get(path.suffix)
        if count:
            folder = str(path.relative_to(ROOT).parent).removesuffix("/csrc")
            found.setdefault(folder, Counter())["Python" if path.suffix == ".py" else "C++"] += count(path.read_text())
    return found


def total() -> int:
    """All of the package's lines."""
    return sum(sum(by_language.values()) for by_language in weights().values())


if __name__ == "__main__":
    print(f"{'':24}{'Python':>8}{'C++':>8}")
    found = weights()
    for folder, lines in found.items():
        print(f"{folder:24}{lines['Python']:8,}{lines['C++']:8,}")
    both = sum(found.values(), Counter())
    print(f"{'':24}{both['Python']:8,}{both['C++']:8,}\n{total():,} lines; the budget is {BUDGET:,}")
