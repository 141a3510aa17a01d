"""The deterministic mode: tokens and log-probabilities are bit-equal whatever happens around a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxoverlap.sampling_params import SamplingParams
from tests.tiny import VOCAB_SIZE, drain, make_engine

RNG = np.random.default_rng(7)
SHARED = RNG.integers(0, VOCAB_SIZE, 40).tolist()
PROMPTS = [
    SHARED[:n] + RNG.integers(0, VOCAB_SIZE, m).tolist() for n, m in [(0, 3), (40, 9), (33, 1), (16, 17), (0, 29)]
]
WISH: dict[str, Any] = {"max_tokens": 20, "logprobs": 3, "prompt_logprobs": 1, "ignore_eos": True}
SIZES = {"deterministic": True, "max_batched_tokens": 13, "max_running": 5, "num_pages": 60, "max_prefill_rows": 4}


def add(engine, index: int, **changes):
    sampling = {"temperature": 0.0 if index % 2 else 1.0, "seed": index} | WISH | changes
    return engine.add(PROMPTS[index], SamplingParams(**sampling))


def bits(request) -> tuple:
    return request.output_ids, request.scores, request.prompt_scores


@pytest.fixture(scope="module")
def alone():
    engine, _ = make_engine(lookahead=0, **SIZES)
    found = []
    for index in range(len(PROMPTS)):
        request = add(engine, index)
        drain(engine)
        engine.loop.scheduler.flush_cache()
        found.append(bits(request))
    return found


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_neighbours_and_lookahead_change_no_bit(alone, lookahead):
    engine, _ = make_engine(lookahead=lookahead, **SIZES)
    requests = [add(engine, index) for index in range(len(PROMPTS))]
    drain(engine)
    assert [bits(request) for request in requests] == alone


def test_neighbours_with_rules_of_their_own_change_no_bit(alone):
    engine, _ = make_engine(lookahead=1, **SIZES)
    for seed in range(3):  # steps with them use the other variant of the second half
        wish = {"presence_penalty": 1.0, "logit_bias": {3: 2.0}, "min_tokens": 5, "max_tokens": 9 + 9 * seed}
        engine.add([seed, 1, 2], SamplingParams(temperature=0.7, seed=seed, **wish))
        requests = [add(engine, index) for index in range(len(PROMPTS))]
        drain(engine)
        engine.loop.scheduler.flush_cache()
        assert [bits(request) for request in requests] == alone


@pytest.mark.parametrize("mixed_steps", [True, False])
def test_chunks_schedule_cache_and_preemption_change_no_bit(alone, mixed_steps):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        engine, _ = make_engine(lookahead=1, mixed_steps=mixed_steps, max_mixed_tokens=int(rng.integers(1, 9)), **SIZES)
        state = engine.loop.scheduler.state
        rng.shuffle(state.rows.free_rows)
        for again in range(2):  # the second time from the cache
            requests = {}
            for index in rng.permutation(len(PROMPTS)).tolist():
                requests[index] = add(engine, index, prompt_logprobs=None if again else 1)
                for _ in range(int(rng.integers(0, 7))):
                    engine.step()
                running = [r for r in state.running.values() if not state.rows.leaving[r.row]]
                if rng.random() < 0.6 and running:
                    state.leave(running[int(rng.integers(len(running)))])
            drain(engine)
            for index, request in requests.items():
                assert bits(request)[:2] == alone[index][:2]
                assert again or bits(request)[2] == alone[index][2]
            assert not again or sum(request.cached_tokens for request in requests.values()) > 0


def test_there_is_one_shape():
    _, runner = make_engine(**SIZES)
    (shape,) = runner.buckets
    assert (shape.prefill_tokens + shape.decode_rows) % 16 == 0 and shape.sample_rows % 16 == 0
