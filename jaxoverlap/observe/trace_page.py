"""A trace as one page of HTML that needs nothing else: host and device over time, and what nothing hid."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from jaxoverlap.observe.chrome_trace import DEVICE, EXPOSED, HOST, engine_spans

_MARK = "/*DATA*/"
_LANES = {HOST: "host", DEVICE: "device", EXPOSED: "exposed"}


def to_page(trace: dict[str, Any]) -> str:
    """HTML of what `to_chrome` gives.

    Raises:
      ValueError: there are no lanes of a host and a device in it.
    """
    lanes: dict[str, list[dict[str, Any]]] = {"host": [], "device": [], "exposed": []}
    for event in engine_spans(trace):
        kind = event["name"].split()[0]
        span = {"name": event["name"], "kind": kind, "ts": event["ts"], "dur": event["dur"]}
        lanes[_LANES[event["tid"]]].append(span | ({"args": event["args"]} if event.get("args") else {}))
    if not lanes["host"] or not lanes["device"]:
        raise ValueError("there are no lanes of a host and a device in it")
    for lane in lanes.values():
        lane.sort(key=lambda span: span["ts"])
    spans = [span for lane in lanes.values() for span in lane]
    data = {
        **lanes,
        "start": min(span["ts"] for span in spans),
        "end": max(span["ts"] + span["dur"] for span in spans),
        "facts": facts(trace.get("otherData", {})),
    }
    # "</script>" within a string would end the element.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = resources.files("jaxoverlap.observe").joinpath("trace_page.html").read_text(encoding="utf-8")
    return page.replace(_MARK, text, 1)


def facts(other: dict[str, Any]) -> list[tuple[str, str]]:
    """What a trace comes to, from its `otherData`: names and values, in words."""
    summary = other.get("summary") or {}
    found: list[tuple[str, str]] = [
        (name, str(other[name])) for name in ("model", "schedule", "lookahead") if name in other
    ]
    if summary.get("steps"):
        seconds, host = summary["seconds"], sum(summary["host"].values())
        exposed = sum(summary["exposed"].values())
        found += [
            ("steps", str(summary["steps"])),
            ("time", f"{seconds:.3f} s"),
            ("device busy", f"{summary['device_busy'] / seconds:.1%}" if seconds else "–"),
            ("host work", f"{1e3 * host / summary['steps']:.3f} ms a step"),
            ("exposed", f"{1e3 * exposed / summary['steps']:.3f} ms a step"),
            ("hidden share", f"{summary['hidden_share']:.1%}" if summary["hidden_share"] is not None else "–"),
        ]
    if other.get("dropped_steps"):
        found.append(("dropped", f"{other['dropped_steps']} earlier steps"))
    return found
