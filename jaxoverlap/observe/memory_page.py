"""Who has which KV page, over time, as one page of HTML that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import groupby
from typing import Any

_MARK = "/*DATA*/"


def to_page(snapshots: Sequence[tuple[float, Mapping[str, Any]]]) -> str:
    """HTML of what `MemorySnapshot.to_dict` gave at some moments, in seconds."""
    numbers: dict[Any, int] = {}
    moments: list[dict[str, Any]] = []
    for seconds, snapshot in snapshots:
        newest = max((page["last_used"] for page in snapshot["pages"] if page["last_used"] is not None), default=0)
        pages = [
            {
                "owner": page["owner"],
                "request": page["request_id"],
                "number": numbers.setdefault(page["request_id"], len(numbers)),
                "index": page["index"],
                "readers": page["readers"],
                "recency": page["last_used"] / newest if page["last_used"] is not None and newest else 0.0,
            }
            for page in snapshot["pages"]
        ]
        moments.append({"seconds": seconds, "facts": facts(snapshot), "pages": pages})
    data = {"num_pages": max(len(moment["pages"]) for moment in moments), "moments": moments}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = resources.files("jaxoverlap.observe").joinpath("memory_page.html").read_text(encoding="utf-8")
    return page.replace(_MARK, text, 1)


def facts(snapshot: Mapping[str, Any]) -> dict[str, str]:
    """What a snapshot comes to: numbers of pages, what sharing saves, and how scattered the free ones are."""
    pages = snapshot["pages"]
    runs = [len(list(run)) for owner, run in groupby(page["owner"] for page in pages) if owner == "free"]
    saved = sum(page["readers"] - 1 for page in pages if page["owner"] == "cache" and page["readers"] > 1)
    return {
        "pages": str(len(pages)),
        "of single requests": str(snapshot["own"]),
        "cached and read": str(snapshot["locked"]),
        "cached": str(snapshot["evictable"]),
        "free": str(snapshot["free"]),
        "promised": str(snapshot["promised"]),
        "saved by sharing": str(saved),
        "free runs": f"{len(runs)}, longest {max(runs, default=0)}",
    }
