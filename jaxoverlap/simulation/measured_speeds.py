"""Speeds of a device and a host, fitted to a trace of what they did: least squares, no time below zero."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxoverlap.observe.chrome_trace import DEVICE, HOST, engine_spans, row_counts
from jaxoverlap.simulation.virtual_time import Speeds

_AFTER = ("commit", "detokenize", "send")
"""Laps that come behind the wait."""


def speeds_of(*traces: dict[str, Any]) -> Speeds:
    """`traces`: what `to_chrome` gives, of runs whose steps differ in what is to be told apart.

    A step that took longer because something else used the machine counts with what it took: throughputs are made of
    means. Where a trace says which compiled steps ran, each of them has its own time.

    Raises:
      ValueError: there are fewer than 10 steps in them.
    """
    work: list[list[int]] = []
    shapes: list[str] = []
    durations: list[float] = []
    turns: list[_Turn] = []
    for trace in traces:
        spans = list(engine_spans(trace))
        for span in spans:
            if span["tid"] == DEVICE and "decode_rows" in (args := span.get("args", {})):
                work.append([1, args["decode_rows"], args["prompt_tokens"], args["kv_tokens"]])
                shapes.append(args.get("shape", ""))
                durations.append(span["dur"])
        turns += _host_turns([event for event in spans if event["tid"] == HOST], row_counts(trace))
    if len(work) < 10:
        raise ValueError(f"the trace has {len(work)} steps of which it says what was in them; 10 are the least")
    step, row, prompt_token, kv_token = _fitted(work, durations)
    of_shapes: dict[str, float] = {}
    if all(shapes):
        kv_tokens = [one.pop() for one in work]
        of_shapes, kv_token = _fitted_shapes(shapes, kv_tokens, durations)
        rest = [micros - 1e6 * kv_token * kv for micros, kv in zip(durations, kv_tokens, strict=True)]
        step, row, prompt_token = _fitted(work, rest)
    host = sum(turn.micros for turn in turns)
    host_step, host_row = _fitted([[1, turn.rows] for turn in turns], [turn.micros for turn in turns])
    return Speeds(
        step=step,
        row=row,
        prompt_token=prompt_token,
        kv_token=kv_token,
        shapes=of_shapes,
        host_step=host_step,
        host_row=host_row,
        after=sum(turn.behind for turn in turns) / host if host else 0.0,
    )


class _Turn(NamedTuple):
    """One that launched a step of so many rows: the host's microseconds, and those of them behind the wait."""

    rows: int
    micros: float
    behind: float


def _fitted(columns: Sequence[Sequence[float]], micros: Sequence[float]) -> list[float]:
    """Seconds for one of each column."""
    from scipy.optimize import nnls

    if not columns:
        return [0.0, 0.0]
    matrix = np.asarray(columns, dtype=float)
    scale = np.maximum(matrix.max(axis=0), 1.0)
    found, _ = nnls(matrix / scale, np.asarray(micros) / 1e6)
    return (found / scale).tolist()


def _fitted_shapes(
    shapes: Sequence[str], kv_tokens: Sequence[int], micros: Sequence[float]
) -> tuple[dict[str, float], float]:
    """Seconds of each shape, and of a KV position in all of them."""
    names = sorted(set(shapes))
    columns = [[*(shape == name for name in names), kv] for shape, kv in zip(shapes, kv_tokens, strict=True)]
    *found, kv_token = _fitted(columns, micros)
    return dict(zip(names, found, strict=True)), kv_token


def _host_turns(laps: Sequence[dict[str, Any]], counts: Iterable[dict[str, Any]]) -> Iterator[_Turn]:
    """`counts`: of the rows, see `row_counts`."""
    launched = {count["ts"]: count["args"]["rows"] for count in counts}
    moments = np.array(sorted(launched))
    turn: list[dict[str, Any]] = []
    for lap in [*laps, {"name": "plan"}]:
        if lap["name"] == "plan" and turn:
            ends = [one["ts"] + one["dur"] for one in turn if one["name"] == "launch"]
            if ends and len(moments):
                nearest = moments[np.abs(moments - ends[-1]).argmin()]
                micros = sum(one["dur"] for one in turn if one["name"] != "wait")
                behind = sum(one["dur"] for one in turn if one["name"] in _AFTER)
                yield _Turn(launched[nearest], micros, behind)
            turn = []
        turn.append(lap)
