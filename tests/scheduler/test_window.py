"""Sliding windows: a page that fell out is freed when nothing in flight reads it, and no sooner.

The harness poisons every page in the moment in which it is freed, and the toy device runs a step only when its
result is read: what is freed too early changes the tokens.
"""

from __future__ import annotations

import numpy as np
import pytest

from jaxoverlap.outputs import FinishReason
from tests.harness import Harness

LOOKAHEADS = [0, 1, 2, 4]


def windowed(window: int, **changes) -> Harness:
    settings = {"prefix_cache": False, "window": window} | changes.pop("settings", {})
    return Harness(**({"max_model_len": 400} | changes), settings=settings)


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 3 * i) % 90 for i in range(length)]


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize(("window", "page_size"), [(32, 16), (31, 16), (33, 16), (1, 16), (16, 1), (5, 4)])
def test_a_long_generation_reads_no_page_that_was_freed(window, page_size, lookahead):
    """B013: 200 tokens, and the pool need not hold them."""
    harness = windowed(window, page_size=page_size, num_pages=400 // page_size, lookahead=lookahead)
    request = harness.submit(prompt(20), max_tokens=200, ignore_eos=True)
    most = 0
    while request.finish_reason is None:
        harness.turn()
        most = max(most, int(harness.scheduler.state.memory.is_own.sum()))
    # The window itself, where it does not begin at a page; the steps in flight; the prompt, which comes at once.
    assert most <= max(-(-(window + lookahead) // page_size) + 1, -(-(20 + lookahead) // page_size) + 1)
    harness.run()


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
@pytest.mark.parametrize("lookahead", [0, 1, 4])
@pytest.mark.parametrize(("window", "page_size"), [(20, 4), (16, 16), (3, 1)])
def test_the_first_decode_after_a_prompt_of_any_length_reads_its_whole_window(window, page_size, lookahead, chunk):
    for length in (1, 2, 3, 4, 15, 16, 17, 19, 20, 21, 33, 64, 65):
        harness = windowed(
            window, page_size=page_size, num_pages=400 // page_size, lookahead=lookahead, max_batched_tokens=chunk
        )
        harness.submit(prompt(length), max_tokens=3, ignore_eos=True)
        harness.run()


@pytest.mark.parametrize("lookahead", [1, 2, 4])
def test_pages_come_free_when_rows_retire_what_was_committed_and_at_no_other_time(lookahead):
    harness = windowed(16, page_size=4, num_pages=100, lookahead=lookahead, max_batched_tokens=16)
    for first in range(3):
        harness.submit(prompt(50, first), max_tokens=40, ignore_eos=True)
    scheduler, memory = harness.scheduler, harness.scheduler.state.memory
    retire, drop_before = scheduler.retire, memory.drop_before
    retiring, dropped = [], []

    def checked_drop(row, position):
        assert retiring, "only retire gives pages back"
        # What is not committed yet starts at `written_len`, and its first token reads the window that ends there.
        assert position == scheduler.state.rows.written_len[row] - 16 + 1
        dropped.append(row)
        drop_before(row, position)

    def checked_retire():
        retiring.append(True)
        retire()
        retiring.pop()

    scheduler.retire, memory.drop_before = checked_retire, checked_drop
    free = memory.pool.free
    memory.pool.free = lambda pages: free(pages) if retiring else pytest.fail("pages freed outside of retire")
    harness.run()
    assert len(dropped) > 30


@pytest.mark.parametrize("ending", ["abort", "preempt", "preempt twice", "eos"])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_a_row_with_holes_ends_and_starts_again_like_any_other(ending, lookahead):
    harness = windowed(32, num_pages=40, lookahead=lookahead)
    rng = np.random.default_rng(5)
    request = harness.submit(prompt(100), max_tokens=120, ignore_eos=ending != "eos")
    for i in range(3):
        harness.submit(rng.integers(0, 90, 30).tolist(), max_tokens=90 + i, ignore_eos=True)
    for _ in range(ending.count("preempt") + ending.count("twice")):
        for _ in range(30):
            harness.turn()
        harness.preempt(request)
        while request.row is not None:
            harness.turn()
    for _ in range(40 if ending == "abort" else 0):
        harness.turn()
    if ending == "abort":
        harness.engine.abort(request)
    harness.run()
    assert request.num_preemptions == ending.count("preempt") + ending.count("twice")
    assert (request.finish_reason == FinishReason.ABORTED) == (ending == "abort")


@pytest.mark.parametrize("lookahead", [0, 2])
def test_windows_and_a_small_pool(lookahead):
    harness = windowed(24, page_size=4, num_pages=30, max_model_len=120, lookahead=lookahead, settings={"headroom": 4})
    rng = np.random.default_rng(6)
    for i in range(12):
        harness.submit(rng.integers(0, 90, int(rng.integers(1, 60))).tolist(), max_tokens=40 + i, ignore_eos=True)
    harness.run()


def test_with_the_prefix_cache_a_window_frees_nothing_early_and_is_still_cached():
    harness = windowed(32, settings={"prefix_cache": True})
    for _ in range(2):
        request = harness.submit(prompt(100), max_tokens=20, ignore_eos=True)
        harness.run()
    assert request.cached_tokens == 96
