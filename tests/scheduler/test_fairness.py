"""Nobody starves: the bounds of `jaxoverlap.scheduler.policy`, on a clock that the test turns.

Every turn takes STEP seconds, so a plan's number is its time.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxoverlap.request import Request, RequestOptions
from tests.harness import Harness

STEP = 0.1
LOW, HIGH = RequestOptions(priority=1), RequestOptions(priority=-1)


def go_on(harness: Harness, turns: int = 1) -> None:
    for _ in range(turns):
        harness.now = round(harness.now + STEP, 6)
        harness.turn()


def longest_gap(harness: Harness, request: Request) -> int:
    """Most plans from one that decodes the request to the next."""
    steps = [plan.step_id for plan in harness.plans if request.request_id in plan.request_ids[len(plan.chunks) :]]
    return int(np.diff(steps).max())


def row_of_prompts(harness: Harness, count: int, length: int) -> list[Request]:
    return [harness.submit([i % 90] * length, max_tokens=2, ignore_eos=True) for i in range(count)]


# -------------------------------------------------------------------- prompts and decoding rows share the device


def steps_of_long_prompts(count: int) -> int:
    """Steps until so many, which come at once beside a decoding row, are through."""
    settings = {"max_mixed_tokens": 64, "context_per_token": 200.0, "prefix_cache": False, "max_prompt_wait": 0.3}
    harness = Harness(num_pages=2000, max_model_len=2048, check_every=None, settings=settings)
    harness.submit([1], max_tokens=2000, ignore_eos=True)
    go_on(harness, 2)
    began = len(harness.plans)
    long = [harness.submit([2 + i] * 1500, max_tokens=1) for i in range(count)]
    turns: dict[int, list[int]] = {request.request_id: [] for request in long}
    while any(request.finish_reason is None for request in long):
        go_on(harness)
        for chunk in harness.plans[-1].chunks:
            turns[chunk.request.request_id].append(len(harness.plans))
    for seen in turns.values():
        assert np.diff(seen).max(initial=0) <= count, "somebody under way had no turn"
    taken = len(harness.plans) - began
    harness.engine.abort(harness.requests[0])
    harness.run()
    return taken


def test_long_prompts_that_come_together_take_no_longer_than_one_after_the_other():
    """Shared by all of them, the budget of a step would be eaten up by reading what is before each chunk."""
    assert steps_of_long_prompts(4) <= 1.1 * 4 * steps_of_long_prompts(1)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("max_decode_wait", [0.15, 0.3, 1.0])
def test_a_decoding_row_waits_for_prompts_no_longer_than_it_may(lookahead, max_decode_wait):
    """gap ≤ max_decode_wait + 2 t, where a step is prompts or decoding rows."""
    settings = {"mixed_steps": False, "max_decode_wait": max_decode_wait}
    harness = Harness(max_batched_tokens=16, num_pages=400, lookahead=lookahead, settings=settings)
    decoding = harness.submit([1], max_tokens=20, ignore_eos=True)
    go_on(harness, 2)
    row_of_prompts(harness, 30, 100)
    while decoding.finish_reason is None:
        go_on(harness)
    assert max_decode_wait <= longest_gap(harness, decoding) * STEP <= max_decode_wait + 2 * STEP
    harness.run()


@pytest.mark.parametrize("streak", [1, 3])
def test_a_decoding_row_waits_for_no_more_prefill_steps_than_it_may(streak):
    settings = {"mixed_steps": False, "max_prefill_streak": streak, "max_decode_wait": 1e9}
    harness = Harness(max_batched_tokens=16, num_pages=400, settings=settings)
    decoding = harness.submit([1], max_tokens=20, ignore_eos=True)
    go_on(harness, 2)
    row_of_prompts(harness, 20, 100)
    harness.run()
    assert longest_gap(harness, decoding) == streak + 1


@pytest.mark.parametrize("max_decode_wait", [0.0, STEP / 2, STEP, 2.5 * STEP])
def test_a_prompt_goes_on_however_long_decode_steps_take(max_decode_wait):
    """The other way round: a decode step that takes longer than `max_decode_wait` must not shut prompts out."""
    settings = {"mixed_steps": False, "max_decode_wait": max_decode_wait}
    harness = Harness(max_batched_tokens=16, settings=settings)
    harness.submit([1], max_tokens=200, ignore_eos=True)
    go_on(harness, 2)
    prompt = harness.submit([2] * 64, max_tokens=2, ignore_eos=True)
    go_on(harness, 40)
    assert prompt.output_ids, "4 prefill steps did not find their place among 40"
    harness.run()


@pytest.mark.parametrize("max_mixed_tokens", [1, 16, 40])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_mixed_steps_make_no_row_wait_and_hold_few_prompt_tokens(lookahead, max_mixed_tokens):
    """Every step decodes every row; prompts go on by `max_mixed_tokens` in each."""
    settings = {"max_mixed_tokens": max_mixed_tokens}
    harness = Harness(max_batched_tokens=64, num_pages=400, lookahead=lookahead, settings=settings)
    decoding = harness.submit([1], max_tokens=150, ignore_eos=True)
    go_on(harness, 2)
    prompt = harness.submit([2] * 60, max_tokens=2, ignore_eos=True)
    first = len(harness.plans)
    harness.run()
    assert longest_gap(harness, decoding) == 1
    chunks = [(plan.step_id - first, plan.num_prefill_tokens) for plan in harness.plans[first:] if plan.chunks]
    assert chunks == [(i, min(max_mixed_tokens, 60 - i * max_mixed_tokens)) for i in range(-(-60 // max_mixed_tokens))]
    assert prompt.output_ids


def test_a_mixed_step_holds_few_prompts():
    """Each publishes a token, which costs a row of logits."""
    harness = Harness(max_batched_tokens=64, max_running=40, settings={"max_mixed_tokens": 48})
    harness.submit([1], max_tokens=50, ignore_eos=True)
    go_on(harness, 2)
    row_of_prompts(harness, 20, 2)
    harness.run()
    mixed = [plan for plan in harness.plans[2:] if len(plan.decode_rows)]
    assert max(len(plan.chunks) for plan in mixed) == harness.scheduler.config.max_mixed_chunks == 3


def test_tokens_far_back_in_a_prompt_count_for_more_beside_decoding_rows():
    settings = {"max_mixed_tokens": 40, "context_per_token": 50.0}
    harness = Harness(max_batched_tokens=256, num_pages=400, lookahead=0, settings=settings)
    harness.submit([1], max_tokens=100, ignore_eos=True)
    go_on(harness, 2)
    harness.submit([2] * 200, max_tokens=1)
    harness.run()
    chunks = [chunk for plan in harness.plans[1:] for chunk in plan.chunks]
    lengths = [len(chunk.token_ids) for chunk in chunks]
    assert lengths[0] == 40
    assert lengths[:-1] == sorted(lengths[:-1], reverse=True)
    assert all(len(chunk.token_ids) * (1 + chunk.start / 50) <= 40 for chunk in chunks)


# -------------------------------------------------------------------- those who wait, and those who must make room


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("short_of", ["rows", "pages"])
def test_the_first_in_the_queue_waits_no_longer_than_it_may(short_of, lookahead):
    """wait ≤ max_prompt_wait + turn + (lookahead + 1) t: then the youngest that had its turn makes room."""
    sizes = {"rows": {"max_running": 2, "num_pages": 64}, "pages": {"max_running": 8, "num_pages": 18}}[short_of]
    settings = {"max_prompt_wait": 2.0, "headroom": 16}
    harness = Harness(max_batched_tokens=256, lookahead=lookahead, settings=settings, **sizes)
    old, young = (harness.submit([i] * 90, max_tokens=100, ignore_eos=True) for i in (1, 2))
    go_on(harness, 3)
    late = harness.submit([3] * 90, max_tokens=100, ignore_eos=True)
    while late.admit_time is None:
        go_on(harness)
    tries = 2.0 / 32
    assert 2.0 - STEP <= late.admit_time - late.arrival_time <= 2.0 + tries + (lookahead + 2) * STEP
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    harness.run()


def test_those_who_take_turns_do_not_take_them_for_ever():
    """Two rows, six long requests: the oldest runs through, and ever longer turns bound how often others change."""
    settings = {"max_prompt_wait": 1.0, "headroom": 8}
    harness = Harness(max_running=2, lookahead=1, settings=settings)
    requests = [harness.submit([i] * 20, max_tokens=150, ignore_eos=True) for i in range(6)]
    while harness.engine.has_work:
        go_on(harness)
    assert requests[0].num_preemptions == 0
    assert 1 <= max(request.num_preemptions for request in requests) <= 150 / (8 * 8) + 3
    assert requests[1].finish_time < requests[5].finish_time


def test_a_row_is_taken_only_from_one_that_had_it_as_long_as_others_may_wait():
    settings = {"max_prompt_wait": 2.0, "headroom": 1}
    harness = Harness(max_running=2, lookahead=1, settings=settings)
    harness.submit([1], max_tokens=200, ignore_eos=True)
    brief = harness.submit([2], max_tokens=12, ignore_eos=True)
    go_on(harness)
    late = harness.submit([4] * 20, max_tokens=200, ignore_eos=True)
    harness.submit([3] * 20, max_tokens=200, ignore_eos=True)
    while late.num_preemptions == 0:
        go_on(harness)
    assert brief.num_preemptions == 0
    assert harness.now - late.admit_time >= 2.0
    harness.run()


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"max_prompt_wait": math.inf}, {"max_running": 2}),
        ({"max_prompt_wait": 0.1}, {"max_running": 1}),
        ({"max_prompt_wait": 0.1, "headroom": 1000}, {"max_running": 2}),
    ],
    ids=["patience without end", "the oldest row is the only one", "nobody had his turn"],
)
def test_nobody_makes_room_where_nobody_has_to(settings, sizes):
    harness = Harness(lookahead=1, settings=settings, **sizes)
    for i in range(4):
        harness.submit([i], max_tokens=60, ignore_eos=True)
    while harness.engine.has_work:
        go_on(harness)
    assert harness.scheduler.counters.preemptions == 0


def test_rows_do_not_leave_for_half_the_room_that_is_needed():
    settings = {"max_prompt_wait": 0.5, "headroom": 1}
    harness = Harness(num_pages=16, lookahead=1, settings=settings)
    harness.submit([1] * 100, max_tokens=60, ignore_eos=True)
    small = harness.submit([2] * 20, max_tokens=60, ignore_eos=True)
    go_on(harness, 2)
    large = harness.submit([3] * 200, max_tokens=2, ignore_eos=True)
    while large.admit_time is None:
        go_on(harness)
    assert small.num_preemptions == 0
    harness.run()


def test_the_room_made_for_one_is_not_taken_by_another():
    settings = {"max_prompt_wait": 1.0, "headroom": 1, "cache_aware_order": True}
    harness = Harness(max_running=2, lookahead=1, settings=settings)
    harness.submit([1] * 40, max_tokens=200, ignore_eos=True)
    harness.submit([2] * 40, max_tokens=200, ignore_eos=True)
    go_on(harness)
    cold = harness.submit([9] * 40, max_tokens=2, ignore_eos=True)
    warm = harness.submit([1] * 40, max_tokens=2, ignore_eos=True)
    while cold.admit_time is None:
        go_on(harness)
        assert warm.admit_time is None
    harness.run()


@pytest.mark.parametrize("lookahead", [2, 4])
@pytest.mark.parametrize("prompt_len", range(50, 66, 3))
def test_room_that_was_lost_is_not_kept_from_others(prompt_len, lookahead):
    """Rows that grow while a victim retires may take a page of the room that was made. Then those who would fit must
    not wait behind the one who does not, least of all when they are more urgent."""
    settings = {"max_prompt_wait": 1.0, "headroom": 1, "prefix_cache": False}
    harness = Harness(page_size=1, num_pages=80, lookahead=lookahead, settings=settings)
    for i in range(2):
        harness.submit([i] * 8, max_tokens=60, ignore_eos=True)
    go_on(harness)
    harness.submit([3] * prompt_len, max_tokens=4, ignore_eos=True)
    go_on(harness, 20)
    urgent = harness.submit([4], max_tokens=2, ignore_eos=True, options=HIGH)
    go_on(harness, 12)
    assert urgent.admit_time is not None, f"{harness.scheduler.state.memory.num_unpromised} pages are free, 2 will do"
    harness.run()


def test_room_is_made_for_what_is_not_cached():
    """A row reads most of what the first in the queue needs: one victim is enough for the rest of it."""
    settings = {"max_prompt_wait": 1.0, "headroom": 1}
    harness = Harness(num_pages=20, lookahead=1, max_batched_tokens=256, settings=settings)
    prefix = [(3 * i) % 89 for i in range(160)]
    harness.submit(prefix, max_tokens=90, ignore_eos=True)
    victim = harness.submit([1] * 64, max_tokens=90, ignore_eos=True)
    go_on(harness, 34)  # both have begun a page, so nobody needs another one in what follows
    assert harness.scheduler.state.memory.num_unpromised == 0  # and 4 are missing
    late = harness.submit([*prefix[:159], 90, *range(40)], max_tokens=2, ignore_eos=True)
    go_on(harness, 13)
    assert late.admit_time is not None
    assert victim.num_preemptions == 1
    harness.run()


# -------------------------------------------------------------------- priorities


def test_the_lowest_priority_value_is_admitted_first_and_equals_by_arrival():
    harness = Harness(max_running=1, lookahead=0)
    options = [RequestOptions(priority=value) for value in (0, 5, -3, 0, 5, -3)]
    requests = [harness.submit([i], max_tokens=3, options=each) for i, each in enumerate(options)]
    while harness.engine.has_work:
        go_on(harness)
    order = sorted(requests, key=lambda request: request.admit_time)
    assert [request.request_id for request in order] == [2, 5, 0, 3, 1, 4]


@pytest.mark.parametrize(("waiting", "preempted"), [(HIGH, 1), (RequestOptions(), 1), (LOW, 0)])
def test_room_is_made_by_equals_and_lower_ones_but_not_by_higher_ones(waiting, preempted):
    settings = {"max_prompt_wait": 1.0, "headroom": 1}
    harness = Harness(max_running=2, lookahead=1, settings=settings)
    for i in range(2):
        harness.submit([i], max_tokens=60, ignore_eos=True)
    go_on(harness)
    late = harness.submit([3], max_tokens=4, ignore_eos=True, options=waiting)
    while late.admit_time is None:
        go_on(harness)
    assert harness.scheduler.counters.preemptions == preempted
    harness.run()


@pytest.mark.parametrize("mixed_steps", [True, False])
def test_a_long_prompt_under_way_does_not_keep_a_more_urgent_one_waiting(mixed_steps):
    """wait ≤ max_prompt_wait + …, whatever the steps are filled with."""
    settings = {"max_prompt_wait": 1.0, "max_mixed_tokens": 16, "mixed_steps": mixed_steps}
    harness = Harness(max_model_len=2000, num_pages=400, max_batched_tokens=16, lookahead=1, settings=settings)
    harness.submit([1], max_tokens=300, ignore_eos=True)
    go_on(harness, 2)
    harness.submit([2] * 1600, max_tokens=2)
    go_on(harness, 2)
    urgent = harness.submit([3] * 4, max_tokens=2, options=HIGH)
    go_on(harness, 20)
    assert urgent.first_token_time is not None
    harness.run()


# -------------------------------------------------------------------- order by what is cached


def test_the_longest_cached_prefix_goes_first_as_long_as_the_head_has_patience():
    settings = {"max_prompt_wait": 2.0, "cache_aware_order": True}
    harness = Harness(max_running=1, lookahead=0, num_pages=64, settings=settings)
    harness.submit([1] * 65, max_tokens=1)
    while harness.engine.has_work:
        go_on(harness)
    cold = harness.submit([2] * 65, max_tokens=2, ignore_eos=True)
    half = harness.submit([1] * 40, max_tokens=2, ignore_eos=True)
    whole = [harness.submit([*([1] * 64), i], max_tokens=2, ignore_eos=True) for i in range(20)]
    while harness.engine.has_work:
        go_on(harness)
    before = [request for request in (half, *whole) if request.admit_time < cold.admit_time]
    assert before == whole[: len(before)], "the longest first, and among equals who came first"
    assert 2.0 <= cold.admit_time - cold.arrival_time <= 2.0 + 3 * STEP
    assert whole[-1].admit_time > cold.admit_time
    assert half.admit_time - half.arrival_time <= 2.0 + 6 * STEP


def test_the_prefixes_of_the_queue_are_not_looked_up_again_while_nothing_changes(monkeypatch):
    settings = {"cache_aware_order": True, "max_prompt_wait": 1e9}
    harness = Harness(num_pages=10, max_running=8, settings=settings)
    harness.submit([1] * 100, max_tokens=60, ignore_eos=True)
    go_on(harness, 8)
    for i in range(6):
        harness.submit([1] * 90 + [i], max_tokens=2, ignore_eos=True)
    go_on(harness, 2)
    cache, looked_up = harness.scheduler.state.memory.cache, []
    match = cache.match
    monkeypatch.setattr(cache, "match", lambda *given: looked_up.append(0) or match(*given))
    pages = cache.num_pages
    go_on(harness, 10)
    assert cache.num_pages == pages and harness.scheduler.num_waiting == 6
    assert not looked_up
    harness.run()


def test_a_higher_priority_and_a_preempted_request_go_before_a_longer_prefix():
    settings = {"max_prompt_wait": 1e9, "cache_aware_order": True}
    harness = Harness(max_running=2, lookahead=0, settings=settings)
    harness.submit([1] * 65, max_tokens=1)
    harness.run()
    runs = [harness.submit([i], max_tokens=30, ignore_eos=True) for i in (7, 8)]
    go_on(harness, 3)
    warm = harness.submit([1] * 65, max_tokens=1)
    first = harness.submit([5] * 20, max_tokens=1, options=HIGH)
    harness.preempt(runs[1])
    while warm.admit_time is None:
        go_on(harness)
    assert first.admit_time < warm.admit_time
    assert runs[1].running_since < warm.admit_time
    harness.run()
