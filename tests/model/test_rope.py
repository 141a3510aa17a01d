"""Rope: frequencies as published and as transformers computes them; what is unknown is refused."""

from __future__ import annotations

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxoverlap.errors import ModelError
from jaxoverlap.model.rope import RopeConfig, inverse_frequencies, rope_from_gguf, rope_from_hf

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_llama3_scaling_by_hand():
    plain = inverse_frequencies(RopeConfig(theta=500000.0), 128)
    scaled = inverse_frequencies(
        rope_from_hf({"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}}, 131072), 128
    )
    ratio = plain / scaled
    assert scaled.dtype == np.float32 and scaled.shape == (64,)
    np.testing.assert_array_equal(ratio[:29], 1)
    np.testing.assert_allclose([ratio[29], ratio[32]], [1.2075, 2.6945], rtol=1e-4)
    np.testing.assert_allclose(ratio[35:], 8, rtol=1e-6)
    np.testing.assert_allclose([plain[63], scaled[63]], [2.4551e-6, 3.0689e-7], rtol=1e-4)


YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", **YARN},
        {"rope_type": "yarn", **YARN, "truncate": False, "beta_fast": 24, "beta_slow": 2},
        {"rope_type": "yarn", **YARN, "attention_factor": 0.7},
        {"rope_type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 1.2},
        {"rope_type": "yarn", "factor": 40.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_scaling_equals_transformers(parameters, spelling):
    theta, max_positions = 150000.0, 8192
    config = transformers.LlamaConfig(
        head_dim=96,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    fields = {"rope_parameters": {"rope_theta": theta, **parameters}}
    if spelling == "rope_scaling":
        fields = {"rope_theta": theta, "rope_scaling": parameters}
    rope = rope_from_hf(fields, max_positions)
    np.testing.assert_allclose(inverse_frequencies(rope, 96), expected.numpy(), rtol=3e-7)
    assert rope.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "proportional", "invented"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_unknown_rope_types_are_refused_by_name(kind, spelling):
    with pytest.raises(ModelError, match=f"rope_type is '{kind}'.*allowed: default, linear, llama3, yarn"):
        rope_from_hf({"rope_scaling": {spelling: kind, "factor": 2.0}}, 2048)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor' is missing"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "'factor' is 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
    ],
)
def test_unusable_rope_parameters_are_refused(fields, named):
    with pytest.raises(ModelError, match=named):
        rope_from_hf(fields, 2048)


def test_gguf_spellings():
    assert rope_from_gguf({"llama.rope.freq_base": 5e5}, "llama", 8192, ()) == RopeConfig(theta=5e5)
    linear = RopeConfig(theta=1e4, kind="linear", factor=4.0)
    new = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert rope_from_gguf(new, "llama", 8192, ()) == linear
    assert rope_from_gguf({"llama.rope.scale_linear": 4.0}, "llama", 8192, ()) == linear
    assert rope_from_gguf({}, "llama", 8192, (1.0, 2.0)).frequency_factors == (1.0, 2.0)
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.type is 'longrope'"):
        rope_from_gguf({"llama.rope.scaling.type": "longrope"}, "llama", 8192, ())
    with pytest.raises(ModelError, match=r"rope_freqs\.weight beside"):
        rope_from_gguf(new, "llama", 8192, (1.0, 2.0))


def test_frequency_factors_divide():
    plain = inverse_frequencies(RopeConfig(), 4)
    np.testing.assert_array_equal(inverse_frequencies(RopeConfig(frequency_factors=(1.0, 8.0)), 4), plain / [1, 8])
