"""Builds waterflow's one extension against the torch that is installed.

Install with ``pip install --no-build-isolation``: an isolated build would fetch another torch than the one
that the extension then meets.
"""

import os
import sys
import sysconfig
from pathlib import Path

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("waterflow needs a Python with its global interpreter lock, such as 3.13; this build is free-threaded")

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = sorted(str(path) for path in Path("waterflow").glob("*/csrc/**/*.cpp"))
HEADERS = sorted(str(path) for path in Path("waterflow").glob("*/csrc/**/*.h"))

# Two compilers at once need about 3 GB of memory; MAX_JOBS overrides.
os.environ.setdefault("MAX_JOBS", str(min(os.cpu_count() or 1, 8)))

# With WATERFLOW_TEST_HOOKS=1 the extension has what tests plant faults with (``make build``); users' builds do not.
FLAGS = ["-O2", "-fvisibility=hidden", f'-DWATERFLOW_TORCH_VERSION="{torch.__version__}"']
if os.environ.get("WATERFLOW_TEST_HOOKS") == "1":
    FLAGS.append("-DWATERFLOW_TEST_HOOKS")


class Build(BuildExtension):
    """Objects stay in ``build/objects``, so that the next build compiles only what has changed since."""

    def finalize_options(self):
        super().finalize_options()
        self.build_temp = os.path.join("build", "objects")


setup(
    ext_modules=[
        CppExtension(
            "waterflow._C", SOURCES, depends=HEADERS, include_dirs=[str(Path(__file__).parent)], extra_compile_args=FLAGS
        )
    ],
    cmdclass={"build_ext": Build},
)
