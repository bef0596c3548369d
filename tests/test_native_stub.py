"""The stub of the native module says what the module says: its names, their arguments, and the types that pybind11 knows."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator

import pytest

from tests.imports import ROOT
from waterflow import _C

STUB = (ROOT / "waterflow/_C.pyi").read_text()
WITH_HOOKS = frozenset(re.findall(r"^def (\w+).*# in builds with test hooks only$", STUB, re.MULTILINE))
METHODS = ("instancemethod", "method_descriptor")  # pybind11's, and C's
READ_ONLY, WRITABLE, CONSTANT = "property {}", "attribute {}", "attribute ClassVar[{}]"
UNTOLD = "..."  # C tells neither arguments nor types


def described(function: ast.FunctionDef) -> str:
    """Its arguments and what it returns; ``_`` is one that has no name for callers."""
    arguments = function.args
    each = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(each) - len(arguments.defaults)) + arguments.defaults
    told = ["*"] if arguments.vararg else []
    assert not arguments.kwonlyargs, "nothing here compares these"
    for i, (argument, default) in reversed([*enumerate(zip(each, defaults))]):
        if argument.annotation is not None:  # else self
            unnamed = i < len(arguments.posonlyargs) or re.fullmatch(r"arg\d+", argument.arg)
            value = "" if default is None else f" = {ast.unparse(default)}"
            told.insert(0, f"{'_' if unnamed else argument.arg}: {ast.unparse(argument.annotation)}{value}")
    return f"def ({', '.join(told)}) -> {ast.unparse(function.returns or ast.Constant(None))}"


# -- the stub


def stubbed(text: str) -> dict[str, str]:
    """What a stub says of each public name, with dots."""
    tree = ast.parse(text.replace("builtins.", ""))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return dict(_of_body(tree.body, "", classes))


def _of_body(body: list[ast.stmt], within: str, classes: dict[str, ast.ClassDef]) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.AnnAssign):
            yield within + ast.unparse(node.target), WRITABLE.format(ast.unparse(node.annotation))
        elif isinstance(node, ast.FunctionDef) and node.name != "__new__":
            read_only = any(ast.unparse(one) == "property" for one in node.decorator_list)
            told = READ_ONLY.format(ast.unparse(node.returns or ast.Constant(None))) if read_only else described(node)
            yield within + node.name, told
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
            yield within + node.name, f"class {[base for base in bases if base not in ('_Enum', 'structseq')]}"
            inherited = classes["_Enum"].body if "_Enum" in bases else []
            yield from _of_body([*inherited, *node.body], f"{within}{node.name}.", classes)


# -- the module


def python_of(told: str) -> str:
    """Types as a stub has them, of a line of pybind11's."""
    for old, new in (
        (r"typing\.Supports(Int|Float)( \| typing\.SupportsIndex)?", lambda found: found[1].lower()),
        (r"waterflow(\._C\.|::)|collections\.abc\.|typing\.", ""),
        (r"\bself: [\w.]+", "self"),
        (r"<([\w.]+): \d+>", r"\1"),  # values of enums
        (r"(?<!\| None) = None", " | None = None"),
    ):
        told = re.sub(old, new, told)
    return told


def signature(doc: str) -> str:
    """Of a function, from the first line of its documentation."""
    (function,) = ast.parse(f"def {python_of(doc.splitlines()[0])}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return described(function)


def native() -> dict[str, str]:
    """The same of the module."""
    return dict(_of_space(_C, ""))


def _of_space(space: object, within: str) -> Iterator[tuple[str, str]]:
    for name, value in vars(space).items():
        if not _is_public(name, value):
            continue
        if isinstance(value, type):
            bases = [base.__name__ for base in value.__bases__ if base.__name__ not in ("pybind11_object", "object")]
            yield within + name, f"class {bases}"
            yield from _of_space(value, f"{within}{name}.")
        else:
            yield within + name, _told(space, name, value)


def _is_public(name: str, value: object) -> bool:
    """Methods that Python calls are, where not every object has them; what each ``structseq`` has is told by typeshed."""
    if name.startswith("_"):
        own = name == "__init__" or not hasattr(object, name)
        return own and name.endswith("__") and type(value).__name__ in METHODS
    return name not in vars(time.struct_time)


def _told(owner: object, name: str, value: object) -> str:
    kind = type(value).__name__
    if isinstance(value, property):
        type_ = python_of(value.fget.__doc__.splitlines()[0].partition(" -> ")[2])
        form = CONSTANT if kind == "pybind11_static_property" else WRITABLE if value.fset else READ_ONLY
        return form.format(type_)
    if kind in ("getset_descriptor", "member_descriptor"):
        return READ_ONLY.format(UNTOLD)
    if kind == "method_descriptor":
        return f"def {UNTOLD}"
    if callable(value):
        return signature(getattr(owner, name).__doc__)
    return CONSTANT.format(owner.__qualname__) if type(value) is owner else WRITABLE.format(kind)


def says(stub: str, module: str) -> bool:
    """Whether a stub says the same, or more where pybind11 knows no more than ``object`` or ``list``."""
    pattern = re.escape(module).replace(re.escape(UNTOLD), ".+")
    pattern = re.sub(r"\b(dict|list|type|Sequence|Callable)\b(?!\\\[)", r"\1(?:\\[.+\\])?", pattern)
    return re.fullmatch(re.sub(r"\bobject\b", ".+", pattern), stub) is not None


def wrong(text: str) -> list[str]:
    """The lines in which a stub and the module differ."""
    stub, module = stubbed(text), native()
    if not WITH_HOOKS & module.keys():
        stub = {name: told for name, told in stub.items() if name not in WITH_HOOKS}
    return [
        f"{name}: the stub has {stub.get(name)}, the module {module.get(name)}"
        for name in sorted(stub.keys() | module.keys())
        if name not in stub or name not in module or not says(stub[name], module[name])
    ]


def test_the_stub_is_the_modules() -> None:
    assert not wrong(STUB), "\n".join(wrong(STUB))


def test_hooks_are_there_all_or_none() -> None:
    assert WITH_HOOKS and WITH_HOOKS & vars(_C).keys() in (set(), WITH_HOOKS)


@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("modes_here", "def modes_here() -> int: ...", ""),
        ("more", "def modes_here() -> int: ...", "def modes_here() -> int: ...\ndef more() -> int: ..."),
        ("place", "operations: int, work: int", "operations: int, most: int"),
        ("place", "operations: int, work: int", "operations: int, work: int, /"),
        ("detached_bytes", "def detached_bytes() -> int", "def detached_bytes() -> float"),
        ("CudaArena.__init__", "page: int = 0", "page: int = 1"),
        ("Engine.record_spans", "most: int = 1048576", "most: int"),
        ("StepRun.by_caller", "    by_caller: bool", "    @property\n    def by_caller(self) -> bool: ..."),
        ("OrderFault.dropped_waits", "    dropped_waits: ClassVar[OrderFault]\n", ""),
        ("StepRun.outputs", "def outputs(self) -> list[", "def outputs(self) -> tuple["),
        ("NodeIndexError", "class NodeIndexError(NodeError)", "class NodeIndexError(RuntimeError)"),
        ("Observation.take_events", "def take_events", "def events"),
    ],
)
def test_what_is_wrong_in_a_stub_is_told(name: str, line: str, instead: str) -> None:
    assert line in STUB
    assert any(told.startswith(f"{name}:") for told in wrong(STUB.replace(line, instead)))
