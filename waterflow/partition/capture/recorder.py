"""Records the operations of a step where they are plain: fake tensors in, fake tensors out.

``make_fx`` can do much more (symbolic shapes, constants, sub-graphs), and takes three times as long for each operation.
The recorder gives up at anything that it does not know, and the caller turns to ``make_fx``.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import extract_val, get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import TorchDispatchMode

from waterflow.errors import CaptureError
from waterflow.partition.passes.cleanup import IN_PLACE_VIEWS

_ASKING = ("prim", "profiler")  # where a tensor is, and marks for profilers: nothing for the graph
_TRUTHS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
_CONSTANTS = (int, float, bool, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class NotPlain(Exception):
    """The step does something that the Recorder does not know."""


Truth = Callable[[fx.Graph, Any, Sequence[Any]], bool | None]  # what an operation says of values, if they are known


class Asking(TorchDispatchMode):
    """Answers, for a step that ``make_fx`` traces, questions about values of tensors."""

    def __init__(self, truth: Truth) -> None:
        super().__init__()
        self._truth = truth

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TRUTHS:
            tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
            known = [get_proxy_slot(value, tracer, None) for value in args]
            nodes = [one.proxy.node for one in known if one is not None]
            if len(nodes) == len(args) and (said := self._truth(tracer.graph, func, nodes)) is not None:
                return said
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Adds a node to ``graph`` for each operation that reaches it, with its result in ``meta["val"]``.

    Works on top of a FakeTensorMode, below autograd. Raises NotPlain, also at the end if the user's code caught it.
    """

    def __init__(self, truth: Truth = lambda *_: None) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self._truth = truth
        self._known: dict[int, tuple[fx.Node, torch.Tensor]] = {}  # tensors by id, held for their ids to stay theirs
        self._gave_up: NotPlain | None = None

    def add_input(self, number: int, fake: torch.Tensor) -> None:
        """Add a placeholder for a tensor that exists before the step."""
        self._know(fake, self.graph.placeholder(f"input_{number}"))

    def add_outputs(self, values: list[torch.Tensor]) -> None:
        """End the graph with these results. Raises NotPlain if the recorder gave up before."""
        if self._gave_up is not None:
            raise self._gave_up
        self.graph.output([self._argument(value) for value in values])

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record every operation of the block, autocast's casts among them."""
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device  # asked ten times as often as anything else
        kwargs = kwargs or {}
        if not _is_plain(func):
            if isinstance(func, OpOverload) and func.namespace in _ASKING:
                return func(*args, **kwargs)
            if func in _TRUTHS and (said := self._truth(self.graph, func, [*map(self._argument, args)])) is not None:
                return said
            raise self._give_up(f"operation {func}")
        # Before the call: an operation in place changes which node stands for its argument.
        given = tuple(map(self._argument, args)), {name: self._argument(value) for name, value in kwargs.items()}
        made = func(*args, **kwargs)
        node = self.graph.create_node("call_function", func, *given)
        if isinstance(made, torch.Tensor):
            self._know(made, node)
        elif isinstance(made, (list, tuple)):
            node.meta["val"] = extract_val(made)
            for position, value in enumerate(made):
                if isinstance(value, torch.Tensor):
                    self._know(value, self.graph.create_node("call_function", operator.getitem, (node, position)))
                elif value is not None:
                    raise self._give_up(f"a {type(value).__name__} from {func}")
        elif made is not None:
            raise self._give_up(f"a {type(made).__name__} from {func}")
        return made

    def _know(self, tensor: torch.Tensor, node: fx.Node) -> None:
        if not isinstance(tensor, FakeTensor):
            raise self._give_up("a tensor with real memory")
        node.meta["val"] = extract_val(tensor)
        self._known[id(tensor)] = node, tensor

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = self._known.get(id(value))
            if known is None:
                raise self._give_up("a tensor from elsewhere")
            return known[0]
        if isinstance(value, (list, tuple)):
            return [self._argument(item) for item in value]
        if type(value) not in _CONSTANTS:
            raise self._give_up(f"an argument of type {type(value).__name__}")
        return value

    def _give_up(self, what: str) -> NotPlain:
        self._gave_up = NotPlain(what)
        return self._gave_up


@functools.cache
def _is_plain(func: Any) -> bool:
    # Plain: a call with a result, without sub-graphs, and neither lifted nor decomposed by torch.
    if not isinstance(func, OpOverload) or func.namespace in _ASKING or func.name().startswith("aten::lift"):
        return False
    # A data-dependent result has no shape yet, and an in-place view can change more of its argument than its form.
    if torch.Tag.data_dependent_output in func.tags or (torch.Tag.inplace_view in func.tags and func not in IN_PLACE_VIEWS):
        return False
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    return has_kernel("CPU") or has_kernel("CUDA") or not has_kernel("CompositeImplicitAutograd")


def constants_of(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Return the tensor constants of a module of ``make_fx``, by name. Raises CaptureError for sub-graphs and fakes."""
    found = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, node.target)
            if not isinstance(value, torch.Tensor):
                raise CaptureError(f"the step uses a sub-graph ({node.target}), which is not one flat graph")
            if isinstance(value, FakeTensor):
                raise CaptureError("the step computes with a tensor that was made in a way that is not seen")
            found[node.target] = value
    return found
