"""Torch's operators with a gradient, as its own tests list them: small models trained eagerly and with ``waterflow.Step``.

Counts the operators of which every sample ended with equal bits, and those of which a step ran eagerly, which a table lists.
Left out are operators that raise an error both ways or that differ between two eager runs. Exit status 1 where an operator
differs, or more than 5 % are refused.
"""

from __future__ import annotations

import os
import sys

from benchmarks import report
from tests.program_runs import quiet


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--samples", type=int, default=3, help="of each operator")
    parser.add_argument("--only", default="", metavar="TEXT", help="only operators whose name has this in it")
    arguments = parser.parse_args()
    os.environ["WATERFLOW_AUDIT"] = "off"  # an audit would hide what differs: the code would run eagerly
    from tests.operator_sweep import MOST_REFUSED, Sweep  # which imports torch's list: that forbids changes of its settings

    quiet()
    sweep = Sweep()
    seconds = report.seconds(lambda: sweep.run(arguments.samples, arguments.only))
    row = {
        "operators": sweep.run_both_ways, "equal": sweep.run_both_ways - len(sweep.differing), "differing": len(sweep.differing),
        "refused": len(sweep.refused), "share refused": len(sweep.refused) / max(1, sweep.run_both_ways),
        "left out": len(sweep.left_out),
        "holds": not sweep.differing and len(sweep.refused) <= MOST_REFUSED * sweep.run_both_ways,
    }  # fmt: skip
    tables = {
        "differing": [{"operator": name, "tensors": "; ".join(lines)} for name, lines in sweep.differing.items()],
        "refused": [{"operator": name, "reason": reason} for name, reason in sweep.refused.items()],
        "left out": [{"operator": name, "reason": reason} for name, reason in sweep.left_out.items()],
    }
    return report.finish("operators", arguments, [row], f"{seconds:.0f} s", tables)


if __name__ == "__main__":
    sys.exit(main())
