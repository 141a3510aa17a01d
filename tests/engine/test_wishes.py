"""Whatever a request asks for, it gets the same alone and among others that ask for everything else."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxoverlap.outputs import FinishReason
from jaxoverlap.sampling_params import SamplingParams
from tests.model.dense import dense_logits
from tests.tiny import CONFIG, VOCAB_SIZE, drain, make_engine, weights

WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 3},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 4, "logprobs": 0},
    {"temperature": 0.0, "logit_bias": {9: 4.0, 11: -4.0}, "banned_token_ids": [3, 70], "logprobs": 5},
    {"temperature": 1.1, "allowed_token_ids": list(range(40, 90)), "seed": 5, "min_p": 0.02},
    {
        "temperature": 1.5,
        "seed": 8,
        "max_tokens": 80,
        "min_tokens": 12,
        "stop_token_ids": list(range(40, 55)),
        "prompt_logprobs": 2,
    },
    {"temperature": 0.0, "ignore_eos": True, "prompt_logprobs": 0, "logprobs": 20},
]
LENGTHS = [3, 17, 33, 40, 16, 5, 37, 29]
PROMPTS = [np.random.default_rng(50 + i).integers(0, VOCAB_SIZE, n).tolist() for i, n in enumerate(LENGTHS)]
SIZES = {"max_running": 8, "num_pages": 80}


def add(engine, index: int, **changes):
    return engine.add(PROMPTS[index], SamplingParams(**({"max_tokens": 24} | WISHES[index] | changes)))


def outcome(request):
    scores = [(score.token_id, score.rank) for score in request.scores]
    return request.output_ids, request.finish_reason, scores


def logprobs(scores) -> np.ndarray:
    return np.array([value for score in scores for value in (score.logprob, *(p for _, p in score.top))])


@pytest.fixture(scope="module")
def alone():
    engine, _ = make_engine(lookahead=0, **SIZES)
    requests = []
    for index in range(len(WISHES)):
        requests.append(add(engine, index))
        drain(engine)
        engine.loop.scheduler.flush_cache()
    return requests


def assert_same(requests, alone) -> None:
    for request, expected in zip(requests, alone, strict=True):
        assert outcome(request) == outcome(expected)
        np.testing.assert_allclose(logprobs(request.scores), logprobs(expected.scores), atol=1e-4)
        np.testing.assert_allclose(logprobs(request.prompt_scores), logprobs(expected.prompt_scores), atol=1e-4)


def test_the_wishes_make_a_difference(alone):
    assert len({tuple(request.output_ids[:8]) for request in alone}) == len(alone)
    assert alone[6].finish_reason == FinishReason.STOP_TOKEN and len(alone[6].output_ids) > 12
    assert not {3, 70} & set(alone[4].output_ids)
    assert set(alone[5].output_ids) <= set(range(40, 90))


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
def test_together_as_alone(alone, lookahead):
    engine, _ = make_engine(lookahead=lookahead, **SIZES)
    requests = [add(engine, index) for index in range(len(WISHES))]
    drain(engine)
    assert_same(requests, alone)


@pytest.mark.parametrize("seed", range(4))
def test_in_every_order_with_rows_joining_leaving_and_preempted(alone, seed):
    rng = np.random.default_rng(seed)
    engine, _ = make_engine(lookahead=int(rng.integers(0, 4)), **SIZES)
    state = engine.loop.scheduler.state
    rng.shuffle(state.rows.free_rows)
    requests: dict[int, Any] = {}
    for index in rng.permutation(len(WISHES)).tolist():
        requests[index] = add(engine, index)
        for _ in range(int(rng.integers(0, 6))):
            engine.step()
        if rng.random() < 0.5:
            running = [r for r in state.running.values() if not state.rows.leaving[r.row] and r.num_preemptions < 2]
            if running:
                state.leave(running[int(rng.integers(len(running)))])
        if rng.random() < 0.3:
            engine.abort(engine.add([1, 2, 3], SamplingParams(presence_penalty=2.0, logprobs=20, max_tokens=30)))
    drain(engine)
    assert_same([requests[index] for index in range(len(WISHES))], alone)
    assert sum(request.num_preemptions for request in requests.values()) > 0


def test_a_penalised_row_joins_and_another_leaves_a_running_batch(alone):
    engine, _ = make_engine(lookahead=1, **SIZES)
    free = add(engine, 0)
    for _ in range(6):
        engine.step()
    penalised = add(engine, 2)
    for _ in range(5):
        engine.step()
    engine.abort(add(engine, 3))
    drain(engine)
    assert_same([free, penalised], [alone[0], alone[2]])


# ---------------------------------------------------------------- log-probabilities against the dense decoder


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_log_probabilities_are_the_dense_decoders_for_outputs_and_prompt(chunk):
    engine, _ = make_engine(lookahead=1, max_batched_tokens=chunk)
    prompt = PROMPTS[3]
    for cached in (False, True):  # the second time all of it is cached, and has to be computed all the same
        wish = SamplingParams(temperature=0, max_tokens=6, logprobs=4, prompt_logprobs=3, ignore_eos=True)
        request = engine.add(prompt, wish)
        drain(engine)
        assert request.cached_tokens == 0
        tokens = prompt + request.output_ids
        padded = np.zeros(128, dtype=np.int32)
        padded[: len(tokens)] = tokens
        expected = np.asarray(jax.nn.log_softmax(dense_logits(CONFIG, weights(), padded)))
        scores = request.prompt_scores + request.scores
        assert [score.token_id for score in scores] == tokens[1:], cached
        for position, score in enumerate(scores):
            row = expected[position]
            np.testing.assert_allclose(score.logprob, row[score.token_id], atol=1e-4)
            assert score.rank == 1 + (row > row[score.token_id]).sum()
            num_top = 3 if position < len(prompt) - 1 else 4
            np.testing.assert_allclose([value for _, value in score.top], np.sort(row)[::-1][:num_top], atol=1e-4)


def test_prompt_log_probabilities_survive_preemption_in_the_middle_of_the_prompt():
    engine, _ = make_engine(lookahead=1, max_batched_tokens=7)
    wish = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1, ignore_eos=True)
    plain = engine.add(PROMPTS[3], wish)
    drain(engine)
    engine.loop.scheduler.flush_cache()
    request = engine.add(PROMPTS[3], wish)
    state = engine.loop.scheduler.state
    for turns in (3, 6, 12):
        while request.row is None or state.rows.leaving[request.row]:
            engine.step()
        for _ in range(turns):
            engine.step()
        if request.row is not None and not state.rows.leaving[request.row]:
            state.leave(request)
    drain(engine)
    assert request.num_preemptions >= 2
    assert request.output_ids == plain.output_ids
    np.testing.assert_allclose(logprobs(request.prompt_scores), logprobs(plain.prompt_scores), atol=1e-4)


def test_a_prompt_of_one_token_has_no_log_probabilities_of_its_own():
    engine, _ = make_engine()
    request = engine.add([5], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3))
    drain(engine)
    assert request.prompt_scores == []


# ---------------------------------------------------------------- bytes


def test_only_steps_that_are_asked_bring_log_probabilities_home():
    engine, runner = make_engine(lookahead=0)
    launched = []
    launch = runner.launch
    runner.launch = lambda plan: launched.append(launch(plan)) or launched[-1]
    engine.add([1, 2], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    engine.step()
    engine.add([1, 2], SamplingParams(temperature=0, max_tokens=2, logprobs=0, ignore_eos=True))
    drain(engine)
    assert [step.scores is not None for step in launched] == [False, True, True, False, False, False]
    assert all(step.scores is None or step.scores.nbytes <= 42 * 4 * step.shape.sample_rows for step in launched)
