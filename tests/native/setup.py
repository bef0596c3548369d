"""Builds the tests' own extension; ``tests.native.build`` runs it."""

from __future__ import annotations

from glob import glob
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

# The parts of the allocator and of the engine that know no torch are compiled once more, so that nothing but interfaces
# is shared with what users have.
CORE = [
    f"waterflow/{folder}/csrc/{name}.cpp"
    for folder, names in {
        "allocator": (
            "simulated/simulated_device", "cpu/cpu_device", "stream/stream_clocks", "stream/free_sets",
            "stream/stream_allocator",
        ),
        "executor": ("engine/admission", "engine/cross_lane_fences", "engine/simulation"),
    }.items()
    for name in names
]  # fmt: skip

setup(
    name="waterflow-tests-native",
    packages=[],
    ext_modules=[
        CppExtension(
            "waterflow_tests_native",
            sorted([*CORE, *glob("tests/native/*.cpp")]),
            include_dirs=[str(Path(__file__).parents[2])],
            extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-DWATERFLOW_TEST_HOOKS"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
