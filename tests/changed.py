"""Which tests a change concerns: ``python -m tests.changed [COMMIT]`` prints their files, for pytest.

A change is what differs from COMMIT, untracked files included. By default that is where the branch left its upstream; a branch
without one is compared with main, and main with its last commit. A file of the package concerns the tests of its folder and all tests that
import it; a test file concerns itself; what a helper of the tests holds, all that import it; a page and an example
concern what runs them. The architecture and the bits are always looked at.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.imports import ROOT, imports_of

ALWAYS = {Path("tests/test_architecture.py"), Path("tests/test_bitwise.py")}


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def base() -> str:
    """The commit to compare with."""
    for other in ("@{upstream}", "main"):
        if git("rev-parse", "--verify", "-q", other) and (found := git("merge-base", "HEAD", other)):
            return found[0]
    return "HEAD"


def changed(commit: str) -> list[Path]:
    """What differs from a commit. Raises SystemExit where git does not know it."""
    if not git("rev-parse", "--verify", "-q", f"{commit}^{{commit}}"):
        raise SystemExit(f"git knows no commit {commit!r}; name one, as in: make test-changed BASE=HEAD~3")
    names = {*git("diff", "--name-only", commit), *git("ls-files", "--others", "--exclude-standard")}
    return [Path(name) for name in sorted(names)]


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def users_of(modules: set[str], files: list[Path]) -> set[Path]:
    """The files that import one of the modules, or a name of it."""
    return {
        path for path in files
        if any(name in modules or name.rpartition(".")[0] in modules for _, name in imports_of(path))
    }  # fmt: skip


def concerned(paths: list[Path]) -> list[Path]:
    """The test files and folders that changed ``paths`` concern."""
    files = [path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("*.py"))]
    modules = {module_of(path) for path in paths if path.suffix == ".py"}
    found = ALWAYS | {path for path in paths if path in files}
    while new := users_of(modules, files) - found:  # helpers lead to the tests that use them
        found |= new
        modules |= {module_of(path) for path in new}
    for path in paths:
        folder = Path("tests", *path.parts[1:2])
        if path.parts[0] == "waterflow" and len(path.parts) > 2 and (ROOT / folder).is_dir():
            found.add(folder)
        elif path.parts[0] == "waterflow":
            found |= {each for each in files if each.name.startswith(f"test_{path.stem}")}
        elif path.name == "conftest.py":
            found.add(path.parent)
        elif path.suffix == ".md" or path.parts[0] == "examples":
            found.add(Path("tests/test_pages.py"))
    return sorted(path for path in found if path.name.startswith("test_") or (ROOT / path).is_dir())


if __name__ == "__main__":
    print(*concerned(changed(sys.argv[1] if len(sys.argv) > 1 else base())))
