"""What all pictures share: matplotlib (the extra `plots`), without a window, the same file for the same data."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOW_TO_GET = "pictures need matplotlib: pip install 'jaxoverlap[plots]'"


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


def save(figure: Figure, path: str) -> None:
    """Writes an SVG, a PNG or a PDF, by the name.

    Raises:
      ValueError: matplotlib knows no such format.
      OSError: it can't be written.
    """
    if path.endswith(".svg"):
        Path(path).write_text(to_svg(figure), encoding="utf-8")
    else:
        figure.savefig(path, dpi=150)


def to_svg(figure: Figure) -> str:
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxoverlap"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
