"""Overlap changes nothing but the time: one request, whatever happens around it, has one answer."""

from __future__ import annotations

import numpy as np
import pytest

from jaxoverlap.outputs import FinishReason
from jaxoverlap.runtime.row_state import KVPages
from jaxoverlap.sampling_params import SamplingParams
from tests.tiny import VOCAB_SIZE, change_pool, dense_greedy, drain, make_engine, random_requests

SEED = 8
"""Step shapes may differ in the last bits. None of this seed's greedy tokens is a near-tie, so all can be compared."""

GAP = 3e-3
"""Between the two highest logits, at least, for every token of the seed; rounding moves them by some 1e-5."""


def outcomes(requests):
    return [(request.output_ids, request.finish_reason, request.matched_token_id) for request in requests]


@pytest.fixture(scope="module")
def alone():
    """Every request of `random_requests(SEED)` by itself, serially, in one chunk."""
    results = []
    for sampling in ({}, {"temperature": 0.9, "top_k": 20, "top_p": 0.95}):
        engine, _ = make_engine(lookahead=0, max_batched_tokens=128)
        requests = random_requests(engine, SEED, 0)
        scratch, _ = make_engine(lookahead=0, max_batched_tokens=128)
        for request in random_requests(scratch, SEED, 14, **sampling):
            requests.append(engine.add(request.prompt_ids, request.sampling))
            drain(engine)
        results.append(outcomes(requests))
    return results


def test_greedy_tokens_equal_a_dense_decoder_without_pages(alone):
    engine, _ = make_engine()
    for request, (outputs, _, _) in zip(random_requests(engine, SEED, 14), alone[0], strict=True):
        expected, gaps = dense_greedy(request.prompt_ids.tolist(), len(outputs))
        assert min(gaps) > GAP
        assert outputs == expected


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
@pytest.mark.parametrize("sampled", [0, 1], ids=["greedy", "sampled"])
def test_together_as_alone_at_every_lookahead(alone, lookahead, sampled):
    fixed = {"temperature": 0.9, "top_k": 20, "top_p": 0.95} if sampled else {}
    engine, _ = make_engine(lookahead=lookahead)
    requests = random_requests(engine, SEED, 14, **fixed)
    drain(engine)
    assert outcomes(requests) == alone[sampled]


@pytest.mark.parametrize(
    "chunk", [1, pytest.param(7, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
def test_chunk_size_changes_nothing(alone, chunk):
    engine, _ = make_engine(max_batched_tokens=chunk, max_running=5 if chunk == 100 else 3)
    requests = random_requests(engine, SEED, 14)
    drain(engine)
    assert outcomes(requests) == alone[0]


@pytest.mark.parametrize("seed", range(3))
def test_order_rows_joining_and_leaving_change_nothing(alone, seed):
    rng = np.random.default_rng(seed)
    engine, _ = make_engine(lookahead=int(rng.integers(0, 4)))
    rng.shuffle(engine.loop.scheduler.state.rows.free_rows)
    scratch, _ = make_engine()
    wanted = random_requests(scratch, SEED, 14)
    requests = {}
    for index in rng.permutation(14).tolist():
        requests[index] = engine.add(wanted[index].prompt_ids, wanted[index].sampling)
        for _ in range(int(rng.integers(0, 9))):
            engine.step()
        if rng.random() < 0.4:
            passing = engine.add([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=30))
            engine.step()
            engine.abort(passing)
    drain(engine)
    assert outcomes(requests[index] for index in range(14)) == alone[0]


def test_pages_left_full_of_nan_hurt_nobody(alone):
    engine, runner = make_engine(lookahead=1)
    change_pool(runner, lambda kv: KVPages(kv.k + np.float32(np.nan), kv.v + np.float32(np.nan)))
    requests = random_requests(engine, SEED, 14)
    drain(engine)
    assert outcomes(requests) == alone[0]


def test_a_chunk_of_nan_ends_its_prompt_and_is_not_cached():
    engine, runner = make_engine(lookahead=0)
    victim = engine.add([9] * 100, SamplingParams(temperature=0, max_tokens=20))
    engine.step()  # 32 tokens
    memory = engine.loop.scheduler.state.memory
    page = int(memory.page_table[victim.row, 0])
    change_pool(runner, lambda kv: KVPages(kv.k, kv.v.at[page].set(np.nan)))
    engine.step()
    assert victim.finish_reason == FinishReason.ERROR and "NaN" in str(victim.error)
    drain(engine)
    assert memory.cache.num_pages == 2


def test_a_row_of_nan_logits_ends_alone_with_an_error(alone):
    engine, runner = make_engine(lookahead=1)
    requests = random_requests(engine, SEED, 3)
    victim = engine.add([9, 9, 9], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    while not victim.output_ids:
        engine.step()
    page = int(engine.loop.scheduler.state.memory.page_table[victim.row, 0])
    change_pool(runner, lambda kv: KVPages(kv.k, kv.v.at[page].set(np.nan)))
    drain(engine)
    assert victim.finish_reason == FinishReason.ERROR
    assert "NaN" in str(victim.error)
    assert outcomes(requests) == alone[0][:3]
    again = engine.add([9, 9, 9], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    drain(engine)
    assert again.finish_reason == FinishReason.LENGTH


def test_the_same_seed_gives_the_same_tokens_and_none_gives_others():
    engine, _ = make_engine()
    seeded = [engine.add([1, 2, 3], SamplingParams(temperature=2.0, seed=42, max_tokens=20)) for _ in range(2)]
    free = [engine.add([1, 2, 3], SamplingParams(temperature=2.0, max_tokens=20)) for _ in range(2)]
    drain(engine)
    assert seeded[0].output_ids == seeded[1].output_ids
    assert free[0].output_ids != free[1].output_ids
    repeat = engine.add([1, 2, 3], SamplingParams(temperature=2.0, seed=free[0].seed, max_tokens=20))
    drain(engine)
    assert repeat.output_ids == free[0].output_ids


def test_every_id_of_the_vocabulary_can_be_a_prompt():
    engine, _ = make_engine()
    engine.add(list(range(VOCAB_SIZE - 60, VOCAB_SIZE)), SamplingParams(temperature=0, max_tokens=2))
    drain(engine)
