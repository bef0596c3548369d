"""Builds waterflow's one extension against the torch that is installed.

Install with ``pip install --no-build-isolation``: an isolated build would fetch another torch than the one
that the extension then meets.
"""

import os
import runpy
import shutil
import sys
import sysconfig
from pathlib import Path

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("waterflow needs a Python with its global interpreter lock, such as 3.13; this build is free-threaded")

import torch
from setuptools import setup
from setuptools.errors import CompileError
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = sorted(str(path) for path in Path("waterflow").glob("*/csrc/**/*.cpp"))
HEADERS = sorted(str(path) for path in Path("waterflow").glob("*/csrc/**/*.h"))
PRECOMPILED = "waterflow/executor/csrc/precompiled.h"
DIGEST = runpy.run_path("waterflow/sources.py")["digest"](Path("waterflow"))

# Two compilers at once need about 3 GB of memory; MAX_JOBS overrides.
os.environ.setdefault("MAX_JOBS", str(min(os.cpu_count() or 1, 8)))

# torch 2.11 would take C++17, and Python's own flags ask for debug information. With WATERFLOW_TEST_HOOKS=1 the extension
# has what tests plant faults with (``make build``); users' builds do not.
FLAGS = ["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", f'-DWATERFLOW_TORCH_VERSION="{torch.__version__}"']
if os.environ.get("WATERFLOW_TEST_HOOKS") == "1":
    FLAGS.append("-DWATERFLOW_TEST_HOOKS")


class Build(BuildExtension):
    """Compiles torch's headers once, before the sources, and keeps objects for the next build."""

    def finalize_options(self):
        super().finalize_options()
        self.build_temp = os.path.join("build", f"objects-{sys.implementation.cache_tag}-{torch.__version__}")

    def build_extension(self, ext):
        ext.sources.append(self.digest())
        try:
            ext.extra_compile_args += ["-include", self.precompiled(ext)]
        except (CompileError, RuntimeError, OSError) as error:  # of distutils, of torch's call of ninja, of hard links
            self.warn(f"the build takes longer: {PRECOMPILED} is compiled with each file, not once ({error})")
        super().build_extension(ext)

    def digest(self):
        """A source of one line, which alone is compiled anew for each change of another."""
        source = Path(self.build_temp, "digest.cpp")
        text = f'extern const char* const waterflow_sources = "{DIGEST}";\n'
        if not source.exists() or source.read_text() != text:
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_text(text)
        return str(source)

    def precompiled(self, ext):
        """The header's path to include: GCC and Clang take ``NAME.gch``, where it is there, in the place of NAME."""
        folder = Path(self.build_temp, "precompiled").absolute()
        self.compiler.src_extensions = [*self.compiler.src_extensions, ".h"]
        [made] = self.compiler.compile(
            [PRECOMPILED], output_dir=str(folder), macros=ext.define_macros, include_dirs=ext.include_dirs,
            extra_preargs=["-xc++-header"], extra_postargs=ext.extra_compile_args,
        )  # fmt: skip
        header = folder / Path(PRECOMPILED).name
        compiled = header.with_name(f"{header.name}.gch")
        compiled.unlink(missing_ok=True)
        compiled.hardlink_to(made)
        shutil.copy(PRECOMPILED, header)  # for a compiler that does not take the other one
        return str(header)


setup(
    ext_modules=[
        CppExtension(
            "waterflow._C", SOURCES, depends=HEADERS, include_dirs=[str(Path(__file__).parent)], extra_compile_args=FLAGS
        )
    ],
    cmdclass={"build_ext": Build},
)
