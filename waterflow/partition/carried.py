"""What tensors carry beside their memory: attributes of their own, which a step sees and may change while it is traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from waterflow import _C
from waterflow.errors import CaptureError


class Carried:
    """Gives stand-ins what the real tensors carry, and notices what a step changes there."""

    def __init__(self) -> None:
        self._given: list[tuple[torch.Tensor, dict[str, Any], frozenset[str], bool]] = []

    def give(self, stand_in: torch.Tensor, real: torch.Tensor) -> None:
        """The stand-in is a parameter where the real one is, and has its attributes. Raises CaptureError for a name that is taken."""
        here = vars(stand_in)
        if isinstance(real, nn.Parameter):
            here["_is_param"] = True
        own = frozenset(here)
        attributes = dict(_C.attributes_of(real) or {})
        taken = own.intersection(attributes) - {"_is_param"}
        if taken:
            raise CaptureError(
                f"a tensor has an attribute {min(taken)}, which stands for something else while a step is traced"
            )
        here.update(attributes)
        self._given.append((stand_in, attributes, own, stand_in.requires_grad))

    def check(self) -> None:
        """Raise CaptureError where the step has given a tensor another attribute, or has frozen or unfrozen it."""
        for stand_in, before, own, wanted in self._given:
            if stand_in.requires_grad != wanted:
                raise CaptureError("a step changes requires_grad of a tensor that it was given")
            now = {name: value for name, value in vars(stand_in).items() if name not in own}
            for name in {**before, **now}:
                if name not in now or name not in before or now[name] is not before[name]:
                    raise CaptureError(f"a step changes the attribute {name} of a tensor")
