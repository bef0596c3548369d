"""The study's storage as a process of its trials sees it: each call is made by the caller of ``optimize``, who owns it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Container
from typing import Any

from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState


class Remote(BaseStorage):
    """Makes all calls through ``call(name, *args)``. Thread-safe. Trials that have ended are kept: samplers read all of them."""

    def __init__(self) -> None:
        self.call: Callable[..., Any]
        self._ended: dict[int, FrozenTrial] = {}  # by number
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, _: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """See ``BaseStorage``. Only what has changed comes from the caller."""
        with self._lock:  # answers are taken up in their order
            news: list[FrozenTrial] = self.call("get_all_trials", study_id)
            self._ended |= {trial.number: trial for trial in news if trial.state.is_finished()}
            there = self._ended | {trial.number: trial for trial in news}
        trials = [trial for _, trial in sorted(there.items()) if states is None or trial.state in states]
        return copy.deepcopy(trials) if deepcopy else trials

    def remove_session(self) -> None:
        """Do nothing: the session is the caller's."""


def _through(name: str) -> Callable[..., Any]:
    def call(self: Remote, *args: Any, **more: Any) -> Any:
        return self.call(name, *args, **more)

    call.__name__ = name
    return call


# All that a storage has to be able to, in the present version of Optuna, and what another one may do in one call.
_CALLS = {name for name in dir(BaseStorage) if callable(getattr(BaseStorage, name)) and not name.startswith("_")}
for _name in _CALLS - set(vars(Remote)):
    setattr(Remote, _name, _through(_name))
Remote.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


class News:
    """The trials of a storage that one process has not heard of."""

    def __init__(self) -> None:
        self._heard: set[int] = set()  # numbers of trials that have ended

    def of(self, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        """Return the trials that it does not know, or that may have changed."""
        news = [trial for trial in trials if trial.number not in self._heard]
        self._heard |= {trial.number for trial in news if trial.state.is_finished()}
        return news
