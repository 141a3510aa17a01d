"""Tokens on their way from one step to the next: whatever is launched in between, each row gets its own."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness import Harness


@pytest.mark.parametrize("lookahead", [1, 4, 14, 40])
def test_tokens_not_read_yet_survive_any_number_of_prompts_launched_after_them(lookahead):
    """B001: twelve prompts in twelve steps, none of them committed, then all decode."""
    settings = {"mixed_steps": False, "max_decode_wait": 1e9}
    harness = Harness(max_running=12, lookahead=lookahead, settings=settings)
    for i in range(12):
        harness.submit([i, i + 1, i + 2], max_tokens=10, ignore_eos=True)
        harness.turn()
    assert [len(plan.chunks) for plan in harness.plans] == [1] * 12
    assert len(harness.engine.loop.in_flight) == min(lookahead, 12)
    harness.run()


@pytest.mark.parametrize("lookahead", [1, 2, 4])
def test_sixteen_streams_that_come_at_any_time_have_every_token_once(lookahead):
    """B004: a token that was doubled, skipped or fed back too late would change all after it."""
    harness = Harness(max_running=16, num_pages=120, lookahead=lookahead)
    rng = np.random.default_rng(lookahead)
    for i in range(16):
        harness.submit([i], max_tokens=64, ignore_eos=True, seed=i)
        for _ in range(int(rng.integers(0, 5))):
            if rng.random() < 0.3:
                harness.runner.catch_up()
            harness.turn()
    harness.run()
    assert [len(tokens) for tokens in harness.delivered.values()] == [64] * 16


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_a_step_names_every_row_once_and_only_for_its_owner(seed, lookahead):
    """B001, B031, B032: rows come and go at unequal times; a row is nobody else's while a step in flight names it."""
    harness = Harness(
        max_running=5, num_pages=24, page_size=4, max_model_len=60, lookahead=lookahead, row_order_seed=seed
    )
    launch, in_flight = harness.runner.launch, []

    def recording(plan):
        in_flight.append(harness.plans[harness.scheduler.state.rows.committed_step + 1 :])
        return launch(plan)

    harness.runner.launch = recording
    rng = np.random.default_rng(seed)
    for _ in range(40):
        request = harness.submit(
            rng.integers(0, 90, int(rng.integers(1, 30))).tolist(), max_tokens=int(rng.integers(1, 30))
        )
        for _ in range(int(rng.integers(0, 6))):
            harness.turn()
        if rng.random() < 0.2:
            harness.engine.abort(request)
    harness.run()
    owner: dict[tuple[int, int], int] = {}
    for plan, others in zip(harness.plans, in_flight, strict=True):
        assert len(set(plan.rows.tolist())) == len(plan.rows)
        new_pages = plan.decode_new_pages[plan.decode_new_pages != plan.no_page].tolist()
        assert len(set(new_pages)) == len(new_pages) and all(0 <= page < 24 for page in new_pages)
        for row, generation, request_id in zip(plan.rows, plan.generations, plan.request_ids, strict=True):
            assert owner.setdefault((int(row), int(generation)), int(request_id)) == request_id
            assert all((other.request_ids[other.rows == row] == request_id).all() for other in others)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_requests_that_end_with_their_prompt_beside_decoding_rows_return_row_and_pages(lookahead):
    """B037: whole pages, one page and a bit, mixed steps."""
    harness = Harness(max_running=4, lookahead=lookahead, settings={"prefix_cache": False, "max_mixed_tokens": 33})
    memory = harness.scheduler.state.memory
    harness.submit([1], max_tokens=90, ignore_eos=True)
    harness.turn()
    for length in (1, 15, 16, 17, 31, 32, 33):
        for first in range(3):
            harness.submit([first] * length, max_tokens=1)
    while harness.engine.has_work:
        harness.turn()
        assert memory.pool.num_free <= memory.pool.num_pages
    assert sum(len(plan.chunks) > 0 and len(plan.decode_rows) > 0 for plan in harness.plans) >= 7
    harness.run()


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_pages_a_step_takes_are_those_its_rows_lack(page_size, lookahead):
    """B040, B041: forecast by what is launched, not by what is committed; for every length."""
    for length in range(1, 66, 4):
        harness = Harness(page_size=page_size, num_pages=800, lookahead=lookahead, max_batched_tokens=400)
        for extra in range(4):
            harness.submit([extra] * (length + extra), max_tokens=20, ignore_eos=True)
        rows, memory = harness.scheduler.state.rows, harness.scheduler.state.memory
        harness.turn()
        while rows.decoding.any():
            wanted = int((rows.planned_len[rows.decoding] % page_size == 0).sum())
            before = int(memory.num_pages.sum())
            plan = harness.scheduler.plan()
            assert int(memory.num_pages.sum()) - before == wanted
            assert int((plan.decode_new_pages != plan.no_page).sum()) == wanted
            harness.engine.loop.in_flight.push(plan, harness.runner.launch(plan))
            if len(harness.engine.loop.in_flight) > lookahead:
                harness._receive(harness.scheduler.commit(*harness.engine.loop.in_flight.pop()))
                harness.scheduler.retire()
        harness.run()


def test_what_was_launched_is_never_written_again():
    harness = Harness(lookahead=4)
    harness.submit([1] * 20, max_tokens=20, ignore_eos=True)
    harness.turn()
    harness.turn()
    prompt, decode = harness.plans[:2]
    arrays = [prompt.chunks[0].token_ids, prompt.chunks[0].page_table, decode.decode_rows, decode.decode_new_pages]
    for array in [*arrays, decode.rows, decode.generations, decode.request_ids, decode.ends]:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
        assert array.base is None or not array.base.flags.writeable
    harness.run()
