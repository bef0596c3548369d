"""Random training programs with hidden state of every kind, eagerly and with ``waterflow.Step``: all that they leave must be equal.

A row counts the programs that have one kind of state: those that change it, their steps, how many of them ran captured, and the
programs of which anything differs. Programs that differ are printed, made smaller, as scripts of their own; exit status 1 then.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict
from pathlib import Path

from benchmarks import report
from tests.program_campaign import Campaign, shrunk
from tests.program_runs import quiet
from tests.random_programs import KINDS


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--count", type=int, default=1000, help="programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS), metavar="KIND", help="only these")
    parser.add_argument("--scripts", type=Path, help="a folder for the scripts of programs that differ, instead of printing them")
    parser.add_argument("--most", type=int, default=5, help="how many of those are made smaller")
    arguments = parser.parse_args()
    quiet()
    warnings.filterwarnings("ignore")
    campaign = Campaign()
    seconds = report.seconds(lambda: campaign.run(arguments.count, arguments.seed, tuple(arguments.kinds)))
    for number, program in enumerate(campaign.differing[: arguments.most]):
        script = shrunk(program).script()
        if arguments.scripts is None:
            print(script)
        else:
            arguments.scripts.mkdir(parents=True, exist_ok=True)
            (arguments.scripts / f"differs_{number}.py").write_text(script)
    for program, error in campaign.failing[: arguments.most]:
        print(f"fails eagerly, though it means to work: {error}\n{program.source()}")
    rows = [{"kind": kind, **asdict(tally)} for kind, tally in sorted(campaign.tallies.items())]
    rows.append({"kind": "all", **asdict(campaign.total), "holds": not campaign.differing and not campaign.failing})
    share = campaign.total.captured / max(1, campaign.total.steps)
    note = f"{share:.0%} of the steps captured, {1000 * seconds / max(1, arguments.count):.0f} ms a program"
    ways = [{"way": way, **asdict(tally)} for way, tally in sorted(campaign.ways.items())]
    return report.finish("random_programs", arguments, rows, note, {"how the number reaches the step": ways})


if __name__ == "__main__":
    sys.exit(main())
