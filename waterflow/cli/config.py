"""YAML configs of the command line: check every key, and find the user's functions.

A train config lists jobs, a study config names an objective. Functions are written ``module:function`` or
``path/to/file.py:function``; paths and modules are relative to the config's folder. Torch is imported only where a function is
called or looked for: it takes seconds, and a misspelled key is told before.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from waterflow.cli.parameters import Loader
from waterflow.cli.references import ConfigError, call, check_arguments, find_function, make, meant
from waterflow.executor.memory_limit import parse_memory
from waterflow.units import DEVICE, RULE, Mode, parse_seconds

if TYPE_CHECKING:
    import optuna

    from waterflow.job import Job

_COMMANDS = {"jobs": "train", "objective": "study", "build": "study"}
_PIECES = {"model", "data", "data_args", "loss", "optimizer", "evaluate"}
# Settings of the study, and not of optimize().
_OF_THE_STUDY = {"objective", "build", "direction", "sampler", "pruner", "storage", "study_name", "output"}
_REFERENCE = "must name a function, as 'module:function' or 'path/to/file.py:function'"
_SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "qmc": "QMCSampler"}
_PRUNERS = {
    "median": "MedianPruner",
    "successive_halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "none": "NopPruner",
}


@dataclass(frozen=True)
class TrainConfig:
    """Jobs to train together, and their common settings. ``time_limit`` is in seconds."""

    jobs: tuple[Job, ...]
    memory: int | float | str | None
    max_concurrent: int | None
    exact: bool
    mode: Mode
    output: str | None
    time_limit: float | None  # seconds; only ``waterflow cluster submit`` uses it
    device: str | None  # only ``waterflow train`` uses it; None: the CPU


@dataclass(frozen=True)
class StudyConfig:
    """A study to run. ``make_study()`` opens or creates it; ``options`` are arguments of ``waterflow.optimize``."""

    title: str
    objective: Callable[[Any], Any]
    make_study: Callable[[], optuna.Study]
    options: dict[str, Any]
    output: str | None


def _broken(rule: str) -> PydanticCustomError:
    return PydanticCustomError("rule", rule)  # type: ignore[arg-type]


def _says(rule: str) -> WrapValidator:
    # pydantic's messages speak of validators and types: each field has a rule in our words instead.
    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise _broken(rule) from None

    return WrapValidator(check)


def _memory(value: Any) -> Any:
    parse_memory(value)
    return value


def _listed(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise _broken("must be a list with at least one job")
    return value


_TrainMode = Literal["auto", "as_is"]
_Direction = Literal["minimize", "maximize"]
_Text = Annotated[str, Field(min_length=1), _says("must be text")]
_Function = Annotated[str, _says(_REFERENCE)]
_Count = Annotated[int, Field(ge=1), _says("must be a positive whole number")]
_Seconds = Annotated[float, BeforeValidator(parse_seconds), _says(RULE)]
_Flag = Annotated[bool, _says("must be true or false")]
_Settings = Annotated[dict[str, Any], _says("must be a mapping of names to values")]
_Named = Annotated[_Settings, BeforeValidator(lambda given: {"name": given} if isinstance(given, str) else given)]
_Device = Annotated[str, Field(pattern=f"^({DEVICE.pattern})$"), _says("must be cpu, cuda, or a GPU by its number, as cuda:1")]
_Form = TypeVar("_Form", bound="_Section")


def _one_of(words: Any) -> WrapValidator:
    return _says(f"must be one of {', '.join(get_args(words))}")


class _Section(BaseModel, extra="forbid", strict=True):
    """A mapping of a config. A key without a value counts as missing."""

    @model_validator(mode="before")
    @classmethod
    def _given(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise _broken("must be a mapping of keys to values")
        # An unknown key stays even without a value, so that it is reported. Keys may be numbers or booleans in YAML.
        return {str(key): v for key, v in given.items() if v is not None or key not in cls.model_fields}


class _Entry(_Section):
    name: _Text | None = None
    job: _Function | None = None
    args: _Settings = {}
    model: _Function | None = None
    data: _Function | None = None
    data_args: _Settings = {}
    loss: _Text | None = None
    optimizer: _Named = {}
    evaluate: _Function | None = None
    epochs: _Count | None = None
    seed: Annotated[int, Field(ge=0), _says("must be a whole number of at least 0")] | None = None
    timeout: _Seconds | None = None
    train_mode: Annotated[_TrainMode, _one_of(_TrainMode)] | None = None


class _Shared(_Section):
    memory: Annotated[Any, AfterValidator(_memory)] = None
    exact: _Flag = True
    mode: Annotated[Mode, _one_of(Mode)] = "auto"
    output: _Text | None = None


class _Train(_Shared):
    jobs: Annotated[list[_Entry], BeforeValidator(_listed)] = Field(None, validate_default=True)
    epochs: _Count | None = None
    max_concurrent: _Count | None = None
    device: _Device | None = None
    time_limit: _Seconds | None = None


class _Study(_Shared):
    objective: _Function | None = None
    build: _Function | None = None
    direction: Annotated[_Direction, _one_of(_Direction)] = "minimize"
    sampler: _Named | None = None
    pruner: _Named | None = None
    storage: _Text | None = None
    study_name: _Text | None = None
    n_trials: _Count | None = None
    timeout: _Seconds | None = None
    max_concurrent: Annotated[_Count | Literal["auto"], _says("must be a positive whole number, or auto")] = "auto"
    device: _Device = "cpu"
    deterministic: _Flag = False
    trial_timeout: _Seconds | None = None
    checkpoint: _Text | None = None
    order: Literal["fifo", "promising"] = "fifo"
    deadline: _Seconds | None = None


def load_train(path: Path) -> TrainConfig:
    """Read a train config and make its jobs. Raises ConfigError."""
    config = _read(path, _Train, "train")
    jobs: dict[str, Job] = {}
    for number, entry in enumerate(config.jobs):
        where = f"{path}: jobs[{number}]."
        job = _job(entry, _Found(entry, where, path), number, config.epochs)
        if job.name in jobs:
            raise ConfigError(f"{where}name: two jobs are called {job.name!r}; names must differ")
        jobs[job.name] = job
    return TrainConfig(tuple(jobs.values()), **config.model_dump(exclude={"jobs", "epochs"}))


def load_study(path: Path) -> StudyConfig:
    """Read a study config and find its objective. Raises ConfigError."""
    config = _read(path, _Study, "study")
    found = _Found(config, f"{path}: ", path)
    key = found.exactly_one("objective", "build")
    if config.n_trials is None and config.timeout is None and config.deadline is None:
        raise ConfigError(f"{path}: n_trials: give n_trials, timeout or deadline, or the study would never end")
    function = found.function(key)
    if key == "build":
        function = functools.partial(_build, function, f"{path}: build")
    import optuna

    # Not made here: creating a study writes to its storage, and the device is checked before.
    make_study = functools.partial(
        optuna.create_study,
        storage=config.storage,
        study_name=config.study_name,
        direction=config.direction,
        sampler=found.made("sampler", _SAMPLERS, optuna.samplers),
        pruner=found.made("pruner", _PRUNERS, optuna.pruners),
        load_if_exists=config.study_name is not None,
    )
    title = config.study_name or getattr(config, key)
    return StudyConfig(title, function, make_study, config.model_dump(exclude=_OF_THE_STUDY), config.output)


def _read(path: Path, form: type[_Form], command: str) -> _Form:
    try:
        given = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
        # Before keys are checked: with the wrong command all of them would be unknown.
        for key, own in _COMMANDS.items() if isinstance(given, dict) else ():
            if key in given and own != command:
                raise ConfigError(f"{path}: {key}: this is a {own} config; run it with: waterflow {own} {path}")
        config = form.model_validate(given)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}{_told(error, form)}") from None
    # So that configs can name modules beside them, from whatever folder the command runs.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return config


def _told(error: ValidationError, form: type[_Section]) -> str:
    # Unknown keys first: a misspelled key explains the missing one.
    wrong = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in wrong["loc"])
    where, value = f": {place[1:]}" if place else "", wrong["input"]
    if wrong["type"] == "extra_forbidden":
        known = (form if len(wrong["loc"]) == 1 else _Entry).model_fields
        return f"{where}: unknown key{meant(wrong['loc'][-1], known)}"
    if wrong["type"] != "rule":
        return f"{where}: {wrong.get('ctx', {}).get('error', wrong['msg'])}"
    if value is None and place:
        return f"{where} is missing; it {wrong['msg']}"
    return f"{where} {wrong['msg']}; got {value!r}"


@dataclass(frozen=True)
class _Found:
    """The objects that a section's values name. Methods raise ConfigError; ``where`` precedes the key in its message."""

    section: _Section
    where: str
    path: Path

    def exactly_one(self, *keys: str) -> str:
        given = [key for key in keys if getattr(self.section, key) is not None]
        if len(given) != 1:
            found = "both are" if given else "neither is"
            raise ConfigError(f"{self.where}{keys[0]}: give {' or '.join(keys)}, exactly one of them; {found} there")
        return given[0]

    def function(self, key: str, args: str | None = None) -> Callable[..., Any]:
        """Return the function that the value of ``key`` names, with the arguments in the mapping ``args`` bound."""
        if (reference := getattr(self.section, key)) is None:
            raise ConfigError(f"{self.where}{key} is missing; it {_REFERENCE}")
        found = find_function(reference, self.path.resolve().parent, f"{self.where}{key}")
        if args is None or not (given := getattr(self.section, args)):
            return found
        check_arguments(found, given, f"{self.where}{args}")
        return functools.partial(found, **given)

    def made(self, key: str, names: Mapping[str, str], module: Any, *first: Any) -> Any:
        """Return an object of the class that ``name`` in ``key`` stands for, made from ``first`` and the other keys; or None."""
        if (settings := getattr(self.section, key)) is None:
            return None
        name, settings = settings.get("name"), {k: v for k, v in settings.items() if k != "name"}
        if str(name).lower() not in names:
            got = "it is missing" if name is None else f"got {name!r}"
            raise ConfigError(f"{self.where}{key}.name must be one of {', '.join(names)}; {got}")
        return make(getattr(module, names[name.lower()]), first, settings, f"{self.where}{key}")

    def optimizer(self, parameters: Any) -> Any:
        import torch

        # LBFGS needs a closure, which no step can give.
        classes = (n for n in torch.optim.__all__ if n[0].isupper() and n not in ("Optimizer", "LBFGS"))
        return self.made("optimizer", {n.lower(): n for n in classes}, torch.optim, parameters)

    def loss(self, given: str | None) -> Any:
        """Return the loss: a torch function such as ``cross_entropy``, a dotted torch name, or a user's function."""
        if given is None or ":" in given:
            return given and self.function("loss")
        import torch

        place, _, name = given.rpartition(".")
        # torch keeps no list of its losses: their names tell.
        known = [n for n in dir(torch.nn.functional) if "loss" in n or "entropy" in n or n == "kl_div"]
        found = None
        if not place and name in known:
            found = getattr(torch.nn.functional, name)
        elif given.startswith("torch."):
            found = functools.reduce(lambda at, part: getattr(at, part, None), given.split(".")[1:], torch)
        if not callable(found):
            raise ConfigError(f"{self.where}loss is not a loss of torch{meant(name, known)}; got {given!r}")
        return found() if isinstance(found, type) else found


def _job(entry: _Entry, found: _Found, number: int, epochs: int | None) -> Job:
    given = entry.model_dump(include={"name", "epochs", "seed", "timeout", "train_mode"}, exclude_none=True)
    if epochs is not None:
        # The entry's own epochs win over the config's.
        given = {"epochs": epochs, **given}
    if found.exactly_one("job", "model") == "job":
        # Two sources for one setting would leave open which one counts.
        for key in _PIECES & entry.model_fields_set:
            raise ConfigError(f"{found.where}{key} cannot stand beside job, whose function sets it; pass it args")
        made = _checked(call(found.function("job", "args"), f"{found.where}job"), f"{found.where}job")
        if epochs is not None and entry.epochs is None and made.epochs not in (1, epochs):  # 1: the function sets none
            raise ConfigError(
                f"{found.path}: epochs is {epochs}, and {entry.job} makes a job with epochs={made.epochs}; keep one of them"
            )
        return dataclasses.replace(made, **given)
    import torch

    from waterflow.job import Job

    job = Job(
        **{"name": f"job-{number}", **given},
        model=found.function("model", "args"),
        data=found.function("data", "data_args"),
        loss=found.loss(entry.loss),
        optimizer=found.optimizer,
        evaluate=found.function("evaluate") if entry.evaluate is not None else None,
    )
    # Made once for its errors: a wrong setting is reported before anything runs.
    found.optimizer([torch.nn.Parameter(torch.zeros(1, 1))])
    return job


def _build(function: Callable[[Any], Any], where: str, trial: Any) -> Job:
    return _checked(function(trial), where)


def _checked(made: Any, where: str) -> Job:
    from waterflow.job import Job

    if not isinstance(made, Job):
        raise ConfigError(f"{where} must name a function that returns a waterflow.Job; it returned {made!r}")
    return made
