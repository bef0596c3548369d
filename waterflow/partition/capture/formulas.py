"""Formulas that torch chooses by whether tensors are plain: a trace has the bits of an eager step's, or is refused.

While a step is traced, torch takes every tensor for one of a subclass (``at::isTensorSubclassLike``), from which no
value can be read and into which nothing is written. Most formulas that ask make a new tensor then instead of writing
into one, which has the same bits. Here are the others:

- A derivative by values (``BY_VALUES``) becomes one operation, which runs autograd's own formula when the step runs.
- Functions ``IN_EAGER`` are called as eager code calls them, or refused.
- Other derivatives (``_OTHERS``) are refused: they are rare.

``tests/partition/capture/test_formulas.py`` finds in torch's library all functions that ask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from waterflow import _C  # noqa: F401  # defines the operator
from waterflow.errors import CaptureError

aten = torch.ops.aten
DERIVATIVE = torch.ops.waterflow.derivative.default

# Nodes of autograd's graph: the name of the function, and a number.
BY_VALUES = frozenset((
    "ProdBackward0", "ProdBackward1", "CumprodBackward0", "MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0",
))  # fmt: skip
# The operations of the others by which a trace's formula is told from the eager one.
_OTHERS = {
    "MaskedFillBackward1": aten.where.self,  # the gradient of the value
    "LinalgDetBackward0": aten._linalg_svd.default,  # of a derivative that has one itself
    "LinalgHouseholderProductBackward0": aten.cat.default,
    "OrmqrBackward0": aten.cat.default,
}


def refused(operation: Any, replaced: Sequence[Any]) -> str:
    """Return why ``operation``, of the derivative that is computed now, ends the trace; empty if it does not.

    ``replaced`` are the nodes of autograd's graph whose derivatives ``in_eager_form`` replaces.
    """
    node: Any = torch._C._current_autograd_node()
    name = "" if node is None else node.name()
    if (name in BY_VALUES and node not in replaced) or _OTHERS.get(name) is operation:
        return f"{name} is another formula where a step is traced; detach what needs no gradient"
    return ""


@contextlib.contextmanager
def in_eager_form(nodes: Iterable[Any], graph: fx.Graph, replaced: list[Any]) -> Iterator[None]:
    """In a backward pass within the block, record one operation for the derivatives ``BY_VALUES`` among ``nodes``.

    Drops from ``graph`` what they record themselves. ``replaced`` holds these nodes, for the block. Raises CaptureError
    where the layout of a gradient depends on values.
    """
    replaced += (node for node in nodes if node.name() in BY_VALUES)
    hooks = [hook for node in replaced for hook in _hooked(node, graph)]
    try:
        yield
    finally:
        replaced.clear()
        for hook in hooks:  # they refer to their nodes
            hook.remove()


def _hooked(node: Any, graph: fx.Graph) -> tuple[Any, Any]:
    last: fx.Node

    def begin(_: Any) -> None:
        nonlocal last
        last = next(reversed(graph.nodes))

    def end(_: Any, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor] | None:
        function, gradient = node.name().split("Backward")[0].lower(), gradients[0]
        try:
            given = node._saved_self
        except RuntimeError as error:
            raise CaptureError(
                f"a checkpoint gives the derivative of {function} its tensor only once; call it outside"
            ) from error
        dim = getattr(node, "_saved_dim", None)
        if dim is not None and dim >= 2**63:  # a negative number, shown without its sign
            dim -= 2**64
        length = given.numel() if dim is None or given.dim() == 0 else given.shape[dim]
        product = function in ("prod", "cumprod")
        if given.is_cuda if not product else length == 1 and (function == "cumprod" or given.dim() == 0):
            return None  # both formulas have the same bits
        while (made := next(reversed(graph.nodes))) is not last:
            graph.erase_node(made)
        if not getattr(node, "_saved_keepdim", True):
            gradient = gradient.unsqueeze(dim)
        by_rows = given.is_contiguous() and torch.mul(gradient, given).is_contiguous() and length != 1
        if gradient.dtype != given.dtype or (product and not by_rows):
            raise CaptureError(
                f"the gradient of {function} may lie in memory as values say; give it x.contiguous(), and no dtype="
            )
        return (DERIVATIVE(gradient, given, function, dim),)

    return node.register_prehook(begin), node.register_hook(end)


def _matmul(input: torch.Tensor, other: torch.Tensor, **more: Any) -> torch.Tensor | None:
    # A matrix without gradient, as a batch of one, is repeated for plain tensors, and in a trace multiplied by all at once.
    for single, many in ((input, other), (other, input)):
        if input.dim() == other.dim() == 3 and len(single) == 1 != len(many) and not single.requires_grad and not more:
            return torch.bmm(input.expand(len(many), -1, -1), other.expand(len(many), -1, -1))
    return None


def _cross_entropy(input: Any, target: torch.Tensor, weight: Any = None, *_: Any, **options: Any) -> None:
    # The sum of the targets' weights is that of a selection, or of all with zeros among them.
    mean = options.get("reduction", "mean") == "mean"
    if mean and weight is not None and options.get("label_smoothing") and not target.is_floating_point():
        what = "the mean of cross_entropy with weights and label_smoothing is another formula where a step is traced"
        raise CaptureError(f"{what}; divide one with reduction='sum' by weight[target].sum()")


# What these return is what the eager step computes; None: a trace has the same bits.
IN_EAGER: Mapping[Any, Callable[..., torch.Tensor | None]] = {
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.linalg.matmul), _matmul),
    functional.cross_entropy: _cross_entropy,
}
