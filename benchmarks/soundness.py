"""A folder of scenarios as users write them, eagerly and with waterflow: which end equal, which run captured, which are wrong.

``scenarios_*.py`` print a line for each scenario; ``repro_*.py`` are programs that once went wrong, each with what it must
print; ``zoo_extra.py`` has models, which train five steps both ways. Exit status: how many of all these are wrong.

With ``--baseline`` (files that ``--save`` wrote, or outputs of the scenarios) 95 % of the scenarios that were captured and
equal there must still be.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report

VERDICT = re.compile(r"^(\S+)\s+(equal|DIFFERS|DIFFSTRUCT|ERRDIFF|BOTHERR|both-error|FAKE)\b.*$", re.MULTILINE)
WRONG = ("DIFFERS", "DIFFSTRUCT", "ERRDIFF")
SHARE_KEPT = 0.95
Row = dict[str, Any]


def run(arguments: list[str], folder: Path) -> tuple[str, str]:
    """A Python program's output, and why it ended badly; nothing where it did not."""
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": path},
        text=True, capture_output=True, timeout=1800, check=False,
    )  # fmt: skip
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return done.stdout, f"exit status {done.returncode}: {last}" if done.returncode else ""


# -- scenarios


def verdicts(text: str) -> dict[str, str]:
    """Each scenario's line by its name."""
    return {found[1]: found[0] for found in VERDICT.finditer(text)}


def kept(lines: dict[str, str]) -> set[str]:
    """The scenarios that were captured and ended equal."""
    return {name for name, line in lines.items() if " equal " in line and line.rstrip().endswith("captured")}


def scenarios(folder: Path) -> tuple[list[Row], dict[str, str]]:
    """A row for each file of scenarios, and all their lines."""
    rows, lines = [], {}
    for file in sorted(folder.glob("scenarios_*.py")):
        text, failure = run([file.name], folder)
        own = verdicts(text)
        wrong = [line for line in own.values() if line.split()[1] in WRONG]
        print(*wrong, *filter(None, [failure and f"{file.name}: {failure}"]), sep="\n")
        equal, captured = (
            sum(" equal " in line for line in own.values()),
            sum(line.rstrip().endswith("captured") for line in own.values()),
        )
        rows.append({
            "what": file.name, "run": len(own), "equal": equal, "captured": captured, "captured and equal": len(kept(own)),
            "wrong": len(wrong) + bool(failure) + (not own),
        })  # fmt: skip
        lines |= own
    return rows, lines


def against(baseline: list[Path], lines: dict[str, str]) -> Row:
    """How many of the scenarios that were captured and equal still are."""
    before = kept(verdicts("\n".join(file.read_text() for file in baseline)))
    lost = sorted(before - kept(lines))
    short = len(before) - len(lost) < SHARE_KEPT * len(before)
    print(*(lines.get(name, f"{name} did not run") for name in lost), sep="\n")
    return {
        "what": "captured and equal before",
        "run": len(before),
        "captured and equal": len(before) - len(lost),
        "wrong": int(short),
    }


# -- programs that once went wrong: whether what they print is right


def _numbers(line: str) -> list[float]:
    return [float(word) for word in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", line)]


def _equal_pairs(text: str) -> bool:
    """Each line has two equal numbers."""
    pairs = [_numbers(line)[:2] for line in text.strip().splitlines()]
    return bool(pairs) and all(len(pair) == 2 and pair[0] == pair[1] for pair in pairs)


def _lists(text: str) -> list[Any]:
    return [ast.literal_eval(found) for found in re.findall(r"\[[^\[\]]*\]", text)]


def _crash(text: str) -> bool:
    """Each step gives a loss, as eager ones do."""
    return text.count("eager ok") == 2 and text.count("tensor(") == 2 and "Error" not in text


def _train_mode(text: str) -> bool:
    """The frozen layer counts no batch, and all losses are equal."""
    found = _lists(text)
    return len(found) == 3 and found[0] == found[1] == found[2] and "BatchNorm: 0" in text


def _tenths(text: str) -> bool:
    """The second trial's loss is a tenth of the first one's."""
    pairs = [_numbers(line.partition("(second")[0]) for line in text.strip().splitlines()]
    return len(pairs) == 4 and all(len(p) == 2 and math.isclose(p[1], p[0] / 10, rel_tol=1e-5) for p in pairs)


def _no_fake(text: str) -> bool:
    """The cache holds a tensor, and evaluating with it works."""
    return "FakeTensor" not in text and "<class 'torch.Tensor'>" in text and "evaluate: tensor(" in text


REPROS: dict[str, Callable[[str], bool]] = {
    "repro_crash_not_eager.py": _crash,
    "repro_data_same_address.py": lambda text: len(text.strip().splitlines()) == 4 and _equal_pairs(text),
    "repro_job_forces_train_mode.py": _train_mode,
    "repro_loader_reads_model.py": lambda text: text.startswith("EQUAL"),
    "repro_lru_cache_fake.py": _no_fake,
    "repro_neg_view_fft.py": _equal_pairs,
    "repro_opaque_leftover_grads.py": lambda text: text.split() == ["captured", "True", "opaque", "True", "0.0"],
    "repro_other_trials_capture.py": _tenths,
    "repro_reused_batch_buffer.py": lambda text: "EQUAL" in text.split() and "DIFFERS" not in text,
    "repro_stride_ln2d.py": lambda text: _lists(text) == [[]] * 6,
}


def repros(folder: Path) -> list[Row]:
    """A row for each program that once went wrong. One that nobody has told about here is wrong."""
    rows = []
    for file in sorted(folder.glob("repro_*.py")):
        text, failure = run([file.name], folder)
        check = REPROS.get(file.name)
        right = check is not None and not failure and check(text)
        if not right:
            print(f"{file.name}: {failure or (text.strip() if check else 'what must it print?')}")
        rows.append({"what": file.name, "run": 1, "equal": int(right), "wrong": int(not right)})
    return rows


# -- models


def zoo(folder: Path) -> list[Row]:
    """A row for the models, which a process of their own trains."""
    file = folder / "zoo_extra.py"
    if not file.exists():
        return []
    text, failure = run(["-m", "benchmarks.soundness_zoo", str(file)], Path.cwd())
    print(text.rstrip())
    found = verdicts(text)
    wrong = [line for line in found.values() if line.split()[1] not in ("equal", "BOTHERR")]
    captured = sum(line.rstrip().endswith("captured") for line in found.values())
    equal = sum(line.split()[1] == "equal" for line in found.values())
    if failure:
        print(f"{file.name}: {failure}")
    return [{
        "what": file.name, "run": len(found), "equal": equal, "captured": captured, "captured and equal": len(kept(found)),
        "wrong": len(wrong) + bool(failure),
    }]  # fmt: skip


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--baseline", type=Path, nargs="+", default=[], help="outputs of scenarios to compare with")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the scenarios' lines, for a later --baseline")
    parser.add_argument("--only", choices=("scenarios", "repros", "zoo"), help="one part alone")
    arguments = parser.parse_args()
    folder, rows = arguments.folder.resolve(), []
    if arguments.only in (None, "scenarios"):
        rows, lines = scenarios(folder)
        if arguments.baseline:
            rows.append(against(arguments.baseline, lines))
        if arguments.save is not None:
            arguments.save.write_text("\n".join(lines.values()) + "\n")
    if arguments.only in (None, "repros"):
        rows += repros(folder)
    if arguments.only in (None, "zoo"):
        rows += zoo(folder)
    wrong = sum(row["wrong"] for row in rows)
    shown = argparse.Namespace(json=False, save=False)
    report.finish("soundness", shown, rows, f"{wrong} wrong")
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
