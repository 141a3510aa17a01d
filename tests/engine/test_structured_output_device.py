"""Rows that follow a grammar on a real device step: a tiny model in JAX, ends, rules, dead ends and the door."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

from jaxoverlap.errors import InvalidRequestError, UnsupportedError
from jaxoverlap.outputs import FinishReason
from jaxoverlap.request import Request
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput
from tests.grammar_tools import RecordingCompiler, ascii_tokenizer, outcome
from tests.tiny import EOS_ID, VOCAB_SIZE, dense_greedy, drain, make_engine


@pytest.fixture(scope="module")
def compiler():
    compiler = RecordingCompiler(ascii_tokenizer(), VOCAB_SIZE, [EOS_ID])
    yield compiler
    compiler.close()


def engine_of(compiler, lookahead: int = 1):
    engine, _ = make_engine(lookahead)
    engine.constraints = compiler
    return engine


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(6, 100, size).tolist() for size in (5, 30, 17, 40, 9)]
WISHES: list[dict[str, Any]] = [
    {},
    {"structured_output": StructuredOutput(regex="a+")},
    {},
    {"structured_output": StructuredOutput(json_schema=SCHEMA)},
    {"structured_output": StructuredOutput(regex="b+")},
]


def params_of(wish: dict[str, Any], **changes) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "seed": 3} | wish | changes))


def text_of(request: Request) -> str:
    return ascii_tokenizer().decode(request.output_ids)


@pytest.fixture(scope="module")
def alone(compiler):
    """What each of the five gives with nobody beside it."""
    outcomes = []
    for prompt, wish in zip(PROMPTS, WISHES, strict=True):
        engine = engine_of(compiler)
        request = engine.add(prompt, params_of(wish))
        drain(engine)
        outcomes.append(outcome(request))
    return outcomes


def test_alone_each_obeys_its_grammar_and_the_free_ones_are_as_without_any(compiler, alone):
    texts = [ascii_tokenizer().decode(ids) for ids, _ in alone]
    assert re.fullmatch("a+", texts[1]) and re.fullmatch("b+", texts[4])
    assert re.match(r'\{"a":', texts[3])
    for index in (0, 2):
        expected = dense_greedy(PROMPTS[index], 12)[0]
        assert alone[index][0] == expected[: len(alone[index][0])]


def test_every_order_of_free_and_constrained_rows_gives_the_same(compiler, alone):
    engine = engine_of(compiler)
    for order in list(itertools.permutations(range(5)))[::5]:  # all of them: on the toy device
        requests = {index: engine.add(PROMPTS[index], params_of(WISHES[index])) for index in order}
        drain(engine)
        assert [outcome(requests[index]) for index in range(5)] == alone, order


def test_sampled_rows_do_not_depend_on_their_neighbours(compiler):
    wish = {"structured_output": StructuredOutput(json_schema={"type": "array", "items": {"type": "boolean"}})}
    params = params_of(wish, temperature=1.0, seed=11, max_tokens=30)
    results = []
    for others in (0, 2, 4):
        engine = engine_of(compiler)
        for index in range(others):
            engine.add(PROMPTS[index], params_of(WISHES[index], temperature=0.7, seed=index))
        request = engine.add(PROMPTS[4], params)
        drain(engine)
        results.append(outcome(request))
    assert results[0] == results[1] == results[2]


# ------------------------------------------------------------------ ends


def run_one(compiler, structure: dict[str, Any], prompt=PROMPTS[0], **changes) -> Request:
    engine = engine_of(compiler)
    request = engine.add(prompt, params_of({"structured_output": StructuredOutput(**structure)}, **changes))
    drain(engine)
    outcome(request)
    return request


def id_of(text: str) -> int:
    return next(i for i in range(VOCAB_SIZE) if ascii_tokenizer().token_bytes(i) == text.encode())


def test_the_model_may_end_as_soon_as_the_grammar_accepts_and_not_before(compiler):
    request = run_one(compiler, {"regex": "(ab){2}a*"}, logit_bias={EOS_ID: 100.0})
    assert request.finish_reason == FinishReason.EOS and request.matched_token_id == EOS_ID
    assert text_of(request) == "abab"


def test_without_an_end_the_limit_ends_it(compiler):
    request = run_one(compiler, {"regex": "a+"}, ignore_eos=True, logit_bias={EOS_ID: 100.0}, max_tokens=7)
    assert request.finish_reason == FinishReason.LENGTH and re.fullmatch("a{7,}", text_of(request))


def test_complete_at_the_limit_is_complete(compiler):
    request = run_one(compiler, {"choices": ["xyz"]}, max_tokens=3)
    assert request.finish_reason == FinishReason.GRAMMAR_COMPLETE and text_of(request) == "xyz"


def test_min_tokens_holds_ends_back(compiler):
    request = run_one(compiler, {"regex": "x+"}, min_tokens=5, logit_bias={EOS_ID: 100.0})
    assert text_of(request) == "xxxxx" and request.finish_reason == FinishReason.EOS


def test_a_stop_id_ends_it_inside_the_grammar(compiler):
    request = run_one(compiler, {"choices": ["xyz"]}, stop_token_ids=[id_of("y")])
    assert request.finish_reason == FinishReason.STOP_TOKEN and text_of(request) == "xy"


def test_penalties_and_log_probabilities_go_with_a_grammar(compiler):
    request = run_one(compiler, {"regex": "[xyz]{6}"}, repetition_penalty=1.5, presence_penalty=2.0, logprobs=3)
    assert re.fullmatch("[xyz]{6}", text_of(request)) and len(request.scores) == 6


def test_a_dead_end_ends_that_request_only(compiler, alone):
    engine = engine_of(compiler)
    banned = [i for i in range(VOCAB_SIZE) if b"b" in (ascii_tokenizer().token_bytes(i) or b"")]
    wish = {"structured_output": StructuredOutput(regex="xxab"), "banned_token_ids": banned}
    dead = engine.add(PROMPTS[0], params_of(wish))
    others = [engine.add(prompt, params_of(wish)) for prompt, wish in zip(PROMPTS[:4], WISHES[:4], strict=True)]
    drain(engine)
    assert dead.finish_reason == FinishReason.ERROR and "dead end" in str(dead.error)
    assert text_of(dead) == "xxa"
    assert [outcome(request) for request in others] == alone[:4]


def test_a_fault_inside_a_grammar_ends_that_request_only(compiler, alone):
    engine = engine_of(compiler)
    requests = [engine.add(prompt, params_of(wish)) for prompt, wish in zip(PROMPTS, WISHES, strict=True)]
    constraint = requests[1].constraint.inner
    constraint._matcher.consume_token(EOS_ID)  # which it does not know: its matcher is in error from here on
    drain(engine)
    assert requests[1].finish_reason == FinishReason.ERROR and len(requests[1].output_ids) == 1
    for index in (0, 2, 3, 4):
        assert outcome(requests[index]) == alone[index]


# ------------------------------------------------------------------ the door


def test_a_bad_structure_is_refused_and_nothing_has_changed(compiler):
    engine = engine_of(compiler)
    for structure in ({"regex": "("}, {"json_schema": {"type": "integer", "minimum": 2, "maximum": 1}}):
        params = params_of({"structured_output": StructuredOutput(**structure)})
        with pytest.raises(InvalidRequestError, match=r"structured_output\."):
            engine.compile_constraint(params).result()
        with pytest.raises(InvalidRequestError, match=r"structured_output\."):
            engine.add([1, 2], params)
    assert not engine.has_work


def test_an_engine_without_a_compiler_says_so():
    engine, _ = make_engine()
    with pytest.raises(UnsupportedError, match="structured_output"):
        engine.add([1, 2], params_of(WISHES[1]))
    assert not engine.has_work


def test_what_was_compiled_beforehand_is_taken(compiler):
    engine = engine_of(compiler)
    params = params_of(WISHES[1])
    compiled = engine.compile_constraint(params).result()
    assert engine.compile_constraint(params_of({})) is None
    engine.constraints = None  # so that `add` could not compile
    requests = [engine.add(PROMPTS[1], params, compiled=compiled) for _ in range(2)]
    drain(engine)
    assert outcome(requests[0]) == outcome(requests[1])
    assert requests[0].constraint is not requests[1].constraint


def test_nothing_compiles_after_the_warm_up(compiler):
    engine, runner = make_engine(warm=True)
    engine.constraints = compiler
    for prompt, wish in zip(PROMPTS, WISHES, strict=True):
        engine.add(prompt, params_of(wish))
    drain(engine)
    assert runner.compiles_after_ready == 0
