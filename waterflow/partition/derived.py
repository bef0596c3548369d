"""What torch's own hooks and recurrent layers make anew in each forward pass, and keep as attributes of a module.

Weight norm, spectral norm and pruning compute a plain tensor from parameters. In a captured step its memory stays where it is, and
holds what the last forward pass has computed, as users look at it between steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from waterflow.errors import CaptureError
from waterflow.partition.operators import storage_id
from waterflow.partition.survivors import LeavesTensors

_OF_RECURRENT = "_flat_weights", "_flat_weight_refs", "_flat_weights_names"


def set_by_torch(module: nn.Module) -> frozenset[str]:
    """The attributes of a module that torch sets in each forward pass."""
    names: Iterable[str] = _OF_RECURRENT if isinstance(module, nn.RNNBase) else ()
    return frozenset([*names, *_computed(module)])


def _computed(module: nn.Module) -> list[str]:
    hooks = module._forward_pre_hooks.values()
    norms = [hook.name for hook in hooks if isinstance(hook, (WeightNorm, SpectralNorm))]
    return norms + [hook._tensor_name for hook in hooks if isinstance(hook, BasePruningMethod)]


class Derived:
    """The tensors that modules keep so, before a step is traced. ``stand_ins`` are by the ``id`` of real tensors.

    Raises LeavesTensors where one has no memory of its own yet.
    """

    def __init__(self, modules: Collection[nn.Module], stand_ins: Mapping[int, torch.Tensor]) -> None:
        places = [(module, name) for module in modules for name in _computed(module)]
        found = [(module, name, vars(module).get(name)) for module, name in places]
        self._before = [(*one, stand_ins[id(one[2])]) for one in found if id(one[2]) in stand_ins]
        held = {
            storage_id(tensor) for module in modules for tensor in (*module.parameters(False), *module.buffers(False))
        }
        for _, name, real, _ in self._before:
            if storage_id(real) in held:  # as spectral_norm() leaves it, until the first forward pass
                raise LeavesTensors(
                    f"{name}, which a hook of torch's computes, still lies in the memory of another tensor"
                )

    def keep(self) -> None:
        """Write into their memory what the trace has computed. Raises CaptureError for another shape or type."""
        moved = []
        for module, name, real, stand_in in self._before:
            new = vars(module).get(name)
            if new is real or new is stand_in or not isinstance(new, torch.Tensor):
                continue
            if new.shape != stand_in.shape or new.dtype != stand_in.dtype:
                raise CaptureError(f"a step changes the shape or type of {name}, which a hook of torch's computes")
            moved.append((stand_in, new))
        with torch.no_grad():
            for stand_in, new in moved:
                stand_in.copy_(new)
