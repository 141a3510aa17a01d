"""The tree of cached pages: what is found, what stays, what goes first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxoverlap.cache.prefix_cache import CacheNode, PrefixCache


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def insert(cache: PrefixCache, tokens: np.ndarray, first_page: int, salt: str | None = None) -> CacheNode:
    """Caches the whole pages of `tokens` as pages first_page, first_page + 1, …, and lets go of them."""
    node = cache.match(ids(), salt)
    cache.lock(node)
    for page, key in enumerate(cache.keys(tokens, 0), first_page):
        node, _ = cache.advance(node, key, page)
    cache.unlock(node)
    cache.check_integrity()
    return node


def found(cache: PrefixCache, tokens: np.ndarray, salt: str | None = None) -> list[int]:
    return cache.path(cache.match(tokens, salt)).tolist()


def test_a_match_is_the_longest_run_of_whole_pages():
    cache = PrefixCache(4)
    insert(cache, ids(*range(14)), first_page=10)
    assert cache.num_pages == 3
    for length, pages in [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (12, 3), (14, 3)]:
        assert found(cache, ids(*range(length))) == [10, 11, 12][:pages]
    assert found(cache, ids(*range(8), 99, 9, 10, 11)) == [10, 11]
    assert found(cache, ids(99, *range(1, 12))) == []


def test_the_same_page_of_tokens_after_another_beginning_is_another_page():
    cache = PrefixCache(2)
    insert(cache, ids(1, 2, 7, 7), first_page=0)
    insert(cache, ids(3, 4, 7, 7), first_page=5)
    assert found(cache, ids(1, 2, 7, 7)) == [0, 1]
    assert found(cache, ids(3, 4, 7, 7)) == [5, 6]
    assert found(cache, ids(7, 7)) == []


def test_a_matched_node_and_all_before_it_stay_while_it_is_locked():
    """B046: the lock begins at the matched node, not at its parent."""
    cache = PrefixCache(4)
    leaf = insert(cache, ids(*range(12)), first_page=0)
    insert(cache, ids(*range(100, 108)), first_page=3)
    cache.lock(leaf)
    assert (cache.num_locked, cache.num_evictable) == (3, 2)
    assert sorted(cache.take_evicted(2).tolist()) == [3, 4]
    with pytest.raises(MemoryError, match="1 cached pages asked for, 0 are evictable"):
        cache.take_evicted(1)
    assert found(cache, ids(*range(12))) == [0, 1, 2]
    cache.unlock(leaf)
    assert sorted(cache.take_evicted(3).tolist()) == [0, 1, 2]
    assert (cache.num_pages, cache.num_locked) == (0, 0)
    cache.check_integrity()


@pytest.mark.parametrize(("page_size", "matched", "locked"), [(4, 20, 20), (16, 20, 16), (1, 20, 20), (4, 3, 0)])
def test_a_partial_match_locks_no_more_than_it_matched(page_size, matched, locked):
    """B047: nodes beyond the match are not pinned, and nothing stays locked afterwards."""
    cache = PrefixCache(page_size)
    insert(cache, ids(*range(1, 49)), first_page=0)
    for _ in range(4):
        node = cache.match(ids(*range(1, matched + 1)), None)
        cache.lock(node)
        assert cache.num_locked * page_size == locked
        cache.check_integrity()
        cache.unlock(node)
        assert cache.num_evictable == cache.num_pages == 48 // page_size


def test_what_was_not_matched_goes_before_what_was():
    """B049: AB is cached, only A was used again, room for B is needed: B goes, A stays."""
    cache = PrefixCache(2)
    a, b = ids(1, 2, 3, 4), ids(5, 6, 7, 8)
    insert(cache, np.concatenate([a, b]), first_page=0)
    node = cache.match(a, None)
    cache.lock(node)
    cache.unlock(node)
    assert cache.take_evicted(2).tolist() == [3, 2]
    assert found(cache, a) == [0, 1]


def test_the_least_recently_used_leaf_goes_first():
    cache = PrefixCache(1)
    leaves = {name: insert(cache, ids(0, name), first_page=10 * name) for name in (1, 2, 3)}
    assert cache.num_pages == 4, "the page before them is shared"
    for name in (2, 1):
        cache.lock(leaves[name])
        cache.unlock(leaves[name])
    assert cache.take_evicted(3).tolist() == [31, 21, 11]
    assert cache.take_evicted(1).tolist() == [10]


def test_use_is_counted_from_when_it_ended():
    cache = PrefixCache(1)
    first, second = insert(cache, ids(1), first_page=1), insert(cache, ids(2), first_page=2)
    cache.lock(first)
    cache.lock(second)
    cache.unlock(second)
    cache.unlock(first)
    assert cache.take_evicted(2).tolist() == [2, 1]


def test_a_page_goes_after_its_children():
    cache = PrefixCache(1)
    insert(cache, ids(1, 2, 3), first_page=0)
    assert cache.take_evicted(3).tolist() == [2, 1, 0]


def test_too_many_evictions_raise_and_change_nothing():
    cache = PrefixCache(1)
    insert(cache, ids(1, 2, 3), first_page=0)
    with pytest.raises(MemoryError):
        cache.take_evicted(4)
    assert found(cache, ids(1, 2, 3)) == [0, 1, 2]
    cache.check_integrity()


def test_salts_share_nothing():
    cache = PrefixCache(2)
    insert(cache, ids(1, 2, 3, 4), first_page=0, salt="a")
    assert found(cache, ids(1, 2, 3, 4), "a") == [0, 1]
    for other in (None, "b", "A"):
        assert found(cache, ids(1, 2, 3, 4), other) == []
    insert(cache, ids(1, 2), first_page=5, salt=None)
    assert found(cache, ids(1, 2, 3, 4)) == [5]
    assert found(cache, ids(1, 2, 3, 4), "a") == [0, 1]


def test_a_salt_is_forgotten_with_its_last_page_and_its_last_reader():
    cache = PrefixCache(2)
    for number in range(50):
        insert(cache, ids(1, 2), first_page=number, salt=str(number))
        assert cache.take_evicted(1).tolist() == [number]
        root = cache.match(ids(1), str(number))
        cache.lock(root)
        cache.unlock(root)
    assert not list(cache.nodes()) and not list(cache.unlocked())


def test_tokens_that_are_cached_already_are_not_taken_twice():
    cache = PrefixCache(2)
    insert(cache, ids(1, 2), first_page=4)
    root = cache.match(ids(), None)
    cache.lock(root)
    child, taken = cache.advance(root, ids(1, 2).tobytes(), 9)
    assert (child.page, taken, cache.num_pages) == (4, False, 1)


def test_only_a_locked_node_grows():
    cache = PrefixCache(2)
    leaf = insert(cache, ids(1, 2), first_page=0)
    with pytest.raises(AssertionError, match="locked node"):
        cache.advance(leaf, ids(3, 4).tobytes(), 1)
    with pytest.raises(AssertionError, match="more often"):
        cache.unlock(leaf)


def test_what_a_reader_alone_holds_is_what_its_leaving_would_free():
    cache = PrefixCache(1)
    long, short = insert(cache, ids(1, 2, 3, 4), first_page=0), insert(cache, ids(1, 2), first_page=0)
    cache.lock(long)
    assert cache.releasable(long) == 4
    cache.lock(short)
    assert (cache.releasable(long), cache.releasable(short)) == (2, 0)
    cache.unlock(long)
    assert cache.releasable(short) == 2


def test_the_order_of_eviction_is_that_of_use_however_often_pages_are_used():
    cache = PrefixCache(1)
    first, second = insert(cache, ids(1), first_page=0), insert(cache, ids(2), first_page=1)
    for _ in range(5000):
        for leaf in (second, first):
            cache.lock(leaf)
            cache.unlock(leaf)
    assert list(cache.unlocked()) == [second, first]
    assert cache.take_evicted(2).tolist() == [1, 0]


class TreeMachine(RuleBasedStateMachine):
    """Any readers that lock, grow, let go, while others evict; a dict of whole prefixes says what must be found."""

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def start(self, page_size):
        self.cache = PrefixCache(page_size)
        self.page_of: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.readers: list[tuple[CacheNode, str | None, tuple[int, ...]]] = []
        self.next_page = 0

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9), salt=st.sampled_from([None, "a"]))
    def lock(self, tokens, salt):
        node = self.cache.match(ids(*tokens), salt)
        size, depth = self.cache.page_size, 0
        while (depth + 1) * size <= len(tokens) and (salt, tuple(tokens[: (depth + 1) * size])) in self.page_of:
            depth += 1
        wanted = [self.page_of[salt, tuple(tokens[: (i + 1) * size])] for i in range(depth)]
        assert self.cache.path(node).tolist() == wanted
        self.cache.lock(node)
        self.readers.append((node, salt, tuple(tokens[: depth * size])))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def extend(self, data):
        index = data.draw(st.integers(0, len(self.readers) - 1))
        node, salt, tokens = self.readers[index]
        size = self.cache.page_size
        page = ids(*data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)))
        tokens = (*tokens, *page.tolist())
        child, taken = self.cache.advance(node, page.tobytes(), self.next_page)
        assert taken == ((salt, tokens) not in self.page_of)
        if taken:
            self.page_of[salt, tokens] = self.next_page
            self.next_page += 1
        self.readers[index] = child, salt, tokens

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def unlock(self, data):
        node, _, _ = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.cache.unlock(node)

    @rule(share=st.floats(0, 1))
    def evict(self, share):
        pages = set(self.cache.take_evicted(int(share * self.cache.num_evictable)).tolist())
        self.page_of = {prefix: page for prefix, page in self.page_of.items() if page not in pages}

    @invariant()
    def locked_is_what_readers_need(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        size = self.cache.page_size
        needed = {(salt, t[:n]) for _, salt, t in self.readers for n in range(size, len(t) + 1, size)}
        assert needed <= self.page_of.keys()
        assert self.cache.num_locked == len(needed)
        assert self.cache.num_pages == len(self.page_of)


TreeMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTreeMachine = pytest.mark.filterwarnings("default")(TreeMachine.TestCase)
