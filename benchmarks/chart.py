"""Bars of normalized speed, a panel for each set of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = 3


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG of ``benchmarks.throughput``'s table: medians, with lines from the lowest to the highest round.

    A way that could not train a set has no bar there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sets = list(dict.fromkeys(row["jobs"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    colours = {way: pyplot.get_cmap("tab20")(number) for number, way in enumerate(ways)}
    columns = min(COLUMNS, len(sets))
    height = -(-len(sets) // columns)
    figure, axes = pyplot.subplots(height, columns, figsize=(5.5 * columns, 2.8 * height), squeeze=False, layout="constrained")
    for panel in axes.flat[len(sets) :]:
        panel.remove()
    for name, panel in zip(sets, axes.flat):
        shown = [row for row in rows if row["jobs"] == name and "normalized" in row]
        places = range(len(shown))
        values = [row["normalized"] for row in shown]
        ends = [[float(end) for end in row["of"].split(" .. ")] for row in shown]
        errors = [[max(0.0, v - low) for v, (low, _) in zip(values, ends)],
                  [max(0.0, high - v) for v, (_, high) in zip(values, ends)]]  # fmt: skip
        panel.barh(places, values, xerr=errors, color=[colours[row["way"]] for row in shown], error_kw={"lw": 1})
        panel.set_yticks(places, [row["way"] for row in shown], fontsize=8)
        panel.invert_yaxis()
        panel.axvline(1.0, color="black", lw=0.6)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("speed in sum, one after the other = 1", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
