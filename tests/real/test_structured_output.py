"""The embedded model under random JSON schemas. JAXOVERLAP_SCHEMAS says how many; 200 take some minutes."""

from __future__ import annotations

import json
import os

import jsonschema
import numpy as np
import pytest

from jaxoverlap import LLM, FinishReason, SamplingParams, StructuredOutput
from tests.grammar_tools import RecordingCompiler, outcome, random_schema

pytestmark = pytest.mark.real_model

COUNT = int(os.environ.get("JAXOVERLAP_SCHEMAS", "8"))


def test_random_schemas_give_valid_json_and_leave_their_neighbours_alone():
    schemas = [random_schema(np.random.default_rng(seed), bounded=True) for seed in range(COUNT)]
    prompts = [f"A JSON document for the schema {json.dumps(schema)}, as an example:\n" for schema in schemas]
    params = [
        SamplingParams(
            temperature=0.8, seed=seed, max_tokens=500, structured_output=StructuredOutput(json_schema=schema)
        )
        for seed, schema in enumerate(schemas)
    ]
    free = SamplingParams(temperature=0, max_tokens=24)
    prompt = "The capital of France is"
    with LLM(max_running=8, max_model_len=1024, max_batched_tokens=128, progress=False) as llm:
        (alone,) = llm.generate(prompt, free)
        own = llm.engine.constraints
        llm.engine.constraints = RecordingCompiler(llm.tokenizer, own.vocabulary.vocab_size, llm.engine.eos_token_ids)
        own.close()
        requests = []
        add = llm.engine.loop.scheduler.add
        llm.engine.loop.scheduler.add = lambda request: add(request) or requests.append(request)  # type: ignore
        beside, *outputs = llm.generate([prompt, *prompts], [free, *params])
        assert llm.runner.compiles_after_ready == 0
    assert beside.token_ids == alone.token_ids
    for request in requests:
        outcome(request)
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.finish_reason in (FinishReason.GRAMMAR_COMPLETE, FinishReason.EOS), (schema, output.text)
        jsonschema.validate(json.loads(output.text), schema, format_checker=jsonschema.FormatChecker())
