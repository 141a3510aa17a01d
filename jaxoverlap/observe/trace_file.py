"""Traces as files: JSON in Chrome's trace event format, compressed where the name ends in ``.gz``."""

from __future__ import annotations

import gzip
import json
from os import PathLike
from pathlib import Path
from typing import Any

from jaxoverlap.observe.chrome_trace import to_chrome
from jaxoverlap.observe.timeline import Timeline

_GZIP = b"\x1f\x8b"


def packed(timeline: Timeline, about: dict[str, Any] | None = None) -> bytes:
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
    """A trace, compressed or not.

    Raises:
      OSError: it can't be read.
      ValueError: it is no trace.
    """
    data = Path(path).read_bytes()
    try:
        trace = json.loads(gzip.decompress(data) if data.startswith(_GZIP) else data)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path} is no trace: there are no traceEvents")
    return trace


def _encode(trace: dict[str, Any]) -> bytes:
    return json.dumps(trace, separators=(",", ":")).encode()
