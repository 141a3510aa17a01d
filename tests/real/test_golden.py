"""The embedded model, decoded by the whole engine, against transformers.

`tests/data/golden.json`: 8 prompts (raw and chat), 64 greedy ids each, by transformers 5.24.0 with torch 2.13.0 in
float32, and the gap between the two highest log-probabilities. The smallest gap is 0.0014, far above what float32
rounding moves, so all 512 ids are compared.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxoverlap import LLM, FinishReason, SamplingParams
from tests.real.settings import SETTINGS, one_compiles

pytestmark = pytest.mark.real_model

ITEMS = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["items"]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with one_compiles():
        llm = LLM(**SETTINGS, progress=False)
    with llm:
        yield llm
        assert llm.runner.compiles_after_ready == 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_greedy_ids_equal_those_of_transformers_in_one_batch(llm, lookahead):
    llm.engine.loop.lookahead = lookahead
    outputs = llm.generate([item["prompt_ids"] for item in ITEMS], replace(GREEDY, logprobs=2))
    assert [output.token_ids for output in outputs] == [item["output_ids"] for item in ITEMS]
    for output, item in zip(outputs, ITEMS, strict=True):
        assert all(position.top[0] == position.chosen for position in output.logprobs)
        chosen = [position.chosen.logprob for position in output.logprobs]
        np.testing.assert_allclose(chosen, item["logprobs"], atol=2e-3)


def test_log_probabilities_of_a_prompt_equal_those_of_transformers(llm):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([item["prompt_ids"] + item["output_ids"] for item in ITEMS[:4]], params)
    for output, item in zip(outputs, ITEMS, strict=False):
        assert output.prompt_logprobs[0].chosen.logprob is None
        scored = [position.chosen.logprob for position in output.prompt_logprobs[len(item["prompt_ids"]) :]]
        np.testing.assert_allclose(scored, item["logprobs"], atol=2e-3)


@pytest.mark.parametrize("index", [0, 3, 5, 7])
def test_greedy_ids_equal_those_of_transformers_alone(llm, index):
    (output,) = llm.generate(ITEMS[index]["prompt_ids"], GREEDY)
    assert output.token_ids == ITEMS[index]["output_ids"]


def test_prompts_give_the_ids_of_transformers(llm):
    for item in ITEMS:
        prompt = item["prompt"]
        chat = [{"role": "user", "content": prompt}]
        (output,) = llm.generate(prompt if item["kind"] == "raw" else chat, SamplingParams(max_tokens=1))
        assert output.prompt_token_ids == item["prompt_ids"]


def test_a_chat_ends_by_itself_and_streams_what_it_generates(llm):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=60)
    (whole,) = llm.generate(chat, params)
    deltas = list(llm.stream(chat, params))
    assert whole.finish_reason == FinishReason.EOS
    assert "Paris" in whole.text
    assert "".join(delta.text for delta in deltas) == whole.text == deltas[-1].output.text
    assert [i for delta in deltas for i in delta.token_ids] == whole.token_ids
    assert whole.token_ids[-1] == whole.matched_token_id
    assert "<|im_end|>" not in whole.text


def test_streams_may_be_drawn_in_turn_and_left(llm):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    first, second, third = (llm.stream(item["prompt_ids"], params) for item in ITEMS[:3])
    heads = [next(first), next(second), next(third)]
    third.close()
    got = [heads[0].token_ids + [i for delta in first for i in delta.token_ids]]
    got.append(heads[1].token_ids + [i for delta in second for i in delta.token_ids])
    assert got == [item["output_ids"][:24] for item in ITEMS[:2]]
    assert not llm.engine.has_work
    memory = llm.engine.loop.scheduler.state.memory
    assert memory.num_available == memory.pool.num_pages


@pytest.mark.parametrize("residue", range(16))
def test_a_cached_prefix_gives_the_ids_of_transformers(llm, residue):
    """An earlier prompt shared whole pages and went on differently, by any number of tokens past the page's end."""
    item = ITEMS[residue % len(ITEMS)]
    whole = item["prompt_ids"] + item["output_ids"]
    cached = -(-len(item["prompt_ids"]) // 16) * 16
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for suffixes in [(1, 2, 15, 16), (17, 40)]:  # those of a step, so that none finds pages of another
        llm.flush_cache()
        llm.generate((whole[:cached] + [504, 253, 28, 7] * 4)[: cached + residue], params)
        lengths = [cached + suffix for suffix in suffixes]
        outputs = llm.generate([whole[:length] for length in lengths], params)
        assert [output.cached_tokens for output in outputs] == [cached] * len(suffixes)
        assert [output.token_ids for output in outputs] == [whole[length : length + 4] for length in lengths]
