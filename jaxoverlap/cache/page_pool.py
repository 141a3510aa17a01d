"""The pool of KV pages: who may write where.

Rules: a page is either free or owned. `allocate` gives free pages or raises and changes nothing; `free`
takes owned pages back or raises and changes nothing. The pool knows nothing of requests, rows or devices.
"""

from __future__ import annotations

import numpy as np


class PagePool:
    """Pages ``0 … num_pages - 1``; most recently freed first, so that warm memory is used again."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: {num_pages} is not allowed; use an integer ≥ 1")
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._is_free = np.ones(num_pages, dtype=bool)
        self.num_free = num_pages

    def allocate(self, count: int) -> np.ndarray:
        """`count` pages, int32 [count]. Raises MemoryError when fewer are free."""
        if count > self.num_free:
            raise MemoryError(f"{count} KV pages asked for, {self.num_free} of {self.num_pages} are free")
        self.num_free -= count
        pages = self._stack[self.num_free : self.num_free + count][::-1].copy()
        self._is_free[pages] = False
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Takes pages back. Raises ValueError when one is not owned, or is named twice."""
        if len(pages) == 0:
            return
        distinct = set(pages.tolist())
        if min(distinct) < 0 or max(distinct) >= self.num_pages:
            raise ValueError(f"pages outside 0 … {self.num_pages - 1} freed: {pages}")
        if len(distinct) != len(pages) or np.count_nonzero(self._is_free[pages]):
            raise ValueError(f"pages freed twice: {pages}")
        self._is_free[pages] = True
        self._stack[self.num_free : self.num_free + len(pages)] = pages[::-1]
        self.num_free += len(pages)

    def check_integrity(self, owned: list[int]) -> None:
        """Raises AssertionError unless exactly the pages in `owned` (each once) are not free."""
        free = self._stack[: self.num_free]
        assert len(free) + len(owned) == self.num_pages, f"{len(free)} free + {len(owned)} owned of {self.num_pages}"
        assert len({*owned, *free.tolist()}) == self.num_pages, "a page has two owners"
        agree = np.count_nonzero(self._is_free) == np.count_nonzero(self._is_free[free]) == len(free)
        assert agree, "the free list and the free flags disagree"
