"""Who has which page: as data, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jaxoverlap.scheduler.state import SchedulerState

_CELL = 10
_COLUMNS = 64
_FREE, _CACHED = "#e8e8e8", "#9aa7b8"


class PageOwner(NamedTuple):
    """One page. A tuple, because there are many of them and the engine stands still while they are made.

    Attributes:
      page: its id.
      owner: "free", "row" (written by one request) or "cache" (shared by all who begin with its tokens).
      request_id: the row's request, for "row"; a server gives its callers' own ids, and None for one who is gone.
      index: which page of its sequence it is, from 0.
      readers: running requests that read it.
      last_used: of a cached page that nobody reads, its place in the order of last use; the lowest goes first.
    """

    page: int
    owner: str
    request_id: int | str | None = None
    index: int | None = None  # type: ignore[assignment]  # not the method of tuples
    readers: int = 0
    last_used: int | None = None


@dataclass(frozen=True)
class MemorySnapshot:
    """Pages in the order of their ids, and what they come to.

    Attributes:
      free, own, locked, evictable: numbers of pages; together `len(pages)`.
      promised: pages kept for running requests beyond what they have; part of free + evictable.
    """

    page_size: int
    pages: tuple[PageOwner, ...]
    free: int
    own: int
    locked: int
    evictable: int
    promised: int

    @classmethod
    def of(cls, state: SchedulerState) -> MemorySnapshot:
        memory, rows = state.memory, state.rows
        pages = [PageOwner(page, "free") for page in range(memory.pool.num_pages)]
        readers = np.bincount(
            memory.page_table[memory.page_table < memory.no_page], minlength=memory.pool.num_pages
        ).tolist()
        place = {node: index for index, node in enumerate(memory.cache.unlocked())}
        for node in memory.cache.nodes():
            page = node.page
            pages[page] = PageOwner(page, "cache", None, node.depth - 1, readers[page], place.get(node))
        for row, column in np.argwhere(memory.is_own).tolist():
            page = int(memory.page_table[row, column])
            pages[page] = PageOwner(page, "row", int(rows.request_ids[row]), column, readers[page])
        cache = memory.cache
        return cls(
            page_size=memory.page_size,
            pages=tuple(pages),
            free=memory.pool.num_free,
            own=int(memory.is_own.sum()),
            locked=cache.num_locked,
            evictable=cache.num_evictable,
            promised=memory.num_available - memory.num_unpromised,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "pages": [page._asdict() for page in self.pages]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MemorySnapshot:
        """From what `to_dict` returned."""
        return cls(**{**values, "pages": tuple(PageOwner(**page) for page in values["pages"])})

    def to_svg(self) -> str:
        """A map with one cell to a page, in the order of ids; hovering names the owner. Requests differ by hue."""
        rows = -(-len(self.pages) // _COLUMNS)
        width, height = _COLUMNS * _CELL, rows * _CELL + 24
        numbers: dict[int | str | None, int] = {}
        cells = []
        for page in self.pages:
            fill = _colour(page, numbers)
            x, y = page.page % _COLUMNS * _CELL, page.page // _COLUMNS * _CELL
            cells.append(
                f'<rect x="{x}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" fill="{fill}">'
                f"<title>{escape(_describe(page))}</title></rect>"
            )
        legend = (
            f"{len(self.pages)} pages of {self.page_size} tokens: {self.own} of single requests, {self.locked} cached "
            f"and read, {self.evictable} cached, {self.free} free; {self.promised} promised"
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">\n'
            + "\n".join(cells)
            + f'\n<text x="2" y="{height - 8}" font-size="11">{legend}</text>\n</svg>\n'
        )


def _colour(page: PageOwner, numbers: dict[int | str | None, int]) -> str:
    """`numbers` says which request of the picture it is, counted from 0, and takes new ones in."""
    if page.owner == "free":
        return _FREE
    if page.owner == "cache":
        return "#3f5f8a" if page.readers else _CACHED
    return f"hsl({numbers.setdefault(page.request_id, len(numbers)) * 137 % 360},70%,55%)"


def _describe(page: PageOwner) -> str:
    if page.owner == "free":
        return f"page {page.page}: free"
    request = "a request that has left" if page.request_id is None else f"request {page.request_id}"
    whose = request if page.owner == "row" else f"cached, {page.readers} readers"
    return f"page {page.page}: {whose}, page {page.index} of its sequence"
