"""Counts of values by size, as Prometheus has them: cheap enough for a value a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class Histogram:
    """How many values were at most each of some bounds, and their sum.

    Args:
      bounds: ascending; larger values are counted too.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.asarray(bounds, dtype=float)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[np.searchsorted(self._bounds, value)] += 1
        self._sum += value

    def add_all(self, values: Sequence[float]) -> None:
        self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
        self._sum += sum(values)

    def read(self) -> dict[str, Any]:
        """`bounds`; `counts`: of the values up to each bound and of all of them; `sum`."""
        return {"bounds": self._bounds.tolist(), "counts": np.cumsum(self._counts).tolist(), "sum": self._sum}


def quantile(before: Mapping[str, Any], after: Mapping[str, Any], share: float) -> float | None:
    """Of the values counted between two readings: at most this is `share` of them, as well as the bounds tell.

    Between two bounds values are taken to be spread evenly, and beyond the last they count as it. None: there are none.
    Counts that went back began anew meanwhile.
    """
    counts = [new - old for new, old in zip(after["counts"], before["counts"], strict=True)]
    if min(counts) < 0:
        counts = after["counts"]
    if not counts[-1]:
        return None
    wanted, low, below = share * counts[-1], 0.0, 0
    for bound, count in zip(after["bounds"], counts, strict=False):
        if count >= wanted:
            return low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low
