"""optimize(): run an Optuna study whose trials train side by side on one device, or on a cluster."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import optuna

from waterflow.errors import AuditError, InvalidJobError, JobTimeoutError, StudyError, explained
from waterflow.executor.engine import Engine
from waterflow.executor.program.capture_budget import TrialLengths
from waterflow.executor.timeline import Timeline
from waterflow.job import Job, why_no_limit
from waterflow.study.cluster_trials import TrialDevices, spread
from waterflow.study.coordinator import Objective, StudyCallback, StudyRunner
from waterflow.study.optuna_compat import check_threads, in_loop
from waterflow.study.order import Fifo, Policy, policy_of
from waterflow.study.processes import Processes, starts_of
from waterflow.study.run import LastingRun, StudyRun
from waterflow.study.values import KeepWeights, NestedStudyError, StudySummary, StudyTypeError, check_keep_weights
from waterflow.training.checkpoint_dir import Checkpoints
from waterflow.training.progress import ProgressLine
from waterflow.units import Mode, parse_seconds

__all__ = ["StudySummary", "optimize"]


@explained("optimize", "waterflow.optimize(study, objective, n_trials=100)", StudyError)
def optimize(
    study: optuna.Study,
    objective: Objective,
    n_trials: int | None = None,
    timeout: float | None = None,
    *,
    max_concurrent: int | Literal["auto"] = "auto",
    memory: int | float | str | None = None,
    device: str = "cpu",
    lanes: int | None = None,
    threads_per_lane: int = 1,
    catch: Iterable[type[Exception]] | type[Exception] = (),
    callbacks: Iterable[StudyCallback] | None = None,
    gc_after_trial: bool = False,
    show_progress_bar: bool = False,
    deterministic: bool = False,
    exact: bool = True,
    mode: Mode = "auto",
    timeline: Callable[[Timeline], None] | None = None,
    cluster: TrialDevices | None = None,
    keep_weights: KeepWeights = "best",
    trial_timeout: float | None = None,
    checkpoint: str | os.PathLike[str] | Checkpoints | None = None,
    order: Literal["fifo", "promising"] | Policy = "fifo",
    deadline: float | str | None = None,
    processes: int = 1,
) -> StudySummary:
    """Run ``study.optimize`` with several trials training side by side on one device.

    ``objective`` is an ordinary Optuna objective whose loop calls a ``waterflow.Step``, or a function that returns a
    ``waterflow.Job``. Such a job is trained, its first metric is reported to the pruner after each evaluation, and its
    ``value`` is told to the study (all metrics, if there are several objectives). Without ``evaluate=`` the value is the
    training loss, which only a study that minimizes one objective accepts.

    Each trial runs on its own thread with its own torch random numbers: ``torch.manual_seed`` and everything that draws there,
    Steps included, use those, so a trial does not depend on the others. Until it seeds them they follow from the trial's number
    and from torch's generator at the start of the study. Python's and NumPy's global generators are shared by all trials; so is
    the sampler, which draws in the order in which trials ask for values.

    Args:
        study: Any Optuna study: in memory, RDB or journal storage, one objective or several.
        objective: See above.
        n_trials, timeout: As in ``study.optimize``; running trials finish after a timeout, and those that ``order`` has paused are
            COMPLETE with their last report, as after ``study.stop()`` and after an error; with ``checkpoint=`` they wait for the next
            call.
        max_concurrent: The most trials at the same time. ``"auto"``: as many as measured throughput allows, if all of them fit
            in memory together. Earlier trials use the lanes first, later ones what these leave.
        memory: The limit for all trials together: bytes, a share of the free memory, or text like ``"4GiB"``.
        device, lanes, threads_per_lane: As in ``train``. In a loop of its own an objective moves the model, to ``wf.device()``.
        catch: Exceptions that fail a trial without ending the study, as in ``study.optimize``. An ``AuditError`` and a passed
            ``trial_timeout`` always do.
        callbacks: Called with (study, trial) after each trial, on the calling thread.
        gc_after_trial: Collect garbage after each trial.
        show_progress_bar: One line of progress, if there is a terminal.
        deterministic: Ask, report, prune and tell in an order that follows training steps, not the clock: equal seeds then give
            equal studies. Needs a whole number as ``max_concurrent``, no ``timeout`` and no ``trial_timeout``. Only calls through
            the trial and ``study.stop()`` are ordered; other changes that objectives make to the study are not.
        exact, mode: As in ``train``.
        timeline: Called at the end with the record of the run, to save its pictures.
        cluster: A ``waterflow.Cluster`` whose devices run the trials, instead of one device here. The study needs an RDB or
            journal storage. Samplers work as with Optuna's ``n_jobs``: values that are sampled one by one are drawn in the
            trial's process, from its own random numbers.
        keep_weights: Weights (``state_dict``) to keep in the summary's results, if trials return jobs: ``"best"`` those of this
            call's best trial, or of its Pareto front in a study with several objectives; ``"all"``; or ``"none"``. The memory
            of others is freed as soon as their trials have ended.
        trial_timeout: Seconds of wall time that a trial may take. A trial that takes longer, or whose job passes
            ``Job.timeout``, is told as FAIL with a JobTimeoutError, which never ends the study. Code that blocks outside the
            interpreter is waited for; with ``cluster=`` its process is ended a minute later.
        checkpoint: A folder, or ``Checkpoints``, by which the study survives: the same call again goes on where this one was
            killed, interrupted, or ended by an error. The study needs an RDB or journal storage. ``n_trials`` counts the trials of
            all calls with that folder, ``timeout`` each call. Trials that were under way keep their numbers, values, reports and
            random numbers; their jobs go on from their last checkpoint and end with the bits of an undisturbed run. An objective
            with a loop of its own begins anew. A trial that is under way at two deaths of its process, without a new checkpoint
            (they come sooner behind each death) or report between, runs alone, and after two more is told as FAIL. An error that ends the
            study does not wait for running trials: they go on in the next call. Heartbeats of the storage tell trials of other
            processes; without them no other process may run the study at the same time.
        order: Which trials run first. ``"fifo"``: each one runs to its end. ``"promising"``: trials are paused after 1, 3, 9, ... reports
            unless they are among the best third of those that have come so far, and run on once they are, or when nothing better waits;
            their bits are those of an undisturbed run. A job is paused while that costs 2 % of its time; its state is kept in memory,
            or on disk. A loop of the objective's own waits in its next call of a Step, and keeps its memory. Pruners still end trials.
            Or a ``waterflow.study.order.Policy``. Needs one objective, and ``n_trials``, ``timeout`` or ``deadline``.
        deadline: Seconds, or text like ``"2h"``, from the call on, in place of ``timeout``: the study ends then. No trial begins that
            would not report in time, or in the last tenth. At the deadline each trial that has reported is COMPLETE with its last
            report, and has the user attribute ``waterflow:unfinished``; weights of one that ran may have trained on.
        processes: Run the trials in so many processes, where Python code between steps (rows made by NumPy, simulated environments)
            takes much of their time: Python runs on one core of a process at a time. Each has its share of the cores, of ``memory``,
            ``lanes`` and ``max_concurrent``. The study stays with the caller, in any storage; callbacks run there. The objective is
            pickled by cloudpickle. Samplers are copies with random numbers of their own, as with Optuna's processes; a trial has the
            bits that its values have in one process. When a process dies its trials fail, and it is started again, three times at most.

    A trial whose job does not fit in memory runs once more with ``recompute="auto"``; alone, if others held what it lacked.

    Returns:
        A summary of the run. The values that trials found are in ``study``.

    Raises:
        StudyError: Settings contradict each other; or, before it trains and whatever ``catch`` names, a job has no
            ``evaluate=`` in a study that maximizes or has several objectives. It is a TypeError for a wrong ``catch``, and a
            RuntimeError inside an objective or a callback of the same study, as in ``study.optimize``.
        CheckpointError: The folder of ``checkpoint=`` is in use, is of another study, or damaged.
        Exception: A trial raised an error that ``catch`` does not name; running trials end first.
    """
    began = time.monotonic()
    policy, until = policy_of(order), _seconds(deadline)
    caught = tuple(catch) if isinstance(catch, Iterable) and not isinstance(catch, str) else (catch,)
    _check(study, objective, n_trials, timeout, max_concurrent, callbacks, deterministic, caught)
    check_keep_weights(keep_weights)
    _check_order(study, policy, until, n_trials, timeout, deterministic)
    if (rule := why_no_limit(trial_timeout)) is not None:
        raise StudyError(f"trial_timeout {rule}")
    if deterministic and trial_timeout is not None:
        raise StudyError("deterministic=True and trial_timeout= contradict each other: which trials pass it follows the clock")
    # A time limit is set to lose single trials, not the study, and a fault of ours costs one: whatever catch names.
    caught = (*caught, JobTimeoutError, AuditError)
    if deterministic and not exact:
        raise StudyError("deterministic=True and exact=False contradict each other: which kernels are faster follows the clock")
    # Settings of one device mean nothing to a cluster: refused, not ignored.
    if cluster is not None:
        elsewhere = {
            "memory": (memory, None),
            "device": (device, "cpu"),
            "lanes": (lanes, None),
            "threads_per_lane": (threads_per_lane, 1),
            "deterministic": (deterministic, False),
            "exact": (exact, True),
            "mode": (mode, "auto"),
            "timeline": (timeline, None),
            "checkpoint": (checkpoint, None),
            "order": (order, "fifo"),
            "deadline": (deadline, None),
            "processes": (processes, 1),
        }
        _check_cluster(cluster, [name for name, (given, default) in elsewhere.items() if given != default])
        return spread(
            study,
            objective,
            n_trials,
            timeout,
            cluster,
            None if max_concurrent == "auto" else max_concurrent,
            caught,
            list(callbacks or ()),
            gc_after_trial,
            show_progress_bar,
            keep_weights,
            trial_timeout,
        )
    if processes != 1 or isinstance(processes, bool):
        _check_processes(
            processes,
            {
                "deterministic=True": deterministic and "the order of events would follow the clocks of several processes",
                "timeline=": timeline is not None and "each process has lanes of its own",
                "checkpoint=": checkpoint is not None and "one process holds the folder",
                "order=": not isinstance(policy, Fifo) and "it ranks the trials of one process",
                f"device={device!r}": device != "cpu" and "each process would need memory of its own on the GPU",
            },
        )
        run = StudyRun(study)
        starts = starts_of(
            processes,
            study,
            objective,
            run,
            memory,
            lanes,
            max_concurrent,
            threads_per_lane=threads_per_lane,
            exact=exact,
            mode=mode,
            gc_after_trial=gc_after_trial,
            keep_weights=keep_weights,
            trial_timeout=trial_timeout,
            catch=caught,
            deadline=None if until is None else began + until,
        )
        with ProgressLine(n_trials, "trials", show_progress_bar) as progress:
            return Processes(study, starts, keep_weights, run).run(n_trials, timeout, list(callbacks or ()), progress)
    check_threads(study)
    if checkpoint is not None and deterministic:
        raise StudyError(
            "deterministic=True and checkpoint= contradict each other: trials that go on meet others in another order. A "
            "deterministic study that is run again from its beginning is the same study: leave checkpoint= out"
        )
    if checkpoint is not None and not isinstance(checkpoint, Checkpoints):
        checkpoint = Checkpoints(checkpoint)
    with contextlib.ExitStack() as stack:
        run = StudyRun(study) if checkpoint is None else stack.enter_context(LastingRun(study, checkpoint).opened())
        engine = stack.enter_context(Engine(device, memory, lanes, threads_per_lane, exact=exact, mode=mode))
        engine.lengths = TrialLengths()
        stack.enter_context(engine.reservations.retain_pages())
        if timeline is not None:
            engine.native.record_spans(True)
        coordinator = StudyRunner(
            study,
            objective,
            engine,
            max_concurrent,
            deterministic,
            gc_after_trial,
            keep_weights,
            trial_timeout,
            run,
            policy,
            None if until is None else until - (time.monotonic() - began),
        )
        with ProgressLine(n_trials, "trials", show_progress_bar) as progress:
            summary = coordinator.run(n_trials, timeout, caught, list(callbacks or ()), progress)
        if timeline is not None:
            timeline(Timeline.of(engine))
    return summary


def _seconds(deadline: Any) -> float | None:
    try:
        return None if deadline is None else parse_seconds(deadline, "deadline")
    except InvalidJobError as error:
        raise StudyError(str(error)) from None


def _check_order(
    study: optuna.Study, policy: Policy, deadline: float | None, n_trials: Any, timeout: Any, deterministic: bool
) -> None:
    if deadline is not None and timeout is not None:
        raise StudyError(
            "deadline= and timeout= are two ways to end a study: at a deadline running trials end with what they have, after a timeout "
            "they run to their end; leave one of them out"
        )
    if deadline is not None and deterministic:
        raise StudyError("deterministic=True and deadline= contradict each other; limit the study with n_trials=")
    if isinstance(policy, Fifo):
        return
    if len(study.directions) > 1:
        raise StudyError(
            f"order= ranks trials by their reports, and Optuna allows none in a study with {len(study.directions)} objectives; "
            "leave order= out"
        )
    if n_trials is None and timeout is None and deadline is None:
        raise StudyError(
            "order= needs an end, or new trials would begin for ever while others wait: pass n_trials=, or deadline='2h'"
        )


def _check_processes(processes: Any, refused: dict[str, Any]) -> None:
    if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
        raise StudyError(f"processes must be a whole number of 1 or more; got {processes!r}")
    for name, why in refused.items():
        if why:
            raise StudyError(f"{name} cannot stand beside processes={processes}: {why}; leave one of them out")


def _check_cluster(cluster: Any, given: list[str]) -> None:
    if not all(callable(getattr(cluster, name, None)) for name in ("check", "submit", "wait", "status", "results", "cancel")):
        raise StudyError(f"cluster must be a waterflow.Cluster; got {type(cluster).__name__}")
    if given:
        raise StudyError(
            f"{', '.join(f'{name}=' for name in given)} cannot stand beside cluster=: devices belong to the cluster, and were "
            "set up with it; leave it out"
        )


def _check(
    study: Any,
    objective: Any,
    n_trials: Any,
    timeout: Any,
    max_concurrent: Any,
    callbacks: Any,
    deterministic: bool,
    catch: tuple[Any, ...],
) -> None:
    if not isinstance(study, optuna.Study):
        raise StudyError(f"study must be an optuna.Study, such as optuna.create_study() makes; got {type(study).__name__}")
    if not callable(objective):
        advice = "; return the Job from a function of the trial" if isinstance(objective, Job) else ""
        raise StudyError(f"objective must be a function of a trial; got {type(objective).__name__}{advice}")
    if n_trials is not None and (not isinstance(n_trials, int) or isinstance(n_trials, bool)):
        raise StudyError(f"n_trials must be a whole number or None; got {n_trials!r}")
    if timeout is not None and (not isinstance(timeout, (int, float)) or isinstance(timeout, bool)):
        raise StudyError(f"timeout must be a number of seconds or None; got {timeout!r}")
    for kind in catch:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise StudyTypeError(f"catch must hold kinds of exceptions, such as (ValueError,), or be left out; got {kind!r}")
    if callable(callbacks):
        raise StudyError("callbacks takes a list; put the one you have into brackets")
    whole = isinstance(max_concurrent, int) and not isinstance(max_concurrent, bool)
    if max_concurrent != "auto" and (not whole or max_concurrent < 1):
        raise StudyError(f"max_concurrent must be 'auto' or a positive integer; got {max_concurrent!r}")
    if n_trials is not None and n_trials < 0:
        raise StudyError(f"n_trials cannot be negative; got {n_trials}")
    if deterministic and not isinstance(max_concurrent, int):
        raise StudyError(
            "deterministic=True needs a whole number as max_concurrent, for 'auto' follows the clock; "
            "pass for example max_concurrent=4"
        )
    if deterministic and timeout is not None:
        raise StudyError("deterministic=True and timeout= contradict each other; limit the study with n_trials=")
    if in_loop(study):
        raise NestedStudyError(
            "optimize() was called inside an objective or a callback of the same study; call it after the first has "
            "returned, or give the inner one a study of its own"
        )
