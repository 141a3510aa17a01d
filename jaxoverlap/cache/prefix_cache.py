"""The prefix cache: which pages hold the KV of which tokens.

A tree with one page to a node. The way from the root spells the tokens whose KV the pages hold, so a page is
found only by *all* the tokens up to its end: nothing is hashed down to something shorter that could collide.

    root ── "You are a helpf" ── "ul assistant. U" ── "ser: hi"…        page 3, 9, 4
                                          └────────── "ser: what"…      page 7

Because a node is one page, nothing is ever split: a match always ends on a node. One dict holds the tree: a node
is found by what stands for all the tokens before it, and its own.

Rules:

* `holds` of a node counts the rows that end there and its children that are locked. A node is *locked* while
  it is above 0; so a locked node's ancestors are locked, and an unlocked node's descendants are not.
* Unlocked nodes stand in a queue in the order in which they were let go of, each behind its descendants. So the
  first of them is a leaf, and the one that was not used for longest: eviction takes the first, and nothing else.
* Requests with different salts have different roots and share nothing. A root has no page and is never locked.

Sources: RadixAttention (Zheng et al. 2023, arXiv:2312.07104) for the tree and its LRU leaves; vLLM's automatic
prefix caching for whole pages as the unit, found by what is before them, and for the salt.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping

import numpy as np

Prefix = int | str | None
"""Stands for all tokens up to a node's end: a number of its own; for a root, the salt."""


class CacheNode:
    """One cached page. `depth` pages lead here, itself included; a root has depth 0 and no page."""

    __slots__ = ("depth", "holds", "key", "page", "parent", "prefix", "salt")

    def __init__(self, parent: CacheNode, tokens: bytes, page: int, number: int) -> None:
        self.parent: CacheNode | None = parent
        self.key: tuple[Prefix, bytes] = (parent.prefix, tokens)
        self.prefix: Prefix = number
        self.page = page
        self.depth: int = parent.depth + 1
        self.salt: str | None = parent.salt
        self.holds = 0

    @classmethod
    def root(cls, salt: str | None) -> CacheNode:
        node = cls.__new__(cls)
        node.parent, node.key, node.prefix, node.salt = None, (salt, b""), salt, salt
        node.page, node.depth, node.holds = -1, 0, 0
        return node


class PrefixCache:
    """Owns the pages it holds; `take_evicted` gives them up. See the module's rules."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._nodes: dict[tuple[Prefix, bytes], CacheNode] = {}
        self._unlocked: OrderedDict[CacheNode, None] = OrderedDict()
        self._numbers = itertools.count()

    @property
    def num_pages(self) -> int:
        return len(self._nodes)

    @property
    def num_evictable(self) -> int:
        return len(self._unlocked)

    @property
    def num_locked(self) -> int:
        return len(self._nodes) - len(self._unlocked)

    def match(self, tokens: np.ndarray, salt: str | None) -> CacheNode:
        """The deepest node whose pages hold a prefix of `tokens`, int32 [n]; a root if nothing is cached."""
        node: CacheNode | None = None
        prefix: Prefix = salt
        for key in self.keys(tokens, 0):
            child = self._nodes.get((prefix, key))
            if child is None:
                break
            node, prefix = child, child.prefix
        return node or CacheNode.root(salt)

    def child(self, node: CacheNode, key: bytes) -> CacheNode | None:
        """Where one more page of tokens is cached."""
        return self._nodes.get((node.prefix, key))

    def keys(self, tokens: np.ndarray, first_page: int) -> Iterator[bytes]:
        """The keys of the whole pages of `tokens` from `first_page` on."""
        size = self.page_size
        for start in range(first_page * size, len(tokens) - size + 1, size):
            yield tokens[start : start + size].tobytes()

    def path(self, node: CacheNode) -> np.ndarray:
        """The pages from the root to `node`, int32 [depth]."""
        pages = []
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        return np.array(pages[::-1], dtype=np.int32)

    def lock(self, node: CacheNode) -> None:
        """One more row ends at `node`: it and its ancestors stay."""
        while node.parent is not None:
            node.holds += 1
            if node.holds > 1:
                return
            del self._unlocked[node]
            node = node.parent

    def unlock(self, node: CacheNode) -> None:
        """The opposite of `lock`. What nobody holds any more was used now."""
        while node.parent is not None:
            assert node.holds > 0, "unlocked more often than locked"
            node.holds -= 1
            if node.holds > 0:
                return
            self._unlocked[node] = None
            node = node.parent

    def advance(self, node: CacheNode, key: bytes, page: int) -> tuple[CacheNode, bool]:
        """Moves a row's lock from `node` to the child for one more page of tokens.

        Returns the child, and whether `page` is now the cache's. It is not where the same tokens are cached
        already: then the caller keeps its copy.
        """
        assert node.holds > 0 or node.parent is None, "only a locked node can grow, or the page might hang in the air"
        child = self.child(node, key)
        taken = child is None
        if child is None:
            child = CacheNode(node, key, page, next(self._numbers))
            self._nodes[child.key] = child
        elif not child.holds:
            del self._unlocked[child]
        if child.holds and node.parent is not None:
            node.holds -= 1  # else the row's hold on the node becomes the child's
        child.holds += 1
        return child, taken

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
        for index in range(count):
            node, _ = self._unlocked.popitem(last=False)
            del self._nodes[node.key]
            pages[index] = node.page
        return pages

    def nodes(self) -> Iterator[CacheNode]:
        """All of them, parents first."""
        return iter(self._nodes.values())

    def unlocked(self) -> Iterator[CacheNode]:
        """In the order in which they would be evicted."""
        return iter(self._unlocked)

    def check_integrity(self, readers: Mapping[CacheNode, int] | None = None) -> None:
        """Raises AssertionError when a node, a lock or the order is wrong; visits every node.

        Args:
          readers: how many rows end at each node, if it is known: then there is no other lock.
        """
        nodes, behind_all = self._nodes, self.num_pages
        place = {node: index for index, node in enumerate(self._unlocked)}
        holds = Counter(node.parent for node in nodes.values() if node.holds)
        holds.update(readers or {})
        num_unlocked = 0
        for key, node in nodes.items():
            parent = node.parent
            assert parent is not None and key == node.key and key[0] == parent.prefix, "a node under a wrong key"
            assert parent.parent is None or nodes.get(parent.key) is parent, "a node that hangs in the air"
            assert node.depth == parent.depth + 1 and node.salt == parent.salt and node.page >= 0
            if node.holds:
                assert node not in place, "a locked node could be evicted"
                assert parent.holds or parent.parent is None, "a locked node below an unlocked one"
            else:
                assert node in place, "a page that can't be evicted"
                assert place[node] < place.get(parent, behind_all), "a page would go before what follows it"
                num_unlocked += 1
            held = holds.get(node, 0)
            assert node.holds == held or (readers is None and node.holds > held), "locks that nobody holds"
        assert len(place) == num_unlocked, "a node that is gone could be evicted"
        for end in holds:
            assert end is None or end.parent is None or nodes.get(end.key) is end, "a page is read that is not cached"
