"""Record of a study: its reports, the spells in which trials ran, and a picture of both."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEN = 10
_COLOURS = {"complete": "#3b6fb6", "unfinished": "#4fa89b", "pruned": "#f0a83c", "fail": "#d9544d", "waiting": "#a9adb3"}
_MOST_BARS = 400  # of a picture; further trials would be thinner than a pixel


@dataclass(frozen=True)
class Report:
    """A trial's report: seconds since the study began, steps and evaluations of all trials until then, its number, its value."""

    seconds: float
    steps: int
    trial: int
    value: float


@dataclass(frozen=True)
class Spell:
    """Seconds since the study began, from and to which a trial ran."""

    trial: int
    began: float
    ended: float


@dataclass(frozen=True)
class StudyTimeline:
    """When a study's trials ran and what they reported. Made by ``StudySummary.timeline()``.

    ``paused`` has the numbers of trials that were paused, ``steps`` training steps by trial. ``states`` at the end are complete,
    unfinished (ended by the deadline), pruned, fail, or waiting (for the next call).
    """

    seconds: float
    maximize: bool
    reports: tuple[Report, ...]
    spells: tuple[Spell, ...]
    paused: frozenset[int]
    states: Mapping[int, str]
    steps: Mapping[int, int]
    winner: int | None

    def leads(self) -> list[Report]:
        """Return the reports that changed the best value of all trials that were told as complete, in order of time.

        A trial counts with its latest report.
        """
        sign, latest, leader = 1.0 if self.maximize else -1.0, dict[int, float](), -1
        found: list[Report] = []
        for report in self.reports:
            if self.states.get(report.trial) not in ("complete", "unfinished"):
                continue
            before = latest.get(report.trial, -math.inf)
            latest[report.trial] = sign * report.value
            if report.trial == leader and latest[leader] < before:
                leader = max(latest, key=lambda trial: (latest[trial], trial == self.winner))
            elif leader < 0 or (latest[report.trial], report.trial == self.winner) > (latest[leader], leader == self.winner):
                leader = report.trial
            elif report.trial != leader:
                continue
            found.append(Report(report.seconds, report.steps, leader, sign * latest[leader]))
        return found

    def __str__(self) -> str:
        leads = self.leads()
        if not leads or leads[-1].trial != self.winner:  # none, of a call before, or with a value that it did not report
            return ""
        since = leads[-1]
        for lead in reversed(leads):
            if lead.trial != self.winner:
                break
            since = lead
        every = max(1, sum(self.steps.values()))
        until_then = since.steps / max(1, self.reports[-1].steps)
        ended = [report.trial for report in sorted(self._last(), key=lambda r: -r.value if self.maximize else r.value)]
        shares = {"it": [self.winner], "the ten best": ended[:TEN], "trials that were paused": self.paused}
        spent = ", ".join(
            f"{sum(self.steps.get(t, 0) for t in trials) / every:.0%} on {who}" for who, trials in shares.items() if trials
        )
        return (
            f"trial {self.winner} led since {_time(since.seconds)} of {_time(self.seconds)}, after {until_then:.0%} of all "
            f"steps; steps: {spent}"
        )

    def _last(self) -> list[Report]:
        last = {report.trial: report for report in self.reports if self.states.get(report.trial) in ("complete", "unfinished")}
        return list(last.values())

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draw the best value over time above the trials as bars, as a PNG 1875 pixels wide. Raises ValueError without trials."""
        if not self.spells:
            raise ValueError("no trial ran: there is nothing to draw")
        from matplotlib.figure import Figure  # slow to import

        shown = sorted({spell.trial for spell in self.spells})[:_MOST_BARS]
        figure = Figure(figsize=(12.5, 4 + min(8, 0.12 * len(shown) + 1)), dpi=150, layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, min(8, 0.12 * len(shown) + 1)])
        self._draw_best(top)
        self._draw_trials(bottom, shown)
        figure.savefig(path, format="png")

    def _draw_best(self, ax: Axes) -> None:
        leads = self.leads()
        ax.scatter([r.seconds for r in self.reports], [r.value for r in self.reports], s=4, color="#c9ccd1", label="reports")
        if leads:
            times, values = [*(lead.seconds for lead in leads), self.seconds], [*(lead.value for lead in leads), leads[-1].value]
            ax.step(times, values, where="post", color="#3b6fb6", label="the leading trial's latest")
            ax.legend(loc="best", frameon=False, fontsize=9)
        ax.set(ylabel="value")
        ax.set_title(str(self) or "no trial was complete", loc="left", fontsize=10.5)

    def _draw_trials(self, ax: Axes, shown: list[int]) -> None:
        rows = {trial: row for row, trial in enumerate(shown)}
        spells: dict[int, list[Spell]] = {}
        for spell in self.spells:
            if spell.trial in rows:
                spells.setdefault(spell.trial, []).append(spell)
        for trial, mine in spells.items():
            colour, row = _COLOURS[self.states.get(trial, "waiting")], rows[trial]
            if len(mine) > 1:
                ax.plot([mine[0].ended, mine[-1].began], [row, row], color=colour, lw=0.6, alpha=0.6)
            bars = [(spell.began, spell.ended - spell.began) for spell in mine]
            ax.broken_barh(bars, (row - 0.4, 0.8), facecolors="#111111" if trial == self.winner else colour, lw=0)
        for state, colour in [*_COLOURS.items(), ("best", "#111111")]:
            if state == "best" or state in self.states.values():
                ax.barh([0], [0], color=colour, label=state)
        ax.legend(
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            frameon=False,
            fontsize=9,
            title="bars: running\nlines: paused",
            title_fontsize=9,
        )
        few = shown if len(shown) <= 60 else shown[:: len(shown) // 30]
        ax.set_yticks([rows[trial] for trial in few], [str(trial) for trial in few], fontsize=7)
        ax.set(ylim=(len(shown) - 0.5, -0.5), ylabel="trial", xlabel="seconds since the study began")


def _time(seconds: float) -> str:
    return f"minute {seconds / 60:.0f}" if seconds >= 600 else f"second {seconds:.3g}"


class History:
    """Records what a StudyTimeline is made of. Reports come from the trials' threads, one after another for each trial."""

    def __init__(self, steps: Callable[[], int]) -> None:
        self._began = time.perf_counter()
        self._steps = steps
        self._since: dict[int, float] = {}
        self._spells: list[Spell] = []
        self._paused: set[int] = set()
        self._reports: list[Report] = []
        self.states: dict[int, str] = {}

    @property
    def now(self) -> float:
        """Seconds since the study began."""
        return time.perf_counter() - self._began

    def runs(self, trial: int) -> None:
        """Note that a trial runs from now on."""
        self._since[trial] = self.now

    def runs_for(self, trial: int) -> float:
        """Return the seconds that a trial has run, this time."""
        now = self.now
        return now - self._since.get(trial, now)

    def stands(self, trial: int, state: str = "waiting") -> float:
        """Note that a trial does not run any more; returns the seconds that it ran, this time."""
        self.states[trial] = state
        if state == "waiting":
            self._paused.add(trial)
        began = self._since.pop(trial, None)
        if began is None:
            return 0.0
        self._spells.append(Spell(trial, began, self.now))
        return self._spells[-1].ended - began

    def report(self, trial: int, value: float) -> None:
        """Note a trial's report."""
        self._reports.append(Report(self.now, self._steps(), trial, value))

    def timeline(self, maximize: bool, steps: Mapping[int, int], winner: int | None) -> StudyTimeline:
        """Return all that was recorded."""
        reports = tuple(sorted(self._reports, key=lambda report: report.seconds))
        return StudyTimeline(
            self.now, maximize, reports, tuple(self._spells), frozenset(self._paused), dict(self.states), steps, winner
        )
