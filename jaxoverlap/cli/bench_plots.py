"""Lines for a suite's tables, drawn by matplotlib (the extra `plots`).

A suite names them itself, as `plots`: a list of {"title", "table", "x", "lines", "unit", "log"?}. `table` names a
list of rows, `x` and `lines` are columns of it, and `log` asks for a scale of powers of two for `x`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxoverlap.observe import figures


def to_svg(plot: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """An SVG element for a page, in the page's own colour of text."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    rows = result[plot["table"]]
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for name in plot["lines"]:
        points = [(row[plot["x"]], row[name]) for row in rows if row.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    if plot.get("log"):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylim(bottom=0)
    axes.set(title=plot["title"], xlabel=plot["x"], ylabel=plot["unit"])
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    drawn = re.sub(r"^.*?(?=<svg)", "", figures.to_svg(figure), flags=re.DOTALL)
    return drawn.replace("#000000", "currentColor").replace("fill: #ffffff", "fill: none")
