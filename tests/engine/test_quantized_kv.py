"""KV pages of 8-bit codes: one request still has one answer, whatever happens around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxoverlap.config import EngineConfig
from jaxoverlap.errors import ConfigError
from jaxoverlap.outputs import FinishReason
from jaxoverlap.runtime.row_state import KVPages, kv_dtype_name, resolve_kv_dtype
from jaxoverlap.sampling_params import SamplingParams
from pallas_kernels.pages import QUANTIZED, num_bytes
from tests.engine.test_deterministic import PROMPTS, SIZES, add, bits
from tests.engine.test_equality import outcomes
from tests.model.dense import dense_logits
from tests.tiny import CONFIG, VOCAB_SIZE, change_pool, drain, make_engine, make_runner, random_requests, weights

KV_DTYPES = pytest.mark.parametrize("kv_dtype", QUANTIZED)
SEED = 8
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@KV_DTYPES
def test_neighbours_chunks_cache_and_preemption_change_no_bit(kv_dtype):
    """Of a deterministic engine, so that nothing is rounded in two ways: a code is of its own numbers only."""
    engine, _ = make_engine(lookahead=0, kv_dtype=kv_dtype, **SIZES)
    alone = []
    for index in range(len(PROMPTS)):
        request = add(engine, index)
        drain(engine)
        engine.loop.scheduler.flush_cache()
        alone.append(bits(request))
    for seed in range(2):
        rng = np.random.default_rng(seed)
        engine, _ = make_engine(lookahead=seed, kv_dtype=kv_dtype, **SIZES)
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


# Few shapes of steps, and a pool far larger than all else, so that any copy of it shows.
FEW: dict[str, Any] = {"max_running": 2, "max_batched_tokens": 16, "max_prefill_rows": 2, "num_pages": 4000}


@KV_DTYPES
def test_schedules_and_chunks_change_no_greedy_token(kv_dtype):
    engine, _ = make_engine(lookahead=0, kv_dtype=kv_dtype, **FEW)
    scratch, _ = make_engine(lookahead=0, kv_dtype=kv_dtype, **FEW)
    alone = []
    for request in random_requests(scratch, SEED, 6):
        alone.append(engine.add(request.prompt_ids, request.sampling))
        drain(engine)
    for lookahead in (0, 2):
        engine, _ = make_engine(lookahead=lookahead, kv_dtype=kv_dtype, **FEW)
        requests = random_requests(engine, SEED, 6)
        drain(engine)
        assert outcomes(requests) == outcomes(alone)


@KV_DTYPES
def test_no_step_copies_the_pool(kv_dtype):
    runner = make_runner(kv_dtype=kv_dtype, **FEW)
    pool = num_bytes(runner._kv)
    assert pool == 2 * 2 * 4000 * 16 * 2 * (16 + 4)  # K and V, layers, pages, positions, heads, codes and a scale
    for shape in runner.buckets:
        step = runner.executables[shape]
        assert step.aliased_bytes >= pool, shape
        assert step.temporary_bytes < pool // 4 // len(runner._kv), shape


@KV_DTYPES
def test_scores_are_near_those_of_a_dense_decoder_without_codes(kv_dtype):
    """The tiny model's weights are large, so errors are too; those of a real model are in tests/real."""
    engine, _ = make_engine(kv_dtype=kv_dtype, **FEW)
    prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, 60).tolist()
    request = engine.add(prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    drain(engine)
    logits = dense_logits(CONFIG, weights(), np.asarray(prompt, np.int32))
    want = np.asarray(jax.nn.log_softmax(logits))[np.arange(59), prompt[1:]]
    off = np.abs([score.logprob for score in request.prompt_scores] - want)
    assert 0 < off.mean() < (0.02 if kv_dtype == "int8" else 0.1)


@KV_DTYPES
def test_a_row_of_nan_ends_alone_with_an_error_and_leaves_no_nan_behind(kv_dtype):
    engine, runner = make_engine(lookahead=1, kv_dtype=kv_dtype, **FEW)
    beside = engine.add([1, 2, 3], GREEDY)
    victim = engine.add([9, 9, 9], GREEDY)
    while not victim.output_ids:
        engine.step()
    page = int(engine.loop.scheduler.state.memory.page_table[victim.row, 0])
    change_pool(runner, lambda kv: KVPages(kv.k, replace(kv.v, scales=kv.v.scales.at[page].set(np.nan))))
    drain(engine)
    assert victim.finish_reason == FinishReason.ERROR and "NaN" in str(victim.error)
    assert beside.finish_reason == FinishReason.LENGTH
    again = engine.add([9, 9, 9], GREEDY)
    drain(engine)
    assert again.finish_reason == FinishReason.LENGTH


def test_what_a_user_calls_a_dtype():
    bfloat16 = np.dtype("bfloat16")
    for name, want in (("auto", "bfloat16"), ("fp8", "fp8"), ("int8", "int8"), ("float16", "float16")):
        assert kv_dtype_name(resolve_kv_dtype(name, bfloat16)) == want
    with pytest.raises(ConfigError, match="kv_cache_dtype: 'int4' is not allowed; use one of auto, float32, bfloat16"):
        EngineConfig(kv_cache_dtype="int4")


def test_codes_take_about_half_of_bfloat16():
    llama = replace(CONFIG, head_dim=128)
    wide, narrow = (num_bytes(KVPages.abstract(llama, 1, 16, dtype)) for dtype in ("bfloat16", "int8"))
    assert narrow / wide == 66 / 128
