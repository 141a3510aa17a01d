"""Preemption by recompute: nothing is lost, nothing twice, it ends, and who must give way is who should."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from jaxoverlap.outputs import FinishReason
from jaxoverlap.request import RequestOptions
from jaxoverlap.scheduler import planner
from jaxoverlap.scheduler.policy import choose_victims
from tests.harness import Harness


def distinct(count: int, length: int) -> list[list[int]]:
    """Prompts that share no page."""
    rng = np.random.default_rng(count * 1000 + length)
    return [rng.integers(0, 90, length).tolist() for _ in range(count)]


@pytest.fixture
def choices(monkeypatch) -> list[tuple]:
    """(views, pages, victims) of every time that rows were to give way for pages."""
    made: list[tuple] = []

    def recording(views, pages, **others):
        victims = choose_victims(views, pages, **others)
        made.append((views, pages, victims))
        return victims

    monkeypatch.setattr(planner, "choose_victims", recording)
    return made


def under_pressure(lookahead: int, **changes) -> Harness:
    """Ten requests of 6 pages each, in a pool for one and a half of them."""
    settings = {"headroom": 8, "max_prompt_wait": 1e9} | changes.pop("settings", {})
    harness = Harness(**({"num_pages": 9, "max_running": 10, "lookahead": lookahead, "settings": settings} | changes))
    for prompt in distinct(10, 30):
        harness.submit(prompt, max_tokens=60, ignore_eos=True)
    return harness


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
def test_one_row_gives_way_when_six_cross_a_page_boundary_and_five_pages_are_free(lookahead):
    """B005, B041: what steps in flight still hold is not free, and no more give way than must."""
    harness = Harness(
        num_pages=20, max_running=6, max_batched_tokens=256, lookahead=lookahead, settings={"headroom": 1}
    )
    prompts = [*distinct(3, 31), *distinct(3, 47)]
    requests = [harness.submit(prompt, max_tokens=16, ignore_eos=True) for prompt in prompts]
    harness.turn()
    assert harness.scheduler.state.memory.num_unpromised == 5
    harness.run()
    assert [request.num_preemptions for request in requests] == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("lookahead", [0, 2])
def test_no_more_rows_give_way_than_must_and_in_pages(lookahead, choices):
    """B041: rows end anywhere in a page; what a victim frees is counted in pages."""
    harness = Harness(
        num_pages=200, max_running=15, max_model_len=400, max_batched_tokens=4000, lookahead=lookahead,
        settings={"headroom": 1, "max_mixed_tokens": 400},
    )  # fmt: skip
    for prompt in [prompt for length in (129, 131, 157, 163, 285) for prompt in distinct(3, length)]:
        harness.submit(prompt, max_tokens=40, ignore_eos=True)
    harness.turn()
    assert harness.scheduler.num_running == 15
    harness.run()
    assert choices
    for views, pages, victims in choices:
        freed = [view.pages for row in victims for view in views if view.row == row]
        assert sum(freed) >= pages > sum(freed[:-1])


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_a_token_in_flight_at_preemption_counts_once(lookahead, times):
    """B007, B008: it is neither lost nor repeated; each launched step is committed exactly once."""
    harness = Harness(lookahead=lookahead)
    request, neighbour = (harness.submit(prompt, max_tokens=40, ignore_eos=True) for prompt in distinct(2, 20))
    for _ in range(times):
        while request.row is None or not harness.scheduler.state.rows.decoding[request.row]:
            harness.turn()
        for _ in range(3):
            harness.turn()
        in_flight, before = harness.steps_in_flight(request.row), len(request.output_ids)
        assert in_flight == lookahead
        harness.preempt(request)
        while request.row is not None:
            harness.turn()
        assert len(request.output_ids) == before + in_flight
    harness.run()
    assert (request.num_preemptions, neighbour.num_preemptions) == (times, 0)
    assert [plan.step_id for plan in harness.plans] == list(range(harness.scheduler.state.rows.committed_step + 1))


def test_a_preempted_request_computes_only_what_is_not_cached():
    harness = Harness(page_size=4, lookahead=1)
    request = harness.submit(distinct(1, 30)[0], max_tokens=30, ignore_eos=True)
    for _ in range(15):
        harness.turn()
    harness.preempt(request)
    harness.run()
    again = next(chunk for plan in harness.plans[2:] for chunk in plan.chunks)
    assert again.end - again.start <= 4
    assert again.num_outputs == again.end - 30 > 0


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("lookahead", [1, 3])
def test_overlap_preempts_and_launches_about_as_often_as_serial(lookahead, prefix_cache):
    """B008: a token in flight is not thrown away to be computed again under the next pressure."""
    ran = {}
    for ahead in (0, lookahead):
        harness = under_pressure(ahead, settings={"prefix_cache": prefix_cache})
        harness.run()
        tokens = sum(len(request.output_ids) for request in harness.requests)
        ran[ahead] = harness.runner.num_launches / tokens, [request.num_preemptions for request in harness.requests]
    (serial_cost, serial), (cost, overlap) = ran[0], ran[lookahead]
    assert cost <= 1.3 * serial_cost
    assert all(more <= less + 1 for more, less in zip(overlap, serial, strict=True)), (overlap, serial)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("lookahead", [0, 1, 4])
@pytest.mark.parametrize("headroom", [1, 8])
def test_a_pool_for_one_and_a_half_requests_serves_ten(lookahead, headroom, prefix_cache):
    """B025: it ends, in bounded steps; the oldest is never a victim, nobody is one for ever."""
    harness = under_pressure(lookahead, settings={"headroom": headroom, "prefix_cache": prefix_cache})
    harness.run()
    requests = harness.requests
    assert harness.runner.num_launches <= 3 * sum(request.committed_len for request in requests)
    assert requests[0].num_preemptions == 0
    assert sum(request.num_preemptions for request in requests) == harness.scheduler.counters.preemptions > 0
    assert max(request.num_preemptions for request in requests) <= 60 / (8 * headroom) + 3


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("headroom", [1, 4, 16])
def test_every_admission_is_good_for_its_headroom_doubled_by_the_first_three_preemptions(headroom, lookahead):
    harness = under_pressure(lookahead, settings={"headroom": headroom})
    seen = {request.request_id: (0, 0) for request in harness.requests}
    while harness.engine.has_work:
        harness.turn()
        for request in harness.requests:
            times, had = seen[request.request_id]
            if request.num_preemptions > times:
                assert request.num_preemptions == times + 1
                assert len(request.output_ids) - had >= headroom << min(times, 3)
                seen[request.request_id] = times + 1, len(request.output_ids)


def test_a_preempted_request_goes_before_those_that_never_ran():
    """B026: its work is not thrown away again by a newcomer."""
    harness = Harness(max_running=2, lookahead=1)
    a, b, c = (harness.submit(prompt, max_tokens=20, ignore_eos=True) for prompt in distinct(3, 10))
    for _ in range(4):
        harness.turn()
    assert (a.row is not None, b.row is not None, c.row) == (True, True, None)
    harness.preempt(b)
    while b.num_preemptions == 0 or b.row is None:
        harness.turn()
        assert c.row is None
    harness.run()
    assert a.finish_time <= c.admit_time


def test_preempted_requests_return_by_age_and_within_their_priority():
    harness = Harness(max_running=4, lookahead=1)
    priorities = [1, 0, 1, 0]
    requests = [
        harness.submit(prompt, max_tokens=20, ignore_eos=True, options=RequestOptions(priority=priority))
        for prompt, priority in zip(distinct(4, 10), priorities, strict=True)
    ]
    harness.turn()
    newcomer = harness.submit([1], max_tokens=2, options=RequestOptions(priority=0))
    for request in reversed(requests):
        harness.preempt(request)
    harness.drain()
    queue = list(harness.scheduler.state.waiting.first(9))
    assert queue == [requests[1], requests[3], newcomer, requests[0], requests[2]]
    harness.run()


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_the_youngest_of_the_lowest_priority_gives_way(lookahead, choices):
    harness = Harness(num_pages=10, max_running=4, lookahead=lookahead, settings={"headroom": 1})
    priorities = [1, 1, 0, 0]
    requests = [
        harness.submit(prompt, max_tokens=40, ignore_eos=True, options=RequestOptions(priority=priority))
        for prompt, priority in zip(distinct(4, 30), priorities, strict=True)
    ]
    harness.run()
    priority = {view.row: (view.priority, view.request_id) for views, _, _ in choices for view in views}
    victims = [priority[row] for _, _, rows in choices for row in rows]
    assert victims[:2] == [(1, 1), (1, 0)]
    assert requests[2].num_preemptions == 0, "the oldest of the highest priority"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_row_that_sits_out_goes_on_where_it_was(lookahead, seed):
    """B010: the next token of a row is found by its row, be it in the previous step or not."""
    harness = Harness(num_pages=6, max_running=2, lookahead=lookahead, row_order_seed=seed, settings={"headroom": 32})
    old, young = (
        harness.submit(prompt, max_tokens=60 - i, ignore_eos=True) for i, prompt in enumerate(distinct(2, 16))
    )
    harness.turn()
    while len(young.output_ids) < 12:
        harness.turn()
        harness.scheduler.state.rows.decoding[young.row] = len(young.output_ids) % 3 > 0 or harness.turns % 2
    harness.scheduler.state.rows.decoding[young.row] = True
    harness.run()
    steps = [[request_id in plan.request_ids for request_id in (0, 1)] for plan in harness.plans]
    assert Counter(map(tuple, steps))[False, True] > 3, "the old one sat out while the young one had its turn"
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_a_prompt_under_way_in_a_full_pool_goes_on_and_nobody_breaks(lookahead):
    """B029: its pages are promised, so rows that grow meanwhile give way to it."""
    harness = Harness(
        num_pages=20, max_running=3, max_batched_tokens=16, lookahead=lookahead,
        settings={"headroom": 16, "max_mixed_tokens": 16},
    )  # fmt: skip
    for prompt in distinct(2, 16):
        harness.submit(prompt, max_tokens=100, ignore_eos=True)
    for _ in range(40):
        harness.turn()
    long = harness.submit(distinct(1, 160)[0], max_tokens=30, ignore_eos=True)
    while not long.output_ids:
        harness.turn()
        if long.row is not None:
            assert harness.scheduler.state.memory.num_unpromised >= 0
    mine = [plan for plan in harness.plans for chunk in plan.chunks if chunk.request is long]
    assert [plan.step_id for plan in mine] == list(range(mine[0].step_id, mine[0].step_id + len(mine)))
    assert long.num_preemptions == 0
    harness.run()
    assert harness.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("lookahead", [0, 1, 4])
def test_after_every_row_was_preempted_all_memory_is_to_be_had(lookahead, prefix_cache):
    """B055: nothing stays resident, and a request for the whole pool is admitted."""
    harness = Harness(num_pages=16, lookahead=lookahead, settings={"prefix_cache": prefix_cache})
    for prompt in distinct(4, 40):
        harness.submit(prompt, max_tokens=20, ignore_eos=True)
    for _ in range(9):
        harness.turn()
    for request in list(harness.scheduler.state.running.values()):
        harness.preempt(request)
    harness.drain()
    memory = harness.scheduler.state.memory
    assert (memory.num_available, memory.num_unpromised, memory.cache.num_locked) == (16, 16, 0)
    whole = harness.submit([1] * 200, max_tokens=57, ignore_eos=True, options=RequestOptions(priority=-1))
    harness.turn()
    assert whole.row is not None
    harness.run()
    assert whole.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_preempted_row_whose_token_in_flight_ends_the_request_is_finished_once(lookahead):
    harness = Harness(lookahead=lookahead)
    request = harness.submit([1, 2, 3], max_tokens=6, ignore_eos=True)
    while request.row is None or harness.scheduler.state.rows.planned_len[request.row] < request.max_len:
        harness.turn()
    assert len(request.output_ids) < 6
    harness.preempt(request)
    harness.run()
    assert (request.finish_reason, request.num_preemptions) == (FinishReason.LENGTH, 0)
