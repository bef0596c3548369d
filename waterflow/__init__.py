"""Train many PyTorch models at once on one device."""

import torch as _torch

from waterflow import _C as _native

if _native.built_with_torch != _torch.__version__:
    raise ImportError(
        f"waterflow was built with torch {_native.built_with_torch}, and torch {_torch.__version__} is installed; "
        "build it again: pip install --no-build-isolation --force-reinstall --no-deps waterflow"
    )

from waterflow.step import Step

__version__ = "0.1.0"
__all__ = ["Step"]
