"""Find the functions and classes that a config names, and check their arguments."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from waterflow.errors import InvalidJobError, WaterflowError, told


class ConfigError(WaterflowError, ValueError):
    """A config or an option cannot be used as given; the message names the key."""


@contextlib.contextmanager
def wrong_use(where: str) -> Iterator[None]:
    """Turn an InvalidJobError inside into a ConfigError at ``where``, an option or a key."""
    try:
        yield
    except InvalidJobError as error:
        raise ConfigError(f"{where}: {error}") from error


def find_function(reference: str, folder: Path, where: str) -> Callable[..., Any]:
    """Return the function ``module:function`` or ``path/to/file.py:function``. Raises ConfigError, naming ``where``."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{where} must be 'module:function' or 'path/to/file.py:function'; got {reference!r}")
    # A file is imported under its path, once: two keys that name it share one module.
    if place.endswith(".py"):
        file = (folder / place).resolve()
        if not file.is_file():
            raise ConfigError(f"{where}: there is no file {file}")
        module = _imported(lambda: _module_of(file), place, where)
    else:
        module = _imported(lambda: importlib.import_module(place), place, where)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(f"{where}: {place} has no function {name!r}{meant(name, functions)}")
    return found


def _module_of(file: Path) -> Any:
    name = str(file)  # a path, as no installed module can have that name
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            # Or the next reference to the file would find a half-made module.
            del sys.modules[name]
            raise
    return sys.modules[name]


def _imported(load: Callable[[], Any], place: str, where: str) -> Any:
    try:
        return load()
    except Exception as error:
        raise ConfigError(f"{where}: cannot import {place}: {one_line(error)}") from error


def call(function: Callable[[], Any], where: str) -> Any:
    """Return what the user's ``function`` returns. Raises ConfigError for its errors, except waterflow's own."""
    try:
        return function()
    except WaterflowError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} failed: {one_line(error)}") from error


def one_line(error: BaseException | None) -> str:
    """Return an error as one line; with the user's source line if the error is not one of ours."""
    text = " ".join(told(error).split())
    if error is None or isinstance(error, (WaterflowError, OSError, ImportError)):
        return text
    if getattr(error, "__notes__", ()):  # they have the line
        return f"{type(error).__name__}: {text}"
    from waterflow.partition.capture.reasons import user_line  # needs torch

    line = user_line(error.__traceback__)
    return f"{type(error).__name__}: {text}" + (f" ({line})" if line and "importlib" not in line else "")


def blamed(name: str, error: BaseException | None) -> str:
    """Return one line that names the job that failed, and the reason."""
    line = one_line(error)
    return line if f"job {name!r}" in line else f"job {name!r} failed: {line}"


def make(made: Callable[..., Any], first: tuple[Any, ...], settings: dict[str, Any], where: str) -> Any:
    """Return ``made(*first, **settings)``. Raises ConfigError if the arguments are wrong."""
    check_arguments(made, settings, where, first)
    try:
        return made(*first, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None


def check_arguments(function: Callable[..., Any], given: dict[str, Any], where: str, first: tuple[Any, ...] = ()) -> None:
    """Raise ConfigError if ``function`` cannot be called with ``first`` and the keywords ``given``."""
    try:
        # Some built-in callables have none: their own error must do.
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    names = list(signature.parameters)[len(first) :]
    for key in given:
        if key not in names and not takes_any:
            raise ConfigError(f"{where}.{key}: unknown key{meant(key, names)}")
    try:
        signature.bind(*first, **given)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None


def meant(word: Any, known: Iterable[str]) -> str:
    """Return text to append to an unknown word: the nearest known word, and all of them if they are few."""
    known = list(known)
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.6)
    suggestion = f"; did you mean {near[0]!r}?" if near else ""
    return f"{suggestion} (known: {', '.join(known)})" if len(known) <= 30 else suggestion
