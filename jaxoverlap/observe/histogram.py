"""Counts of values by size, as Prometheus has them: cheap enough for a value a token."""

from __future__ import annotations

from collections.abc import Sequence
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
