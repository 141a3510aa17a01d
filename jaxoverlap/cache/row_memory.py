"""Each row's share of the KV memory: its page table, and whose the pages in it are.

    column          0    1    2    3    4    5    6
    page            9    2    7    5    8    .    .         `.` is `no_page`
    whose           cache cache own own  own
                    |<- node.depth ->|
                    |<------- num_pages ------>|
                    |<----------- promised: at least so much is kept for it ------->|

A page is in exactly one place: free in the pool, a row's own, or the prefix cache's. Rows read cached pages
through a lock on the tree; what they write is always their own.

Rules:

* ``available = free + evictable``, and it never falls below what is promised to rows and not theirs yet. So a
  row gets its promised pages, whatever the load.
* `cache_pages` hands a row's own pages, whole and committed, to the prefix cache. Where the same tokens are
  cached already, by a row that was quicker, the row keeps its own copy, since a launched step may read it: the
  page table never changes. What follows that page is handed over only when the row is released.
* With a `window`, pages wholly before it are freed once no step in flight can read them (`drop_before`); such
  a row has holes, so nothing of it can be cached, and the prefix cache is off.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from jaxoverlap.cache.page_pool import PagePool
from jaxoverlap.cache.prefix_cache import CacheNode, PrefixCache


class RowMemory:
    """See the module's rules. `page_table` is int32 [rows, pages_per_row]."""

    def __init__(
        self, num_rows: int, pages_per_row: int, num_pages: int, page_size: int, *, prefix_cache: bool = True
    ) -> None:
        self.page_size = page_size
        self.no_page = num_pages
        self.prefix_cache_enabled = prefix_cache
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(page_size)
        self.page_table = np.full((num_rows, pages_per_row), self.no_page, dtype=np.int32)
        self.is_own = np.zeros((num_rows, pages_per_row), dtype=bool)
        self.num_pages = np.zeros(num_rows, dtype=np.intp)
        self.allocated_len = np.zeros(num_rows, dtype=np.int32)
        """Positions that have a page."""
        self.last_page = np.full(num_rows, self.no_page, dtype=np.int32)
        """The page that a row has got last, and writes to now."""
        self.promised = np.zeros(num_rows, dtype=np.intp)
        self.first_page = np.zeros(num_rows, dtype=np.int32)
        """Columns before it were dropped from the window."""
        self._nodes: list[CacheNode | None] = [None] * num_rows
        self._outstanding = 0

    @property
    def num_available(self) -> int:
        """Pages that are free, or cached and read by nobody."""
        return self.pool.num_free + self.cache.num_evictable

    @property
    def share_used(self) -> float:
        """Of all pages, those that are not available."""
        return 1 - self.num_available / self.pool.num_pages

    @property
    def num_unpromised(self) -> int:
        return self.num_available - self._outstanding

    # ---------------------------------------------------------------- a row's life

    def seat(self, row: int, tokens: np.ndarray, salt: str | None, promised: int, *, reuse: bool = True) -> int | None:
        """Gives an empty row the cached prefix of its tokens, and promises it `promised` pages in all.

        At least the last token is left to be computed; all of them, if nothing may be reused. Returns how many tokens
        are cached; None when there are not enough pages, and then nothing has changed.
        """
        wanted = tokens[:-1] if self.prefix_cache_enabled and reuse else tokens[:0]
        node = self.cache.match(wanted, salt)
        self.cache.lock(node)
        if promised - node.depth > self.num_unpromised:
            self.cache.unlock(node)
            return None
        self._nodes[row] = node
        self.page_table[row, : node.depth] = self.cache.path(node)
        self.num_pages[row] = node.depth
        self.allocated_len[row] = node.depth * self.page_size
        self.promised[row] = promised
        self._outstanding += promised - node.depth
        return node.depth * self.page_size

    def shortage(self, tokens: np.ndarray, salt: str | None, promised: int, *, reuse: bool = True) -> int:
        """Pages that have to come free before `seat` succeeds; 0 or less when there are enough."""
        wanted = tokens[:-1] if self.prefix_cache_enabled and reuse else tokens[:0]
        node = self.cache.match(wanted, salt)
        while node.parent is not None and not node.holds:
            node = node.parent
        return promised - node.depth - self.num_unpromised

    def grow(self, row: int, length: int) -> None:
        """Pages for the first `length` positions. Raises MemoryError; what was promised is always there."""
        have = int(self.num_pages[row])
        missing = -(-length // self.page_size) - have
        if missing > 0:
            self._outstanding -= min(missing, max(0, int(self.promised[row]) - have))
            self.page_table[row, have : have + missing] = pages = self._allocate(missing)
            self.last_page[row] = pages[-1]
            self.is_own[row, have : have + missing] = True
            self.num_pages[row] = have + missing
            self.allocated_len[row] = (have + missing) * self.page_size

    def grow_by_one(self, rows: np.ndarray) -> np.ndarray:
        """One more page for each of several rows, int32 [len(rows)]."""
        columns = self.num_pages[rows]
        self._outstanding -= int(np.count_nonzero(columns < self.promised[rows]))
        pages = self._allocate(len(rows))
        self.page_table[rows, columns] = self.last_page[rows] = pages
        self.is_own[rows, columns] = True
        columns += 1
        self.num_pages[rows] = columns
        self.allocated_len[rows] = columns * self.page_size
        return pages

    def cache_pages(self, row: int, tokens: np.ndarray) -> None:
        """Hands the whole pages of `tokens`, all committed, to the prefix cache, up to the first page of which another
        copy is cached: locking that as well would take a page from those to whom it is promised."""
        self._cache_pages(row, tokens, past_copies=False)

    def _cache_pages(self, row: int, tokens: np.ndarray, *, past_copies: bool) -> None:
        node = self._nodes[row]
        assert node is not None, f"row {row} has no memory"
        if not self.prefix_cache_enabled:
            return
        for key in self.cache.keys(tokens, node.depth):
            if not past_copies and self.cache.child(node, key) is not None:
                break
            column = node.depth
            node, taken = self.cache.advance(node, key, int(self.page_table[row, column]))
            if taken:
                self.is_own[row, column] = False
        self._nodes[row] = node

    def stop_growing(self, row: int) -> None:
        """The row will not be planned any more: what was promised to it is free for others."""
        self._outstanding -= max(0, int(self.promised[row] - self.num_pages[row]))
        self.promised[row] = 0

    def drop_before(self, row: int, position: int) -> None:
        """Frees the pages wholly before a position that no step, in flight or to come, reads any more."""
        assert not self.prefix_cache_enabled, "a row with holes can't be cached"
        first, keep = int(self.first_page[row]), position // self.page_size
        if keep > first:
            self.pool.free(self.page_table[row, first:keep].copy())
            self.page_table[row, first:keep] = self.no_page
            self.is_own[row, first:keep] = False
            self.first_page[row] = keep

    def release(self, row: int, tokens: np.ndarray) -> None:
        """Takes everything back: own pages to the pool, cached ones by letting go. The only way out.

        The whole pages of `tokens`, all committed, stay in the prefix cache; what follows a page of which another
        copy is cached goes below that copy.
        """
        assert self._nodes[row] is not None, f"row {row} has no memory to release"
        self.stop_growing(row)
        self._cache_pages(row, tokens, past_copies=True)
        node, count = self._nodes[row], int(self.num_pages[row])
        assert node is not None
        self.pool.free(self.page_table[row, :count][self.is_own[row, :count]])
        self.cache.unlock(node)
        self._nodes[row] = None
        self.page_table[row, :count] = self.no_page
        self.is_own[row, :count] = False
        self.num_pages[row] = self.allocated_len[row] = self.first_page[row] = 0

    def releasable(self, row: int) -> int:
        """Pages that would be available if the row left."""
        node = self._nodes[row]
        return int(np.count_nonzero(self.is_own[row])) + (0 if node is None else self.cache.releasable(node))

    def flush(self) -> int:
        """Empties the prefix cache of everything that no row reads. Returns the number of pages."""
        count = self.cache.num_evictable
        self.pool.free(self.cache.take_evicted(count))
        return count

    def _allocate(self, count: int) -> np.ndarray:
        missing = count - self.pool.num_free
        if missing > 0:
            self.pool.free(self.cache.take_evicted(missing))
        return self.pool.allocate(count)

    # ---------------------------------------------------------------- proof

    def node_of(self, row: int) -> CacheNode | None:
        """The deepest cached page that the row reads, or hangs its own pages below."""
        return self._nodes[row]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is in exactly one place and every promise can be kept."""
        columns = np.arange(self.page_table.shape[1])
        in_table = (columns >= self.first_page[:, None]) & (columns < self.num_pages[:, None])
        wrong = np.count_nonzero((self.page_table != self.no_page) != in_table)
        assert (self.num_pages * self.page_size).tolist() == self.allocated_len.tolist(), "pages and positions disagree"
        assert not wrong, "a page beyond its row's count, or a column without a page"
        assert not np.count_nonzero(self.is_own > in_table), "a row owns a page that it does not have"
        self.pool.check_integrity(self.page_table[self.is_own].tolist() + [node.page for node in self.cache.nodes()])
        readers: Counter[CacheNode] = Counter()
        for row, end in enumerate(self._nodes):
            if end is None:
                assert self.num_pages[row] == 0, "a row without memory has pages"
                continue
            readers[end] += 1
            if self.prefix_cache_enabled:
                count = self.num_pages[row]
                shared = self.page_table[row, :count][~self.is_own[row, :count]].tolist()
                path = self.cache.path(end).tolist()
                assert shared == path or set(shared) <= set(path), "a row reads a page that it does not hold"
        self.cache.check_integrity(readers)
        lacking = zip(self._nodes, self.promised.tolist(), self.num_pages.tolist(), strict=True)
        outstanding = sum(max(0, promised - have) for node, promised, have in lacking if node is not None)
        assert outstanding == self._outstanding <= self.num_available, "promised pages are not there"
