"""Builds the tests' own extension; ``tests.native.build`` runs it."""

from __future__ import annotations

from glob import glob

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

# The parts of the allocator that know no torch are compiled once more, so that nothing but interfaces is shared with
# what users have.
CORE = [
    f"waterflow/allocator/csrc/{name}.cpp"
    for name in (
        "simulated_device", "cpu_device", "size_bins", "stream_clocks", "free_sets", "stream_allocator",
        "stream_allocator_tiers", "stream_allocator_report",
    )
]  # fmt: skip

setup(
    name="waterflow-tests-native",
    packages=[],
    ext_modules=[
        CppExtension(
            "waterflow_tests_native",
            sorted([*CORE, *glob("tests/native/*.cpp")]),
            extra_compile_args=["-O2", "-g0", "-fvisibility=hidden", "-DWATERFLOW_TEST_HOOKS"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
