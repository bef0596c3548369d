"""TrialOrder: the table of a study's trials, from which a policy chooses."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from waterflow.errors import StudyError
from waterflow.study.order.fifo import Fifo
from waterflow.study.order.policy import Policy, TrialProgress
from waterflow.study.order.promising import Promising

POLICIES: dict[str, type[Policy]] = {"fifo": Fifo, "promising": Promising}


def policy_of(order: Any) -> Policy:
    """Return the policy of ``optimize(order=)``. Raises StudyError."""
    if isinstance(order, Policy):
        return order
    if isinstance(order, str) and order in POLICIES:
        return POLICIES[order]()
    raise StudyError(f"order must be {' or '.join(map(repr, POLICIES))}, or a waterflow.study.order.Policy; got {order!r}")


class TrialOrder:
    """All trials as far as they are known, and those of them that a policy lets run. Thread-safe."""

    def __init__(self, policy: Policy, maximize: bool) -> None:
        self.pauses = not isinstance(policy, Fifo)  # False: a trial that runs goes on to its end
        self._policy = policy
        self._sign = 1.0 if maximize else -1.0
        self._trials: dict[int, TrialProgress] = {}
        self._steps: dict[int, set[int]] = {}  # of each trial's reports
        self._leaving: set[int] = set()  # trials whose lane is free for another, and that stand soon
        self._following = 0  # the number of the next trial
        self._lock = threading.Lock()

    def add(self, number: int, reports: Mapping[int, float], ended: bool = False) -> None:
        """Add a trial that waits, or has ended, with its reports by step; larger steps come later."""
        made = TrialProgress(number, [self._sign * reports[step] for step in sorted(reports)], "ended" if ended else "ready")
        with self._lock:
            self._trials[number], self._steps[number] = made, {*reports}
            self._following = max(self._following, number + 1)

    def runs(self, number: int) -> None:
        """Note that a trial runs from now on."""
        with self._lock:
            self._trials[number].state = "running"
            self._leaving.discard(number)

    def stands(self, number: int) -> None:
        """Note that a trial waits from now on."""
        with self._lock:
            self._trials[number].state = "ready"
            self._leaving.discard(number)

    def ended(self, number: int, forget: bool = False) -> None:
        """Note that a trial has ended; ``forget`` one with which others are not to be compared."""
        with self._lock:
            self._leaving.discard(number)
            if forget or not self.pauses:
                del self._trials[number], self._steps[number]
            else:
                self._trials[number].state = "ended"

    def report(self, number: int, step: int, value: float) -> bool:
        """Note a trial's report; False if it has made one at this step before."""
        with self._lock:
            if step in self._steps[number]:
                return False
            self._steps[number].add(step)
            self._trials[number].reports.append(self._sign * value)
            return True

    def goes_on(self, number: int, slots: int, new: int) -> bool:
        """Return True if a running trial, which has made a report, goes on; else its lane is free, and it stands soon.

        ``slots`` trials may run at a time, and ``new`` more may begin.
        """
        with self._lock:
            trial = self._trials[number]
            if not self._policy.asks(trial):
                return True
            trial.state = "ready"
            try:
                goes_on = trial in self._chosen(slots, new)
            finally:
                trial.state = "running"
            if not goes_on:
                self._leaving.add(number)
            return goes_on

    def next(self, slots: int, new: int, running: bool) -> TrialProgress | None:
        """Return the trial that is to run now, or None. Raises StudyError if none is to, none is ``running``, and some could."""
        with self._lock:
            chosen = self._chosen(slots, new)
            waiting = self._waiting()
            if not chosen and not running and (new or waiting):
                raise StudyError(
                    f"{type(self._policy).__name__}.choose() chose none of {new} new trials and of trials [{_numbers(waiting)}], which "
                    "wait, while no trial runs: the study would wait for ever. Let it choose one of them"
                )
            return chosen[0] if chosen else None

    def _chosen(self, slots: int, new: int) -> list[TrialProgress]:
        running = sum(trial.state == "running" for trial in self._trials.values()) - len(self._leaving)
        lanes = max(1, slots - running)
        fresh = [TrialProgress(self._following + i, state="new") for i in range(min(new, lanes))]
        given = [*self._trials.values(), *fresh]
        chosen = list(self._policy.choose(given, lanes))
        if wrong := [trial for trial in chosen if trial.state not in ("new", "ready")]:
            raise StudyError(
                f"{type(self._policy).__name__}.choose() may return trials that are new or ready; trials {_numbers(wrong)} are "
                f"{', '.join(sorted({trial.state for trial in wrong}))}"
            )
        return chosen[:lanes]

    def _waiting(self) -> list[TrialProgress]:
        return [trial for trial in self._trials.values() if trial.state == "ready"]


def _numbers(trials: Iterable[TrialProgress]) -> str:
    return ", ".join(str(trial.number) for trial in trials)
