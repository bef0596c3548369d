"""The command's YAML files: every key is checked, and the user's functions are found.

A train config lists jobs, a study config names an objective. Functions are written ``module:function`` or
``path/to/file.py:function``; paths and modules are looked up from the config's folder.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
import yaml
from torch import nn

from waterflow.device_names import DEVICE
from waterflow.durations import parse_seconds
from waterflow.errors import InvalidJobError
from waterflow.executor.engine import Mode
from waterflow.executor.memory_limit import parse_memory
from waterflow.job import Job
from waterflow.references import ConfigError, call, check_arguments, find_function, make, meant

if TYPE_CHECKING:
    import optuna

_TRAIN_KEYS = ("jobs", "epochs", "device", "memory", "max_concurrent", "exact", "mode", "output", "time_limit")
_JOB_KEYS = ("name", "job", "args", "model", "data", "data_args", "loss", "optimizer", "evaluate", "epochs", "seed",
             "timeout", "train_mode")  # fmt: skip
_PIECES = ("model", "data", "data_args", "loss", "optimizer", "evaluate")
_STUDY_KEYS = (
    "objective", "build", "direction", "sampler", "pruner", "storage", "study_name", "n_trials", "timeout",
    "max_concurrent", "device", "memory", "exact", "mode", "deterministic", "trial_timeout", "output",
)  # fmt: skip
_SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "qmc": "QMCSampler"}
_PRUNERS = {
    "median": "MedianPruner", "successive_halving": "SuccessiveHalvingPruner", "hyperband": "HyperbandPruner",
    "none": "NopPruner",
}  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """Jobs to train together, and the limits they share."""

    jobs: tuple[Job, ...]
    memory: int | float | str | None
    max_concurrent: int | None
    exact: bool
    mode: Mode
    output: Path | None
    time_limit: float | None = None  # seconds: of ``waterflow cluster submit``
    device: str | None = None  # of ``waterflow train``; None: the CPU


@dataclass(frozen=True)
class StudyConfig:
    """A study to run. ``make_study()`` opens or creates it; ``options`` are those of ``waterflow.optimize``."""

    title: str
    objective: Callable[[Any], Any]
    make_study: Callable[[], optuna.Study]
    options: dict[str, Any]
    output: Path | None


def load_train(path: Path) -> TrainConfig:
    """Read a train config and make its jobs. Raises ConfigError."""
    top = _open(path, _TRAIN_KEYS, other={"objective": "study", "build": "study"})
    entries = top.get("jobs")
    if not isinstance(entries, list) or not entries:
        raise top.wrong("jobs", "must be a list with at least one job", entries)
    epochs = top.whole("epochs")
    names: set[str] = set()
    jobs = []
    for number, entry in enumerate(entries):
        job = _job(Section(entry, f"{top.where}jobs[{number}]", _JOB_KEYS, top.folder), number, epochs)
        if job.name in names:
            raise ConfigError(f"{top.where}jobs[{number}].name: two jobs are called {job.name!r}; names must differ")
        names.add(job.name)
        jobs.append(job)
    return TrainConfig(
        tuple(jobs), top.memory(), top.whole("max_concurrent"), top.flag("exact", True), top.mode(), top.path("output"),
        top.seconds("time_limit"), top.device(),
    )  # fmt: skip


def load_study(path: Path) -> StudyConfig:
    """Read a study config and find its objective. Raises ConfigError."""
    top = _open(path, _STUDY_KEYS, other={"jobs": "train"})
    objective = top.exactly_one("objective", "build")
    function = top.function(objective)
    if objective == "build":
        function = functools.partial(_build, function, f"{top.where}build")
    direction: Any = top.choice("direction", ("minimize", "maximize"), "minimize")
    if top.get("n_trials") is None and top.get("timeout") is None:
        raise ConfigError(f"{top.where}n_trials: give n_trials or timeout, or the study would never end")
    import optuna

    sampler = top.made("sampler", _SAMPLERS, optuna.samplers)
    pruner = top.made("pruner", _PRUNERS, optuna.pruners)
    storage, study_name = top.text("storage"), top.text("study_name")

    def make_study() -> optuna.Study:
        return optuna.create_study(
            storage=storage, sampler=sampler, pruner=pruner, study_name=study_name, direction=direction,
            load_if_exists=study_name is not None,
        )  # fmt: skip

    options = {
        "n_trials": top.whole("n_trials"),
        "timeout": top.seconds("timeout"),
        "max_concurrent": "auto" if top.get("max_concurrent") in (None, "auto") else top.whole("max_concurrent"),
        "device": top.device() or "cpu",
        "memory": top.memory(),
        "exact": top.flag("exact", True),
        "mode": top.mode(),
        "deterministic": top.flag("deterministic"),
        "trial_timeout": top.seconds("trial_timeout"),
    }
    return StudyConfig(study_name or str(top.get(objective)), function, make_study, options, top.path("output"))


class Section:
    """One mapping of a config, whose values are read by key and checked. ``where`` stands before a key in messages.

    Raises ConfigError for a key that is not among ``keys``, and from each method for a value that cannot be right.
    """

    def __init__(self, given: Any, where: str, keys: Iterable[str], folder: Path) -> None:
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where} must be a mapping of keys to values; got {given!r}")
        self.where = where if where.endswith(": ") else f"{where}."
        self.folder = folder
        self._given = given
        for key in given:
            if key not in keys:
                raise ConfigError(f"{self.where}{key}: unknown key{meant(key, keys)}")

    def wrong(self, key: str, rule: str, value: Any) -> ConfigError:
        """The error for a value that breaks a rule."""
        if value is None:
            return ConfigError(f"{self.where}{key} is missing; it {rule}")
        return ConfigError(f"{self.where}{key} {rule}; got {value!r}")

    def get(self, key: str) -> Any:
        """The value as it is written; None where it is not."""
        return self._given.get(key)

    def exactly_one(self, *keys: str) -> str:
        """The one key that is given."""
        given = [key for key in keys if self.get(key) is not None]
        if len(given) != 1:
            found = "both are" if given else "neither is"
            raise ConfigError(f"{self.where}{keys[0]}: give {' or '.join(keys)}, exactly one of them; {found} there")
        return given[0]

    def text(self, key: str) -> str | None:
        """A text."""
        value = self.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.wrong(key, "must be text", value)
        return value

    def whole(self, key: str, least: int = 1) -> int | None:
        """A whole number."""
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            kind = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
            raise self.wrong(key, f"must be {kind}", value)
        return value

    def seconds(self, key: str) -> float | None:
        """A positive number of seconds, or text like ``2h``."""
        value = self.get(key)
        if isinstance(value, str):
            try:
                return parse_seconds(value, f"{self.where}{key}")
            except InvalidJobError as error:
                raise ConfigError(str(error)) from None
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf
        ):
            raise self.wrong(key, "must be a positive number of seconds", value)
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false", value)
        return bool(value)

    def choice(self, key: str, allowed: Sequence[str], default: str) -> str:
        """One of a few words."""
        value = self.get(key) if self.get(key) is not None else default
        if value not in allowed:
            raise self.wrong(key, f"must be one of {', '.join(allowed)}", value)
        return str(value)

    def mode(self, key: str = "mode") -> Mode:
        """What decides which jobs run beside which."""
        return cast(Mode, self.choice(key, get_args(Mode), "auto"))

    def memory(self, key: str = "memory") -> int | float | str | None:
        """A memory limit as ``train`` and ``optimize`` take it."""
        value = self.get(key)
        try:
            parse_memory(value)
        except InvalidJobError as error:
            raise ConfigError(f"{self.where}{key}: {error}") from None
        return value  # type: ignore[no-any-return]

    def device(self, key: str = "device") -> str | None:
        """The name of a device: ``cpu``, ``cuda``, or one of several GPUs, as ``cuda:1``. It need not be there."""
        value = self.text(key)
        if value is None:
            return None
        if not DEVICE.fullmatch(value):
            raise self.wrong(key, "must be cpu, cuda, or a GPU by its number, as cuda:1", value)
        return value

    def path(self, key: str) -> Path | None:
        """A path, from the current folder."""
        value = self.text(key)
        return None if value is None else Path(value)

    def mapping(self, key: str) -> dict[str, Any]:
        """A mapping with text keys; empty where it is not given."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise self.wrong(key, "must be a mapping of names to values", value)
        return dict(value)

    def function(self, key: str, args: str | None = None) -> Callable[..., Any]:
        """The function that a reference names, with the arguments in the mapping ``args`` bound to it."""
        value = self.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "must name a function, as 'module:function' or 'path/to/file.py:function'", value)
        found = find_function(value, self.folder, f"{self.where}{key}")
        given = self.mapping(args) if args is not None else {}
        if not given:
            return found
        check_arguments(found, given, f"{self.where}{args}")
        return functools.partial(found, **given)

    def made(self, key: str, table: Mapping[str, str], module: Any) -> Any:
        """An object of the class that ``name`` stands for, made with the other keys; None where it is not given."""
        value = self.get(key)
        if value is None:
            return None
        made, settings = self._named(key, value, table, module)
        return make(made, (), settings, f"{self.where}{key}")

    def optimizer(self, key: str = "optimizer") -> Callable[[Any], torch.optim.Optimizer]:
        """A function of the parameters that makes an optimizer."""
        value = self.get(key)
        classes = {n: getattr(torch.optim, n) for n in torch.optim.__all__}
        known = {
            n.lower(): n
            for n, made in classes.items()
            if isinstance(made, type) and issubclass(made, torch.optim.Optimizer) and n not in ("Optimizer", "LBFGS")
        }
        made, settings = self._named(key, value, known, torch.optim)
        make(made, ([nn.Parameter(torch.zeros(1, 1))],), settings, f"{self.where}{key}")
        return lambda parameters: made(parameters, **settings)

    def _named(
        self, key: str, value: Any, table: Mapping[str, str], module: Any
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        settings = {"name": value} if isinstance(value, str) else self.mapping(key)
        name = settings.pop("name", None)
        if not isinstance(name, str) or name.lower() not in table:
            raise ConfigError(
                f"{self.where}{key}.name must be one of {', '.join(table)}; "
                + (f"got {name!r}" if name is not None else "it is missing")
            )
        return getattr(module, table[name.lower()]), settings

    def loss(self, key: str = "loss") -> Any:
        """``cross_entropy`` and its like, a torch name with dots, or a reference to a function."""
        value = self.text(key)
        if value is None or ":" in value:
            return None if value is None else self.function(key)
        place, _, name = value.rpartition(".")
        known = [n for n in dir(nn.functional) if "loss" in n or "entropy" in n or n == "kl_div"]
        found = None
        if not place and name in known:
            found = getattr(nn.functional, name)
        elif place.split(".")[0] == "torch":
            found = functools.reduce(lambda at, part: getattr(at, part, None), value.split(".")[1:], torch)
        if not callable(found):
            raise self.wrong(key, f"is not a loss of torch{meant(name, known)}", value)
        return found() if isinstance(found, type) else found


def _open(path: Path, keys: Iterable[str], other: Mapping[str, str]) -> Section:
    try:
        given = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if isinstance(given, Mapping):
        for key, command in other.items():
            if key in given:
                article = "a study" if command == "study" else "a train"
                raise ConfigError(f"{path}: {key}: this is {article} config; run it with: waterflow {command} {path}")
    folder = path.resolve().parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return Section(given, f"{path}: ", keys, folder)


class _Loader(yaml.SafeLoader):
    """Takes ``1e-3`` as a number, as everybody means it; YAML 1.1 asks for ``1.0e-3``."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _job(entry: Section, number: int, epochs: int | None) -> Job:
    epochs = entry.whole("epochs") or epochs
    name, seed = entry.text("name"), entry.whole("seed", least=0)
    timeout = entry.seconds("timeout")
    train_mode: Any = entry.get("train_mode") and entry.choice("train_mode", ("auto", "as_is"), "auto")
    if entry.exactly_one("job", "model") == "job":
        for key in _PIECES:
            if entry.get(key) is not None:
                raise ConfigError(f"{entry.where}{key} cannot stand beside job, whose function sets it; pass it args")
        job = _checked(call(entry.function("job", "args"), f"{entry.where}job"), f"{entry.where}job")
        changes = {"name": name, "epochs": epochs, "seed": seed, "timeout": timeout, "train_mode": train_mode}
        return dataclasses.replace(job, **{k: v for k, v in changes.items() if v is not None})  # type: ignore[arg-type]
    return Job(
        name=name or f"job-{number}",
        model=entry.function("model", "args"),
        data=entry.function("data", "data_args"),
        loss=entry.loss(),
        optimizer=entry.optimizer(),
        evaluate=entry.function("evaluate") if entry.get("evaluate") is not None else None,
        epochs=epochs or 1,
        seed=seed,
        timeout=timeout,
        train_mode=train_mode or "auto",
    )


def _build(function: Callable[[Any], Any], where: str, trial: Any) -> Job:
    return _checked(function(trial), where)


def _checked(made: Any, where: str) -> Job:
    if not isinstance(made, Job):
        raise ConfigError(f"{where} must name a function that returns a waterflow.Job; it returned {made!r}")
    return made
