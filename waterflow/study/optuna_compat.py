"""All uses of Optuna's private names, with a fallback for each that an Optuna version lacks."""

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

__all__ = ["Trial", "TrialPruned", "TrialState"]  # for modules that import nothing else of Optuna


def _loop_flags(study: optuna.Study) -> Any:
    return getattr(study, "_thread_local", None)


def in_loop(study: optuna.Study) -> bool:
    """Return True if the calling thread is inside an objective or a callback of ``study``."""
    return bool(getattr(_loop_flags(study), "in_optimize_loop", False))


def set_in_loop(study: optuna.Study, value: bool) -> None:
    """Mark the calling thread as inside (or outside) an objective; ``study.stop()`` checks it."""
    flags = _loop_flags(study)
    if flags is not None:
        flags.in_optimize_loop = value


@contextlib.contextmanager
def loop(study: optuna.Study, clock: VirtualClock | None) -> Iterator[None]:
    """Let the calling thread ask and tell inside. Under a clock ``study.stop()`` waits for its turn."""
    # As study.optimize() does: a stop() of the call before must not end this one.
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
    """Return True if ``study.stop()`` was called."""
    return bool(getattr(study, "_stop_flag", False))


def verbosity() -> int:
    """Return the level of Optuna's log."""
    return optuna.logging.get_verbosity()


def set_verbosity(level: int) -> None:
    """Set the level of Optuna's log."""
    optuna.logging.set_verbosity(level)


def heartbeat(trial: Trial, study: optuna.Study) -> contextlib.AbstractContextManager[Any]:
    """Return a context that records heartbeats inside, if the storage supports them."""
    try:
        from optuna.storages._heartbeat import get_heartbeat_thread
    except ImportError:
        return contextlib.nullcontext()
    return get_heartbeat_thread(trial._trial_id, study._storage)  # type: ignore[return-value]


def fail_stale(study: optuna.Study) -> None:
    """Fail trials whose process has died, if the storage records heartbeats."""
    if not _heartbeats(study._storage):
        return
    with warnings.catch_warnings():
        # The function is marked experimental: Optuna would warn of it.
        warnings.simplefilter("ignore")
        with contextlib.suppress(AttributeError):
            optuna.storages.fail_stale_trials(study)


def tell_quietly(
    study: optuna.Study,
    trial: Trial,
    value: Any,
    state: TrialState | None,
    error: BaseException | None,
    caught: tuple[type[BaseException], ...] = (),
) -> FrozenTrial:
    """Tell a trial's outcome, and log it as Optuna does, but without a traceback for our own errors that are ``caught``.

    Such an error says what to change, and its frames are ours. Log handlers find any error as ``record.error``. Raises the
    sampler's errors.
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
            "Trial %d failed with parameters: %s because of the following error: %s.",
            number,
            told.params,
            why,
            exc_info=None if expected else error,
            extra={"error": error},
        )
        log.warning("Trial %d failed with value %r.", number, value)
    return told


def values_of(trial: FrozenTrial) -> list[float] | None:
    """Return the values of a told trial; None if it is not complete or breaks a constraint, and so is never the best."""
    if trial.state != TrialState.COMPLETE:
        return None
    # Newer versions of Optuna have an attribute; older ones keep constraints among system attributes.
    found: Any = getattr(trial, "constraints", None)
    constraints = found.values() if isinstance(found, dict) else trial.system_attrs.get("constraints") or ()
    return list(trial.values) if all(value <= 0 for value in constraints) else None


def running_trials(study: optuna.Study) -> list[int]:
    """Return the numbers of the storage's RUNNING trials: asked for, and not told."""
    return [trial.number for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))]


def tell_once(
    study: optuna.Study,
    trial: Trial,
    value: Any,
    state: TrialState | None,
    error: BaseException | None,
    caught: tuple[type[BaseException], ...],
) -> FrozenTrial | None:
    """As ``tell_quietly``, but return None if another process has told the trial meanwhile."""
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
    """A trial whose calls to the study wait for their turn on a virtual clock."""


_TURNS = ("suggest_float", "suggest_int", "suggest_categorical", "report", "should_prune", "set_user_attr", "set_constraint")


def _in_turn(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Trial, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The lane would stay occupied while the trial waits for others, which may need that lane for their turn.
        if evaluating():
            raise StudyError(
                f"trial.{name}() inside evaluate of a Job: that would wait for other trials while it keeps their lane. "
                "Return the number from evaluate, and it is reported; suggest values before the Job is made"
            )
        with self._waterflow_clock.turn(self.number):
            return getattr(super(_InTurn, self), name)(*args, **kwargs)

    return call


for _name in _TURNS:
    if hasattr(Trial, _name):
        setattr(_InTurn, _name, _in_turn(_name))


def take_turns(trial: Trial, clock: VirtualClock) -> None:
    """Make the trial's calls to its study wait for their turn from now on."""
    # Changed in place, as a new Trial object would ask the sampler again.
    if not isinstance(trial, _InTurn):
        trial.__class__ = type("_InTurn", (_InTurn, trial.__class__), {})
    trial._waterflow_clock = clock  # type: ignore[attr-defined]


def check_threads(study: optuna.Study) -> None:
    """Raise StudyError for a storage that the threads of trials do not share: a SQLite database in memory."""
    storage: Any = study._storage
    url: Any = getattr(getattr(getattr(storage, "_backend", storage), "engine", None), "url", None)
    # It belongs to its connection, and each thread has a connection of its own, to an empty database.
    if url is not None and url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise StudyError(
            f"trials run on threads of their own, which cannot share the study's storage {url}: a SQLite database in memory belongs "
            "to one thread. Leave storage= out, as optuna.create_study() keeps trials in memory, or name a file: "
            "storage='sqlite:///study.sqlite3'"
        )


def shareable(study: optuna.Study) -> optuna.Study:
    """Return a copy of the study that other processes can open: paths of its storage are absolute.

    Raises StudyError for a storage that other processes cannot open.
    """
    storage: Any = study._storage
    inner: Any = getattr(storage, "_backend", storage)
    if isinstance(storage, optuna.storages.JournalStorage):
        # A worker runs in another folder: a relative path would make a new, empty storage there.
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
        return with_storage(study, _with_backend(storage, changed))
    if isinstance(inner, optuna.storages.RDBStorage):
        from sqlalchemy.engine import make_url

        url = make_url(inner.url)
        if url.get_backend_name() != "sqlite":
            return study
        if url.database and url.database != ":memory:":
            changed = copy.copy(inner)
            changed.url = url.set(database=os.path.abspath(url.database)).render_as_string(hide_password=False)
            return with_storage(study, changed if inner is storage else _with_backend(storage, changed))
    raise StudyError(
        "cluster= spreads trials over processes, which meet in the study's storage: it must be an RDB or a journal storage, "
        f"in a file or on a server; this one is in memory ({type(inner).__name__}). Make it with "
        "optuna.create_study(storage='sqlite:///study.db')"
    )


def with_storage(study: optuna.Study, storage: Any) -> optuna.Study:
    """Return a copy of the study that uses another storage."""
    changed = copy.copy(study)
    changed._storage = storage
    return changed


def _with_backend(storage: Any, backend: Any) -> Any:
    changed = copy.copy(storage)
    changed._backend = backend
    return changed


_NAME = "waterflow:name"  # system attribute: the name of a study on a cluster


def lasting_name(study: optuna.Study) -> str:
    """Return a name that this study keeps in its storage, and that no other study has, even one with an equal name."""
    storage: Any = study._storage
    known = storage.get_study_system_attrs(study._study_id).get(_NAME)
    if known is None:
        storage.set_study_system_attr(study._study_id, _NAME, secrets.token_hex(6))
        # Read again: if two processes wrote at the same time, both use the one that the storage kept.
        known = storage.get_study_system_attrs(study._study_id)[_NAME]
    return str(known)


def trial_of(study: optuna.Study, number: int) -> Trial:
    """Return a trial that another process asked for."""
    return Trial(study, study._storage.get_trial_id_from_study_id_trial_number(study._study_id, number))


def refresh(trial: Trial) -> None:
    """Read again what another process wrote of the trial, as ``tell`` uses the cached values."""
    trial._cached_frozen_trial = trial.storage.get_trial(trial._trial_id)


_RUN = "waterflow:run"  # system attributes of trials: the run that a trial belongs to, with the seed of its first run;
_DEATHS = "waterflow:deaths"  # and how many deaths of its process it has seen, and how far it had come then
_RUNS = "waterflow:runs"  # of a study: its runs and their seeds by folder


def check_lasting(study: optuna.Study) -> None:
    """Raise StudyError for a storage that ends with its process."""
    storage: Any = study._storage
    if isinstance(getattr(storage, "_backend", storage), optuna.storages.InMemoryStorage):
        raise StudyError(
            "checkpoint= lets a study go on in another process, and this one is in memory, where it ends with its own. Make it with "
            "optuna.create_study(study_name='a', storage='sqlite:///study.sqlite3', load_if_exists=True)"
        )


def run_in(study: optuna.Study, folder: str) -> tuple[str, int] | None:
    """Return the run that has this folder, and its seed; None if there is none."""
    found = study._storage.get_study_system_attrs(study._study_id).get(_RUNS, {}).get(folder)
    return None if found is None else (str(found[0]), int(found[1]))


def set_run_in(study: optuna.Study, folder: str, run: str, seed: int) -> None:
    """Store what ``run_in`` returns."""
    known = study._storage.get_study_system_attrs(study._study_id).get(_RUNS, {})
    study._storage.set_study_system_attr(study._study_id, _RUNS, {**known, folder: [run, seed]})


def run_of(trial: FrozenTrial) -> tuple[str, int] | None:
    """Return the run that a trial belongs to, and the seed of the run in which it began; None without a mark."""
    mark = trial.system_attrs.get(_RUN)
    return None if mark is None else (str(mark[0]), int(mark[1]))


def trials_of_run(study: optuna.Study, run: str) -> list[FrozenTrial]:
    """Return the trials that ``ask_marked`` gave to a run, in the order of their numbers."""
    return [trial for trial in study.get_trials(deepcopy=False) if (run_of(trial) or ("",))[0] == run]


def ask_marked(study: optuna.Study, run: str, seed: int) -> Trial:
    """Ask for a trial that bears the run's mark: a waiting one, if there is one.

    It is marked while it waits, so that none is left without a mark if the process dies in between.
    """

    def mark(trial: FrozenTrial) -> None:
        known = run_of(trial)
        if known is None or known[0] != run:  # what it has reported followed from the seed that it has
            study._storage.set_trial_system_attr(trial._trial_id, _RUN, [run, seed if known is None else known[1]])

    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    if waiting:
        mark(waiting[0])
    else:
        study.add_trial(optuna.create_trial(state=TrialState.WAITING, system_attrs={_RUN: [run, seed]}))
    trial = study.ask()
    mark(frozen(trial))  # another process may have been quicker
    return trial


def fail(study: optuna.Study, number: int) -> None:
    """Tell a RUNNING trial as FAIL, as Optuna does with stale ones: without its sampler."""
    with contextlib.suppress(RuntimeError):  # it was told meanwhile
        study._storage.set_trial_state_values(_id_of(study, number), state=TrialState.FAIL)


def next_waiting(study: optuna.Study) -> int | None:
    """Return the number of the trial that ``ask`` would take up."""
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    return waiting[0].number if waiting else None


def set_back(study: optuna.Study, number: int) -> bool:
    """Let a RUNNING trial wait again: ``ask`` takes it up with its number, values and reports. False if it has ended."""
    storage: Any = study._storage
    try:
        storage.set_trial_state_values(_id_of(study, number), state=TrialState.WAITING)
    except (RuntimeError, KeyError):  # told by another process
        return False
    return True


def deaths_of(trial: FrozenTrial) -> tuple[int, int]:
    """Return how many deaths of its process a trial has seen, and its progress then: checkpointed steps and reports."""
    count, progress = trial.system_attrs.get(_DEATHS, (0, 0))
    return int(count), int(progress)


def set_deaths(study: optuna.Study, number: int, count: int, progress: int) -> None:
    """Store what ``deaths_of`` returns."""
    study._storage.set_trial_system_attr(_id_of(study, number), _DEATHS, [count, progress])


def retried(trial: FrozenTrial) -> list[int]:
    """Return the numbers of the trials that this one repeats, the latest first, as Optuna's retry callback names them."""
    return [int(number) for number in reversed(trial.system_attrs.get("retry_history", ()))]


def frozen(trial: Trial) -> FrozenTrial:
    """Return what is known of a trial here, without a call of the storage."""
    return trial._cached_frozen_trial


def stale(study: optuna.Study) -> set[int] | None:
    """Return the numbers of RUNNING trials whose heartbeats have ended; None if the storage records none."""
    storage: Any = study._storage
    if not _heartbeats(storage):
        return None
    return {storage.get_trial(trial_id).number for trial_id in storage._get_stale_trial_ids(study._study_id)}


def beat(study: optuna.Study, number: int) -> None:
    """Record a heartbeat of a trial, if the storage does: it becomes stale if no other process records more."""
    storage: Any = study._storage
    if _heartbeats(storage):
        storage.record_heartbeat(_id_of(study, number))


def beats_every(study: optuna.Study) -> float:
    """Return the seconds between two heartbeats; 0 if the storage records none."""
    storage: Any = study._storage
    return float(storage.get_heartbeat_interval()) if _heartbeats(storage) else 0.0


def _heartbeats(storage: Any) -> bool:
    interval = getattr(storage, "get_heartbeat_interval", None)
    return interval is not None and interval() is not None


def _id_of(study: optuna.Study, number: int) -> int:
    return study._storage.get_trial_id_from_study_id_trial_number(study._study_id, number)


class _TakenUp(Trial):
    """A trial that has reported before: what the storage knows is not reported again, and only the last of it is judged."""

    _waterflow_known: frozenset[int]
    _waterflow_again: int | None = None  # the known step that was reported last

    def report(self, value: float, step: int) -> None:
        self._waterflow_again = int(step) if step in self._waterflow_known else None
        if self._waterflow_again is None:
            super().report(value, step)

    def should_prune(self) -> bool:
        # The last one is: the process may have died between the report and the question.
        judged = self._waterflow_again is not None and self._waterflow_again < max(self._waterflow_known)
        return False if judged else super().should_prune()


def take_up(trial: Trial) -> None:
    """Make the trial's reports of before stand, from now on."""
    known = frozenset(frozen(trial).intermediate_values)
    if known and not isinstance(trial, _TakenUp):
        trial.__class__ = type("_TakenUp", (_TakenUp, trial.__class__), {})
    if isinstance(trial, _TakenUp):
        trial._waterflow_known, trial._waterflow_again = known, None


class _Observed(Trial):
    """A trial whose reports are seen by waterflow, too."""

    _waterflow_observe: Callable[[int, float], None]

    def report(self, value: float, step: int) -> None:
        super().report(value, step)
        self._waterflow_observe(int(step), float(value))

    def __reduce__(self) -> Any:
        return _plain, ({name: value for name, value in vars(self).items() if not name.startswith("_waterflow")},)


def _plain(state: dict[str, Any]) -> Trial:
    trial = Trial.__new__(Trial)  # the constructor would ask the sampler
    vars(trial).update(state)
    return trial


def observe(trial: Trial, observe: Callable[[int, float], None]) -> None:
    """Call ``observe(step, value)`` after each report that the trial makes from now on."""
    if not isinstance(trial, _Observed):
        trial.__class__ = type("_Observed", (_Observed, trial.__class__), {})
    trial._waterflow_observe = observe  # type: ignore[attr-defined]
