"""The shape of the code: which way imports go, how long files are, what may not be there."""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

from tests import weight
from tests.imports import ROOT, imports_of
from tests.tiers import without_reason

pytestmark = pytest.mark.needs_time("the code of all files is parsed")

PACKAGE = ROOT / "waterflow"
SOURCES = sorted(p.relative_to(ROOT) for p in PACKAGE.rglob("*.py"))
NATIVE = sorted(p.relative_to(ROOT) for kind in ("*.cpp", "*.h") for p in PACKAGE.rglob(kind))
BENCHMARKS = sorted(p.relative_to(ROOT) for p in (ROOT / "benchmarks").rglob("*.py"))
TESTS = sorted(p.relative_to(ROOT) for p in (ROOT / "tests").rglob("*.py"))

# The way of the data: each part imports only those before it.
ORDER = [
    "by_value",
    "errors",
    "sources",
    "units",
    "partition",
    "allocator",
    "executor",
    "planner",
    "run_stats",
    "job",
    "step_arguments",
    "step",
    "results",
    "training",
    "study",
    "cluster",
    "zoo",
    "cli",
    "__main__",
    "__init__",
]
# Libraries that only these files may import, for whoever does without them must not need them. Files of the command
# line that deal with studies may import Optuna inside of functions.
ONLY = {
    "optuna": {"study/__init__", "study/coordinator", "study/optuna_compat", "study/remote_storage", "study/run"},
    "ray": {"cluster/ray"},
}
# Modules, identifiers and options that are gone (docs/releases.md); what was tried stays in docs/experiments/gone.md.
GONE = {
    "executor.compiling", "compiling.py", "compile_worker", "executor.fusing", "fusing.py", "fused_group", "partition.regions",
    "regions.py", "partition.stacking", "stacking.py", "stacking_rules", "faster_layers", "dropout_rates", "partition.derived",
    "derived.py", "FusedPending", "fused_steps", "stand_alone", "bind_stacked", "bind_readings", "call_off", "CompiledRegion",
    "lstm_layer", "lstm_layer_backward", "RatesMatter", "wraps_numbers", "ambient_parts", "with_batch", 'mode="fused"',
    'compile="inductor"', 'batches="lane"', "below_need", "BelowNeed", "memory_control", "MemoryControl", "lower_forms",
    "goes_lower", "give_shares", "opportunistic_limit", "height_for", "set_spill", "allocate_pinned",
    "allocator.counting", "allocator.fuzzing", "allocator.request_log", "allocator.devices", "allocator.stream_allocator",
    "wf.count_memory", "record_log", "take_log", "CountingAllocator",
    "waterflow demo", "waterflow/demo.py", "zoo_networks", "OtherPrograms",
    "planner.policies", "planner/policies", "planner.largest", "executor.pool_replay", "replay_spans", "POOL_ALIGNMENT",
}  # fmt: skip
# Words that others have replaced, as docs/glossary.md has them: no module, class, argument, option or metric is called so. The
# cluster's are left until it is built anew.
RENAMED = {
    "Ground", "ground", "Terms", "terms", "Residence", "residence", "belonging", "Boundary", "boundary", "Wish", "together",
    "surroundings", "MakingWay", "MakeWay", "making_way", "make_way", "figures", "EngineFigures", "RunFigures", "user_code", "stopping",
    "Starving", "starving", "Claims", "claims", "claiming", "spill", "spilled", "repeat", "shortcuts", "measured", "faster_products",
    "Pending", "pending", "Variant", "variant", "Variants", "variants", "Behind", "behind", "strand", "stranger", "strangers",
    "looked", "unlooked", "eldest_first", "pages_stay", "pacer", "device_order", "DeviceOrder", "short_products", "Coordinator",
    "job_spills", "intra_op",
}  # fmt: skip
# Files that comments name although the repository does not have them: a library's, and a stand-in for the user's.
OTHERS = {"tacotron2.py", "path/to/file.py"}
# Files that are one idea, and longer than others may be.
LONG = {"waterflow/executor/csrc/engine/engine.cpp": 1100}  # one class, all of it under one lock
INSIDE_FUNCTIONS = {"optuna": {"cli/main", "cli/config", "cli/output"}}


def part_of(name: str) -> int:
    """Where a part of the package stands: a folder, or a file of the top."""
    return ORDER.index(name)


def module_name(path: Path) -> str:
    """Of a file of the package, with slashes, without the suffix."""
    return str(path.relative_to("waterflow").with_suffix(""))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def included_by(path: Path) -> list[str]:
    return re.findall(r'#include\s+[<"]([^">]+)', (ROOT / path).read_text())


def assert_none(wrong: list[str]) -> None:
    assert not wrong, "\n".join(wrong)


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 20 and len(NATIVE) > 8 and BENCHMARKS and TESTS
    parts = {path.parts[1].removesuffix(".py") for path in SOURCES}
    assert set(ORDER) == parts


def test_imports_go_one_way() -> None:
    assert_none([f"{path}:{line} imports {name}" for path in SOURCES for line, name in _upwards(path)])


def _upwards(path: Path) -> Iterator[tuple[int, str]]:
    own = path.parts[1].removesuffix(".py")
    if own == "__init__":
        return
    for line, name in imports_of(path, types=True):
        top, *rest = name.split(".")
        if top != "waterflow":
            continue
        other = rest[0] if rest else "__init__"
        if other == "_C":
            allowed = part_of(own) >= part_of("partition")
        elif other == "__init__":
            allowed = own == "cli"
        else:
            allowed = other == own or part_of(other) < part_of(own)
        if not allowed:
            yield line, name


def test_files_import_one_another_in_no_circle() -> None:
    """Under ``TYPE_CHECKING`` and inside functions neither; those of the cluster may, until it is built anew."""
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}
    imports = {
        path: {modules[module] for _, name in imports_of(path, types=True) if (module := _module_of(name, modules))}
        for path in SOURCES
    }
    circles = {tuple(sorted(_circle(path, imports))) for path in SOURCES} - {()}
    assert_none([
        " <-> ".join(map(str, circle)) for circle in sorted(circles)
        if not all(path.is_relative_to("waterflow/cluster") for path in circle)
    ])  # fmt: skip


def _module_of(name: str, modules: Collection[str]) -> str | None:
    """The file's name that an imported name stands for, or is defined in; None for others' and for the native part."""
    found = name if name in modules else name.rpartition(".")[0]
    return found if found in modules and name != "waterflow._C" else None


def _circle(path: Path, imports: Mapping[Path, set[Path]]) -> set[Path]:
    """All files that ``path`` imports, itself or through others, and that import it; none where no circle leads through it."""

    def reached(start: Path) -> set[Path]:
        found: set[Path] = set()
        left = [start]
        while left:
            new = imports[left.pop()] - found
            found |= new
            left += new
        return found

    return {other for other in reached(path) if path in reached(other)}


def test_optional_libraries_have_files_of_their_own() -> None:
    wrong = []
    for library, only in ONLY.items():
        for path in SOURCES:
            if module_name(path) in only:
                continue
            lazily = module_name(path) in INSIDE_FUNCTIONS.get(library, ())
            if library in {name.split(".")[0] for _, name in imports_of(path, functions=not lazily)}:
                wrong.append(f"{path} imports {library}; only {sorted(only)} may")
    assert_none(wrong)


def test_importing_the_package_does_not_import_what_is_optional() -> None:
    code = "import sys, waterflow; print([m for m in ('optuna', 'ray', 'matplotlib', 'typer') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


def test_benchmarks_use_the_public_package() -> None:
    """All but ``baselines``, whose policies are built of the parts of ours."""
    wrong = []
    for path in BENCHMARKS:
        if path.is_relative_to("benchmarks/baselines"):
            continue
        for line, name in imports_of(path):
            top, *rest = name.split(".")
            open_ = ["training", "batch_size"], ["study", "order"]  # whose __all__ says what is open
            inside = rest[:2] not in open_ and len(rest) > 1
            if top == "waterflow" and (inside or any(part.startswith("_") for part in rest)):
                wrong.append(f"{path}:{line} imports from inside: {name}")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("waterflow._", "wf._")):
                wrong.append(f"{path}:{node.lineno} reaches into {ast.unparse(node)}")
    assert_none(wrong)


def test_the_package_weighs_no_more_than_its_budget() -> None:
    assert weight.total() <= weight.BUDGET, f"{weight.total()} lines of code, {weight.BUDGET} are the budget: make weight"


def test_files_are_short() -> None:
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in (*SOURCES, *NATIVE)}
    assert_none([
        f"{path} has {n} lines; over {most} it is two concepts"
        for path, n in lengths.items() if n > (most := LONG.get(str(path), 800))
    ])  # fmt: skip


MOST_SKIPS = 30


def test_few_lines_are_kept_from_the_formatter() -> None:
    """Tables alone, whose rows belong together."""
    kept = [path for path in SOURCES for line in (ROOT / path).read_text().splitlines() if "# fmt: skip" in line]
    assert len(kept) <= MOST_SKIPS, kept


def test_the_package_does_not_print() -> None:
    assert_none([
        f"{path}:{node.lineno} prints; use the logger, or the terminal of the command line"
        for path in SOURCES for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ])  # fmt: skip


def test_what_is_gone_is_named_nowhere() -> None:
    told = {ROOT / "docs/experiments/gone.md", ROOT / "docs/releases.md", Path(__file__)}
    texts = [ROOT / "README.md", *(ROOT / path for path in (*SOURCES, *NATIVE, *BENCHMARKS, *TESTS))]
    kinds = (".md", ".py", ".yaml")
    texts += [path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.*") if path.suffix in kinds]
    names = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, sorted(GONE)))})(?!\w)")
    assert_none([
        f"{path.relative_to(ROOT)}:{number} names {found[0]}, which is gone"
        for path in sorted({*texts} - told) for number, line in enumerate(path.read_text().splitlines(), 1)
        for found in names.finditer(line)
    ])  # fmt: skip


def _names_of(path: Path) -> Iterator[str]:
    """What a file calls modules, classes, arguments, options and metrics."""
    yield path.stem
    text = (ROOT / path).read_text()
    if path.suffix != ".py":
        yield from re.findall(r"^ *(?:class|struct|enum class) (\w+)|py::arg\(\"(\w+)\"\)", text, re.MULTILINE)
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Constant) and str(node.value).startswith(("--", "job_", "device_")):
            yield node.value.removeprefix("--").replace("-", "_")


def test_what_was_renamed_is_called_by_its_name() -> None:
    assert_none([
        f"{path} calls something {name}" for path in (*SOURCES, *NATIVE) if path.parts[1] != "cluster"
        for found in _names_of(path) for name in ([found] if isinstance(found, str) else found) if name in RENAMED
    ])  # fmt: skip


def _prose_of(path: Path) -> str:
    """The comments of a file, and its docstrings."""
    text = (ROOT / path).read_text()
    if path.suffix != ".py":
        return "\n".join(re.findall(r"//.*", text))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(tree_of(path)) if isinstance(node, kinds)]
    return "\n".join([*docstrings, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def _files_missing(prose: str) -> list[str]:
    """The files named, with or without folders, that are not in the repository; ``name.*`` counts in backticks or brackets."""
    named = re.findall(r"[\w./-]*\w\.(?:py|pyi|cpp|h|md)\b|(?<=[`(])[\w/]+\.\*(?=[`)])", prose)
    files = _repository_files()
    return [name for name in named if name not in OTHERS and not any(f"/{file}".endswith(f"/{name}") for file in files)]


@functools.cache
def _repository_files() -> list[str]:
    folders = [ROOT / name for name in ("waterflow", "tests", "benchmarks", "docs", "examples")]
    files = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*.*"))]
    return [str(found.relative_to(ROOT)) for path in files for found in (path, path.with_suffix(".*"))]


def test_comments_name_files_that_exist() -> None:
    planted = "// (graph_cache.h) In csrc/engine.cpp, engine/engine.cpp, ``admission.*``, ``fingerprint.*`` and setup.py."
    assert _files_missing(planted) == ["graph_cache.h", "csrc/engine.cpp", "fingerprint.*"]
    assert_none([f"{path} names {name}" for path in (*SOURCES, *NATIVE) for name in _files_missing(_prose_of(path))])


def test_helpers_live_with_their_concept() -> None:
    assert_none([
        str(path) for path in (*SOURCES, *TESTS, *BENCHMARKS)
        if path.stem in ("utils", "util", "helpers", "misc", "common")
    ])  # fmt: skip


def test_modules_and_public_names_are_documented() -> None:
    wrong = []
    for path in SOURCES:
        tree = tree_of(path)
        if tree.body and not ast.get_docstring(tree):
            wrong.append(f"{path} does not say what it is")
        wrong += [
            f"{path}:{node.lineno} {node.name} has no docstring" for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ]  # fmt: skip
    assert_none(wrong)


def test_native_code_needs_no_cuda() -> None:
    """One source builds against a CPU-only torch and a CUDA torch: CUDA is looked up at run time."""
    own = {path.name for path in NATIVE}
    assert_none([
        f"{path} includes {name}" for path in NATIVE for name in included_by(path)
        if name.rsplit("/", 1)[-1] not in own and ("cuda" in name.lower() or "cublas" in name.lower())
    ])  # fmt: skip


def test_admission_and_barriers_know_no_torch() -> None:
    """Pure book-keeping: no clock, no threads, no torch."""
    pure = ("admission", "cross_lane_fences", "simulation")
    banned = ("ATen", "torch", "c10", "thread", "mutex", "chrono", "condition_variable", "atomic")
    assert_none([
        f"{path} includes {name}" for path in NATIVE if path.stem in pure for name in included_by(path)
        if name.startswith(banned)
    ])  # fmt: skip


def test_private_names_of_optuna_stand_in_one_file() -> None:
    assert_none([
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path in SOURCES if module_name(path) in ONLY["optuna"] - {"study/optuna_compat"} for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        and ast.unparse(node.value) not in ("self", "cls")
    ])  # fmt: skip


def test_what_sleeps_or_measures_a_duration_says_why(request: pytest.FixtureRequest) -> None:
    """Of the tests that run beside this one, in the short tier (``tests/tiers.py``)."""
    assert_none(without_reason(request.session.items))


def test_the_exceptions_that_users_catch_have_one_root() -> None:
    import waterflow as wf
    from waterflow import errors

    public = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert all(issubclass(error, wf.WaterflowError) for error in public)
    assert all(getattr(wf, error.__name__) is error for error in public)
