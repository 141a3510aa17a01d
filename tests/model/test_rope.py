"""Rope: frequencies as published and as transformers computes them; what is unknown is refused."""

from __future__ import annotations

import logging
from copy import deepcopy

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


PLAIN = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 1e6, "rope_parameters": PLAIN, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": PLAIN, "rope_scaling": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}, "rope_scaling": {}},
        {"rope_parameters": {**PLAIN, "rope_type": "yarn", **YARN}, "rope_scaling": {"type": "linear", "factor": 3.0}},
        {"original_max_position_embeddings": 2048, "rope_parameters": {**PLAIN, "rope_type": "yarn", **YARN}},
        {
            "original_max_position_embeddings": 2048,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        },
    ],
    ids=str,
)
def test_where_fields_contradict_each_other_transformers_decides(fields):
    fields = {"rope_theta": 1e6, **fields}
    config = transformers.LlamaConfig.from_dict({"head_dim": 96, "max_position_embeddings": 8192, **deepcopy(fields)})
    expected, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)
    rope = rope_from_hf(fields, 8192)
    np.testing.assert_allclose(inverse_frequencies(rope, 96), expected.numpy(), rtol=1e-6)
    assert rope.attention_factor == pytest.approx(factor)


def test_rope_scaling_keeps_the_base_of_the_rope_parameters_that_it_replaces():
    rope = rope_from_hf({"rope_parameters": PLAIN, "rope_scaling": {"rope_type": "yarn", **YARN}}, 8192)
    assert (rope.kind, rope.theta, rope.factor) == ("yarn", 1e6, 4.0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_type": "yarn", **YARN, "rope_theta": 1}, "rope_theta is 1.0; rope type 'yarn' needs more than 1"),
        ({"rope_type": "yarn", **YARN, "rope_theta": 0}, "rope_theta is 0"),
        *(
            ({"rope_type": "yarn", **YARN, "factor": value}, f"'factor' is {value}")
            for value in (0, -2.0, np.nan, np.inf)
        ),
        ({"rope_type": "yarn", **YARN, "factor": 1e300}, r"'factor' is 1e\+300; .* from 1e-18 to 1e\+18"),
        ({"rope_type": "yarn", **YARN, "beta_fast": 1e300}, r"'beta_fast' is 1e\+300"),
        ({"rope_type": "linear", "factor": 0}, "'factor' is 0"),
        *(
            ({"rope_type": kind, **LLAMA3, "original_max_position_embeddings": value}, f"original.* is {shown}")
            for kind in ("yarn", "llama3")
            for value, shown in ((0, 0), (-1, -1), (0.5, 0))
        ),
        (
            {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0},
            "'high_freq_factor' is 4.0.*'low_freq_factor', 4.0",
        ),
    ],
    ids=str,
)
def test_numbers_without_frequencies_are_refused_by_name(fields, named):
    with pytest.raises(ModelError, match=named):
        rope_from_hf({"rope_parameters": fields}, 8192)
    with pytest.raises(ModelError, match="original_max_position_embeddings is 0"):
        rope_from_hf({"rope_parameters": {"rope_type": "yarn", **YARN}, "original_max_position_embeddings": 0}, 8192)


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
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": "1"}}, "'attention_factor' is '1'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": "1", "mscale_all_dim": 1}},
            "'mscale'.* is '1'",
        ),
        ({"rope_scaling": ["yarn"]}, r"rope_scaling is \['yarn'\]; it must be an object"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn'; it must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
    ],
)
def test_unusable_rope_parameters_are_refused(fields, named):
    with pytest.raises(ModelError, match=named):
        rope_from_hf(fields, 2048)


def test_parameters_that_transformers_ignores_are_ignored_with_a_warning(caplog):
    scaling = {"rope_type": "yarn", **YARN, "attn_factor": 0.5}
    config = transformers.LlamaConfig(head_dim=96, max_position_embeddings=8192, rope_parameters=scaling)
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jaxoverlap"):
        rope = rope_from_hf({"rope_scaling": {"type": "yarn", **YARN}}, 8192)
        assert not caplog.records
        assert rope_from_hf({"rope_scaling": scaling}, 8192) == rope
    assert rope.attention_factor == pytest.approx(factor)
    assert "rope_type 'yarn' does not have are ignored: ['attn_factor']" in caplog.text


@pytest.mark.parametrize(
    ("scaling", "stretched"),
    [
        ({"rope_type": "default"}, 40960),
        ({"rope_type": "llama3", **LLAMA3}, 40960),
        ({"rope_type": "linear", "factor": 2.5}, 102400),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "yarn", "factor": 4.0}, 163840),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 40960),
    ],
    ids=str,
)
def test_scaling_stretches_the_context(scaling, stretched):
    assert rope_from_hf({"rope_scaling": scaling}, 40960).stretched(40960) == stretched


def test_gguf_spellings():
    assert rope_from_gguf({"llama.rope.freq_base": 5e5}, "llama", 8192, ()) == RopeConfig(theta=5e5)
    linear = RopeConfig(theta=1e4, kind="linear", factor=4.0)
    new = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert rope_from_gguf(new, "llama", 8192, ()) == linear
    assert rope_from_gguf({"llama.rope.scale_linear": 4.0}, "llama", 8192, ()) == linear
    assert rope_from_gguf({"llama.rope.scaling.factor": 4.0}, "llama", 8192, ()) == linear
    none = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    assert rope_from_gguf(none, "llama", 8192, ()) == rope_from_gguf({}, "llama", 8192, ()) == RopeConfig()
    assert rope_from_gguf({}, "llama", 8192, (1.0, 2.0)).frequency_factors == (1.0, 2.0)
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.type is 'longrope'"):
        rope_from_gguf({"llama.rope.scaling.type": "longrope"}, "llama", 8192, ())
    with pytest.raises(ModelError, match=r"rope_freqs\.weight beside"):
        rope_from_gguf(new, "llama", 8192, (1.0, 2.0))


GGUF_YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 4096}


def gguf(**scaling):
    return rope_from_gguf({f"llama.rope.scaling.{name}": value for name, value in scaling.items()}, "llama", 8192, ())


def test_gguf_yarn_bounds_are_those_of_transformers():
    for fields in ({}, {"beta_fast": 24.0, "beta_slow": 2.0}):
        expected = rope_from_hf({"rope_scaling": {"rope_type": "yarn", **YARN, **fields}}, 8192)
        given = {**GGUF_YARN, **{f"yarn_{name}": value for name, value in fields.items()}}
        assert gguf(**given) == gguf(**given, yarn_ext_factor=1.0, finetuned=True) == expected
    assert gguf(**GGUF_YARN, attn_factor=0.5).attention_factor == pytest.approx(expected.attention_factor / 2)
    assert gguf(type="linear", factor=4.0, attn_factor=0.5).attention_factor == 0.5


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({**GGUF_YARN, "yarn_ext_factor": 0.0}, "yarn_ext_factor is 0.0"),
        ({"type": "linear", "factor": 4.0, "yarn_ext_factor": 1.0}, "yarn_ext_factor is 1.0"),
        ({**GGUF_YARN, "yarn_attn_factor": 1.0}, "yarn_attn_factor is 1.0"),
        ({**GGUF_YARN, "yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
        ({"alpha": 1000.0}, "alpha is 1000.0"),
        ({**GGUF_YARN, "yarn_beta_fast": "32"}, "yarn_beta_fast is '32'"),
        ({**GGUF_YARN, "factor": "4"}, "factor is '4'"),
        ({**GGUF_YARN, "original_context_length": 0}, "original_context_length is 0"),
    ],
    ids=str,
)
def test_gguf_rope_keys_that_are_not_computed_are_refused(scaling, named):
    with pytest.raises(ModelError, match=rf"llama\.rope\.scaling\.{named}"):
        gguf(**scaling)


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("nan"), float("inf")])
def test_frequency_factors_that_give_no_frequencies_are_refused(divisor):
    with pytest.raises(ModelError, match=r"rope frequency factors: .* must be positive"):
        rope_from_gguf({}, "llama", 8192, (1.0, divisor))


def test_frequency_factors_divide():
    plain = inverse_frequencies(RopeConfig(), 4)
    np.testing.assert_array_equal(inverse_frequencies(RopeConfig(frequency_factors=(1.0, 8.0)), 4), plain / [1, 8])
