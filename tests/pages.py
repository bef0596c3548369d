"""What README and docs show their reader: the fences of each section, their commands, and one program that does it all."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.imports import ROOT

PAGES = [ROOT / "README.md", *(page for folder in ("docs", "waterflow") for page in sorted((ROOT / folder).rglob("*.md")))]
SHELLS = ("sh", "bash", "shell")
LANGUAGES = {"python", *SHELLS, "text", "yaml", "diff", "json"}
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What looks like code, or begins a fence, and stands where no fence is seen.
_HIDDEN = re.compile(r" {4,}(\$ |waterflow |python |make |pip |import |from \w+ import )|\s*(```|~~~)")
_LINK = re.compile(r"\]\(([^)\s#:]*)(?:#([^)\s]*))?\)")  # to a page of ours, or within one
_FILE = re.compile(r"`([\w/.-]+\.(?:py|cpp|h|md))`")
_MENTIONED = re.compile(r"`((?:waterflow|make|python -m benchmarks\.\w+|optuna-dashboard|tensorboard)(?: [^`]*)?)`")


@dataclass(frozen=True)
class Command:
    """One command of a shell's fence, without its comment: its first line there, counted from 0, and how many it has."""

    at: int
    lines: int
    text: str


@dataclass(frozen=True)
class Block:
    """A fence: its info string, the line of its page at which its text begins, and its text."""

    info: str
    line: int
    text: str

    @property
    def runs(self) -> bool:
        return self.info in ("python", *SHELLS)

    def commands(self) -> Iterator[Command]:
        for found in re.finditer(r"(?:.*\\\n)*.*\n", self.text) if self.info in SHELLS else ():
            text = re.sub(r"(^|\s)#.*", "", found[0].replace("\\\n", " "))
            yield Command(self.text.count("\n", 0, found.start()), found[0].count("\n"), " ".join(text.split()))


def outside_fences(text: str) -> str:
    """The same text, with spaces for what is fenced."""
    return _FENCE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def sections_of(page: Path) -> dict[str, list[Block]]:
    """What each ``## `` section of a page shows, by "page: title". What comes before the first one has the page's title."""
    found = {}
    text = page.read_text()
    starts = {match.start() for match in re.finditer("^## ", outside_fences(text), re.MULTILINE)}
    for start, end in itertools.pairwise(sorted({0, len(text)} | starts)):
        title = text[start:end].partition("\n")[0].lstrip("# ")
        blocks = [f for f in _FENCE.finditer(text) if start <= f.start() < end]
        name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page.name
        found[f"{name}: {title}"] = [Block(f[1].strip(), text.count("\n", 0, f.start(2)) + 1, f[2]) for f in blocks]
    return found


def hidden_code(page: Path) -> list[str]:
    """Lines that show code where no test looks."""
    lines = enumerate(outside_fences(page.read_text()).splitlines(), 1)
    return [
        f"{page.relative_to(ROOT)}:{number} shows code without a fence: {line}" for number, line in lines if _HIDDEN.match(line)
    ]


def mentioned(page: Path) -> set[str]:
    """The commands that the text of a page names."""
    return {" ".join(text.split()) for text in _MENTIONED.findall(outside_fences(page.read_text()))}


def _anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", outside_fences(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Links of a page that lead to no file, or to no heading of it."""
    wrong = []
    for file, anchor in _LINK.findall(outside_fences(page.read_text())):
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            wrong.append(f"{page.relative_to(ROOT)} links to {file}#{anchor}, which is not there")
    return wrong


def missing_files(page: Path) -> list[str]:
    """Source files that a page names, from the root, from the package or by their ends, and that are not there."""
    there = [f"/{path.relative_to(ROOT)}" for folder in ("waterflow", "tests", "benchmarks", "examples", "docs")
             for path in (ROOT / folder).rglob("*.*")]  # fmt: skip
    named = {name for name in _FILE.findall(outside_fences(page.read_text())) if "NAME" not in name}
    return [
        f"{page.relative_to(ROOT)} names {name}, which is not there"
        for name in sorted(named)
        if not (ROOT / name).exists() and not any(path.endswith(f"/{name}") for path in there)
    ]


def program_of(page: str, blocks: list[Block], left_out: Callable[[str], bool]) -> str:
    """One Python program with each line where the page has it; a shell's fence is called at its first line."""
    lines = [""] * max(block.line + block.text.count("\n") for block in blocks)
    for block in blocks:
        text = block.text.splitlines()
        if block.info == "python":
            lines[block.line - 1 : block.line - 1 + len(text)] = text
        elif block.info in SHELLS:
            for command in block.commands():
                if left_out(command.text):
                    text[command.at : command.at + command.lines] = [""] * command.lines
            trap = f"set -e; trap 'echo \"{page}:$LINENO: $BASH_COMMAND\" >&2' ERR"
            script = "\n".join([trap, *[""] * (block.line - 2), *text])
            lines[block.line - 1] = f"import subprocess; subprocess.run(['bash', '-c', {script!r}], check=True)"
    return "\n".join(lines) + "\n"
