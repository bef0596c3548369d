"""The ``waterflow`` command: studies, training and plans from YAML files."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import waterflow
from waterflow.cli.cluster import cluster
from waterflow.cli.output import Pictures, Terminal, check_picture, table
from waterflow.cli.references import ConfigError, blamed, wrong_use
from waterflow.cli.simulate import simulate
from waterflow.executor.memory_limit import parse_recompute
from waterflow.planner.gpus import gpu as gpu_of
from waterflow.training.progress import ProgressLine
from waterflow.units import missing

if TYPE_CHECKING:
    import optuna

_MOST_ROWS = 50
_PATIENCE = 2.0  # seconds before a plan shows how far it is

app = typer.Typer(
    name="waterflow",
    help="Train many PyTorch models at once on one device.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(cluster)
app.command()(simulate)
Config = Annotated[Path, typer.Argument(metavar="CONFIG.YAML", help="A YAML file; examples/ has some to start from.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def main() -> None:
    """Run the command line."""
    app(prog_name="waterflow")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"waterflow {waterflow.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# -- study


@app.command()
def study(config: Config, as_json: AsJson = False, debug: Debug = False) -> None:
    """Run an Optuna study from a config, several trials at a time."""
    with Terminal(as_json, debug) as terminal, terminal.studies():
        # Imported inside each command: torch and Optuna take seconds, and --help needs neither.
        from waterflow.cli.config import load_study

        settings = load_study(config)
        from waterflow.study import optimize

        _check_device(config, settings.options["device"])
        opened = settings.make_study()
        pictures = Pictures(Path(settings.output)) if settings.output is not None else None
        # catch=Exception: a failed trial is reported, and the study continues. No weights: the command writes none.
        done = optimize(
            opened,
            settings.objective,
            catch=Exception,
            show_progress_bar=not as_json,
            timeline=pictures,
            keep_weights="none",
            **settings.options,
        )
        report = _study_report(opened, terminal.failures)
        report["run"] = _pace(opened, done.seconds, done.steps) | {
            "trials": done.trials,
            "captures": done.captures,
            "most_at_once": done.most_at_once,
        }
        report["files"] = pictures.files if pictures is not None else {}
        _show_study(terminal, opened, f"the trials of {settings.title}")
        terminal.say(Text(str(done)))
        terminal.files(pictures)
        terminal.result(report)


def _pace(study: optuna.Study, seconds: float, steps: int) -> dict[str, Any]:
    return {"trials": len(study.trials), "seconds": seconds, "steps": steps, "steps_per_second": steps / seconds}


def _check_device(config: Path, device: str | None) -> None:
    # Before the study is created or a model is made.
    why = missing(device) if device is not None else None
    if why is not None:
        raise ConfigError(f"{config}: device: {why}")


def _study_report(study: optuna.Study, failures: dict[int, str]) -> dict[str, Any]:
    trials = [
        {
            "number": trial.number,
            "state": trial.state.name.lower(),
            "value": trial.value,
            "params": trial.params,
            "reports": len(trial.intermediate_values),
            "seconds": trial.duration.total_seconds() if trial.duration is not None else None,
            "error": failures.get(trial.number),
        }
        for trial in study.trials
    ]
    best = _best(study)
    return {
        "study_name": study.study_name,
        "direction": study.direction.name.lower(),
        "best": None if best is None else {"number": best.number, "value": best.value, "params": best.params},
        "trials": trials,
    }


def _best(study: optuna.Study) -> optuna.trial.FrozenTrial | None:
    with contextlib.suppress(ValueError):
        return study.best_trial
    return None


def _show_study(terminal: Terminal, study: optuna.Study, title: str) -> None:
    from optuna.study import StudyDirection

    best, trials = _best(study), study.trials
    if len(trials) > _MOST_ROWS:
        # The best first, as only some rows are shown; trials without a value last.
        sign = -1 if study.direction == StudyDirection.MAXIMIZE else 1
        trials = sorted(trials, key=lambda t: (t.value is None, sign * (t.value or 0.0), t.number))[:_MOST_ROWS]
        title += f", the best {len(trials)} of {len(study.trials)}"
    # A column per hyperparameter if the terminal is wide enough; else all in one column that wraps.
    wide = _trial_table(title, trials, best, apart=True)
    terminal.say(wide if terminal.holds(wide) else _trial_table(title, trials, best, apart=False))
    if best is not None:
        settings = ", ".join(f"{name} {_short(value)}" for name, value in best.params.items())
        terminal.say(f"[bold]best: trial {best.number} with {best.value:.4f}[/bold] ({settings})")


def _trial_table(title: str, trials: list[optuna.trial.FrozenTrial], best: optuna.trial.FrozenTrial | None, apart: bool) -> Table:
    """Return a table with a row per trial; ``apart`` gives each hyperparameter its own column, else all share one."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    joined = () if apart else (", ".join(names),)
    columns = ("trial", "state", "value", "reports", "time", *(names if apart else joined))
    made = table(title, columns, left=("state", *joined), wraps=joined)
    colours = {"complete": "green", "pruned": "yellow", "fail": "red"}
    for trial in trials:
        state = trial.state.name.lower()
        seconds = trial.duration.total_seconds() if trial.duration is not None else None
        settings = [_short(trial.params.get(name, "")) for name in names]
        made.add_row(
            str(trial.number),
            f"[{colours.get(state, 'white')}]{state}[/]",
            "" if trial.value is None else f"{trial.value:.4f}",
            str(len(trial.intermediate_values)),
            "" if seconds is None else f"{seconds:.1f} s",
            *(settings if apart else [", ".join(settings)]),
            style="bold" if best is not None and trial.number == best.number else None,
        )
    return made


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# -- train


@app.command()
def train(config: Config, as_json: AsJson = False, debug: Debug = False) -> None:
    """Train the jobs of a config side by side. A failed job does not affect the others."""
    with Terminal(as_json, debug) as terminal:
        from waterflow.cli.config import load_train

        settings = load_train(config)
        # Nothing here would end the jobs: refuse a limit that would be ignored.
        if settings.time_limit is not None:
            raise ConfigError(f"{config}: time_limit: a cluster keeps to it: waterflow cluster submit {config}")
        _check_device(config, settings.device)
        pictures = Pictures(Path(settings.output)) if settings.output is not None else None
        results = waterflow.train(
            settings.jobs,
            device=settings.device or "cpu",
            memory=settings.memory,
            max_concurrent=settings.max_concurrent,
            exact=settings.exact,
            mode=settings.mode,
            on_error="continue",
            show_progress_bar=not as_json,
            timeline=pictures,
        )
        together = results.stats.lines_for("jobs") if results.stats else []
        terminal.say(Text("\n".join(map(str, [*results, *together]))))
        terminal.files(pictures)
        for result in results.failed:
            terminal.fail(blamed(result.name, result.error), result.traceback)
        files = pictures.files if pictures is not None else {}
        jobs = [result.to_dict() for result in results]
        terminal.result({"jobs": jobs, "decisions": list(results.decisions), "files": files})


# -- plan


@app.command()
def plan(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.YAML]", help="Jobs to plan for; --model adds others.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Plan for this GPU, such as v100-32g; none is needed.")] = None,
    memory: Annotated[str | None, typer.Option(help="Plan for this much memory, such as 24GiB.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model of the zoo, such as resnet50, or module:function. Repeatable.")
    ] = None,
    copies: Annotated[int, typer.Option(min=1, help="Number of copies of each job, on the GPU.")] = 1,
    recompute: Annotated[
        str | None, typer.Option(help="Let all steps recompute: auto, or their height, such as 8GiB; on the GPU.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.PNG", help="Draw the largest batches: memory, lanes, and the peak by line.")
    ] = None,
    groups: Annotated[bool, typer.Option("--groups", help="Show each job's node groups (this machine only).")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Predict the memory of jobs, and which of them fit together, without training: here, or on a GPU (--gpu)."""
    with Terminal(as_json, debug) as terminal:
        if config is None and not model:
            raise ConfigError("there must be jobs to plan for: name a config, or a model by --model resnet50")
        # Two kinds of plans: the jobs as they are under this machine's memory, or largest batches on a named device.
        here = gpu is None and memory is None
        if here and (model or copies > 1 or recompute is not None or report is not None):
            raise ConfigError(
                "--model, --copies, --recompute and --report need a device: add --gpu v100-32g or another one, or --memory 24GiB"
            )
        if groups and not here:
            raise ConfigError("--groups shows plans for this machine: leave out --gpu and --memory, or --groups")
        if report is not None:
            check_picture(report)
        with wrong_use("--recompute"):
            parse_recompute(recompute)
        with wrong_use("--gpu"):
            device = gpu_of(gpu) if gpu is not None else None
        from waterflow.cli.config import load_train

        settings = load_train(config) if config is not None else None
        from waterflow.cli.plan import job_named, plan_for_gpu, renamed, show_gpu_plan, show_plan_here
        from waterflow.training.batch_size import device_of

        if not here:
            with wrong_use("--memory"):  # before models are made, which takes a while
                device_of(device, memory)
            named = [job_named(reference, Path()) for reference in model or ()]
            # Models may be named twice on the command line; names in tables and pictures must differ.
            jobs = renamed([*(settings.jobs if settings else ()), *named])
            jobs = [replace(job, recompute=recompute or job.recompute) for job in jobs]
            with ProgressLine(None, "captures", show=not as_json, delay=_PATIENCE) as progress:
                found = plan_for_gpu(jobs, copies=copies, gpu=device, memory=memory, captured=progress.advance)
            show_gpu_plan(terminal, found, report)
        elif settings is not None:
            show_plan_here(terminal, settings, groups)


# -- what all commands share
