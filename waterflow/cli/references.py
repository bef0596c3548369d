"""Functions and classes that a config names: finding them, and checking what they are called with."""

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
    """A config that cannot be used as it is written; the message names the key."""


@contextlib.contextmanager
def wrong_use(where: str) -> Iterator[None]:
    """What is refused within as a setting is a mistake of the command line or the config, at ``where``."""
    try:
        yield
    except InvalidJobError as error:
        raise ConfigError(f"{where}: {error}") from error


def find_function(reference: str, folder: Path, where: str) -> Callable[..., Any]:
    """The function named ``module:function`` or ``path/to/file.py:function``. Raises ConfigError, naming ``where``."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{where} must be 'module:function' or 'path/to/file.py:function'; got {reference!r}")
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
    name = str(file)  # no module of that name can be installed
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _imported(load: Callable[[], Any], place: str, where: str) -> Any:
    try:
        return load()
    except Exception as error:
        raise ConfigError(f"{where}: cannot import {place}: {one_line(error)}") from error


def call(function: Callable[[], Any], where: str) -> Any:
    """What the user's ``function`` returns; a ConfigError for what it raises."""
    try:
        return function()
    except WaterflowError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} failed: {one_line(error)}") from error


def one_line(error: BaseException | None) -> str:
    """What went wrong, for a terminal; with the user's own line where the error is not one that says it all."""
    text = " ".join(told(error).split())
    if error is None or isinstance(error, (WaterflowError, OSError, ImportError)):
        return text
    if getattr(error, "__notes__", ()):  # they have the line
        return f"{type(error).__name__}: {text}"
    from waterflow.partition.capture.substitution import user_line  # needs torch

    line = user_line(error.__traceback__)
    return f"{type(error).__name__}: {text}" + (f" ({line})" if line and "importlib" not in line else "")


def blamed(name: str, error: BaseException | None) -> str:
    """One line that says which job failed, and why."""
    line = one_line(error)
    return line if f"job {name!r}" in line else f"job {name!r} failed: {line}"


def make(made: Callable[..., Any], first: tuple[Any, ...], settings: dict[str, Any], where: str) -> Any:
    """``made(*first, **settings)``; a ConfigError where it does not take them."""
    check_arguments(made, settings, where, first)
    try:
        return made(*first, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None


def check_arguments(function: Callable[..., Any], given: dict[str, Any], where: str, first: tuple[Any, ...] = ()) -> None:
    """Raise ConfigError where ``function`` cannot be called with ``given`` behind ``first``."""
    try:
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
    """What to say behind a word that is not known: the nearest, and what there is."""
    known = list(known)
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.6)
    suggestion = f"; did you mean {near[0]!r}?" if near else ""
    return f"{suggestion} (known: {', '.join(known)})" if len(known) <= 30 else suggestion
