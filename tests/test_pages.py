"""Every command and example of README and docs runs as typed.

One test for each ``## `` section of a page. What its ``python`` and ``sh`` fences hold runs from top to bottom, in an empty folder
that has a copy of ``examples/``: Python in one namespace, each ``sh`` fence in a bash of its own. No example is exempt;
``NOT_RUN`` exempts commands, each with its reason. The arguments of those, and of commands in the text, are checked.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import typer

from tests import pages
from tests.imports import ROOT
from tests.pages import PAGES, Block
from waterflow.cli.main import app

# Commands that do not run here, and why: patterns of a whole command.
NOT_RUN = {
    r"make\b.*": "builds, trains for minutes, or runs this test; `make demo` is tests/test_demo.py. The target is looked up",
    r"(python -m )?pip install .*": "changes the environment, which `make build` makes of the same files",
    r"git clone .*": "needs a network",
    r"python -m benchmarks\..*": "takes minutes to hours. Its arguments are parsed",
    r"(optuna-dashboard|tensorboard) .*": "serves until it is ended. That it is installed is checked",
    r"waterflow cluster (logs|cancel) ID.*": "ID stands for a job's. Options are looked up",
    r"waterflow cluster status --watch": "shows until it is ended. Options are looked up",
}
# Sections that take more than about five seconds.
SLOW = {
    "docs/howto.md: A Hugging Face model",
    "docs/howto.md: A batch that does not fit",
    "docs/howto.md: LoRA adapters over one frozen model",
    "docs/howto.md: One job on several devices",
    "docs/howto.md: Its dashboard, and several programs",
    "docs/memory.md: Plans on the command line",
    "docs/memory.md: The largest batch",
    "docs/sharing.md: Guaranteed and opportunistic jobs",
}
SECONDS = 300  # that a section may take
PRELOADED = [
    "torch._dynamo",
    "sympy",
    "waterflow.cli.main",
    "waterflow.study",
    "waterflow.training.train",
    "optuna.storages._rdb.storage",
]

SECTIONS = {name: blocks for page in PAGES for name, blocks in pages.sections_of(page).items()}
SHOWN = {command.text for blocks in SECTIONS.values() for block in blocks for command in block.commands()}


def left_out(command: str) -> bool:
    return any(re.fullmatch(pattern, command) for pattern in NOT_RUN)


def is_slow(name: str) -> bool:
    return name in SLOW or any(c.text.startswith("waterflow cluster up") for b in SECTIONS[name] for c in b.commands())


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Each is forked from one that has imported what most need, and has done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_program(path: Path, output: Path) -> None:
    """In a process of its own: what a reader types, in the reader's environment."""
    os.setsid()
    os.chdir(path.parent)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method(None, force=True)  # the reader's, for workers of a DataLoader
    os.environ.pop("WATERFLOW_AUDIT", None)
    os.environ |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "WATERFLOW_CLUSTER": str(path.parent / "cluster"),
    }
    runpy.run_path(str(path), run_name="__main__")


def what_went_wrong(page: str, blocks: list[Block], folder: Path, processes: ForkServerContext) -> str | None:
    """Run what a section shows, in this folder."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    program, output = folder / page, folder / "output"
    program.write_text(pages.program_of(page, blocks, left_out))
    process = processes.Process(target=run_program, args=(program, output))
    process.start()
    process.join(SECONDS)
    ended = process.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and what it has left running
    if (folder / "cluster").exists():
        down = [sys.executable, "-m", "waterflow", "cluster", "down"]
        subprocess.run(down, cwd=ROOT, env=os.environ | {"WATERFLOW_CLUSTER": str(folder / "cluster")})
    if ended == 0:
        return None
    how = f"did not end within {SECONDS} s" if ended is None else f"ended with {ended}"
    return f"{how}; lines are those of {page}:\n{output.read_text()[-4000:]}"


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.needs_time("the examples of a section train, each section in a process of its own")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if is_slow(name) else [])
        for name, blocks in SECTIONS.items() if any(block.runs for block in blocks)
    ],
)  # fmt: skip
def test_examples_run_as_typed(name: str, tmp_path: Path, processes: ForkServerContext) -> None:
    page = Path(name.partition(": ")[0]).name
    wrong = what_went_wrong(page, SECTIONS[name], tmp_path, processes)
    assert wrong is None, f"{name} {wrong}"


PLANTED = "## Title\n\n```python\nx = 1\n```\n\n```sh\ntrue \\\n  a  # comment\nmake demo\n{}\n```\n\n```python\n{}\n```\n"


@pytest.mark.parametrize(
    ("shell", "python", "said"),
    [
        ("false  # wrong", "", "page.md:11: false"),
        ("true", "assert x == 2", 'page.md", line 15, in <module>'),
        ("true", "assert x == 1", None),
        ("cd examples; waterflow nothing", "", "No such command"),
    ],
)
@pytest.mark.needs_time("each is a process")
def test_a_failure_names_its_line(shell: str, python: str, said: str | None, tmp_path: Path, processes: Any) -> None:
    (tmp_path / "page.md").write_text(PLANTED.format(shell, python))
    [blocks] = pages.sections_of(tmp_path / "page.md").values()
    wrong = what_went_wrong("page.md", blocks, tmp_path, processes)
    assert wrong is None if said is None else said in (wrong or "")


def test_fences_say_what_they_hold() -> None:
    """Nobody can hide an example from this test, by its fence or without one."""
    wrong = [
        f"{name}: a fence in line {block.line - 1} holds {block.info!r}; known are {', '.join(sorted(pages.LANGUAGES))}"
        for name, blocks in SECTIONS.items() for block in blocks if block.info not in pages.LANGUAGES
    ]  # fmt: skip
    wrong += [line for page in PAGES for line in pages.hidden_code(page)]
    wrong += [f"{name} is slow, and is gone" for name in SLOW - SECTIONS.keys()]
    assert not wrong, "\n".join(wrong)


def test_links_and_files_are_there() -> None:
    """What is gone may be named where the project tells of it."""
    past = (ROOT / "docs/experiments", ROOT / "docs/releases.md")
    wrong = [line for page in PAGES for line in pages.broken_links(page)]
    wrong += [line for page in PAGES if not any(map(page.is_relative_to, past)) for line in pages.missing_files(page)]
    assert not wrong, "\n".join(wrong)


def test_words_of_the_glossary_stand_there_once_and_are_used() -> None:
    """``reduced form`` is used by ``reduced_form`` and ``ReducedForm``, too."""
    glossary = ROOT / "docs/glossary.md"
    rows = re.findall(r"^\| ([^|]+?) \|", glossary.read_text(), re.MULTILINE)[1:]  # the first is the head
    assert rows == sorted(set(rows))
    sources = [path for kind in ("*.py", "*.cpp", "*.h") for path in (ROOT / "waterflow").rglob(kind)]
    used = "\n".join(path.read_text() for path in (*PAGES, *sources) if path != glossary)
    forms = {word: r"(?<![a-z])" + re.sub(r"[ -]", r"[\\s_-]*", word) for word in rows}
    unused = [word for word, form in forms.items() if not re.search(form, used, re.IGNORECASE)]
    assert not unused


@pytest.mark.parametrize("command", sorted(set(filter(left_out, SHOWN)).union(*map(pages.mentioned, PAGES))))
def test_commands_take_their_arguments(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif words[0] == "waterflow":
        look_up(words[1:])
    elif command.startswith("python -m benchmarks."):
        parse(words[2], words[3:], monkeypatch)
    elif words[0] in ("optuna-dashboard", "tensorboard"):
        assert (Path(sys.executable).parent / words[0]).exists()


def look_up(words: list[str]) -> None:
    """The command line has this command, with these options."""
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands") or not words or words[0].startswith("-"), f"no command {words[0]}"
    known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)} | {"--help"}
    unknown = {word.partition("=")[0] for word in words if word.startswith("-")} - known
    assert not unknown, f"{command.name} has no {', '.join(unknown)}"


class Parsed(Exception):
    pass


def parse(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is there, and its parser takes the arguments; it goes no further."""
    source = ROOT / Path(*module.split(".")).with_suffix(".py")
    assert source.exists() and "parse_args(" in source.read_text(), f"{module} is no program with arguments"
    original = argparse.ArgumentParser.parse_args

    def stop(*given: Any, **named: Any) -> None:
        original(*given, **named)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [str(source), *arguments])
    with pytest.raises(Parsed):
        runpy.run_path(str(source), run_name="__main__")
