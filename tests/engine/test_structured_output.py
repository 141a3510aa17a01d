"""Rows that follow a grammar, among others that don't: each as if it were alone, whatever the schedule.

On the toy device, which does nothing before its result is read; it chooses among the ids that a mask allows by a hash
of everything its row has seen.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

from jaxoverlap.engine.engine import Engine
from jaxoverlap.outputs import FinishReason
from jaxoverlap.request import Request, RequestLimits, RequestOptions
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput
from jaxoverlap.scheduler.config import SchedulerConfig
from tests.fakes import VOCAB_SIZE, ToyRunner, oracle
from tests.grammar_tools import RecordingCompiler, ascii_tokenizer, outcome, random_schema
from tests.tiny import drain

EOS_ID = 5
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(6, VOCAB_SIZE, size).tolist() for size in (5, 30, 17, 40, 9)]
WISHES: list[dict[str, Any]] = [
    {},
    {"structured_output": StructuredOutput(regex="a+")},
    {},
    {"structured_output": StructuredOutput(json_schema=SCHEMA)},
    {"structured_output": StructuredOutput(regex="b+")},
]


@pytest.fixture(scope="module")
def compiler():
    compiler = RecordingCompiler(ascii_tokenizer(), VOCAB_SIZE, [EOS_ID])
    yield compiler
    compiler.close()


def engine_of(compiler, lookahead: int = 1, *, num_pages: int = 64, max_running: int = 8, **settings) -> Engine:
    limits = RequestLimits(VOCAB_SIZE, 128, 16, num_pages)
    config = SchedulerConfig(
        limits=limits, max_running=max_running, max_batched_tokens=32, max_prefill_rows=4, **settings
    )
    runner = ToyRunner(limits, max_running, salted=True)
    return Engine(config, runner, lookahead=lookahead, eos_token_ids=[EOS_ID], constraints=compiler)


def params_of(index: int, **changes) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 25, "seed": index} | WISHES[index] | changes))


def add_all(engine: Engine, order=range(5), **options) -> dict[int, Request]:
    return {index: engine.add(PROMPTS[index], params_of(index), RequestOptions(**options)) for index in order}


@pytest.fixture(scope="module")
def alone(compiler):
    """What each of the five gives with nobody beside it, one step at a time."""
    outcomes = []
    for index in range(5):
        engine = engine_of(compiler, lookahead=0)
        request = engine.add(PROMPTS[index], params_of(index))
        drain(engine)
        outcomes.append(outcome(request))
    return outcomes


def test_alone_each_obeys_its_grammar_and_the_free_ones_are_the_oracles(alone):
    texts = [ascii_tokenizer().decode(ids) for ids, _ in alone]
    assert re.fullmatch("a+", texts[1]) and re.fullmatch("b+", texts[4])
    assert re.match(r'\s*\{\s*"a"', texts[3])
    for index in (0, 2):
        assert alone[index] == oracle(PROMPTS[index], 25, [EOS_ID], salt=index)


@pytest.mark.parametrize("lookahead", range(5))
def test_every_order_of_free_and_constrained_rows_gives_the_same(compiler, alone, lookahead):
    orders = list(itertools.permutations(range(5)))
    for order in orders if lookahead == 1 else orders[lookahead::6]:
        engine = engine_of(compiler, lookahead)
        requests = add_all(engine, order)
        drain(engine)
        assert [outcome(requests[index]) for index in range(5)] == alone, order


@pytest.mark.parametrize("gone", range(5))
def test_a_row_that_is_removed_changes_nothing_for_the_others(compiler, alone, gone):
    for after in range(12):
        engine = engine_of(compiler, max_running=5)
        requests = add_all(engine)
        for _ in range(after):
            engine.step()
        engine.abort(requests[gone])
        late = engine.add(PROMPTS[gone], params_of(gone))  # takes its row, perhaps
        drain(engine)
        outcome(requests[gone])
        assert [outcome(late if index == gone else requests[index]) for index in range(5)] == alone


@pytest.mark.parametrize("lookahead", range(5))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mixed_steps": False},
        {"mixed_steps": False, "max_prefill_streak": 1},
        {"max_mixed_tokens": 8},
        {"max_running": 2},
        {"prefix_cache": False},
    ],
    ids=str,
)
def test_schedules_and_lookahead_change_nothing(compiler, alone, lookahead, settings):
    engine = engine_of(compiler, lookahead, **settings)
    for _ in range(2):  # the second time with cached prompts
        requests = add_all(engine)
        drain(engine)
        assert [outcome(requests[index]) for index in range(5)] == alone


@pytest.mark.parametrize("lookahead", range(5))
def test_eight_at_once_match_fully_and_end_complete(compiler, lookahead):
    engine = engine_of(compiler, lookahead)
    structure = StructuredOutput(regex="[0-9]{4}")
    requests = [
        engine.add([7 + i] * (3 + 5 * i), SamplingParams(structured_output=structure, max_tokens=50, seed=i))
        for i in range(8)
    ]
    drain(engine)
    for request in requests:
        assert request.finish_reason == FinishReason.GRAMMAR_COMPLETE and request.error is None
        assert re.fullmatch("[0-9]{4}", ascii_tokenizer().decode(request.output_ids))
        outcome(request)
    assert len({tuple(request.output_ids) for request in requests}) > 1


@pytest.mark.parametrize("lookahead", range(5))
def test_preempted_rows_go_on_where_they_were(compiler, lookahead):
    params = [
        SamplingParams(structured_output=StructuredOutput(regex=f"[a-{end}0-9]{{20,}}"), max_tokens=25, seed=index)
        for index, end in enumerate("fgh")
    ]
    results = []
    for disturbed in (False, True):
        engine = engine_of(compiler, lookahead, num_pages=9, headroom=1, max_prompt_wait=1e-6)
        requests = [engine.add(PROMPTS[index], one, RequestOptions(priority=5)) for index, one in enumerate(params)]
        for turn in range(60):
            engine.step()
            engine.loop.scheduler.check_integrity()
            if disturbed and turn % 5 == 4:
                engine.add([9] * 40, SamplingParams(max_tokens=2, seed=0))  # more urgent
        drain(engine)
        results.append([outcome(request) for request in requests])
    assert sum(request.num_preemptions for request in requests) > 2
    assert results[0] == results[1]


def test_random_schemas_among_free_rows_and_random_aborts(compiler):
    rng = np.random.default_rng(0)
    engine = engine_of(compiler, 2, max_running=6, num_pages=30)
    requests: list[Request] = []
    for seed in range(40):
        structure = StructuredOutput(json_schema=random_schema(rng, depth=2)) if seed % 3 else None
        params = SamplingParams(structured_output=structure, max_tokens=int(rng.integers(1, 40)), seed=seed)
        requests.append(engine.add(rng.integers(6, VOCAB_SIZE, int(rng.integers(1, 60))).tolist(), params))
    while engine.has_work:
        engine.step()
        engine.loop.scheduler.check_integrity()
        if rng.random() < 0.1:
            engine.abort(requests[int(rng.integers(len(requests)))])
    for request in requests:
        ids, reason = outcome(request)
        if reason == FinishReason.ERROR:  # the one text of `random_schema` that has letters which no id has
            assert "dead end" in str(request.error)
            assert "déjà" in str(request.sampling.structured_output)
        if request.constraint is None and reason != FinishReason.ABORTED:
            expected = oracle(request.prompt_ids.tolist(), request.max_tokens, [EOS_ID], salt=request.seed)
            assert (ids, reason) == expected
    assert {request.finish_reason for request in requests} >= {FinishReason.GRAMMAR_COMPLETE, FinishReason.LENGTH}
