"""The shape of the code: which way imports go, how long files are, what may not be there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "waterflow"
SOURCES = sorted(p.relative_to(ROOT) for p in PACKAGE.rglob("*.py"))
NATIVE = sorted(p.relative_to(ROOT) for kind in ("*.cpp", "*.h") for p in PACKAGE.rglob(kind))
BENCHMARKS = sorted(p.relative_to(ROOT) for p in (ROOT / "benchmarks").rglob("*.py"))
TESTS = sorted(p.relative_to(ROOT) for p in (ROOT / "tests").rglob("*.py"))

# The way of the data: each part imports only those before it. All other files stand between step and study.
ORDER = [
    "errors",
    "calls",
    "priority",
    "job",
    "partition",
    "allocator",
    "executor",
    "planner",
    "step",
    "",
    "study",
    "cluster",
    "cli_cluster",
    "cli_simulate",
    "cli",
    "__main__",
    "__init__",
]
# Libraries that only these files may import, for whoever does without them must not need them. Files of the command
# line that deal with studies may import Optuna inside of functions.
ONLY = {"optuna": {"study", "study_coordinator", "optuna_private"}, "ray": {"cluster/ray"}}
INSIDE_FUNCTIONS = {"optuna": {"cli", "config", "demo", "terminal"}}


def part_of(name: str) -> int:
    """Where a part of the package stands: a folder, or a file of the top."""
    return ORDER.index(name) if name in ORDER else ORDER.index("")


def nodes_at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING``."""
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        for node in tree.orelse:
            yield from nodes_at_run_time(node)
        return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from nodes_at_run_time(child)


def imports_of(path: Path, functions: bool = True) -> list[tuple[int, str]]:
    """(line, full name) of everything that a file imports; relative names are made absolute.

    Without ``functions``: what it imports when it is itself imported.
    """
    found = []
    tree = ast.parse((ROOT / path).read_text())
    if not functions:
        tree.body = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for node in nodes_at_run_time(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = list(path.with_suffix("").parts[: -node.level]) if node.level else []
            module = ".".join([*package, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def named(paths: list[Path]) -> object:
    return pytest.mark.parametrize("path", paths, ids=str)


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 20 and len(NATIVE) > 8 and BENCHMARKS and TESTS
    parts = {path.parts[1].removesuffix(".py") for path in SOURCES}
    assert set(ORDER) - {"", "cluster", "cli"} <= parts


@named(SOURCES)
def test_imports_go_one_way(path: Path) -> None:
    own = path.parts[1].removesuffix(".py")
    if own == "__init__":
        return
    wrong = []
    for line, name in imports_of(path):
        top, *rest = name.split(".")
        if top != "waterflow":
            continue
        other = rest[0] if rest else "__init__"
        if other == "_C":
            allowed = part_of(own) >= part_of("partition")
        elif other == "__init__":
            allowed = own == "cli"
        else:
            allowed = other == own or part_of(other) < part_of(own) or part_of(own) == part_of(other) == part_of("")
        if not allowed:
            wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


@named(SOURCES)
def test_optional_libraries_have_files_of_their_own(path: Path) -> None:
    for library, only in ONLY.items():
        lazily = path.stem in INSIDE_FUNCTIONS.get(library, ())
        found = {name.split(".")[0] for _, name in imports_of(path, functions=not lazily)}
        name = str(path.relative_to("waterflow").with_suffix(""))
        assert library not in found or name in only, f"{path} imports {library}; only {sorted(only)} may"


def test_importing_the_package_does_not_import_what_is_optional() -> None:
    import subprocess
    import sys

    code = "import sys, waterflow; print([m for m in ('optuna', 'ray', 'matplotlib', 'typer') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


@named(BENCHMARKS)
def test_benchmarks_use_the_public_package(path: Path) -> None:
    tree = ast.parse((ROOT / path).read_text())
    wrong = []
    for line, name in imports_of(path):
        top, *rest = name.split(".")
        if top == "waterflow" and any(part.startswith("_") for part in rest):
            wrong.append(f"{path}:{line} imports {name}")
        if top == "waterflow" and len(rest) > 1:
            wrong.append(f"{path}:{line} imports from inside: {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("waterflow._", "wf._")):
            wrong.append(f"{path}:{node.lineno} reaches into {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


@named([*SOURCES, *NATIVE])
def test_files_are_short(path: Path) -> None:
    lines = len((ROOT / path).read_text().splitlines())
    assert lines <= 400, f"{path} has {lines} lines; over 400 it is usually two"


@named(SOURCES)
def test_the_package_does_not_print(path: Path) -> None:
    calls = [
        node.lineno for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]  # fmt: skip
    assert not calls, f"{path} prints in lines {calls}; use the logger, or the terminal of the command line"


@named([*SOURCES, *TESTS, *BENCHMARKS])
def test_helpers_live_with_their_concept(path: Path) -> None:
    assert path.stem not in ("utils", "util", "helpers", "misc", "common")


@named(SOURCES)
def test_modules_and_public_names_are_documented(path: Path) -> None:
    text = (ROOT / path).read_text()
    tree = ast.parse(text)
    if not text.strip():
        return
    assert ast.get_docstring(tree), f"{path} does not say what it is"
    silent = [
        node.name for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]  # fmt: skip
    assert not silent, f"{path}: {silent}"


@named(NATIVE)
def test_native_code_needs_no_cuda(path: Path) -> None:
    """One source builds against a CPU-only torch and a CUDA torch: CUDA is looked up at run time."""
    included = re.findall(r'#include\s+[<"]([^">]+)', (ROOT / path).read_text())
    own = {path.name for path in NATIVE}
    foreign = [name for name in included if name.rsplit("/", 1)[-1] not in own]
    assert not [name for name in foreign if "cuda" in name.lower() or "cublas" in name.lower()]


@named(NATIVE)
def test_admission_and_barriers_know_no_torch(path: Path) -> None:
    """Pure book-keeping: no clock, no threads, no torch."""
    if path.stem not in ("admission", "barrier", "device_order", "device_clock", "simulation", "pool_replay"):
        return
    included = re.findall(r'#include\s+[<"]([^">]+)', (ROOT / path).read_text())
    banned = ("ATen", "torch", "c10", "thread", "mutex", "chrono", "condition_variable", "atomic")
    assert not [name for name in included if name.startswith(banned)]


@named(SOURCES)
def test_private_names_of_optuna_stand_in_one_file(path: Path) -> None:
    if path.stem not in ONLY["optuna"] - {"optuna_private"}:
        return
    private = [
        f"{path}:{node.lineno} {ast.unparse(node)}" for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        and ast.unparse(node.value) not in ("self", "cls")
    ]  # fmt: skip
    assert not private, "\n".join(private)


def test_the_exceptions_that_users_catch_have_one_root() -> None:
    import waterflow as wf
    from waterflow import errors

    public = [value for name, value in vars(errors).items() if isinstance(value, type) and not name.startswith("_")]
    assert all(issubclass(error, wf.WaterflowError) for error in public)
    assert all(getattr(wf, error.__name__) is error for error in public)
