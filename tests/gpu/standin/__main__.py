"""``python -m tests.gpu.standin [all | PART ...]``: the tests of a GPU, on the stand-in; ``make cuda-check`` calls it."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.gpu import standin

BITS = tuple(f"tests/gpu/test_{name}.py" for name in ("as_cpu", "engine", "forms", "together", "results"))
PARTS = {  # the order of the streams, and tests
    "late": ("late", ("tests/gpu",)),
    "once": ("once", BITS),
    **{f"stream {number} first": (str(number), BITS) for number in range(1, 7)},
}


def main(asked: list[str]) -> int:
    """Run the parts; return 0 if all passed."""
    import waterflow._C  # noqa: F401  # or else each process fails by itself

    standin.build()
    failed = []
    for name in PARTS if asked == ["all"] else asked or ["late"]:
        if name not in PARTS:
            sys.exit(f"there is no part {name!r}; there are: {', '.join(PARTS)}")
        (schedule, tests), began = PARTS[name], time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--all", *tests]
        status = subprocess.run(command, cwd=standin.ROOT, env=standin.environment(schedule)).returncode
        failed += [name] if status else []
        print(f"{name}: {'failed' if status else 'passed'}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"only a GPU shows what these do: {standin.missing()}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
