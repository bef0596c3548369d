"""Shape rules for fake tensors: the layouts that kernels really return, and cheap rules for common operations.

What a trace records depends on strides: ``contiguous()`` copies or does nothing, ``reshape`` is a view or a copy, a sum
adds up in the order in which its operand lies. After a wrong prediction a captured step would compute with other
layouts than an eager one, and end with other last bits. So before a captured step first runs, the kernels of its
operations are asked: each is called once in a process, on zeros of the shapes and strides that it will see. Where one
answers otherwise than predicted, the step is captured again, by its answer.

A kernel is not asked where all its operands and results are contiguous: it then allocates what its shape rule says.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils import _pytree as pytree

from waterflow.errors import CaptureError, StepError
from waterflow.partition.capture import formulas, rng_ops
from waterflow.partition.guards.guarded_places import exact
from waterflow.partition.passes.operators import is_random, is_view, lazy_bits, storage_id, tensors_in

aten = torch.ops.aten

Strides = tuple[tuple[int, ...] | None, ...]  # of each result; None: left as predicted
# Their shape rule is the very function that allocates the kernel's result, row by row.
_ROW_BY_ROW = frozenset(getattr(aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm"))

_asking = threading.Lock()
_answers: dict[_Question, Strides] = {}
_corrections: dict[Any, dict[_Question, Strides]] = {}  # by operator: the answers that its shape rule does not give


@dataclass(frozen=True)
class _Form:
    # A tensor as far as layouts depend on it.
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        size = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride)) if 0 not in self.shape else 0
        return torch.zeros(size, dtype=self.dtype, device=self.device).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Question:
    target: Any
    # Forms in the place of tensors, numbers by their bits: NaN must be found again, and 1 is not True.
    arguments: Any


def surprises(graph: fx.Graph) -> bool:
    """Ask the kernels of a captured step for their layouts; return whether one differs from the graph.

    If so, the caller must capture the step again: the rules know the answers from now on.
    """
    found = False
    with _asking:
        for node in graph.nodes:
            if not _is_doubtful(node):
                continue
            predicted = _strides(node.meta["val"])
            question = _question(node.target, node.args, node.kwargs)
            if question not in _answers:
                _answers[question] = _ask(node)
            answer = _answers[question]
            if any(told is not None and told != said for told, said in zip(answer, predicted)):
                known = _corrections.setdefault(node.target, {})
                # Known corrections count once: a rule that was told and still differs must not cause endless captures.
                found |= known.get(question) != answer
                known[question] = answer
    return found


def is_corrected(target: Any) -> bool:
    """Return whether a kernel has contradicted the shape rule of this operator."""
    return target in _corrections


def corrected(mode: Any, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> Any:
    """Return ``made``, the result of a shape rule, in the layout in which the operator's kernel returns it."""
    answer = _corrections[target].get(_question(target, args, kwargs))
    if answer is None:
        return made
    leaves, form = pytree.tree_flatten(made)
    with mode:
        leaves = [
            torch.empty_strided(one.shape, strides, dtype=one.dtype, device=one.device)
            if strides is not None and isinstance(one, torch.Tensor) and tuple(one.stride()) != strides
            else one
            for one, strides in zip(leaves, answer)
        ]
    return pytree.tree_unflatten(leaves, form)


def _is_doubtful(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if target._schema.is_mutable or is_view(target) or is_random(target) or target in _ROW_BY_ROW:
        return False
    if "_rnn" in target._schema.name:
        return False  # its workspace has a size that no shape rule knows, and zeros in the place of what it wrote there
    given = [tensor for source in node.all_input_nodes for tensor in tensors_in(source.meta["val"])]
    made = list(tensors_in(node.meta.get("val")))
    if any(t.layout != torch.strided or t.is_quantized or any(lazy_bits(t)) for t in (*given, *made)):
        return False
    if not {storage_id(t) for t in given}.isdisjoint(storage_id(t) for t in made):
        return False
    return not all(_lies_row_by_row(t) for t in (*given, *made))


def _lies_row_by_row(tensor: torch.Tensor) -> bool:
    rows = [*accumulate(reversed(tensor.shape[1:]), lambda one, other: one * max(1, other), initial=1)]
    return tensor.dim() == 0 or tuple(tensor.stride()) == tuple(reversed(rows))


def _ask(node: fx.Node) -> Strides:
    # A kernel that cannot be called with zeros, or that returns another shape, leaves the prediction.
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: _mapped(source.meta["val"], _form))
    args, kwargs = _mapped((args, kwargs), lambda one: one.zeros(), _Form)
    predicted = node.meta["val"]
    try:
        with torch.no_grad(), torch._C._DisableAutocast():
            returned = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return tuple(None for _ in pytree.tree_leaves(predicted))
    pairs = zip(pytree.tree_leaves(returned), pytree.tree_leaves(predicted))
    return tuple(
        tuple(one.stride())
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape
        else None
        for one, other in pairs
    )


def _strides(made: Any) -> Strides:
    return tuple(tuple(t.stride()) if isinstance(t, torch.Tensor) else None for t in pytree.tree_leaves(made))


def _form(tensor: torch.Tensor) -> _Form:
    return _Form(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)


def _question(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Question:
    return _Question(target, (tuple(_keys(args)), tuple((name, *_keys([kwargs[name]])) for name in sorted(kwargs))))


def _keys(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        value = value.meta["val"] if isinstance(value, fx.Node) else value
        if isinstance(value, (list, tuple)):
            yield tuple(_keys(value))
        else:
            yield _form(value) if isinstance(value, torch.Tensor) else exact(value)


def _mapped(value: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change, kind) for item in value]
    if isinstance(value, dict):
        return {key: _mapped(item, change, kind) for key, item in value.items()}
    return change(value) if isinstance(value, kind) else value


# One function of torch lays out their results on every device, whatever the strides of their operands.
_OF_ANY_STRIDES = frozenset(
    {
        *(getattr(aten, name).default for name in ("mm", "bmm", "baddbmm", "view", "t", "expand", "detach", "unsqueeze")),
        aten.transpose.int,
        aten.select.int,
        aten.slice.Tensor,
    }
)
# And of these where their operands lie row by row.
_OF_ROWS = frozenset({
    aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d.default, aten.avg_pool2d_backward.default, aten.sum.dim_IntList, aten.mean.dim,
})  # fmt: skip
KNOWN = _OF_ANY_STRIDES | _OF_ROWS


def by_meta_kernel(mode: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the fake result of one of the operations ``KNOWN``, by torch's meta kernel.

    Returns NotImplemented where the arguments are not plain fake tensors of ``mode`` on one device.
    """
    device = None
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            if not is_plain_fake(mode, value) or (func in _OF_ROWS and not value.is_contiguous()):
                return NotImplemented
            if device is not None and device != value.device:
                return NotImplemented
            device = value.device
    if device is None:
        return NotImplemented
    with in_kernel_invocation_manager(mode):
        made = func(*args, **kwargs)
    if isinstance(made, torch.Tensor):
        return FakeTensor(mode, made, device)
    return tuple(FakeTensor(mode, one, device) for one in made)


def is_plain_fake(mode: Any, value: torch.Tensor) -> bool:
    """Return whether a tensor is a fake one of ``mode`` for strided memory whose values are not known."""
    if type(value) is not FakeTensor or value.fake_mode is not mode or value.constant is not None:
        return False
    return value.layout is torch.strided and not value.is_conj() and not value.is_neg()


def rows(mode: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> FakeTensor:
    """Return a contiguous fake tensor."""
    with in_kernel_invocation_manager(mode):
        made = torch.empty(shape, dtype=dtype, device="meta")
    return FakeTensor(mode, made, device)


def strided(mode: Any, like: torch.Tensor) -> FakeTensor:
    """Return a fake tensor with the shape and strides of a real one, in memory of its own."""
    with in_kernel_invocation_manager(mode):
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return FakeTensor(mode, made, like.device)


_UPDATES = (
    aten._fused_sgd_.default,
    aten._fused_sgd_.tensor_lr,
    aten._fused_adam_.default,
    aten._fused_adam_.tensor_lr,
    aten._fused_adamw_.default,
    aten._fused_adamw_.tensor_lr,
)


def is_update(target: Any) -> bool:
    """Return whether an operation is an optimizer's fused update."""
    return target in _UPDATES


def _changes_in_place(mode: Any, *args: Any, **kwargs: Any) -> None:
    """These return nothing: there is no shape to work out."""


def _plain(mode: Any, *tensors: torch.Tensor) -> bool:
    first = tensors[0]
    return all(
        t.is_contiguous()
        and t.shape == first.shape
        and t.dtype == first.dtype
        and t.dtype in (torch.float32, torch.float64)
        and t.device == first.device
        and is_plain_fake(mode, t)
        for t in tensors
    )


def _batch_norm(mode: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *_: Any) -> Any:
    held = [t for t in (weight, bias, mean, variance) if t is not None]
    if not training or not _plain(mode, x) or any(t.dtype != x.dtype for t in held):
        return NotImplemented
    return tuple(rows(mode, shape, x.dtype, x.device) for shape in (x.shape, x.shape[1:2], x.shape[1:2]))


def _batch_norm_backward(
    mode: Any,
    gradient: Any,
    x: Any,
    weight: Any,
    mean: Any,
    variance: Any,
    save_mean: Any,
    save_inverse: Any,
    training: bool,
    eps: float,
    mask: Any,
) -> Any:
    if not training or not all(mask) or weight is None or weight.dtype != x.dtype or not _plain(mode, gradient, x):
        return NotImplemented
    return tuple(rows(mode, one.shape, x.dtype, x.device) for one in (x, weight, weight))


def _like_operands(mode: Any, *args: Any, **kwargs: Any) -> Any:
    """All operands have the result's shape; numbers do not widen it."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if not _plain(mode, *tensors) or any(isinstance(a, complex) for a in (*args, *kwargs.values())):
        return NotImplemented
    return rows(mode, tensors[0].shape, tensors[0].dtype, tensors[0].device)


def _softmax(mode: Any, x: Any, dim: int, half_to_float: bool) -> Any:
    inside = -x.dim() <= dim < x.dim()
    return _like_operands(mode, x) if inside and not half_to_float else NotImplemented


def _linear(mode: Any, bias: Any, x: Any, weight: Any, **kwargs: Any) -> Any:
    # A product of matrices is contiguous, whatever the strides of its operands.
    held = (bias, x, weight)
    if kwargs or not all(t.dtype == x.dtype and t.device == x.device and is_plain_fake(mode, t) for t in held):
        return NotImplemented
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0] or bias.shape != weight.shape[1:]:
        return NotImplemented
    return rows(mode, (x.shape[0], weight.shape[1]), x.dtype, x.device)


def _classifies(mode: Any, x: Any, target: Any, weight: Any) -> bool:
    known = _plain(mode, x) and is_plain_fake(mode, target) and target.dtype == torch.int64
    known = known and x.dim() == 2 and target.shape == x.shape[:1] and target.device == x.device
    return known and (weight is None or (weight.dtype == x.dtype and weight.shape == x.shape[1:]))


def _nll_loss(mode: Any, x: Any, target: Any, weight: Any, reduction: int, *_: Any) -> Any:
    if not _classifies(mode, x, target, weight):
        return NotImplemented
    return tuple(rows(mode, shape, x.dtype, x.device) for shape in (() if reduction else x.shape[:1], ()))


def _nll_loss_backward(mode: Any, gradient: Any, x: Any, target: Any, weight: Any, reduction: int, *_: Any) -> Any:
    fits = gradient.dtype == x.dtype and gradient.shape == (() if reduction else x.shape[:1])
    if not fits or not _classifies(mode, x, target, weight):
        return NotImplemented
    return rows(mode, x.shape, x.dtype, x.device)


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and first.device == second.device


def _contiguous_loss(mode: Any, gradient: Any, x: Any, target: Any, *_: Any) -> Any:
    # torch makes the gradients of these losses by zeros_like with a contiguous memory format.
    if not _alike(x, target):
        return NotImplemented
    with mode:
        return torch.empty_like(x, memory_format=torch.contiguous_format)


def _contiguous_softmax(mode: Any, gradient: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    if not _alike(gradient, output) or output.dtype != dtype:
        return NotImplemented
    if _plain(mode, gradient, output):
        return rows(mode, output.shape, output.dtype, output.device)
    with mode:
        return torch.empty_like(output, memory_format=torch.contiguous_format)


def _elementwise(mode: Any, gradient: Any, *args: Any, **kwargs: Any) -> Any:
    # Strides follow from both operands, in this order, as those of any elementwise operation do.
    (x,) = [a for a in args if isinstance(a, torch.Tensor)]
    if not _alike(gradient, x):
        return NotImplemented
    with mode:
        return torch.mul(gradient, x)


def _state(mode: Any, device: torch.device, **_: Any) -> Any:
    with mode:
        # A generator's state lies in host memory, whatever the device.
        return torch.empty(_state_bytes(device.type), dtype=torch.uint8)


def _recurrent(mode: Any, *args: Any, **kwargs: Any) -> Any:
    # oneDNN has another kernel under no_grad, and the operation in a graph does not say which.
    if not torch.is_grad_enabled():
        what = "a recurrent layer under torch.no_grad() has a kernel of its own; call it outside, and detach its result"
        mode.refuse(CaptureError(what))
    return NotImplemented


def _eigenvalues(mode: Any, matrix: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # Those of a plain tensor without gradient come without vectors, from another kernel. Derivatives ask for both.
    wanted = torch.is_grad_enabled() and matrix.requires_grad
    if not wanted and torch._C._current_autograd_node() is None:
        what = "eigenvalues or singular values of what has no gradient come from another kernel in a trace; compute them outside"
        mode.refuse(CaptureError(what))
    return NotImplemented


def _as_strided(mode: Any, x: torch.Tensor, size: Any, stride: Any, offset: int | None = None) -> Any:
    # A captured step's memory goes on behind a tensor's end.
    start = x.storage_offset() if offset is None else offset
    end = 0 if 0 in size else start + 1 + sum((n - 1) * s for n, s in zip(size, stride))
    if end * x.element_size() > x.untyped_storage().nbytes():
        mode.refuse(CaptureError("as_strided reaches beyond the memory of its tensor, or of the part that the step is given"))
    return NotImplemented


@functools.cache
def _state_bytes(device_type: str) -> int:
    return torch.Generator(device_type).get_state().numel()


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((*_UPDATES, rng_ops.WRITE, rng_ops.SEED), _changes_in_place),
    rng_ops.READ: _state,
    **dict.fromkeys((
        aten.relu.default, aten.threshold_backward.default, aten.gelu.default, aten.gelu_backward.default, aten.silu.default,
        aten.sigmoid.default, aten.sigmoid_backward.default, aten.tanh.default, aten.tanh_backward.default,
        aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor), _like_operands),
    aten.mkldnn_rnn_layer.default: _recurrent,
    **dict.fromkeys((aten._linalg_eigh.default, aten._linalg_svd.default, aten.linalg_eig.default), _eigenvalues),
    aten.as_strided.default: _as_strided,
    formulas.DERIVATIVE: lambda mode, gradient, x, *_: rows(mode, x.shape, x.dtype, x.device),
    aten._log_softmax.default: _softmax,
    aten._softmax.default: _softmax,
    aten.addmm.default: _linear,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.mse_loss_backward.default: _contiguous_loss,
    aten.smooth_l1_loss_backward.default: _contiguous_loss,
    aten.huber_loss_backward.default: _contiguous_loss,
    aten._log_softmax_backward_data.default: _contiguous_softmax,
    aten.hardtanh_backward.default: _elementwise,
    aten.hardswish_backward.default: _elementwise,
    aten.hardsigmoid_backward.default: _elementwise,
    aten.elu_backward.default: _elementwise,
    aten.softplus_backward.default: _elementwise,
}  # fmt: skip


def _keep_device_guard() -> None:
    # torch for CUDA, where there is no GPU: the first trace sets a guard in its place, which all threads use, and which is gone
    # with the thread that set it. This one does not end.
    is_set = threading.Event()

    def stay() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        is_set.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="waterflow-device-guard", daemon=True).start()
    is_set.wait()


if torch.version.cuda is not None and not torch.cuda.is_available():
    _keep_device_guard()


class TracingMode(FakeTensorMode):
    """A FakeTensorMode with these rules, for one trace.

    ``refused`` is the error that ends the trace. ``replaced`` are the nodes of autograd's whose formulas are not
    recorded. ``made`` refers weakly to the fake tensors that the mode made, and to
    all else that must not outlive the trace. Once ``closed`` is set, every operation on a tensor of the mode raises
    StepError with that text.
    """

    refused: Exception | None = None
    closed: str | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.made: list[weakref.ref[Any]] = []
        self.replaced: list[Any] = []

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on fake tensors. Raises StepError once the mode is closed."""
        if self.closed is not None and func is not torch.ops.prim.device.default:
            raise StepError(self.closed)
        if what := formulas.refused(func, self.replaced):
            self.refuse(CaptureError(what))
        made = super().dispatch(func, types, args, kwargs)
        for value in made if isinstance(made, (list, tuple)) else (made,):
            if isinstance(value, FakeTensor):
                self.made.append(weakref.ref(value))
        return made

    def like(self, real: torch.Tensor) -> FakeTensor:
        """Return a fake tensor that stands for a real one."""
        made = strided(self, real)
        self.made.append(weakref.ref(made))
        return made

    def default_generator(self, real: torch.Generator) -> rng_ops.Traced:
        """Return the object that stands for a default generator in the traced step."""
        return rng_ops.Traced(real.device, self.refuse)

    def refuse(self, error: Exception) -> NoReturn:
        """Raise ``error``, which ends the trace even if the user's code catches it."""
        self.refused = error
        raise error

    def _cached_dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # torch remembers shapes for all fake modes of the process, those that know none of this included.
        if func in _RULES or func in KNOWN or is_corrected(func):
            return self._dispatch_impl(func, types, args, kwargs)
        return super()._cached_dispatch_impl(func, types, args, kwargs)

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        rule = _RULES.get(func)
        if rule is not None:
            made = rule(self, *args, **kwargs)
        else:
            made = by_meta_kernel(self, func, args, kwargs) if func in KNOWN else NotImplemented
        if made is NotImplemented:
            made = super()._dispatch_impl(func, types, args, kwargs)
        return corrected(self, func, args, kwargs, made) if is_corrected(func) else made
