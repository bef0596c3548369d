"""Digest of nested data, the same in every process that holds the same."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from waterflow import _C

_NUMBERS = (type(None), bool, int, float, complex, str, bytes)
_NESTED = (list, tuple, set, frozenset, dict)


def digest(value: Any) -> bytes:
    """Return a digest of tensors, arrays, numbers and text in lists, dicts and sets; of any other object its class counts alone.

    The order of a set does not count, as it differs between processes.
    """
    return hashlib.blake2b("\n".join(_told(value)).encode(errors="surrogatepass"), digest_size=8).digest()


def is_plain(value: Any) -> bool:
    """Return True for numbers, text and arrays, also nested: what another process can be given, and a digest sees wholly."""
    try:
        return _is_plain(value)
    except RecursionError:  # it contains itself
        return False


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(entry) for key, entry in value.items())
    if type(value) in _NESTED:
        return all(map(_is_plain, value))
    return type(value) in _NUMBERS or (isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject)


def _told(value: Any) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield f"{tuple(value.shape)} {value.dtype} {value.layout}"
        if value.layout == torch.strided:
            held = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            yield str(_C.StateBytes([held]).checksum())
        else:  # of a sparse one its parts
            yield from _told(value.detach().__reduce_ex__(pickle.HIGHEST_PROTOCOL))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.shape} {value.dtype} {hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()}"
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _told(key)
            yield from _told(entry)
        yield "}"
    elif isinstance(value, (set, frozenset)):
        yield from sorted(digest(entry).hex() for entry in value)
        yield "}"
    elif isinstance(value, (list, tuple)):
        if all(type(entry) is int for entry in value):  # indices of rows
            yield repr(value)
            return
        for entry in value:
            yield from _told(entry)
        yield "]"
    else:
        yield repr(value) if isinstance(value, (*_NUMBERS, np.generic)) else type(value).__qualname__
