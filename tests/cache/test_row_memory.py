"""A row's life in memory: seat, grow, cache, release; and every page in exactly one place all along."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxoverlap.cache.row_memory import RowMemory


def make(
    *, rows: int = 3, columns: int = 8, pages: int = 10, page_size: int = 2, prefix_cache: bool = True
) -> RowMemory:
    return RowMemory(rows, columns, pages, page_size, prefix_cache=prefix_cache)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def fill(memory: RowMemory, row: int, tokens: np.ndarray, *, salt: str | None = None, promised: int = 0) -> int | None:
    """Seats a row and gives all its tokens a page, as if it had computed them."""
    cached = memory.seat(row, tokens, salt, promised or -(-len(tokens) // memory.page_size))
    if cached is not None:
        memory.grow(row, len(tokens))
    return cached


def table(memory: RowMemory, row: int) -> list[int]:
    return memory.page_table[row, : memory.num_pages[row]].tolist()


def test_the_second_request_reads_the_pages_of_the_first():
    memory = make()
    assert fill(memory, 0, ids(1, 2, 3, 4, 5)) == 0
    memory.cache_pages(0, ids(1, 2, 3, 4))
    assert fill(memory, 1, ids(1, 2, 3, 4, 9, 9)) == 4
    assert table(memory, 1)[:2] == table(memory, 0)[:2]
    assert memory.is_own[1].tolist()[:4] == [False, False, True, False]
    memory.check_integrity()
    memory.release(0, ids())
    memory.release(1, ids())
    assert (memory.num_available, memory.cache.num_locked, memory.cache.num_pages) == (10, 0, 2)
    memory.check_integrity()


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (2, 0), (3, 2), (4, 2), (5, 4)])
def test_at_least_one_token_is_left_to_be_computed(length, cached):
    """B043: a prompt that is cached to its last token still needs the logits after it."""
    memory = make()
    tokens = ids(1, 2, 3, 4, 5)
    fill(memory, 0, tokens)
    memory.release(0, tokens)
    assert memory.seat(1, tokens[:length], None, 3) == cached


def test_other_salts_read_nothing():
    memory = make()
    tokens = ids(1, 2, 3, 4, 5)
    fill(memory, 0, tokens, salt="a")
    memory.cache_pages(0, tokens)
    assert memory.seat(1, tokens, "b", 3) == 0
    assert memory.seat(2, tokens, "a", 3) == 4
    memory.check_integrity()


def test_without_the_prefix_cache_nothing_is_kept():
    memory = make(prefix_cache=False)
    fill(memory, 0, ids(1, 2, 3, 4))
    memory.release(0, ids(1, 2, 3, 4))
    assert (memory.pool.num_free, memory.cache.num_pages) == (10, 0)
    assert memory.seat(1, ids(1, 2, 3, 4), None, 2) == 0


def test_of_two_copies_one_is_cached_and_neither_row_sees_its_table_change():
    memory = make()
    tokens = ids(1, 2, 3, 4, 5)
    for row in (0, 1):
        fill(memory, row, tokens)
    before = [table(memory, row) for row in (0, 1)]
    for row in (0, 1):
        memory.cache_pages(row, tokens[:4])
        memory.check_integrity()
    assert [table(memory, row) for row in (0, 1)] == before
    assert memory.is_own[1].tolist()[:3] == [True, True, True]
    assert memory.cache.num_pages == 2
    memory.release(1, ids())
    assert memory.cache.path(memory.cache.match(tokens, None)).tolist() == before[0][:2]


def test_a_row_that_leaves_puts_what_follows_below_the_other_copy():
    memory = make()
    for row in (0, 1):
        fill(memory, row, ids(7, 7, 8, 8, 9))
    memory.cache_pages(0, ids(7, 7))
    own = table(memory, 1)
    memory.release(1, ids(7, 7, 8, 8))
    assert memory.cache.path(memory.cache.match(ids(7, 7, 8, 8), None)).tolist() == [table(memory, 0)[0], own[1]]
    memory.check_integrity()


def test_a_copy_is_cached_after_all_once_the_other_is_gone():
    memory = make(pages=6)
    tokens = ids(1, 2, 3, 4, 5)
    for row in (0, 1):
        fill(memory, row, tokens)
    memory.cache_pages(0, tokens[:2])
    memory.release(0, ids())
    memory.cache_pages(1, tokens[:2])
    assert memory.is_own[1, 0]
    memory.flush()
    memory.cache_pages(1, tokens[:4])
    assert memory.is_own[1].tolist()[:3] == [False, False, True]
    memory.check_integrity()


def test_a_promise_is_kept_whatever_others_take():
    memory = make(pages=6)
    assert memory.seat(0, ids(1), None, 4) == 0
    assert memory.num_unpromised == 2
    assert memory.seat(1, ids(1), None, 3) is None
    assert memory.seat(1, ids(1), None, 2) == 0
    memory.check_integrity()
    memory.grow(1, 4)
    memory.grow(0, 8)
    assert (memory.num_unpromised, memory.num_available) == (0, 0)
    with pytest.raises(MemoryError):
        memory.grow(0, 9)
    memory.check_integrity()


def test_a_refused_seat_changes_nothing():
    memory = make(pages=4)
    tokens = ids(1, 2, 3, 4, 5)
    fill(memory, 0, tokens)
    memory.release(0, tokens)
    before = memory.num_available, memory.num_unpromised, memory.cache.num_locked
    assert memory.seat(1, tokens, None, 5) is None
    assert (memory.num_available, memory.num_unpromised, memory.cache.num_locked) == before
    memory.check_integrity()
    assert memory.seat(1, tokens, None, 4) == 4


def test_pages_read_from_the_cache_count_towards_the_promise_and_not_as_free():
    """B041: locking a prefix takes its pages from what could be evicted, in pages, not in tokens."""
    memory = make(pages=4)
    tokens = ids(1, 2, 3, 4, 5)
    fill(memory, 0, tokens)
    memory.release(0, tokens)
    assert memory.num_available == 4
    memory.seat(0, tokens, None, 3)
    assert (memory.num_available, memory.num_unpromised) == (2, 1)
    assert memory.seat(1, ids(8), None, 2) is None
    assert memory.seat(1, ids(8), None, 1) == 0


def test_growing_beyond_the_promise_takes_what_is_left_over():
    memory = make(pages=6)
    memory.seat(0, ids(1), None, 1)
    memory.seat(1, ids(1), None, 3)
    for expected in (2, 1, 0):
        memory.grow_by_one(ids(0))
        assert memory.num_unpromised == expected
        memory.check_integrity()


def test_one_call_grows_rows_within_and_beyond_their_promise():
    memory = make(pages=8)
    for row, promised in ((0, 1), (1, 4), (2, 1)):
        memory.seat(row, ids(1), None, promised)
        memory.grow(row, 1)
    new = memory.grow_by_one(ids(0, 1, 2))
    assert [table(memory, row)[1] for row in range(3)] == new.tolist()
    assert len(set(new.tolist())) == 3
    assert memory.num_unpromised == 8 - 6 - 2
    memory.check_integrity()


def test_cached_pages_make_way_for_what_is_needed():
    memory = make(pages=4)
    fill(memory, 0, ids(1, 2, 3, 4, 5, 6))
    memory.release(0, ids(1, 2, 3, 4, 5, 6))
    assert (memory.pool.num_free, memory.num_available) == (1, 4)
    fill(memory, 1, ids(9, 9, 9, 9, 9))
    assert memory.cache.num_pages == memory.cache.match(ids(1, 2, 3, 4, 5, 6), None).depth == 1
    memory.check_integrity()


def test_a_row_that_will_not_be_planned_lets_go_of_its_promise_once():
    memory = make(pages=6)
    memory.seat(0, ids(1), None, 5)
    memory.grow(0, 2)
    for _ in range(2):
        memory.stop_growing(0)
        assert memory.num_unpromised == 5
        memory.check_integrity()
    memory.release(0, ids())
    assert memory.num_unpromised == 6


def test_releasing_twice_raises_and_changes_nothing():
    """B035: there is one way out, and it is taken once."""
    memory = make()
    fill(memory, 0, ids(1, 2, 3))
    memory.release(0, ids())
    with pytest.raises(AssertionError, match="row 0 has no memory to release"):
        memory.release(0, ids())
    assert memory.num_available == 10
    memory.check_integrity()


def test_a_released_row_points_at_no_page():
    """B032: what is left in a vacated row is out of range, so that nothing can be written through it."""
    memory = make()
    fill(memory, 0, ids(1, 2, 3, 4, 5))
    memory.release(0, ids(1, 2))
    assert (memory.page_table[0] == memory.no_page).all() and memory.no_page == 10


def test_a_flush_leaves_what_is_read():
    memory = make()
    fill(memory, 0, ids(1, 2, 3, 4, 5))
    memory.cache_pages(0, ids(1, 2, 3, 4))
    fill(memory, 1, ids(1, 2, 7, 7))
    memory.release(1, ids(1, 2, 7, 7))
    assert memory.flush() == 1
    assert (memory.cache.num_pages, memory.cache.num_evictable) == (2, 0)
    memory.release(0, ids())
    assert memory.flush() == 2
    assert memory.pool.num_free == 10
    memory.check_integrity()


def test_what_would_come_free_is_what_comes_free():
    memory = make()
    for row, last in ((0, 5), (1, 6)):
        fill(memory, row, ids(1, 2, 3, 4, last, 9, 9))
        memory.cache_pages(row, ids(1, 2, 3, 4, last, 9))
        memory.check_integrity()
    for row, last in ((0, 5), (1, 6)):
        would, before = memory.releasable(row), memory.num_available
        memory.release(row, ids(1, 2, 3, 4, last, 9))
        assert memory.num_available - before == would
    assert memory.num_available == 10


def test_pages_before_a_window_come_free_and_are_not_freed_again():
    memory = make(prefix_cache=False)
    fill(memory, 0, ids(*range(9)))
    pages = table(memory, 0)
    for position, free in [(1, 5), (2, 6), (3, 6), (6, 8), (4, 8)]:
        memory.drop_before(0, position)
        assert memory.pool.num_free == free
        memory.check_integrity()
    assert table(memory, 0) == [10, 10, 10, *pages[3:]]
    assert memory.releasable(0) == 2
    memory.grow(0, 11)
    memory.release(0, ids())
    assert memory.pool.num_free == 10
    memory.check_integrity()
    fill(memory, 0, ids(1, 2, 3))
    memory.check_integrity()


def test_a_row_with_holes_can_not_be_cached():
    memory = make()
    fill(memory, 0, ids(1, 2, 3))
    with pytest.raises(AssertionError, match="holes"):
        memory.drop_before(0, 2)


class MemoryMachine(RuleBasedStateMachine):
    """B038: whatever rows do, the pages of all owners and the free ones come to the pool, in whole pages."""

    @initialize(page_size=st.sampled_from([1, 2, 16, 64]), pages=st.integers(1, 24), prefix_cache=st.booleans())
    def start(self, page_size, pages, prefix_cache):
        self.memory = make(rows=4, columns=24, pages=pages, page_size=page_size, prefix_cache=prefix_cache)
        self.tokens: dict[int, np.ndarray] = {}

    @precondition(lambda self: len(self.tokens) < 4)
    @rule(base=st.integers(0, 2), length=st.integers(1, 200), room=st.integers(0, 40))
    def seat(self, base, length, room):
        row = next(row for row in range(4) if row not in self.tokens)
        tokens = np.full(length, base, np.int32)
        if base == 2:
            tokens[length // 2 :] = 0
        promised = min(-(-(length + room) // self.memory.page_size), 24)
        if length > 24 * self.memory.page_size:
            return
        cached = self.memory.seat(row, tokens, None, promised)
        if cached is not None:
            assert cached < length and cached % self.memory.page_size == 0
            self.memory.grow(row, length)
            self.tokens[row] = tokens

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), extra=st.integers(1, 40), token=st.integers(0, 1))
    def extend(self, data, extra, token):
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        memory, length = self.memory, len(self.tokens[row]) + extra
        if length > 24 * memory.page_size:
            return
        needed = -(-length // memory.page_size)
        beyond = max(0, needed - max(int(memory.num_pages[row]), int(memory.promised[row])))
        if beyond <= memory.num_unpromised:
            memory.grow(row, length)
            self.tokens[row] = np.concatenate([self.tokens[row], np.full(extra, token, np.int32)])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), share=st.floats(0, 1))
    def cache(self, data, share):
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        before = table(self.memory, row)
        self.memory.cache_pages(row, self.tokens[row][: int(share * len(self.tokens[row]))])
        assert table(self.memory, row) == before

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), share=st.sampled_from([0.0, 0.5, 1.0]))
    def leave(self, data, share):
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens = self.tokens.pop(row)
        self.memory.stop_growing(row)
        would, before = self.memory.releasable(row), self.memory.num_available
        self.memory.release(row, tokens[: int(share * len(tokens))])
        assert self.memory.num_available - before == would

    @rule()
    def flush(self):
        self.memory.flush()

    @invariant()
    def every_page_is_in_one_place(self):
        if hasattr(self, "memory"):
            self.memory.check_integrity()
            if not self.tokens:
                assert self.memory.num_available == self.memory.pool.num_pages


MemoryMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMemoryMachine = pytest.mark.filterwarnings("default")(MemoryMachine.TestCase)
