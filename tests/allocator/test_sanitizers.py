"""The allocator's random runs, compiled alone and watched by the compiler's sanitizers (``make sanitize``)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def missing(sanitizer: str, folder: Path) -> str:
    """Why this compiler cannot, or nothing."""
    if shutil.which("make") is None or shutil.which("g++") is None:
        return "there is no make, or no g++"
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    built = subprocess.run(
        ["g++", f"-fsanitize={sanitizer}", str(probe), "-o", str(folder / "probe")], capture_output=True, text=True
    )
    if built.returncode:
        return f"the compiler has no -fsanitize={sanitizer}"
    ran = subprocess.run([str(folder / "probe")], capture_output=True, text=True)
    return f"programs with -fsanitize={sanitizer} do not run here: {ran.stderr.strip()[-200:]}" if ran.returncode else ""


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_random_runs(sanitizer: str, tmp_path: Path) -> None:
    reason = missing(sanitizer, tmp_path)
    if reason:
        pytest.skip(reason)
    program = f"build/fuzz-{sanitizer}"
    built = subprocess.run(["make", program], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([f"./{program}", "1500"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
