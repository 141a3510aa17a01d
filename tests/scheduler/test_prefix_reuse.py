"""What was computed once is read by those that begin with it, and makes no difference to their tokens.

`Harness` holds every finished request to the oracle, which has no pages and no cache: so each run below also says
that the tokens after a hit are those of a cold start.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from jaxoverlap.errors import EngineError
from jaxoverlap.request import Request, RequestOptions
from tests.harness import Harness

PREFIX = [(7 * i) % 89 for i in range(200)]
LOOKAHEADS = [0, 1, 3]


def warm(harness: Harness, prompt: list[int], **sampling) -> Request:
    """Runs one request to its end, so that its pages are cached."""
    request = harness.submit(prompt, **({"max_tokens": 1, "ignore_eos": True} | sampling))
    harness.run()
    return request


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize(
    ("length", "cached"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32), (49, 48)]
)
def test_a_prompt_seen_before_computes_at_least_one_token(lookahead, length, cached):
    """B043: the last token of a prompt is never taken from the cache, be it at the end of a page or not."""
    harness = Harness(lookahead=lookahead)
    first, second = (warm(harness, PREFIX[:length], max_tokens=5) for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, cached)
    assert first.output_ids == second.output_ids


@pytest.mark.parametrize("cached", [0, 16, 32, 48])
@pytest.mark.parametrize("lookahead", [0, 2])
def test_chunks_are_cut_from_what_is_not_cached(cached, lookahead):
    """B044: no step more than the rest of the prompt needs, and no empty one."""
    for total in range(cached + 1, cached + 34):
        harness = Harness(max_batched_tokens=16, lookahead=lookahead, check_every=None)
        warm(harness, PREFIX[: cached + 1])
        before = len(harness.plans)
        request = warm(harness, [*PREFIX[:cached], *(90 for _ in range(total - cached))])
        chunks = [len(chunk.token_ids) for plan in harness.plans[before:] for chunk in plan.chunks]
        assert request.cached_tokens == cached
        assert len(harness.plans) - before == len(chunks) == -(-(total - cached) // 16)
        assert min(chunks) >= 1 and sum(chunks) == total - cached


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("suffix", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("cached", [16, 64, 112])
def test_a_suffix_of_any_length_goes_on_from_the_cached_prefix(cached, suffix, lookahead):
    """B052: positions go on after the prefix, and all of it is read."""
    harness = Harness(lookahead=lookahead)
    warm(harness, PREFIX[: cached + 3])
    request = warm(harness, [*PREFIX[:cached], *range(suffix)], max_tokens=20)
    assert request.cached_tokens == cached


@pytest.mark.parametrize("over", range(16))
def test_a_page_that_is_not_full_is_not_shared(over):
    """B053: whatever the earlier prompt left in its last page."""
    harness = Harness(lookahead=1)
    warm(harness, PREFIX[: 32 + over], max_tokens=1)
    request = warm(harness, [*PREFIX[:32], 90, 91], max_tokens=8)
    assert request.cached_tokens == 32


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_hits_and_misses_share_a_step_in_any_order(order):
    """B050: each row reads its own pages, cached or not."""
    harness = Harness(max_batched_tokens=256, lookahead=1)
    warm(harness, PREFIX[:49])
    prompts = [PREFIX[:49], [90, *PREFIX[:48]], [*PREFIX[:20], *PREFIX[:20]], PREFIX[:50]]
    requests = [harness.submit(prompts[index], max_tokens=6, ignore_eos=True) for index in order]
    before = len(harness.plans)
    harness.run()
    assert len(harness.plans[before].chunks) == 4, "all in one step"
    assert [request.cached_tokens for request in requests] == [[48, 0, 16, 48][index] for index in order]


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_the_next_turn_of_a_chat_finds_the_answer_too(lookahead):
    harness = Harness(page_size=4, lookahead=lookahead)
    chat = PREFIX[:10]
    for _ in range(4):
        request = warm(harness, chat, max_tokens=9)
        chat = [*chat, *request.output_ids, 1, 2, 3]
    written = request.committed_len - 1
    assert harness.submit(chat, max_tokens=1).prompt_len == written + 4
    harness.run()
    assert harness.requests[-1].cached_tokens == written // 4 * 4


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_equal_prompts_in_one_step_leave_one_copy_behind(page_size, lookahead):
    harness = Harness(page_size=page_size, num_pages=400, max_batched_tokens=200, lookahead=lookahead)
    requests = [harness.submit(PREFIX[:40], max_tokens=7, ignore_eos=True) for _ in range(4)]
    harness.run()
    assert [request.cached_tokens for request in requests] == [0] * 4
    assert harness.scheduler.state.memory.cache.num_pages == (40 + 6) // page_size


@pytest.mark.parametrize("lookahead", [1, 2, 4])
def test_only_committed_pages_are_found(lookahead):
    """B014: what is launched may still fail, so nobody can build on it."""
    harness = Harness(lookahead=lookahead, max_batched_tokens=64, settings={"max_mixed_tokens": 64})
    first = harness.submit(PREFIX[:40], max_tokens=9, ignore_eos=True)
    cache = harness.scheduler.state.memory.cache
    while not first.output_ids:
        assert cache.num_pages == 0
        harness.turn()
    assert cache.num_pages == 2
    harness.run()
    assert cache.num_pages == (40 + 8) // 16


def test_a_chunk_is_found_while_its_prompt_still_goes_on():
    harness = Harness(lookahead=1, max_batched_tokens=16)
    harness.submit(PREFIX[:100], max_tokens=3)
    for _ in range(4):
        harness.turn()
    second = harness.submit(PREFIX[:50], max_tokens=3)
    harness.run()
    assert second.cached_tokens >= 32


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_salt_is_shared_with_its_own_only(lookahead):
    harness = Harness(lookahead=lookahead)
    cached = []
    for salt in (None, "a", "b", "a", None, "b", "c"):
        request = harness.submit(PREFIX[:40], max_tokens=4, options=RequestOptions(cache_salt=salt))
        harness.run()
        cached.append(request.cached_tokens)
    assert cached == [0, 0, 0, 32, 32, 32, 0]


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("ending", ["abort", "fail"])
def test_outputs_of_an_aborted_request_are_kept_and_those_of_a_failed_one_are_not(ending, lookahead):
    harness = Harness(lookahead=lookahead, page_size=4)
    request = harness.submit(PREFIX[:3], max_tokens=50, ignore_eos=True)
    while len(request.output_ids) < 20:
        harness.turn()
    if ending == "abort":
        harness.engine.abort(request)
    else:
        harness.check_outcome = lambda request: None
        harness.scheduler.fail(request.request_id, EngineError("why"))
    written = request.committed_len - 1
    harness.run()
    assert harness.scheduler.state.memory.cache.num_pages == (written // 4 if ending == "abort" else 0)


def test_a_reader_that_leaves_takes_nothing_from_those_that_stay():
    harness = Harness(lookahead=2)
    warm(harness, PREFIX[:65])
    readers = [harness.submit([*PREFIX[:64], i], max_tokens=20, ignore_eos=True) for i in range(4)]
    for _ in range(5):
        harness.turn()
    for reader in readers[:3]:
        harness.engine.abort(reader)
        harness.turn()
        assert harness.scheduler.state.memory.cache.num_locked >= 4
    harness.scheduler.flush_cache()
    harness.run()


def test_what_is_not_read_makes_way_for_what_is_needed():
    harness = Harness(num_pages=8)
    for first in range(12):
        warm(harness, [first, *PREFIX[:60]], max_tokens=20)
    memory = harness.scheduler.state.memory
    assert memory.pool.num_free + memory.cache.num_pages == 8
    assert warm(harness, [11, *PREFIX[:60]]).cached_tokens > 0
    assert warm(harness, [0, *PREFIX[:60]]).cached_tokens == 0


def test_a_flush_empties_what_nobody_reads():
    harness = Harness()
    warm(harness, PREFIX[:50])
    reader = harness.submit([*PREFIX[:16], 1], max_tokens=9, ignore_eos=True)
    harness.turn()
    assert harness.scheduler.flush_cache() == 2
    harness.run()
    assert reader.cached_tokens == 16
    harness.scheduler.flush_cache()
    assert harness.scheduler.state.memory.pool.num_free == 64
    assert warm(harness, PREFIX[:50]).cached_tokens == 0


def test_without_the_cache_nothing_is_found_and_nothing_stays():
    harness = Harness(settings={"prefix_cache": False})
    for _ in range(2):
        assert warm(harness, PREFIX[:50]).cached_tokens == 0
        assert harness.scheduler.state.memory.pool.num_free == 64


def test_counters_add_up():
    harness = Harness(lookahead=1)
    for length in (50, 60, 50, 10):
        warm(harness, PREFIX[:length], max_tokens=4)
    counters = harness.scheduler.counters
    assert (counters.admitted_tokens, counters.cached_tokens) == (170, 48 + 48)
    assert counters.computed_tokens == counters.admitted_tokens - counters.cached_tokens


def test_what_a_preempted_request_finds_again_is_no_hit():
    harness = Harness(num_pages=8, max_running=4, settings={"headroom": 1})
    for i in range(4):
        harness.submit([i] * 40, max_tokens=40, ignore_eos=True)
    harness.run()
    counters = harness.scheduler.counters
    assert counters.preemptions > 0
    assert (counters.admitted_tokens, counters.cached_tokens) == (160, 0)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_pages_read_from_the_cache_can_not_be_promised_twice(lookahead):
    """B056: readers of one long prefix and strangers, more than fit: all finish."""
    harness = Harness(num_pages=20, max_running=16, lookahead=lookahead, settings={"headroom": 16})
    warm(harness, PREFIX[:130])
    rng = np.random.default_rng(1)
    for i in range(20):
        prompt = [*PREFIX[: int(rng.integers(1, 130))], i] if i % 2 else rng.integers(0, 90, 60).tolist()
        harness.submit(prompt, max_tokens=int(rng.integers(30, 100)), ignore_eos=True)
    harness.run()
    assert harness.scheduler.counters.cached_tokens > 0
