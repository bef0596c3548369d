"""The observer on other versions of Python, where they are there: built alone, for it needs no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PARTITION = HERE.parents[2] / "waterflow" / "partition"
TESTS = [HERE / f"test_observer{part}.py" for part in ("", "_leaves_nothing", "_stack")]
MODULE = """
#include "waterflow/partition/csrc/observer.h"
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&definition);
  return module != nullptr && waterflow::observer::add_to_module(module) ? module : nullptr;
}
"""
RUN = """
import faulthandler, importlib.util, sys
faulthandler.enable()
for number, path in enumerate(sys.argv[1:]):
    spec = importlib.util.spec_from_file_location(f"tests_{number}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for name in [name for name in vars(module) if name.startswith("test_")]:
        print(name, flush=True)
        getattr(module, name)()
"""


def python(version: str) -> str:
    """An interpreter of that version with headers. Skips the test where there is none."""
    folders = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python{version}")
    for found in filter(None, [shutil.which(f"python{version}"), *map(str, folders)]):
        asked = subprocess.run(
            [found, "-c", "import sysconfig; print(sysconfig.get_path('include'))"], capture_output=True, text=True
        )
        if asked.returncode == 0 and (Path(asked.stdout.strip()) / "Python.h").exists():
            return found
    pytest.skip(f"no Python {version} with headers")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_version(version: str, tmp_path: Path) -> None:
    compiler = shutil.which("c++") or pytest.skip("no compiler")
    found = python(version)
    include = subprocess.run(
        [found, "-c", "import sysconfig; print(sysconfig.get_path('include'))"], capture_output=True, text=True, check=True
    ).stdout.strip()
    package = tmp_path / "waterflow"
    (package / "partition/guards").mkdir(parents=True)
    for name in ("__init__.py", "partition/__init__.py", "partition/guards/__init__.py"):
        (package / name).touch()
    shutil.copy(PARTITION / "guards/observer.py", package / "partition/guards/observer.py")
    (tmp_path / "module.cpp").write_text(MODULE)
    sources = [tmp_path / "module.cpp", *(PARTITION / "csrc").glob("observ*.cpp")]
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Werror=return-type"]
    flags += [f"-I{include}", f"-I{PARTITION.parents[1]}"] + (["-undefined", "dynamic_lookup"] * (sys.platform == "darwin"))
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(package / "_C.so")], check=True)
    done = subprocess.run(
        [found, "-c", RUN, *map(str, TESTS)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout[-500:], done.stderr[-4000:])


def test_a_free_threaded_python_is_told_in_one_sentence() -> None:
    told = "import sysconfig; sysconfig.get_config_var = lambda name: 1; exec(open('setup.py').read())"
    root = PARTITION.parents[1]
    done = subprocess.run([sys.executable, "-c", told], cwd=root, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "this build is free-threaded" in done.stderr


def test_the_observer_is_not_built_for_frames_that_it_does_not_know() -> None:
    compiler = shutil.which("c++") or pytest.skip("no compiler")
    include = f"-I{sysconfig.get_path('include')}"
    command = [
        compiler,
        "-std=c++17",
        "-fsyntax-only",
        include,
        f"-I{PARTITION.parents[1]}",
        "-DPy_GIL_DISABLED",
        str(PARTITION / "csrc/observer.cpp"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "waterflow needs CPython 3.11, 3.12 or 3.13" in done.stderr
