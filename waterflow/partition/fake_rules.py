"""Shape rules for tracing, where torch's own are missing, slow or wrong.

Fused optimizer kernels would otherwise run on real memory; a BatchNorm's shapes take 10 ms in a Python decomposition; some
backward passes return other strides than their rules say (torch 2.13), and what was traced behind them would copy.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from waterflow.errors import CaptureError, StepError
from waterflow.partition import default_generators
from waterflow.partition.layouts import corrected, is_corrected
from waterflow.partition.meta_kernels import KNOWN, by_meta_kernel, is_plain_fake, rows, strided

aten = torch.ops.aten

_UPDATES = (
    aten._fused_sgd_.default,
    aten._fused_sgd_.tensor_lr,
    aten._fused_adam_.default,
    aten._fused_adam_.tensor_lr,
    aten._fused_adamw_.default,
    aten._fused_adamw_.tensor_lr,
)


def is_update(target: Any) -> bool:
    """Whether an operation is an optimizer's fused update."""
    return target in _UPDATES


def _changes_in_place(mode: Any, *args: Any, **kwargs: Any) -> None:
    """These return nothing: there is no shape to work out."""


def _plain(mode: Any, *tensors: torch.Tensor) -> bool:
    """Whether tensors of one shape lie in memory in the same plain order, in a type that kernels do not widen."""
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


def _batch_norm(mode: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any,
                training: bool, *_: Any) -> Any:  # fmt: skip
    held = [t for t in (weight, bias, mean, variance) if t is not None]
    if not training or not _plain(mode, x) or any(t.dtype != x.dtype for t in held):
        return NotImplemented
    return tuple(rows(mode, shape, x.dtype, x.device) for shape in (x.shape, x.shape[1:2], x.shape[1:2]))


def _batch_norm_backward(mode: Any, gradient: Any, x: Any, weight: Any, mean: Any, variance: Any,
                         save_mean: Any, save_inverse: Any, training: bool, eps: float, mask: Any) -> Any:  # fmt: skip
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
    """``addmm``: a product of matrices lies row by row, whatever the strides of its operands."""
    held = (bias, x, weight)
    if kwargs or not all(t.dtype == x.dtype and t.device == x.device and is_plain_fake(mode, t) for t in held):
        return NotImplemented
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0] or bias.shape != weight.shape[1:]:
        return NotImplemented
    return rows(mode, (x.shape[0], weight.shape[1]), x.dtype, x.device)


def _classifies(mode: Any, x: Any, target: Any, weight: Any) -> bool:
    """Whether these are scores of classes, row by row, and the numbers of the right ones."""
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
    """Whether two tensors are alike but for their strides, so that neither is broadcast or converted."""
    return first.shape == second.shape and first.dtype == second.dtype and first.device == second.device


def _contiguous_loss(mode: Any, gradient: Any, x: Any, target: Any, *_: Any) -> Any:
    """Gradients of these losses are made by ``zeros_like`` with a contiguous memory format."""
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
    """Strides as of any operation of two operands in this order."""
    (x,) = [a for a in args if isinstance(a, torch.Tensor)]
    if not _alike(gradient, x):
        return NotImplemented
    with mode:
        return torch.mul(gradient, x)


def _state(mode: Any, device: torch.device, **_: Any) -> Any:
    """A generator's state is bytes in host memory, as many as the default one's of that device has."""
    with mode:
        return torch.empty(_state_bytes(device.type), dtype=torch.uint8)


def _recurrent(mode: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer of oneDNN's has another kernel under ``no_grad``, which the operation of a graph is not told of."""
    if not torch.is_grad_enabled():
        what = "a recurrent layer under torch.no_grad() has a kernel of its own; call it outside, and detach its result"
        mode.refuse(CaptureError(what))
    return NotImplemented


@functools.cache
def _state_bytes(device_type: str) -> int:
    return torch.Generator(device_type).get_state().numel()


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((*_UPDATES, default_generators.WRITE, default_generators.SEED), _changes_in_place),
    default_generators.READ: _state,
    **dict.fromkeys((
        aten.relu.default, aten.threshold_backward.default, aten.gelu.default, aten.gelu_backward.default, aten.silu.default,
        aten.sigmoid.default, aten.sigmoid_backward.default, aten.tanh.default, aten.tanh_backward.default,
        aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor), _like_operands),
    aten.mkldnn_rnn_layer.default: _recurrent,
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


class TracingMode(FakeTensorMode):
    """A FakeTensorMode that knows these rules, for one trace.

    ``refused`` is why what it has seen cannot be captured; ``made`` is what it made, and what else must not outlive the trace. Once
    it is ``closed`` nothing can be done with the tensors: that is what is then to be said.
    """

    refused: Exception | None = None
    closed: str | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.made: list[weakref.ref[Any]] = []

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on fake tensors."""
        if self.closed is not None and func is not torch.ops.prim.device.default:
            raise StepError(self.closed)
        made = super().dispatch(func, types, args, kwargs)
        for value in made if isinstance(made, (list, tuple)) else (made,):
            if isinstance(value, FakeTensor):
                self.made.append(weakref.ref(value))
        return made

    def like(self, real: torch.Tensor) -> FakeTensor:
        """A tensor that stands for a real one."""
        made = strided(self, real)
        self.made.append(weakref.ref(made))
        return made

    def default_generator(self, real: torch.Generator) -> default_generators.Traced:
        """What the step gets for a default generator."""
        return default_generators.Traced(real.device, self.refuse)

    def refuse(self, error: Exception) -> NoReturn:
        """Raise an error by which the trace ends, whatever the user's code makes of it."""
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
