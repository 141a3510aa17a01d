"""Traces as a picture, host above device, one under the other at the same scale; drawn by matplotlib (`plots`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxoverlap.observe.chrome_trace import DEVICE, EXPOSED, HOST, engine_spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "plan": "#4c78a8",
    "launch": "#72b7b2",
    "commit": "#b279a2",
    "detokenize": "#eeca3b",
    "wait": "#e4e4e4",
    "prefill": "#f58518",
    "decode": "#54a24b",
    "mixed": "#9d755d",
}
_OTHER = "#9ecae9"
_EXPOSED = "#e45756"
_LANES = {HOST: 1.0, DEVICE: 0.0}


def to_figure(
    traces: Mapping[str, dict[str, Any]], *, start_ms: float | Mapping[str, float], length_ms: float
) -> Figure:
    """A window of each trace, by its title.

    Args:
      start_ms: after the first step of each trace, for all or by title; length_ms: from there.

    Raises:
      ValueError: a trace has no step in the window.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.5 * len(traces) + 0.6), layout="constrained")
    rows = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    drawn: dict[str, Any] = {}
    for axes, (title, trace) in zip(rows, traces.items(), strict=True):
        start = start_ms[title] if isinstance(start_ms, Mapping) else start_ms
        drawn |= _draw(axes, title, trace, start, length_ms)
    rows[-1].set_xlabel("ms")
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=9, frameon=False, fontsize="small")
    return figure


def _draw(axes: Axes, title: str, trace: dict[str, Any], start_ms: float, length_ms: float) -> dict[str, Any]:
    """Returns a handle of each kind of span that is in it."""
    spans = list(engine_spans(trace))
    began = min((span["ts"] for span in spans if span["tid"] == DEVICE), default=0.0) + 1e3 * start_ms
    shown: dict[tuple[float, str, str], list[tuple[float, float]]] = {}
    for span in spans:
        low, high = (span["ts"] - began) / 1e3, (span["ts"] + span["dur"] - began) / 1e3
        if high <= 0 or low >= length_ms:
            continue
        low, high = max(low, 0.0), min(high, length_ms)
        kind = span["name"].split()[0]
        if span["tid"] == EXPOSED:
            key = (0.75, "exposed", _EXPOSED)
        else:
            known = kind in _COLOURS
            key = (_LANES[span["tid"]], kind if known else "other", _COLOURS.get(kind, _OTHER))
        shown.setdefault(key, []).append((low, high - low))
    if not any(lane == _LANES[DEVICE] for lane, _, _ in shown):
        raise ValueError(f"{title}: no step from {start_ms:g} ms on, for {length_ms:g} ms")
    handles = {}
    for (lane, kind, colour), bars in shown.items():
        height = 0.2 if kind == "exposed" else 0.7
        handles[kind] = axes.broken_barh(bars, (lane, height), facecolor=colour, edgecolor="white", linewidth=0.3)
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set(xlim=(0, length_ms), ylim=(-0.1, 1.8), yticks=[0.35, 1.35], yticklabels=["device", "host"])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    return handles
