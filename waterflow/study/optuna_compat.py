"""All that touches Optuna's private names, with a way around each where it is missing."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import optuna
from optuna import TrialPruned
from optuna.trial import FrozenTrial, Trial, TrialState

from waterflow.errors import StudyError, WaterflowError
from waterflow.executor.engine import current_worker
from waterflow.executor.virtual_clock import VirtualClock
from waterflow.training.evaluation import evaluating

__all__ = ["TrialPruned", "TrialState"]  # beside what is defined here: for those who do without the rest of Optuna


def _loop_flags(study: optuna.Study) -> Any:
    return getattr(study, "_thread_local", None)


def in_loop(study: optuna.Study) -> bool:
    """Whether the calling thread is inside an objective or a callback of ``study``."""
    return bool(getattr(_loop_flags(study), "in_optimize_loop", False))


def set_in_loop(study: optuna.Study, value: bool) -> None:
    """Say so; ``study.stop()`` looks at it."""
    flags = _loop_flags(study)
    if flags is not None:
        flags.in_optimize_loop = value


@contextlib.contextmanager
def loop(study: optuna.Study, clock: VirtualClock | None) -> Iterator[None]:
    """The calling thread asks and tells inside. Under a clock ``study.stop()`` waits for its turn."""
    study._stop_flag = False
    set_in_loop(study, True)
    if clock is not None:
        study.stop = _stop_in_turn(study, clock)  # type: ignore[method-assign]
    try:
        yield
    finally:
        set_in_loop(study, False)
        if clock is not None:
            del study.stop


def _stop_in_turn(study: optuna.Study, clock: VirtualClock) -> Callable[[], None]:
    stop = study.stop

    def call() -> None:
        worker = current_worker()
        with clock.turn(worker) if worker is not None else contextlib.nullcontext():
            stop()

    return call


def stopped(study: optuna.Study) -> bool:
    """Whether ``study.stop()`` was called."""
    return bool(getattr(study, "_stop_flag", False))


def heartbeat(trial: Trial, study: optuna.Study) -> contextlib.AbstractContextManager[Any]:
    """Beats inside, where the storage wants that."""
    try:
        from optuna.storages._heartbeat import get_heartbeat_thread
    except ImportError:
        return contextlib.nullcontext()
    return get_heartbeat_thread(trial._trial_id, study._storage)  # type: ignore[return-value]


def fail_stale(study: optuna.Study) -> None:
    """Fail trials whose process has died, where the storage can tell."""
    interval = getattr(study._storage, "get_heartbeat_interval", None)
    if interval is None or interval() is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(AttributeError):
            optuna.storages.fail_stale_trials(study)


def tell_quietly(
    study: optuna.Study, trial: Trial, value: Any, state: TrialState | None, error: BaseException | None,
    caught: tuple[type[BaseException], ...] = (),
) -> FrozenTrial:  # fmt: skip
    """Tell, and log what became of the trial as Optuna does; without a traceback for our own errors that are ``caught``.

    Such an error says what to change, and the frames behind it are ours. Handlers find any error as ``record.error``.
    """
    number = trial.number
    said: list[warnings.WarningMessage] = []
    if state is not None or _numbers(value, len(study.directions)):
        told = study.tell(trial, None if state is not None else value, state=state)
    else:  # tell() warns of what is wrong. To catch that reaches into all threads: only where it must be
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            told = study.tell(trial, value)
    log = logging.getLogger("optuna.study._optimize")
    if told.state == TrialState.COMPLETE:
        if hasattr(study, "_log_completed_trial"):
            study._log_completed_trial(told.values, number, told.params)
    elif told.state == TrialState.PRUNED:
        log.info("Trial %d pruned. %s", number, error)
    else:
        why = repr(error) if error is not None else "; ".join(str(warning.message) for warning in said)
        expected = isinstance(error, WaterflowError) and isinstance(error, caught)
        log.warning(
            "Trial %d failed with parameters: %s because of the following error: %s.", number, told.params, why,
            exc_info=None if expected else error, extra={"error": error},
        )  # fmt: skip
        log.warning("Trial %d failed with value %r.", number, value)
    return told


def values_of(trial: FrozenTrial) -> list[float] | None:
    """What a trial that was told is worth; None for one that is not complete, or breaks a constraint, and so is never the best."""
    if trial.state != TrialState.COMPLETE:
        return None
    found: Any = getattr(trial, "constraints", None)
    constraints = found.values() if isinstance(found, dict) else trial.system_attrs.get("constraints") or ()
    return list(trial.values) if all(value <= 0 for value in constraints) else None


def running_trials(study: optuna.Study) -> list[int]:
    """The numbers of trials that were asked for and not told of, as the storage has them now."""
    return [trial.number for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))]


def tell_once(
    study: optuna.Study, trial: Trial, value: Any, state: TrialState | None, error: BaseException | None,
    caught: tuple[type[BaseException], ...],
) -> FrozenTrial | None:  # fmt: skip
    """``tell_quietly``; None where another process has told meanwhile."""
    try:
        return tell_quietly(study, trial, value, state, error, caught)
    except (ValueError, RuntimeError):
        if study._storage.get_trial(trial._trial_id).state.is_finished():
            return None
        raise


def _numbers(value: Any, count: int) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return len(values) == count and all(isinstance(v, (int, float)) and not math.isnan(v) for v in values)


class _InTurn(Trial):
    """A trial whose dealings with the study wait for their turn on a virtual clock."""


_TURNS = ("suggest_float", "suggest_int", "suggest_categorical", "report", "should_prune", "set_user_attr",
          "set_constraint")  # fmt: skip


def _in_turn(name: str) -> Callable[..., Any]:
    method = getattr(Trial, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if evaluating():
            raise StudyError(
                f"trial.{name}() inside evaluate of a Job: that would wait for other trials while it keeps their lane. "
                "Return the number from evaluate, and it is reported; suggest values before the Job is made"
            )
        with self._waterflow_clock.turn(self.number):
            return method(self, *args, **kwargs)

    return call


for _name in _TURNS:
    if hasattr(Trial, _name):
        setattr(_InTurn, _name, _in_turn(_name))


def take_turns(trial: Trial, clock: VirtualClock) -> None:
    """From now on the trial's dealings with its study wait for their turn."""
    # A new object would ask the sampler again.
    trial.__class__ = _InTurn
    trial._waterflow_clock = clock  # type: ignore[attr-defined]


def shareable(study: optuna.Study) -> optuna.Study:
    """The study as other processes can open it: files of its storage are named from the root.

    Raises StudyError for a storage that stays in this process.
    """
    storage: Any = study._storage
    inner: Any = getattr(storage, "_backend", storage)
    if isinstance(storage, optuna.storages.JournalStorage):
        path = getattr(inner, "_file_path", None)
        if path is None or os.path.isabs(path):
            return study
        changed = copy.copy(inner)
        changed._file_path = os.path.abspath(path)
        lock = copy.copy(inner._lock)
        for name in ("_lock_target_file", "_lock_file"):
            if isinstance(getattr(lock, name, None), str):
                setattr(lock, name, os.path.abspath(getattr(lock, name)))
        changed._lock = lock
        return _with_storage(study, _with_backend(storage, changed))
    if isinstance(inner, optuna.storages.RDBStorage):
        from sqlalchemy.engine import make_url

        url = make_url(inner.url)
        if url.get_backend_name() != "sqlite":
            return study
        if url.database and url.database != ":memory:":
            changed = copy.copy(inner)
            changed.url = url.set(database=os.path.abspath(url.database)).render_as_string(hide_password=False)
            return _with_storage(study, changed if inner is storage else _with_backend(storage, changed))
    raise StudyError(
        "cluster= spreads trials over processes, which meet in the study's storage: it must be an RDB or a journal storage, "
        f"in a file or on a server; this one is in memory ({type(inner).__name__}). Make it with "
        "optuna.create_study(storage='sqlite:///study.db')"
    )


def _with_storage(study: optuna.Study, storage: Any) -> optuna.Study:
    changed = copy.copy(study)
    changed._storage = storage
    return changed


def _with_backend(storage: Any, backend: Any) -> Any:
    changed = copy.copy(storage)
    changed._backend = backend
    return changed


_NAME = "waterflow:name"  # of a study on a cluster, among what Optuna keeps of a study for itself


def lasting_name(study: optuna.Study) -> str:
    """A name that the study has in its storage for good, and no other study has, also one that is called the same."""
    storage: Any = study._storage
    known = storage.get_study_system_attrs(study._study_id).get(_NAME)
    if known is None:
        storage.set_study_system_attr(study._study_id, _NAME, secrets.token_hex(6))
        known = storage.get_study_system_attrs(study._study_id)[_NAME]
    return str(known)


def trial_of(study: optuna.Study, number: int) -> Trial:
    """A trial that was asked for in another process."""
    return Trial(study, study._storage.get_trial_id_from_study_id_trial_number(study._study_id, number))


def refresh(trial: Trial) -> None:
    """Let the trial see what another process wrote of it, as ``tell`` looks here."""
    trial._cached_frozen_trial = trial.storage.get_trial(trial._trial_id)
