"""Compiles regions of a step, in a process of its own.

Compiling patches torch's globals, holds the interpreter lock for seconds, and what it makes is run here for the first time:
nothing of that touches a process that trains.
"""

from __future__ import annotations

import operator
import pickle
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from waterflow import _C
from waterflow.executor.lowering import lower
from waterflow.partition.capture import Capture
from waterflow.partition.operators import storage_id
from waterflow.partition.spec import GraphInput

MEASURED_SECONDS = 0.2  # for one region; each way gets half
ROUNDS = 5, 201  # at least and at most


@dataclass(frozen=True)
class Like:
    """A tensor to be made: its shape, strides and type."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Like:
        """The same of a (fake) tensor."""
        return Like(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def make(self) -> torch.Tensor:
        """Small random numbers; zeros where they count something, which are right as places and classes, too."""
        extent = (
            1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides)) if all(self.shape) else 0
        )
        made = torch.zeros(extent, dtype=self.dtype)  # elements may lie on one another
        return (made.normal_().mul_(0.1) if made.is_floating_point() else made).as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class Task:
    """One region to compile, for kernels that use so many threads.

    ``exact``: it is measured against the very operations that were captured, not their faster forms.
    """

    module: fx.GraphModule
    inputs: tuple[Like, ...]
    outputs: tuple[Like, ...]
    threads: int
    exact: bool


@dataclass(frozen=True)
class Answer:
    """Native code of a region, or the ``error`` why there is none.

    ``same`` has results that came out in the memory of something else, as in ``Loaded``. ``temporary`` counts bytes held beside
    results at most; ``seconds`` are medians of calls here, of the operations as they were captured, and of the native code.
    """

    path: str = ""
    temporary: int = 0
    same: dict[int, int] = field(default_factory=dict)
    seconds: tuple[float, float] = (0.0, 0.0)
    error: str = ""


def compile_region(task: Task) -> Answer:
    """Compile, check and measure one region."""
    import torch._inductor  # slow to import, and of no use to a process that trains

    torch.set_num_threads(task.threads)
    torch.manual_seed(0)
    inputs = [like.make() for like in task.inputs]
    options = {"cpp.threads": task.threads, "aot_inductor.package": False}
    with torch.no_grad():
        path = torch._inductor.aot_compile(task.module, tuple(inputs), options=options)
    region = _C.CompiledRegion(path)
    plain = _Timed(_captured(task.module, inputs), inputs, task.exact)
    native = _Timed(_calling(region.number, task), inputs)
    made, expected = native(), plain()
    _check(made, expected, task.outputs)
    made, peak = _C.metered(lambda: torch.ops.waterflow.compiled(region.number, inputs))
    same = _same(made, inputs)
    held = sum(t.untyped_storage().nbytes() for number, t in enumerate(made) if number not in same)
    del made, expected
    return Answer(path, max(0, peak - held), same, _medians(plain, native))


class _Timed:
    """A region as the engine would run it, on tensors made for it."""

    def __init__(self, capture: Capture, inputs: Sequence[torch.Tensor], exact: bool = True) -> None:
        lowered = lower(capture, exact)
        count = len(lowered.instructions)
        self._binding = _C.Binding(lowered.program)
        self._binding.finish_inputs()
        self._plan = _C.GroupPlan(ends=[count], peak=[0], after=[0])
        self._inputs, self._slots = list(inputs), list(range(len(inputs)))

    def __call__(self) -> list[torch.Tensor]:
        run = self._binding.run(self._plan, self._inputs, self._slots, False)
        run.run_alone()
        return run.outputs()


def _captured(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Capture:
    mode = FakeTensorMode()
    FakeTensorProp(module, mode).propagate(*inputs)
    for node in module.graph.nodes:
        node.meta["phase"] = "forward"
    return _capture(module.graph, len(inputs))


def _calling(region: int, task: Task) -> Capture:
    graph = fx.Graph()
    with FakeTensorMode():
        values = [torch.empty_strided(o.shape, o.strides, dtype=o.dtype) for o in (*task.inputs, *task.outputs)]
    given = [graph.placeholder(f"given_{number}") for number in range(len(task.inputs))]
    call = graph.call_function(torch.ops.waterflow.compiled.default, (region, given))
    made = [graph.call_function(operator.getitem, (call, number)) for number in range(len(task.outputs))]
    for node, value in zip((*given, *made), values):
        node.meta["val"] = value
    call.meta = {"val": values[len(given) :], "phase": "forward"}
    graph.output(tuple(made))
    return _capture(graph, len(given))


def _capture(graph: fx.Graph, inputs: int) -> Capture:
    given = tuple(GraphInput("batch", leaf=number) for number in range(inputs))
    return Capture(graph, {}, given, (), {}, {}, early_updates=0, apart=True, seconds=0.0)


def _medians(plain: _Timed, native: _Timed) -> tuple[float, float]:
    """In turn, so that what else the machine does meets both."""
    seconds: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    while len(seconds[0]) < ROUNDS[0] or (
        len(seconds[0]) < ROUNDS[1] and time.perf_counter() - begin < MEASURED_SECONDS
    ):
        for times, call in zip(seconds, (plain, native)):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def _same(made: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> dict[int, int]:
    """Results that Inductor found to be equal to something else, by position, and what that is."""
    everything = (*inputs, *made)
    first: dict[int, int] = {}
    for number, one in enumerate(everything):
        first.setdefault(storage_id(one), number)
    same = {}
    for number, one in enumerate(made):
        earlier = first[storage_id(one)]
        if earlier == len(inputs) + number:
            continue
        twin = everything[earlier]
        if Like.of(twin) != Like.of(one) or twin.data_ptr() != one.data_ptr():
            raise ValueError(f"result {number} looks at memory of something else, in another way")
        same[number] = earlier
    return same


def _check(made: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], like: Sequence[Like]) -> None:
    """Whether results lie as the graph says and have the numbers that they are to have."""
    for number, (one, other, described) in enumerate(zip(made, expected, like, strict=True)):
        if Like.of(one) != described:
            raise ValueError(f"result {number} came out as {Like.of(one)}, not as {described}")
        rough = max(torch.finfo(one.dtype).eps ** 0.5, 1e-3) if one.is_floating_point() else 0
        largest = other.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() if other.numel() else 0.0
        if not torch.allclose(one, other, rtol=rough, atol=rough * min(1.0, largest) + 1e-12, equal_nan=True):
            worst = (one.double() - other.double()).abs().max().item()
            raise ValueError(f"result {number} differs by {worst:.3g} from what the captured operations gave")


def main(task: str, answer: str) -> None:
    """Read the tasks and write the answers, in their order; a region that fails does not stop the others."""
    answers = []
    for one in pickle.loads(Path(task).read_bytes()):
        try:
            answers.append(compile_region(one))
        except Exception as error:
            sys.stderr.write(traceback.format_exc())
            answers.append(Answer(error=f"{type(error).__name__}: {str(error).strip()[:400]}"))
    Path(answer).write_bytes(pickle.dumps(answers))
