"""A captured step with regions of it compiled to native code."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal

from waterflow import _C
from waterflow.errors import InvalidJobError
from waterflow.executor.captured import CapturedStep, assemble
from waterflow.executor.compile_worker import Answer, Like, Task
from waterflow.partition.regions import Compiled, Loaded, Region, Regions

logger = logging.getLogger("waterflow")

Compile = Literal["inductor", "inductor-always"] | None
TIMEOUT_SECONDS = 900.0
WORTH = 0.95  # of the time that a region takes as it was captured: one that takes more is not used

_told: set[str] = set()
_one_at_a_time = threading.Lock()  # compilers are large; steps that were compiled before do not come here


def check_compile(compile: Any, device_type: str, recompute: Any) -> Compile:
    """What ``compile=`` asks for. Raises InvalidJobError for what it cannot be."""
    if compile is None:
        return None
    if compile not in ("inductor", "inductor-always"):
        raise InvalidJobError(f"compile must be 'inductor', 'inductor-always' or None; got {compile!r}")
    if device_type != "cpu":
        raise InvalidJobError(
            f"compile={compile!r} needs a model on the CPU; got one on {device_type!r}. Pass compile=None"
        )
    if recompute is not None:
        raise InvalidJobError(
            f"compile={compile!r} and recompute={recompute!r} exclude each other: what native code holds cannot be made again. "
            "Give one of them"
        )
    return compile  # type: ignore[no-any-return]


def compiling(captured: CapturedStep, threads: int, always: bool) -> CapturedStep:
    """The same step with regions compiled for ``threads`` intra-op threads; without ``always`` those that were faster.

    Other processes do the work, which takes from seconds to minutes; the step runs as captured where they cannot.
    ``compiled`` of what is returned tells what became of it.
    """
    begin = time.perf_counter()
    regions = Regions(captured.capture)
    of = len(captured.lowered.instructions)
    if not regions.found:
        return _unchanged(
            captured, Compiled(0, of, 0, 0, reason="no operations that belong together could be compiled")
        )
    try:
        with _one_at_a_time:
            answers = dict(
                zip(regions.found, _ask([_task(r, threads, captured.exact) for r in regions.found.values()]))
            )
    except _NoCompiler as error:
        _warn(str(error))
        return _unchanged(captured, Compiled(0, of, 0, len(regions.found), reason=str(error)))
    good = {stage: answer for stage, answer in answers.items() if not answer.error}
    errors = [answer.error for answer in answers.values() if answer.error]
    if errors:
        _warn(errors[0])
    used = {stage: a for stage, a in good.items() if always or a.seconds[1] <= WORTH * a.seconds[0]}
    reason = errors[0] if errors else None
    if reason is None and len(used) < len(good):
        reason = "the others were not faster" if used else "none was faster"
    before, after = (sum(answer.seconds[way] for answer in used.values()) for way in (0, 1))
    told = Compiled(
        operations=sum(len(regions.found[stage].nodes) for stage in used), of=of, regions=len(used),
        found=len(regions.found), speedup=before / after if after else 1.0, seconds=time.perf_counter() - begin,
        reason=reason,
    )  # fmt: skip
    if not used:
        return _unchanged(captured, told)
    try:
        native = {stage: _C.CompiledRegion(answer.path) for stage, answer in used.items()}
    except RuntimeError as error:
        _warn(str(error))
        return _unchanged(captured, Compiled(0, of, 0, len(regions.found), reason=str(error)))
    loaded = {stage: Loaded(region.number, used[stage].temporary, used[stage].same) for stage, region in native.items()}
    made = assemble(regions.replaced(loaded), captured.predicted.name, captured.keep, captured.exact)
    for region in native.values():
        made.lowered.program.keep(region)
    made.compiled = told
    return made


class _NoCompiler(Exception):
    """Nothing could be compiled."""


def _task(region: Region, threads: int, exact: bool) -> Task:
    inputs, outputs = (tuple(Like.of(n.meta["val"]) for n in nodes) for nodes in (region.inputs, region.outputs))
    return Task(region.module, inputs, outputs, threads, exact)


def _ask(tasks: list[Task]) -> list[Answer]:
    """Answers in the order of the tasks. Raises _NoCompiler where the other process fails as a whole."""
    call = "import sys; from waterflow.executor.compile_worker import main; main(*sys.argv[1:])"
    # With CI set, Inductor refuses operators that it would leave as they are elsewhere.
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | {
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no further processes, which might outlive it
    }
    with tempfile.TemporaryDirectory(prefix="waterflow-") as folder:
        task, answer, errors = (Path(folder, name) for name in ("task", "answer", "errors"))
        task.write_bytes(pickle.dumps(tasks))
        try:
            # Into a file: who waits for the end of a pipe waits for all that have inherited it.
            with errors.open("w") as written:
                ended = subprocess.run(
                    # -P: what lies in the working directory is not taken for the package.
                    [sys.executable, "-P", "-c", call, str(task), str(answer)], env=environment, stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, stderr=written, timeout=TIMEOUT_SECONDS,
                )  # fmt: skip
            told = errors.read_text(errors="replace")
            if not answer.exists():
                raise _NoCompiler(_last_line(told) or f"the compiling process ended with {ended.returncode}")
            for line in told.splitlines():
                logger.debug("compiling: %s", line)
            return pickle.loads(answer.read_bytes())  # type: ignore[no-any-return]
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _NoCompiler(f"no process to compile in: {error}") from error


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def as_captured(captured: CapturedStep, told: Compiled) -> CapturedStep:
    """The step without the native code that was made of it, as that does not fit into memory."""
    reason = "native code holds more memory than the limit leaves"
    return _unchanged(captured, Compiled(0, told.of, 0, told.found, seconds=told.seconds, reason=reason))


def _unchanged(captured: CapturedStep, told: Compiled) -> CapturedStep:
    given = captured.capture, captured.lowered, captured.memory, captured.predicted, captured.keep, captured.exact
    return CapturedStep(*given, compiled=told)


def _warn(reason: str) -> None:
    if reason in _told:
        return
    _told.add(reason)
    missing = any(error in reason for error in ("InvalidCxxCompiler", "CppCompileError"))
    remedy = (
        "Inductor needs a C++ compiler with OpenMP: install one, or pass compile=None"
        if missing
        else "compile=None stops asking"
    )
    logger.warning(
        "compile= has no effect on operations that Inductor does not compile here: %s. They run as captured. %s.", reason.rstrip("."),
        remedy,
    )  # fmt: skip
