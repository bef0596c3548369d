"""What is imported when: commands that only talk to a cluster need no torch, and nothing is missing for those that do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import waterflow as wf
from waterflow.sources import digest

ROOT = Path(wf.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    for path in ROOT.rglob("*.py")
    if path.stem not in ("__init__", "__main__") and path != ROOT / "cluster" / "ray.py"
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "arguments",
    ["status", "logs x", "cancel x", "set x --quota 2GiB", "down", "up --devices 2 --policy none"],
    ids=lambda text: text.split()[0],
)  # fmt: skip
def test_what_talks_to_a_cluster_needs_no_torch(arguments: str, tmp_path: Path) -> None:
    code = f"""
import sys
from waterflow.cli.main import app
try:
    app("cluster {arguments} --state {tmp_path / "none"}".split())
except SystemExit as end:
    assert end.code in (1, 2), end
print([name for name in ("torch", "optuna", "waterflow._C", "numpy", "tqdm") if name in sys.modules])
"""
    assert run(code) == "[]"


@pytest.mark.parametrize("command", ["train", "plan", "study"])
def test_what_is_wrong_in_a_config_itself_needs_no_torch(command: str, tmp_path: Path) -> None:
    """A misspelled key, a wrong type, and no number of trials are told before torch and the user's code are imported."""
    what = "objective: code.py:run" if command == "study" else "jobs: [{job: code.py:run}]"
    wrong = ["epocs: 3", "memory: 4 parsecs", "max_concurrent: x", "n_trials: 0" if command == "study" else "epochs: [3]"]
    code = f"""
import pathlib, sys
from waterflow.cli.main import app
for line in [*{wrong}, *([""] if {command == "study"} else [])]:
    path = pathlib.Path("{tmp_path}", "config.yaml")
    path.write_text("{what}\\n" + line)
    try:
        app(["{command}", str(path)])
    except SystemExit as end:
        print(end.code)
print([name for name in ("torch", "waterflow._C") if name in sys.modules])
"""
    assert run(code) == "2\n" * (4 + (command == "study")) + "[]"


def test_public_names_are_where_they_are_said_to_be() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    told = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }  # fmt: skip
    told["device"] = told.pop("current_device")
    assert told.keys() - {"_C"} == set(wf.__all__) and set(wf.__all__) <= set(dir(wf))
    for name in wf.__all__:
        module, inside = told[name]
        assert getattr(wf, name) is getattr(sys.modules[str(module)], inside)


def test_a_native_part_of_other_sources_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    native = vars(wf)["_native"]
    assert native() is wf._C
    monkeypatch.setattr(wf._C, "built_from", "an earlier commit's digest")
    kept = vars(wf)["_C"]
    try:
        with pytest.raises(ImportError, match="the extension was built from other sources than these: run make build, or pip"):
            native()
    finally:
        setattr(wf, "_C", kept)  # noqa: B010


def test_each_change_of_a_source_changes_the_digest(tmp_path: Path) -> None:
    source = tmp_path / "partition" / "csrc" / "guards.cpp"
    source.parent.mkdir(parents=True)
    digests = set()
    for text in ("int a;", "int b;"):
        source.write_text(text)
        digests.add(digest(tmp_path))
    digests.add(digest(tmp_path.parent))
    source.rename(source.with_suffix(".h"))
    assert len({*digests, digest(tmp_path)}) == 4


def test_names_that_are_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'waterflow' has no attribute 'trian'"):
        wf.trian  # noqa: B018
    assert not hasattr(wf, "_private") and wf.allocator.time_planned_requests


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_each_module_can_be_the_first() -> None:
    """Nobody else imports first what it needs. A process for each: forked, for speed, once torch is there."""
    code = f"""
import os, sys, torch
wrong = []
for name in {MODULES!r}:
    pid = os.fork()
    if pid == 0:
        try:
            __import__(name)
        except BaseException as error:
            print(name, repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        wrong.append(name)
print(wrong)
"""
    assert run(code).splitlines()[-1] == "[]"


@pytest.mark.slow
def test_a_native_part_that_was_built_for_another_torch_is_refused() -> None:
    code = """
import torch
torch.__version__ = "0.0.1"
import waterflow as wf
for _ in range(2):
    try:
        wf.train
    except ImportError as error:
        print("torch 0.0.1 is installed: run make build" in str(error))
"""
    assert run(code) == "True\nTrue"
