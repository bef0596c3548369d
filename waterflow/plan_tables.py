"""What ``waterflow plan`` shows of its findings: tables for people."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from waterflow.config import TrainConfig
from waterflow.gpu_plan import GPUPlan
from waterflow.partition.plan import format_bytes
from waterflow.references import ConfigError, blamed
from waterflow.terminal import Terminal, table
from waterflow.together import Together, fit_together


def gpu_table(found: GPUPlan) -> Table:
    """A row a job: what it takes with its batch, and its largest batch beside the others."""
    where = found.device.name if found.device is not None else "a device"
    columns = ("job", "batch", "held", "step", "", "largest batch", "alone", "ratio")
    title = f"{where}: {format_bytes(found.memory)} for jobs, {format_bytes(found.reserve)} of it reserve"
    made = table(title, columns, left=("job", ""))
    rows = found.largest.jobs if found.largest is not None else ()
    for i, (name, step) in enumerate(found.steps):
        sizes = (str(rows[i].size), str(rows[i].alone), f"{rows[i].ratio:.3f}") if rows else ("", "", "")
        held, height = format_bytes(step.held), format_bytes(step.height)
        made.add_row(name, str(step.size), held, height, found.verdict(i), *sizes)
    for name in found.eager:
        made.add_row(name, "", "", "", "trains eagerly: not known")
    return made


def here_table(found: Together) -> Table:
    """A row a job: its plan, and whether it would be under way."""
    columns = ("job", "persistent", "batch", "height", "peak", "operations", "groups", "")
    made = table("predicted, per job", columns, left=("job", ""))
    for job in found.jobs:
        p = job.plan
        sizes = [format_bytes(n) for n in (p.persistent, p.batch, p.height, p.peak)] if p is not None else [""] * 4
        counts = [str(p.operations), str(len(p.groups))] if p is not None else ["", ""]
        made.add_row(job.name, *sizes, *counts, job.verdict)
    return made


def check_picture(path: Path) -> None:
    """Raise ConfigError where no picture can be drawn."""
    if path.suffix.lower() != ".png":
        raise ConfigError(
            f"--report: pictures are PNG files; call it {path.with_suffix('.png').name!r}, got {path.name!r}"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--report: there is no folder {path.parent}; make it, or name another")


def show_gpu_plan(terminal: Terminal, found: GPUPlan, report: Path | None) -> None:
    """What fits on a GPU, and a picture of it where one is wanted."""
    terminal.say(gpu_table(found))
    for line in found.explanation():
        terminal.say(line)
    if report is not None:
        what = found.save_report(report)
        terminal.say(f"[dim]drawn: {what}: {report}[/dim]")
    terminal.result(found.to_dict())


def show_plan_here(terminal: Terminal, settings: TrainConfig, groups: bool) -> None:
    """What fits together on this machine."""
    found = fit_together(settings.jobs, settings.memory, settings.max_concurrent)
    terminal.say(here_table(found))
    for line in found.explanation():
        terminal.say(line)
    for job in found.jobs:
        if groups and job.plan is not None:
            terminal.say("")
            terminal.say(str(job.plan))
        if job.error is not None:
            terminal.fail(blamed(job.name, job.error))
    terminal.result(found.to_dict(groups))
