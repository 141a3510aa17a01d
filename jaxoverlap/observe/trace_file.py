"""Traces as files: JSON in Chrome's trace event format, compressed where the name ends in ``.gz``."""

from __future__ import annotations

import gzip
import json
import reprlib
import zlib
from os import PathLike
from pathlib import Path
from typing import Any

from jaxoverlap.observe.chrome_trace import DEVICE, About, engine_spans, row_counts, to_chrome
from jaxoverlap.observe.timeline import Timeline

_GZIP = b"\x1f\x8b"
_MOST = 1e15
"""Microseconds, tokens or rows; some thirty years."""


def packed(timeline: Timeline, about: About | None = None) -> bytes:
    """The compressed file of a timeline; see `to_chrome`."""
    return gzip.compress(_encode(to_chrome(timeline, about)), compresslevel=5)


def write(path: str | PathLike[str], trace: dict[str, Any]) -> None:
    """Writes what `to_chrome` gives.

    Raises:
      OSError: it can't be written.
    """
    data = _encode(trace)
    Path(path).write_bytes(gzip.compress(data, compresslevel=5) if str(path).endswith(".gz") else data)


def save(path: str | PathLike[str], packed: bytes) -> None:
    """Writes what `packed` gives; raises as `write`."""
    Path(path).write_bytes(packed if str(path).endswith(".gz") else gzip.decompress(packed))


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """A trace, compressed or not, in which all is of the right kind that this package reads.

    Raises:
      OSError: it can't be read.
      ValueError: it is no trace, or something in it is of another kind; the message begins with the path.
    """
    data = Path(path).read_bytes()
    try:
        trace = json.loads(gzip.decompress(data) if data.startswith(_GZIP) else data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    try:
        _check(trace)
    except ValueError as error:
        raise ValueError(f"{path} is no trace: {error}") from error
    return trace


def _check(trace: Any) -> None:
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError("there are no traceEvents")
    for index, event in enumerate(trace["traceEvents"]):
        if not isinstance(event, dict):
            raise _wrong(f"traceEvents[{index}]", event, "an object")
    for event in engine_spans(trace):
        where = f"the event {json.dumps(event)[:200]}"
        if not isinstance(event.get("name"), str) or not event["name"].strip():
            raise _wrong(f"{where}: name", event.get("name"), "a text that is not empty")
        _check_number(f"{where}: ts", event.get("ts"), least=-_MOST)
        _check_number(f"{where}: dur", event.get("dur"))
        args = event.get("args", {})
        if not isinstance(args, dict):
            raise _wrong(f"{where}: args", args, "an object")
        if event["tid"] == DEVICE and "decode_rows" in args:
            for name in ("decode_rows", "prompt_tokens", "kv_tokens"):
                _check_number(f"{where}: args.{name}", args.get(name))
            if not isinstance(args.get("shape", ""), str):
                raise _wrong(f"{where}: args.shape", args["shape"], "a text")
    for event in row_counts(trace):
        args = event.get("args")
        _check_number("the counter rows: ts", event.get("ts"), least=-_MOST)
        _check_number("the counter rows: args.rows", args.get("rows") if isinstance(args, dict) else None)
    _check_about(trace.get("otherData", {}))


def _check_about(other: Any) -> None:
    if not isinstance(other, dict):
        raise _wrong("otherData", other, "an object")
    if not isinstance(other.get("platform", ""), str):
        raise _wrong("otherData.platform", other["platform"], "a text")
    summary = other.get("summary", {})
    if not isinstance(summary, dict):
        raise _wrong("otherData.summary", summary, "an object")
    if not summary.get("steps"):
        return
    for name in ("steps", "seconds", "device_busy"):
        _check_number(f"otherData.summary.{name}", summary.get(name))
    if summary.get("hidden_share") is not None:
        _check_number("otherData.summary.hidden_share", summary["hidden_share"], least=-_MOST)
    for name in ("host", "exposed"):
        if not isinstance(summary.get(name), dict):
            raise _wrong(f"otherData.summary.{name}", summary.get(name), "an object")
        for lap, seconds in summary[name].items():
            _check_number(f"otherData.summary.{name}.{lap}", seconds)


def _check_number(field: str, value: Any, least: float = 0.0) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= _MOST:
        raise _wrong(field, value, f"a number from {least:g} to {_MOST:g}")


def _wrong(field: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"{field}: {reprlib.repr(value)} is not allowed; {allowed} is needed")


def _encode(trace: dict[str, Any]) -> bytes:
    return json.dumps(trace, separators=(",", ":")).encode()
