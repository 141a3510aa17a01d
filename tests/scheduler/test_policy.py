"""The scheduler's decisions, as functions of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxoverlap.scheduler.policy import (
    PromptView,
    RunningView,
    StepKind,
    StepView,
    choose_sharers,
    choose_step,
    choose_victims,
    chunk_cost,
    chunk_len,
    order_by_prefix,
    promised_tokens,
)


@pytest.mark.parametrize(
    ("view", "kind"),
    [
        (StepView(False, False, 0, 0.0), StepKind(False, False)),
        (StepView(True, False, 9, 9.0), StepKind(True, False)),
        (StepView(False, True, 0, 0.0), StepKind(False, True)),
        (StepView(True, True, 1, 0.1), StepKind(True, False)),
        (StepView(True, True, 2, 0.1), StepKind(False, True)),
        (StepView(True, True, 1, 0.3), StepKind(False, True)),
    ],
)
def test_steps_that_are_not_mixed_are_prompts_first_until_rows_have_waited(view, kind):
    assert choose_step(view, mixed_steps=False, max_prefill_streak=2, max_decode_wait=0.3) == kind
    everything = StepKind(view.can_prefill, view.can_decode)
    assert choose_step(view, mixed_steps=True, max_prefill_streak=2, max_decode_wait=0.3) == everything


@given(st.integers(1, 500), st.integers(0, 500), st.floats(1, 300), st.none() | st.floats(1, 1000))
def test_a_chunk_fits_its_budget_and_is_never_empty(remaining, start, budget, context_per_token):
    length = chunk_len(remaining, start, budget, context_per_token)
    assert 1 <= length <= remaining
    assert length == 1 or chunk_cost(length, start, context_per_token) <= budget * (1 + 1e-9)
    assert length == remaining or chunk_cost(length + 1, start, context_per_token) > budget * (1 - 1e-9)


@given(st.integers(1, 9000), st.integers(0, 9000), st.floats(1, 600), st.floats(1, 5000))
def test_a_chunk_that_is_cut_short_far_into_a_prompt_fills_its_step(remaining, start, budget, context_per_token):
    free = chunk_len(remaining, start, budget, context_per_token)
    length = chunk_len(remaining, start, budget, context_per_token, (8, 32, 64))
    most = min(remaining, int(budget))
    if free == most:
        assert length == most
    else:
        assert length == max((size for size in (8, 32, 64) if size <= free), default=min(8, most)) <= most


def test_the_cost_of_a_chunk_is_its_tokens_and_what_they_read():
    assert chunk_cost(10, 0, 100.0) == chunk_cost(10, 500, None) == 10
    assert chunk_cost(10, 200, 100.0) - 10 == pytest.approx(2 * (chunk_cost(10, 100, 100.0) - 10))
    assert 1 < chunk_cost(1, 100, 100.0) - chunk_cost(0, 100, 100.0) == 2 < chunk_cost(0, 100, 100.0)


prompts = st.lists(st.builds(PromptView, st.integers(1, 900), st.integers(0, 9000), st.integers(-1, 9)), max_size=9)


@given(prompts, st.floats(1, 300), st.none() | st.floats(1, 2000))
def test_prompts_share_a_budget_as_long_as_each_gets_a_worthwhile_chunk(prompts, budget, context_per_token):
    chosen = choose_sharers(prompts, budget, context_per_token)
    share = budget / max(1, len(chosen))
    for index in chosen:
        remaining, start, _ = prompts[index]
        length = chunk_len(remaining, start, share, context_per_token)
        assert length >= min(remaining, int(max(1, share)), 8)
        assert chunk_cost(length, start, context_per_token) <= max(1, share) * (1 + 1e-9)
    assert [prompts[i].remaining for i in chosen] == sorted(prompts[i].remaining for i in chosen)
    waiting = [prompt.last_step for index, prompt in enumerate(prompts) if index not in chosen]
    if chosen and waiting:
        assert max(prompts[index].last_step for index in chosen) <= min(waiting), "the others had their turn later"
    if context_per_token is None:
        assert len(chosen) == len(prompts)


def test_a_promise_covers_what_is_known_and_doubles_three_times_and_never_exceeds_what_can_be_needed():
    assert [promised_tokens(10, 1000, 8, times) for times in range(6)] == [18, 26, 42, 74, 74, 74]
    assert promised_tokens(10, 12, 8, 0) == promised_tokens(10, 12, 8, 5) == 12


views = st.lists(
    st.builds(RunningView, st.integers(0, 99), st.integers(0, 2), st.integers(0, 99), st.integers(0, 5), st.booleans()),
    unique_by=(lambda view: view.row, lambda view: view.request_id),
    max_size=8,
)


@given(views, st.integers(-2, 12), st.integers(0, 2), st.none() | st.integers(0, 2))
def test_victims_are_the_least_deserving_no_more_than_needed_and_never_the_oldest(running, pages, rows, at_least):
    victims = choose_victims(running, pages, rows=rows, at_least_priority=at_least)
    by_row = {view.row: view for view in running}
    chosen = [by_row[row] for row in victims]

    def is_enough(taken):
        return sum(view.pages for view in taken) >= pages and len(taken) >= rows

    ranked = sorted(running, key=lambda view: (view.priority, view.request_id))
    allowed = [v for v in ranked[1:] if v.had_its_turn and (at_least is None or v.priority >= at_least)]
    assert chosen == allowed[::-1][: len(chosen)]
    assert is_enough(chosen) or len(chosen) == len(allowed)
    assert not chosen or not is_enough(chosen[:-1])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=10), st.floats(0, 4))
def test_the_order_by_prefix_keeps_the_queue_among_equals_and_when_the_head_has_waited(lens, waited):
    order = order_by_prefix(lens, waited, 2.0)
    assert sorted(order) == list(range(len(lens)))
    expected = sorted(range(len(lens)), key=lambda i: (-lens[i], i)) if waited < 2.0 else list(range(len(lens)))
    assert order == expected
