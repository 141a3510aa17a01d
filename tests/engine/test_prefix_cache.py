"""What is cached or recomputed gives the tokens that a cold engine gives."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.config import PRESETS
from jaxoverlap.request import RequestOptions
from jaxoverlap.runtime.row_state import KVPages
from jaxoverlap.sampling_params import SamplingParams
from tests.engine.test_equality import GAP, SEED, outcomes
from tests.tiny import VOCAB_SIZE, change_pool, dense_greedy, drain, make_engine, random_requests

GREEDY = {"temperature": 0.0, "ignore_eos": True}
SUFFIXES = [1, 2, 15, 16, 17, 40]


def poison_freed_pages(engine, runner, value: float) -> None:
    """What is free holds `value`, so that reading it shows."""
    pool = engine.loop.scheduler.state.memory.pool
    free = pool.free

    def free_and_poison(pages):
        free(pages)
        if len(pages):

            def poison(kv: KVPages) -> KVPages:
                layers = np.arange(0, kv.k.shape[0], runner.step.num_pages)[:, None]
                at = jnp.asarray((layers + pages).reshape(-1))
                return KVPages(kv.k.at[at].set(value), kv.v.at[at].set(value))

            change_pool(runner, poison)

    pool.free = free_and_poison


@pytest.mark.parametrize("value", [1e4, np.nan])
def test_a_hit_gives_the_tokens_of_a_miss_for_every_residue_and_suffix(value):
    engine, runner = make_engine(num_pages=24)
    poison_freed_pages(engine, runner, value)
    rng = np.random.default_rng(11)
    compared = 0
    for residue in range(16):
        first = rng.integers(0, VOCAB_SIZE, 32 + residue).tolist()
        engine.add(first, SamplingParams(max_tokens=3, **GREEDY))
        drain(engine)
        suffix = SUFFIXES[residue % len(SUFFIXES)]
        prompt = first[:32] + rng.integers(0, VOCAB_SIZE, suffix).tolist()
        second = engine.add(prompt, SamplingParams(max_tokens=4, **GREEDY))
        drain(engine)
        assert second.cached_tokens == 32
        expected, gaps = dense_greedy(prompt, 4)
        fair = next((index for index, gap in enumerate(gaps) if gap < GAP), 4)
        assert second.output_ids[:fair] == expected[:fair]
        compared += fair
    assert compared >= 16 * 3, "hardly a token could be compared"


def test_the_same_prompt_again_leaves_one_page_to_compute():
    engine, _ = make_engine()
    rng = np.random.default_rng(1)
    for length in (15, 16, 17, 31, 32, 33):
        prompt = rng.integers(0, VOCAB_SIZE, length).tolist()
        runs = []
        for _ in range(2):
            runs.append(engine.add(prompt, SamplingParams(max_tokens=5, **GREEDY)))
            drain(engine)
        assert runs[0].output_ids == runs[1].output_ids
        assert [run.cached_tokens for run in runs] == [0, (length - 1) // 16 * 16]


def test_a_chat_finds_the_answers_of_its_earlier_turns():
    engine, _ = make_engine()
    chat, written, rng = [1, 2, 3], 0, np.random.default_rng(2)
    for _ in range(3):
        request = engine.add(chat, SamplingParams(max_tokens=20, **GREEDY))
        drain(engine)
        expected, gaps = dense_greedy(chat, 20)
        assert min(gaps) < GAP or request.output_ids == expected
        assert request.cached_tokens == written // 16 * 16
        written = len(chat) + 19  # the KV of the last output was never written
        chat = chat + request.output_ids + rng.integers(0, VOCAB_SIZE, 5).tolist()


def test_salts_do_not_share():
    engine, _ = make_engine()
    cached = []
    for salt in (None, "a", "b", "a"):
        request = engine.add([7] * 40, SamplingParams(max_tokens=2, **GREEDY), RequestOptions(cache_salt=salt))
        drain(engine)
        cached.append(request.cached_tokens)
    assert cached == [0, 0, 0, 32]


def test_flushed_is_forgotten():
    engine, _ = make_engine()
    for expected in (0, 32, 0):
        request = engine.add([7] * 40, SamplingParams(max_tokens=2, **GREEDY))
        drain(engine)
        assert request.cached_tokens == expected
        if expected:
            assert engine.loop.scheduler.flush_cache() == 2


@pytest.fixture(scope="module")
def expected():
    engine, _ = make_engine(lookahead=0, mixed_steps=False)
    requests = random_requests(engine, SEED, 14)
    drain(engine)
    return outcomes(requests)


@pytest.mark.parametrize("name", PRESETS)
def test_the_three_schedules_give_the_same_tokens(name, expected):
    preset = PRESETS[name]
    settings = {"mixed_steps": preset.mixed_steps, "max_prefill_streak": preset.max_prefill_streak}
    engine, _ = make_engine(lookahead=preset.lookahead, **settings)
    requests = random_requests(engine, SEED, 14)
    drain(engine)
    assert outcomes(requests) == expected


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("value", [1e4, np.nan])
def test_preemption_changes_no_token(lookahead, value, expected):
    engine, runner = make_engine(lookahead=lookahead, num_pages=8, headroom=1)
    poison_freed_pages(engine, runner, value)
    requests = random_requests(engine, SEED, 14)
    drain(engine)
    assert engine.loop.scheduler.counters.preemptions > 0
    assert outcomes(requests) == expected
