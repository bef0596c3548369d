"""StudyRun: the trials that one call of optimize runs; with ``checkpoint=`` they go on where a call before it ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from waterflow.errors import CheckpointError
from waterflow.executor.data.loader import why_not_again
from waterflow.job import Job, JobResult
from waterflow.study.optuna_compat import (
    ask_marked,
    beat,
    beats_every,
    check_lasting,
    deaths_of,
    fail,
    fail_stale,
    frozen,
    lasting_name,
    next_waiting,
    retried,
    run_in,
    run_of,
    set_back,
    set_deaths,
    set_run_in,
    stale,
    take_up,
    trials_of_run,
)
from waterflow.study.values import UnfitCheckpointError
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.checkpoint_dir import Checkpointing, Checkpoints, replace_text, steps_of
from waterflow.training.runner import JobRunner, draw_seed

logger = logging.getLogger("waterflow")

# Deaths of its process that a trial was under way at, without progress between. Twice alone: a process that others kill may hit one
# that has just begun.
ALONE_AFTER, FAIL_AFTER = 2, 4
BEATS = 10  # of trials that wait, at a time: each one is written to the storage
LOOK_AGAIN = 1.0  # seconds between two looks for trials of a process whose heartbeats may end


class StudyRun:
    """The trials of one call. What it does not finish has failed."""

    lasts = False  # True: what it does not finish waits for the next call
    files: Checkpoints | None = None

    def __init__(self, study: optuna.Study, seed: int | None = None) -> None:
        self._study = study
        self._seed = draw_seed() if seed is None else seed
        self.begun = 0  # trials that were asked for, by calls before, too
        self.alone: set[int] = set()  # trials that may only run alone
        self._beaten: dict[int, float] = {}  # when trials that wait had their last heartbeat

    @property
    def seed(self) -> int:
        """The base of its trials' seeds."""
        return self._seed

    @property
    def waiting(self) -> int:
        """The number of trials that a call before had begun, and that wait to be asked for first."""
        return 0

    def wanted(self) -> bool:
        """Return True if one more trial may be asked for."""
        return True

    def ask(self) -> Trial:
        """Ask for the next trial."""
        fail_stale(self._study)
        trial = self._study.ask()
        self.begun += 1
        return trial

    def seed_of(self, trial: Trial) -> int:
        """Return the seed of a trial's own random numbers, which follows from its first run's and from its number."""
        _, seed = run_of(frozen(trial)) or ("", self._seed)
        # A hash: numbers that lie side by side would give generators that do.
        return int.from_bytes(hashlib.blake2b(f"{seed} {trial.number}".encode(), digest_size=4).digest()) >> 1

    def under_way(self, numbers: Collection[int]) -> None:
        """Note which trials run from now on. Those that stand aside are not at fault if the process dies."""

    def next_is_alone(self) -> bool:
        """Return True if the next trial may only run alone."""
        return bool(self.alone) and next_waiting(self._study) in self.alone

    def waits_for_others(self) -> bool:
        """Return True if there are trials that another process seems to run."""
        return False

    def keep_alive(self, trials: Collection[Trial]) -> None:
        """Record heartbeats of trials that wait for their turn, and have no thread that does: some at each call."""
        now, every = time.monotonic(), beats_every(self._study) / 4
        due = [trial for trial in trials if every and now - self._beaten.get(trial.number, 0.0) >= every]
        for trial in due[:BEATS]:
            self._beaten[trial.number] = now
            beat(self._study, trial.number)

    def train(
        self, trial: Trial, job: Job, began: Callable[[JobRunner], None], resume: Checkpoint | None, **settings: Any
    ) -> JobResult:
        """Train a trial's job; ``resume`` and ``settings`` are those of ``JobRunner``, and ``began`` is given the runner."""
        runner = JobRunner(job, resume=resume, **settings)
        began(runner)
        return runner.run()

    def began_anew(self, trial: Trial) -> None:
        """Note that a trial has no job, or one without a checkpoint, and began at its beginning."""

    def kept(self) -> Iterable[tuple[FrozenTrial, JobResult]]:
        """Return trials of calls before whose weights were kept, and their results."""
        return ()

    def keep(self, trial: Trial, result: JobResult) -> None:
        """Keep a result with its weights. Called before the study is told."""

    def told(self, trial: Trial, with_weights: Collection[int]) -> None:
        """Forget what a trial that was told needs no more, and all weights but those of the trials named."""

    def last(self) -> None:
        """Write the jobs under way, as far as half a second allows."""

    def leave(self, trial: Trial) -> None:
        """End a trial that the study is not told of."""
        self._study.tell(trial, state=TrialState.FAIL)


class LastingRun(StudyRun):
    """Trials that go on in the next call, whatever has ended this one.

    The study's storage is the truth: each trial bears the run's mark there before it runs, so that one that is RUNNING when a
    call begins was left by a process that has died. The folder has what the storage cannot hold: checkpoints of trials under way,
    and kept weights. One call at a time has the folder.
    """

    lasts = True

    def __init__(self, study: optuna.Study, files: Checkpoints) -> None:
        super().__init__(study)
        check_lasting(study)
        self.files: Checkpoints = files
        self._writing = Checkpointing(files)
        self._mine: set[int] = set()  # trials that this call asked for
        self._taken_up: set[int] = set()  # trials that a call before had begun
        self._deaths: dict[int, int] = {}
        self._beating: set[int] = set()  # RUNNING in another process, or in one that has just died
        self._looked = 0.0
        self._with_weights: set[int] = set()
        self._lock = threading.Lock()
        self._said: set[str] = set()

    @contextlib.contextmanager
    def opened(self) -> Iterator[LastingRun]:
        """Hold the folder inside, and let trials that were under way wait to be taken up. Raises CheckpointError."""
        with self.files.opened(()), self._writing.under_way():
            self._name, self._seed = self._known()
            self._ran = self._noted()  # before this call notes its own
            self._take_back()
            trials = trials_of_run(self._study, self._name)
            repeated = {number for trial in trials if not trial.state.is_finished() for number in retried(trial)}
            ended = [trial for trial in trials if trial.state.is_finished()]
            for trial in ended:
                if trial.number not in repeated:
                    self.files.remove(folder_of(trial.number))
            if trials:
                logger.warning(
                    "the study goes on from %s: %d trials had ended, %d are taken up; n_trials= counts all of them",
                    self.files.folder,
                    len(ended),
                    len(self._taken_up),
                )
            yield self

    def _known(self) -> tuple[str, int]:
        folder, study = self.files.folder, lasting_name(self._study)
        path, where = folder / "study.json", str(folder.resolve())
        if (folder / "seeds.json").exists():
            raise CheckpointError(f"{folder} has the checkpoints of jobs of train(); give the study a folder of its own")
        try:
            known = json.loads(path.read_text())
            if known["study"] != study:
                raise CheckpointError(
                    f"{folder} has the checkpoints of another study than {self._study.study_name!r}; give this one a folder of its own"
                )
            run, seed = str(known["run"]), int(known["seed"])
        except FileNotFoundError:
            run, seed = run_in(self._study, where) or (secrets.token_hex(6), self._seed)  # known: its folder was lost
            if any(folder.glob("trial-*")):
                raise CheckpointError(
                    f"{folder} has checkpoints of trials and no study.json, which says whose they are; give the study a folder of its "
                    "own, or remove them"
                ) from None
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(
                f"{path} is damaged, and it says whose the checkpoints beside it are. Remove {folder}, and trials that were under way "
                "begin anew"
            ) from None
        # Before the first trial bears its mark, or nobody would know whose it is.
        if run_in(self._study, where) != (run, seed):
            set_run_in(self._study, where, run, seed)
        replace_text(path, json.dumps({"study": study, "run": run, "seed": seed}))
        return run, seed

    # -- trials of a process that has died

    def _take_back(self) -> None:
        dead, beating, ran = stale(self._study), set(), self._ran
        for trial in trials_of_run(self._study, self._name):
            if trial.state != TrialState.RUNNING or trial.number in self._mine:
                continue
            if dead is None or trial.number in dead:
                if ran is None or trial.number in ran:
                    self._let_wait(trial)
                else:
                    set_back(self._study, trial.number)
                continue
            beating.add(trial.number)
            if trial.number not in self._beating:
                beat(self._study, trial.number)  # a process that died before its first one would never become stale
        self._beating, self._looked = beating, time.monotonic()
        trials = trials_of_run(self._study, self._name)
        waiting = [trial for trial in trials if trial.state == TrialState.WAITING]
        repeated = {number for trial in trials for number in retried(trial)}
        self.begun = sum(trial.state != TrialState.WAITING and trial.number not in repeated for trial in trials)
        self._taken_up |= {trial.number for trial in waiting if trial.params}
        self._deaths |= {trial.number: deaths_of(trial)[0] for trial in waiting}
        self.alone = {number for number, deaths in self._deaths.items() if deaths >= ALONE_AFTER}

    def _noted(self) -> set[int] | None:
        """Return the trials that ran when the process died; None if that is not known."""
        try:
            return {int(number) for number in json.loads((self.files.folder / "running.json").read_text())}
        except (OSError, ValueError, TypeError):
            return None

    def _let_wait(self, trial: FrozenTrial) -> None:
        number, states = trial.number, self.files.states(folder_of(trial.number))
        steps = steps_of(states[-1]) if states else 0
        (count, before), progress = deaths_of(trial), steps + len(trial.intermediate_values)
        count = 1 if progress > before else count + 1
        if count >= FAIL_AFTER:
            fail(self._study, number)
            logger.warning(
                "trial %d is told as FAIL: its process has died %d times while it ran, twice while it ran alone, without a new "
                "checkpoint or report between. Its values: %s",
                number,
                count,
                trial.params,
            )
        elif set_back(self._study, number):
            set_deaths(self._study, number, count, progress)

    def waits_for_others(self) -> bool:
        """See StudyRun."""
        if self._beating and time.monotonic() - self._looked >= LOOK_AGAIN:
            told = ", ".join(map(str, sorted(self._beating)))
            self._say_once(
                "by their heartbeats another process runs trials %s of this run; they are taken up if it has died", told
            )
            self._take_back()
        return bool(self._beating)

    def leave(self, trial: Trial) -> None:
        """See StudyRun."""
        set_back(self._study, trial.number)

    # -- trials of this call

    @property
    def waiting(self) -> int:
        """See StudyRun."""
        return len(self._taken_up - self._mine)

    def under_way(self, numbers: Collection[int]) -> None:
        """See StudyRun."""
        path = self.files.folder / "running.json"
        if not self._writing.attempt("running.json", lambda: replace_text(path, json.dumps([*numbers]))):
            with contextlib.suppress(OSError):
                path.unlink()  # not known: a death counts for all

    def ask(self) -> Trial:
        """See StudyRun."""
        if self._beating:  # before Optuna fails them
            self._take_back()
        fail_stale(self._study)
        trial = ask_marked(self._study, self._name, self._seed)
        beat(self._study, trial.number)  # its last one may be its dead process's: the next to look would fail it
        self._mine.add(trial.number)
        self.begun += 1
        take_up(trial)
        return trial

    def train(
        self, trial: Trial, job: Job, began: Callable[[JobRunner], None], resume: Checkpoint | None, **settings: Any
    ) -> JobResult:
        """See StudyRun. Raises UnfitCheckpointError if the trial's checkpoints are damaged, or of another job."""
        found, name = resume, ""
        try:
            for name in map(folder_of, (trial.number, *retried(frozen(trial)))):
                found = found or self.files.last(name, job.name)
                if found is not None:
                    break
            runner = JobRunner(job, resume=found, **settings)
        except (CheckpointError, OSError) as error:
            raise self._cannot_go_on(trial, name, error) from error
        if found is None:
            self.began_anew(trial)
        elif resume is None:
            self._report(trial, found)
        began(runner)
        with self._written(trial, job, runner):
            result = runner.run()
        if found is not None and isinstance(result.error, CheckpointError):  # its model was not known before
            raise self._cannot_go_on(trial, name, result.error) from result.error
        return result

    def _report(self, trial: Trial, found: Checkpoint) -> None:
        # What the trial that this one repeats had reported: a pruner compares with all epochs.
        known = frozen(trial).intermediate_values
        for epoch, metrics in enumerate(found.state["metrics"] if len(self._study.directions) == 1 else ()):
            if epoch not in known:
                trial.report(next(iter(metrics.values())), epoch)

    def _cannot_go_on(self, trial: Trial, name: str, error: Exception) -> UnfitCheckpointError:
        return UnfitCheckpointError(
            f"trial {trial.number} cannot go on from its checkpoint in {self.files.of(name)}: {error}. Nothing was removed and the "
            "trial waits: call optimize() again with the code that wrote it, or remove that folder, and the trial begins anew"
        )

    @contextlib.contextmanager
    def _written(self, trial: Trial, job: Job, runner: JobRunner) -> Iterator[None]:
        if (why := why_not_again(f"data of job {job.name!r}", job.data, job.data)) is not None:
            self._say_once("a trial whose process dies will begin anew: %s", why)
            yield
            return
        # The more often it has died, the shorter a step forward counts.
        self._writing.begin(runner, folder_of(trial.number), sooner=4 ** self._deaths.get(trial.number, 0))
        try:
            yield
        finally:
            self._writing.end(runner)

    def began_anew(self, trial: Trial) -> None:
        """See StudyRun."""
        if trial.number in self._taken_up:
            self._say_once(
                "trial %d, and others like it, was under way and begins anew: it is a loop of its own, or there is no checkpoint of it "
                "yet. Objectives that return a wf.Job go on from their last checkpoint",
                trial.number,
            )

    def _say_once(self, text: str, *values: Any) -> None:
        with self._lock:
            if text in self._said:
                return
            self._said.add(text)
        logger.warning(text, *values)

    # -- results

    def kept(self) -> Iterator[tuple[FrozenTrial, JobResult]]:
        """See StudyRun."""
        for trial in trials_of_run(self._study, self._name):
            name = folder_of(trial.number)
            if trial.state != TrialState.COMPLETE or not self.files.has_result(name):
                continue
            try:
                result = self.files.result(name)
            except (CheckpointError, OSError) as error:
                logger.warning("the weights of trial %d are lost: %s", trial.number, error)
                continue
            self._with_weights.add(trial.number)
            yield trial, result

    def keep(self, trial: Trial, result: JobResult) -> None:
        """See StudyRun."""
        name = folder_of(trial.number)
        if self._writing.attempt(name, lambda: self.files.keep_result(name, result)):
            self._with_weights.add(trial.number)

    def told(self, trial: Trial, with_weights: Collection[int]) -> None:
        """See StudyRun."""
        self.files.remove(folder_of(trial.number))
        self._writing.forget(folder_of(trial.number))
        # The best of before stays until what is better now could be written.
        for number in self._with_weights - {*with_weights} if self._with_weights.issuperset(with_weights) else ():
            self._with_weights.remove(number)
            self.files.remove(folder_of(number), result=True)

    def last(self) -> None:
        """See StudyRun."""
        self._writing.last()


def folder_of(number: int) -> str:
    """Return the name of a trial's folder of checkpoints."""
    return f"trial-{number}"
