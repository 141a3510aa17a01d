"""The prefix cache: which pages hold the KV of which tokens.

A tree with one page to a node. The way from the root spells the tokens whose KV the pages hold, so a page is
found only by *all* the tokens up to its end: nothing is hashed down to something shorter that could collide.

    root ── "You are a helpf" ── "ul assistant. U" ── "ser: hi"…        page 3, 9, 4
                                          └────────── "ser: what"…      page 7

Because a node is one page, nothing is ever split: a match always ends on a node.

Rules:

* `holds` of a node counts the rows that end there and its children that are locked. A node is *locked* while
  it is above 0; so a locked node's ancestors are locked, and an unlocked node's descendants are not.
* Only leaves are evicted, only unlocked ones, the least recently used first. Every unlocked page can be had by
  evicting leaf after leaf, so `num_evictable` counts them all.
* Requests with different salts have different roots and share nothing.

Sources: RadixAttention (Zheng et al. 2023, arXiv:2312.07104) for the tree and its LRU leaves; vLLM's automatic
prefix caching for whole pages as the unit and for the salt.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import numpy as np


class CacheNode:
    """One cached page. `depth` pages lead here, itself included; a root has depth 0 and no page."""

    __slots__ = ("children", "depth", "holds", "key", "last_used", "page", "parent", "salt")

    def __init__(self, parent: CacheNode | None, key: bytes, page: int, salt: str | None) -> None:
        self.parent = parent
        self.key = key
        self.salt = salt
        self.page = page
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[bytes, CacheNode] = {}
        self.holds = 0
        self.last_used = 0


class PrefixCache:
    """Owns the pages it holds; `take_evicted` gives them up. See the module's rules."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_locked = 0
        self._roots: dict[str | None, CacheNode] = {}
        self._leaves: list[tuple[int, int, CacheNode]] = []  # a heap; entries may be out of date
        self._clock = itertools.count(1)
        self._serial = itertools.count()

    @property
    def num_evictable(self) -> int:
        return self.num_pages - self.num_locked

    def match(self, tokens: np.ndarray, salt: str | None) -> CacheNode:
        """The deepest node whose pages hold a prefix of `tokens`, int32 [n]; a root if nothing is cached."""
        node = self._roots.get(salt) or CacheNode(None, b"", -1, salt)
        for key in self.keys(tokens, 0):
            child = node.children.get(key)
            if child is None:
                break
            node = child
        return node

    def keys(self, tokens: np.ndarray, first_page: int) -> Iterator[bytes]:
        """The keys of the whole pages of `tokens` from `first_page` on."""
        size = self.page_size
        for start in range(first_page * size, len(tokens) - size + 1, size):
            yield tokens[start : start + size].tobytes()

    def path(self, node: CacheNode) -> np.ndarray:
        """The pages from the root to `node`, int32 [depth]."""
        pages = np.empty(node.depth, dtype=np.int32)
        while node.parent is not None:
            pages[node.depth - 1] = node.page
            node = node.parent
        return pages

    def extend(self, node: CacheNode, key: bytes, page: int) -> tuple[CacheNode, bool]:
        """The child of a locked node for one more page of tokens.

        Returns the child, and whether `page` is now the cache's. It is not where the same tokens are cached
        already: then the caller keeps its copy.
        """
        assert node.holds > 0, "only a locked node can grow, or the new page might hang in the air"
        child = node.children.get(key)
        if child is not None:
            return child, False
        child = node.children[key] = CacheNode(node, key, page, node.salt)
        child.last_used = next(self._clock)
        self.num_pages += 1
        self._offer(child)
        return child, True

    def lock(self, node: CacheNode) -> None:
        """One more row ends at `node`: it and its ancestors stay."""
        at: CacheNode | None = node
        while at is not None:
            at.holds += 1
            if at.holds > 1:
                return
            if at.parent is not None:
                self.num_locked += 1
            else:
                assert self._roots.setdefault(at.salt, at) is at, "two roots for one salt"
            at = at.parent

    def unlock(self, node: CacheNode) -> None:
        """The opposite of `lock`. What nobody holds any more was used now."""
        at: CacheNode | None = node
        now = next(self._clock)
        while at is not None:
            assert at.holds > 0, "unlocked more often than locked"
            at.holds -= 1
            if at.holds > 0:
                return
            at.last_used = now
            if at.parent is None:
                self._forget_empty_root(at)
            else:
                self.num_locked -= 1
                self._offer(at)
            at = at.parent

    def releasable(self, node: CacheNode) -> int:
        """Pages that would become evictable if one row let go of `node`."""
        count = 0
        at = node
        while at.parent is not None and at.holds == 1:
            count += 1
            at = at.parent
        return count

    def take_evicted(self, count: int) -> np.ndarray:
        """Evicts `count` pages, least recently used first; they are the caller's now. int32 [count].

        Raises:
          MemoryError: fewer are evictable; nothing has changed.
        """
        if count > self.num_evictable:
            raise MemoryError(f"{count} cached pages asked for, {self.num_evictable} are evictable")
        pages = np.empty(count, dtype=np.int32)
        taken = 0
        while taken < count:
            last_used, _, node = heapq.heappop(self._leaves)
            if node.holds or node.children or node.last_used != last_used or node.page < 0:
                continue
            pages[taken] = node.page
            taken += 1
            self._remove(node)
        return pages

    def _remove(self, node: CacheNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.page = -1  # marks older entries of the heap
        self.num_pages -= 1
        if parent.parent is None:
            self._forget_empty_root(parent)
        else:
            self._offer(parent)

    def _offer(self, node: CacheNode) -> None:
        """A node that may be evicted from now on enters the heap; `take_evicted` looks again."""
        if not node.holds and not node.children:
            heapq.heappush(self._leaves, (node.last_used, next(self._serial), node))
            if len(self._leaves) > 4 * self.num_pages + 64:  # mostly out of date: pay for the rebuild once in a while
                current = (n for n in self.nodes() if not n.holds and not n.children)
                self._leaves = [(n.last_used, next(self._serial), n) for n in current]
                heapq.heapify(self._leaves)

    def _forget_empty_root(self, root: CacheNode) -> None:
        """Salts may be as many as requests."""
        if not root.holds and not root.children:
            self._roots.pop(root.salt, None)

    def nodes(self) -> Iterator[CacheNode]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def check_integrity(self) -> None:
        """Raises AssertionError when a count or a lock is wrong; visits every node."""
        pages = locked = 0
        offered = {id(node) for used, _, node in self._leaves if node.last_used == used}
        for node in self.nodes():
            pages += 1
            locked += node.holds > 0
            assert node.parent is not None and node.parent.children[node.key] is node, "a node that hangs in the air"
            assert node.depth == node.parent.depth + 1 and node.page >= 0
            assert node.holds >= sum(child.holds > 0 for child in node.children.values()), "a child locked for nothing"
            assert not node.holds or node.parent.holds, "a locked node below an unlocked one"
            assert node.holds or node.children or id(node) in offered, "a leaf that can't be evicted"
        assert (pages, locked) == (self.num_pages, self.num_locked), "cached or locked pages miscounted"
        assert all(root.holds or root.children for root in self._roots.values()), "an empty root was kept"
