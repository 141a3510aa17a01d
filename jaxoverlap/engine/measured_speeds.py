"""Speeds of a device and a host, fitted to a trace of what they did: least squares, no time below zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxoverlap.engine.simulation import Speeds
from jaxoverlap.observe.chrome_trace import DEVICE, ENGINE, HOST

_AFTER = ("commit", "detokenize", "send")
"""Laps that come behind the wait."""


def speeds_of(trace: dict[str, Any]) -> Speeds:
    """`trace`: what `to_chrome` gives, of a run whose steps differ in what is to be told apart.

    A step that took longer because something else used the machine counts with what it took: throughputs are made of
    means.

    Raises:
      ValueError: there are fewer than 10 steps in it.
    """
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("pid") == ENGINE]
    steps = [event for event in spans if event["tid"] == DEVICE and "decode_rows" in event.get("args", {})]
    if len(steps) < 10:
        raise ValueError(f"the trace has {len(steps)} steps of which it says what was in them; 10 are the least")
    work = [[1, *(step["args"][name] for name in ("decode_rows", "prompt_tokens", "kv_tokens"))] for step in steps]
    step, row, prompt_token, kv_token = _fitted(work, [event["dur"] for event in steps])
    rows, seconds, after = _host_turns([event for event in spans if event["tid"] == HOST], trace["traceEvents"])
    host_step, host_row = _fitted([[1, count] for count in rows], seconds) if rows else [0.0, 0.0]
    return Speeds(
        step=step,
        row=row,
        prompt_token=prompt_token,
        kv_token=kv_token,
        host_step=host_step,
        host_row=host_row,
        after=after,
    )


def _fitted(columns: Sequence[Sequence[float]], micros: Sequence[float]) -> list[float]:
    """Seconds for one of each column."""
    from scipy.optimize import nnls

    matrix = np.asarray(columns, dtype=float)
    scale = np.maximum(matrix.max(axis=0), 1.0)
    found, _ = nnls(matrix / scale, np.asarray(micros) / 1e6)
    return (found / scale).tolist()


def _host_turns(
    laps: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]
) -> tuple[list[int], list[float], float]:
    """Of each turn that launched a step: its rows and the host's microseconds; and the share behind the wait."""
    launched = {event["ts"]: event["args"]["rows"] for event in events if event.get("name") == "rows"}
    moments = np.array(sorted(launched))
    rows, micros, behind = [], [], 0.0
    turn: list[dict[str, Any]] = []
    for lap in [*laps, {"name": "plan"}]:
        if lap["name"] == "plan" and turn:
            ends = [one["ts"] + one["dur"] for one in turn if one["name"] == "launch"]
            if ends and len(moments):
                nearest = moments[np.abs(moments - ends[-1]).argmin()]
                rows.append(launched[nearest])
                micros.append(sum(one["dur"] for one in turn if one["name"] != "wait"))
                behind += sum(one["dur"] for one in turn if one["name"] in _AFTER)
            turn = []
        turn.append(lap)
    return rows, micros, behind / sum(micros) if sum(micros) else 0.0
