"""Steps of functions for which torch has another formula in a trace: the bits of an eager step, or a refusal."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tests.support import compare, train_step
from waterflow.partition.capture import formulas
from waterflow.partition.capture.spec import StepSpec
from waterflow.partition.capture.trace import capture_step
from waterflow.partition.plan.probe import hidden_memory

ROWS = torch.rand(3, 1, 5, generator=torch.Generator().manual_seed(0))
MASK = torch.rand(24, 5, generator=torch.Generator().manual_seed(1)) < 0.5


class Held(nn.Module):
    """One tensor, whose gradient is that of the function with nothing behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(24, 5))


def made() -> tuple[nn.Module, SGD]:
    model = Held()
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)  # momentum has the gradient's bits, the signs of zeros too


BATCHES = [torch.tensor(scale) for scale in (1.0, 0.9, 0.8)]


def trained(function: Callable[[torch.Tensor], torch.Tensor], opaque: str | None = None) -> None:
    compare(made, BATCHES, step=lambda model, scale: (function(model.x * scale) - 3).square().mean(), opaque=opaque)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "prod": lambda x: torch.sigmoid(x).add(0.5).prod(),
    "prod of rows": lambda x: torch.sigmoid(x).prod(1),
    "prod of columns": lambda x: torch.sigmoid(x).prod(-2, keepdim=True),
    "prod with zeros": lambda x: torch.relu(x).prod(-1),
    "prod of a number": lambda x: x[0, 0].prod() * x[0, 1].prod(0),
    "cumprod": lambda x: torch.sigmoid(x).cumprod(-2),
    "cumprod with zeros": lambda x: torch.relu(x).cumprod(1),
    "cumprod of one": lambda x: x[:, :1].cumprod(1),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max of several": lambda x: x.clamp(max=0.5).max(),
    "median": lambda x: x.t().median(),
    "nanmedian": lambda x: torch.where(x > 0, x, torch.nan).nanmedian(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_by_values_have_the_eager_bits(name: str) -> None:
    trained(FUNCTIONS[name])


def test_one_matrix_without_gradient_times_many() -> None:
    many = torch.rand(1, 5, 7, generator=torch.Generator().manual_seed(3))
    trained(lambda x: x.reshape(4, 6, 5) @ many)
    trained(lambda x: torch.matmul(input=many.mT, other=x.reshape(4, 6, 5).mT))
    trained(lambda x: x.reshape(4, 6, 5) @ (many + x[:1].mean()))


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "a transposed product": (lambda x: x.t().prod(0), "give it x.contiguous()"),
    "a product of ones": (lambda x: x[:, :1].contiguous().prod(1), "give it x.contiguous()"),
    "a product of another type": (lambda x: x.double().prod(1, dtype=torch.float32), "no dtype="),
    "a product that is computed again": (lambda x: checkpoint(lambda x: x.prod(1), x, use_reentrant=False), "checkpoint"),
    "the value of masked_fill": (lambda x: ROWS.new_zeros(24, 5).masked_fill(MASK, x.mean()), "MaskedFillBackward1"),
    "a gradient within": (lambda x: torch.autograd.grad(x.max(), x, create_graph=True)[0] * x, "MaxBackward1"),
    "reflections": (lambda x: torch.linalg.householder_product(x, x[0]), "LinalgHouseholderProductBackward0"),
    "eigenvalues": (lambda x: x * torch.linalg.eigvalsh((x.t() @ x).detach()), "eigenvalues"),
    "singular values": (lambda x: x * torch.linalg.matrix_norm(x.detach(), ord=2), "singular values"),
    "weights and smoothing": (
        lambda x: F.cross_entropy(x, MASK.long().sum(1).clamp(max=4), ROWS[0, 0], label_smoothing=0.1),
        "label_smoothing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_formulas_are_refused(name: str) -> None:
    trained(REFUSED[name][0], REFUSED[name][1])


def caught(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * torch.autograd.grad(x.max(), x)[0]
    except Exception:
        return x


def test_code_that_catches_the_refusal_runs_eagerly() -> None:
    trained(caught, "MaxBackward1")


def test_memory_of_a_derivative_is_planned() -> None:
    model, optimizer = made()
    spec = StepSpec(
        model=model, compute_loss=lambda model, scale: (model.x * scale).cumprod(1).sum(), optimizer=optimizer,
        update=True, accumulate=1, clip_norm=None, clip_value=None, autocast=None, device=torch.device("cpu"),
    )  # fmt: skip
    graph = capture_step(spec, BATCHES[:1], pytree.tree_structure(BATCHES[0])).graph
    node = next(node for node in graph.nodes if node.target is formulas.DERIVATIVE)
    ((asked, hidden),) = hidden_memory([node])
    assert asked is node and hidden.temporary > node.meta["val"].nbytes


def test_a_value_without_gradient_is_captured() -> None:
    trained(lambda x: x.masked_fill(MASK, torch.tensor(0.5)))
    trained(lambda x: F.cross_entropy(x, MASK.long().sum(1).clamp(max=4), ROWS[0, 0]))
    trained(lambda x: x * torch.linalg.svdvals(x).sum())


def test_nothing_is_read_behind_a_tensors_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATERFLOW_AUDIT", "off")  # an audit would raise what the eager step raises
    trained(lambda x: x.as_strided((4, 5), (5, 1), 7))
    with pytest.raises(RuntimeError, match="out of bounds"):
        train_step(made, BATCHES, step=lambda model, scale: (model.x * scale).as_strided((24, 5), (5, 1), 7).sum())


# -- what asks in torch's library

ASKS = "dispatch_mode_enabled"  # of c10, by which at::isTensorSubclassLike and its like answer in a trace
# They make new tensors instead of writing into some, with the same kernels; make views and sizes; only raise errors by values;
# are forward derivatives, which no step has; take the largest of a window, add a mask, or read lengths in both ways.
SAME_BITS = """
    aminmax_backward atan2_backward binary_cross_entropy_double_backward binary_cross_entropy_double_backward_grad_output
    binary_cross_entropy_double_backward_target binary_cross_entropy_target_backward binary_cross_entropy_with_logits_backward
    binary_cross_entropy_with_logits_target_backward clamp_backward clamp_backward_min_max cummaxmin_backward
    _embedding_bag_backward_symint gather_backward hinge_embedding_loss index_backward index_select_backward_symint isclose
    differential_analytic_matrix_function linear margin_ranking_loss masked_select_backward take_backward
    trace_backward_symint value_selecting_reduction_backward_symint accumulate can_accumulate_inplace
    reshape_symint resize_output resize_output_symint matrix_rank_impl quantile_compute linalg_eig_backward
    _affine_jvp _invstd_jvp _norm_jvp norm_jvp householder_product_jvp logcumsumexp_jvp logsumexp_jvp rms_norm_jvp
    rms_norm_rstd_jvp max_pool1d _scaled_dot_product_attention_math ctc_loss
"""
HANDLED = """
    prod_backward cumprod_backward evenly_distribute_backward masked_fill_backward linalg_det_backward
    householder_product_backward linalg_eigvals linalg_eigvalsh linalg_svdvals _matmul_impl cross_entropy_loss_symint
"""


def listed(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def calls(library: Path, start: int, size: int, offset: int, targets: set[int]) -> Iterator[int]:
    """The addresses of calls and jumps in a library's code that lead to ``targets``."""
    text = np.memmap(library, np.uint8, "r", offset, (size,))
    for first in range(0, size - 5, 1 << 25):
        part = np.asarray(text[first : first + (1 << 25) + 4])
        places = np.flatnonzero((part[:-4] & 0xFE) == 0xE8)
        distances = np.stack([part[places + i] for i in (1, 2, 3, 4)], axis=1).copy().view("<i4")[:, 0]
        found = np.isin(start + first + places + 5 + distances, list(targets))
        yield from (start + first + places[found]).tolist()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("readelf") or not shutil.which("nm"), reason="needs binutils")
def test_no_other_function_of_torchs_asks() -> None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    shapes = re.compile(r"\] (\S+)\s+\S+\s+([0-9a-f]+) ([0-9a-f]+) ([0-9a-f]+)")
    sections = {m[1]: [int(m[i], 16) for i in (2, 3, 4)] for m in map(shapes.search, listed("readelf", "-SW", str(library))) if m}
    wanted = {int(line.split()[0], 16) for line in listed("readelf", "-rW", str(library)) if ASKS in line}
    start, offset, size = sections[".plt"]
    stubs = library.open("rb")
    stubs.seek(offset)
    code = stubs.read(size)
    jumps = ((m.start(), struct.unpack_from("<i", code, m.start() + 2)[0]) for m in re.finditer(rb"\xff\x25", code[:-4]))
    targets = {start + place for place, distance in jumps if start + place + 6 + distance in wanted}
    assert targets, "the library does not ask in the known way"
    symbols = sorted(
        (int(line[:16], 16), line[19:]) for line in listed("nm", "-C", "--defined-only", str(library)) if line[17:18] in "tTwW"
    )
    starts = [address for address, _ in symbols]
    start, offset, size = sections[".text"]
    asking: set[str] = set()
    for _ in range(2):  # those that ask by a shared function, too
        callers = {symbols[bisect_right(starts, one) - 1] for one in calls(library, start, size, offset, targets)}
        asking |= {base(name) for _, name in callers}
        targets = {address for address, name in callers if base(name).endswith("SubclassLike")}
    asking = {name for name in asking if not name.endswith(("SubclassLike", "_Iter_pred"))}  # of a search in a list
    assert asking - {*SAME_BITS.split()} == {*HANDLED.split()}


def base(name: str) -> str:
    """A function's name without its namespaces, arguments and template."""
    plain: Any = re.split(r"[(<]", name.replace("(anonymous namespace)::", ""))[0]
    return plain.split("::")[-1].split(" ")[-1]
