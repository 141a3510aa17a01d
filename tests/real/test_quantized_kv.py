"""What KV pages of 8-bit codes cost: log-probabilities of the embedded model against those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxoverlap import SamplingParams
from jaxoverlap.config import EngineConfig
from jaxoverlap.engine.build import build_engine
from tests.real.settings import one_compiles

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

ITEMS = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["items"]
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
# Deterministic: one shape of a step, so one to compile, and all its tokens read their pages as decoding rows do.
SIZES: dict[str, Any] = {
    "deterministic": True,
    "max_running": 4,
    "max_batched_tokens": 124,
    "max_model_len": 256,
    "kv_memory_gib": 1.0,
}


def errors(kv_cache_dtype: str, count: int) -> np.ndarray:
    """Of the 64 outputs of each of `count` golden items: log-probability less that of transformers."""
    with one_compiles():
        engine = build_engine(EngineConfig(kv_cache_dtype=kv_cache_dtype, **SIZES), warm_up=False).engine
        requests = [engine.add(item["prompt_ids"] + item["output_ids"], SCORED) for item in ITEMS[:count]]
        while engine.has_work:
            engine.step()
        engine.close()
    found = []
    for request, item in zip(requests, ITEMS, strict=False):
        scores = request.prompt_scores[len(item["prompt_ids"]) - 1 :]
        found.append([score.logprob for score in scores] - np.asarray(item["logprobs"]))
    return np.stack(found)


@pytest.mark.parametrize(("kv_cache_dtype", "mean", "largest"), [("int8", 0.03, 0.4), ("fp8", 0.06, 0.8)])
def test_log_probabilities_are_near_those_of_transformers(kv_cache_dtype, mean, largest):
    off = np.abs(errors(kv_cache_dtype, 4))
    assert 1e-4 < off.mean() < mean  # above what float32 pages are off by
    assert off.max() < largest
