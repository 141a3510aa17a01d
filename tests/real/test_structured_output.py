"""The embedded model under random JSON schemas. JAXOVERLAP_SCHEMAS says how many; 200 take some minutes."""

from __future__ import annotations

import json
import os

import jsonschema
import numpy as np
import pytest

from jaxoverlap import FinishReason, SamplingParams, StructuredOutput
from jaxoverlap.config import EngineConfig
from jaxoverlap.engine.build import build_engine
from tests.grammar_tools import RecordingCompiler, outcome, random_schema
from tests.real.settings import SETTINGS, one_compiles

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

COUNT = int(os.environ.get("JAXOVERLAP_SCHEMAS", "4"))


def test_random_schemas_give_valid_json_and_leave_their_neighbours_alone():
    schemas = [random_schema(np.random.default_rng(seed), bounded=True) for seed in range(COUNT)]
    with one_compiles():
        built = build_engine(EngineConfig(**SETTINGS))
    engine, tokenizer = built.engine, built.tokenizer
    engine.close()
    engine.constraints = RecordingCompiler(tokenizer, built.model_config.vocab_size, engine.eos_token_ids)
    prompt, free = tokenizer.encode("The capital of France is"), SamplingParams(temperature=0, max_tokens=24)
    alone = engine.add(prompt, free)
    while engine.has_work:
        engine.step()
    beside = engine.add(prompt, free)
    requests = []
    for seed, schema in enumerate(schemas):
        ids = tokenizer.encode(f"A JSON document for the schema {json.dumps(schema)}, as an example:\n")
        structure = StructuredOutput(json_schema=schema)
        params = SamplingParams(temperature=0.8, seed=seed, max_tokens=500, structured_output=structure)
        requests.append(engine.add(ids[-500:], params))
    while engine.has_work:
        engine.step()
    engine.close()
    assert beside.output_ids == alone.output_ids
    for schema, request in zip(schemas, requests, strict=True):
        _, reason = outcome(request)
        text = tokenizer.decode(request.output_ids)
        assert reason in (FinishReason.GRAMMAR_COMPLETE, FinishReason.EOS), (schema, text, request.error)
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
