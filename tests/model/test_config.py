"""Configurations: what is read, what is assumed, and what is refused rather than ignored."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import transformers

from jaxoverlap.errors import ModelError
from jaxoverlap.model.config import FAMILIES, config_from_gguf, config_from_hf
from jaxoverlap.model.rope import inverse_frequencies

HF = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 120,
}


def hf(family="llama", **fields):
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    return {**HF, "model_type": family, "architectures": [f"{architecture}ForCausalLM"], **fields}


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_left_out_mean_what_transformers_means(family):
    # As its own to_dict() writes them, then without all optional ones.
    required = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
    switches = {"sliding_window": None} if family == "mistral" else {}
    sizes = {name: HF[name] for name in required} | {"num_attention_heads": 32} | switches
    full = transformers.AutoConfig.for_model(family, **sizes)
    written = json.loads(full.to_json_string(use_diff=False))
    short = {"model_type": family, "eos_token_id": full.eos_token_id, "bos_token_id": full.bos_token_id, **sizes}
    assert config_from_hf(short) == config_from_hf({**written, "architectures": None})


def test_explicit_null_of_kv_heads_means_as_many_as_heads():
    assert config_from_hf(hf("qwen2", num_key_value_heads=None)).num_kv_heads == 4


def test_family_features():
    assert not config_from_hf(hf()).qkv_bias
    llama = config_from_hf(hf(attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
    qwen2 = config_from_hf(hf("qwen2"))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    qwen3 = config_from_hf(hf("qwen3"))
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architectures is 'GemmaForCausalLM'.*LlamaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "gemma", "architectures": None}, "model_type is 'gemma'"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2' but architectures"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*allowed: silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is 'awq'"),
        ({"quantization_config": "awq"}, "quantization_config is 'awq'"),
        ({"architectures": [{}]}, "architectures is {}"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'.*list"),
        ({"per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config is .*all layers are alike"),
        ({"dual_chunk_attention_config": [1]}, r"dual_chunk_attention_config is \[1\]; it must be an object"),
        ({"dual_chunk_attention_config": {"local_size": 8}}, "chunk_size is missing"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({"bos_token_id": "1"}, "bos_token_id is '1'"),
        ({"bos_token_id": [1, 2]}, r"bos_token_id is \[1, 2\]; it must be one"),
        ({"is_causal": False}, "is_causal is False.*allowed: true"),
        ({"is_causal": None}, "is_causal is None"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "layer_types is 'sliding_attention'.*llama"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"num_key_value_heads": 3}, "num_kv_heads is 3.*divide the 4"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None"),
        ({"eos_token_id": [-1]}, r"eos_token_id is \[-1\]"),
    ],
)
def test_what_can_not_be_computed_is_refused(fields, named):
    with pytest.raises(ModelError, match=named):
        config_from_hf(hf(**fields))


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
)
def test_a_missing_size_is_named(name):
    with pytest.raises(ModelError, match=f"{name} is missing"):
        config_from_hf({key: value for key, value in hf().items() if key != name})


SLIDING = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("mistral", {"sliding_window": 128}, (128, 128)),
        ("mistral", {}, (4096, 4096)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("mistral", {"sliding_window": 128, "layer_types": None}, (128, 128)),
        ("mistral", {"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]}, (None, 128)),
        ("mistral", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, (None, None)),
        ("llama", {"sliding_window": 128}, (None, None)),  # transformers' llama knows no window
        ("qwen2", SLIDING, (None, 128)),
        ("qwen2", {**SLIDING, "max_window_layers": 0}, (128, 128)),
        ("qwen2", {**SLIDING, "max_window_layers": 2}, (None, None)),
        ("qwen2", {**SLIDING, "use_sliding_window": False}, (None, None)),
        ("qwen3", SLIDING, (None, 128)),
        ("qwen3", {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}, (128, None)),
        ("qwen3", {**SLIDING, "layer_types": ["full_attention", "full_attention"]}, (None, None)),
    ],
)
def test_every_layer_has_the_window_that_transformers_gives_it(family, fields, windows):
    config = config_from_hf(hf(family, **fields))
    assert (config.max_position_embeddings, config.windows) == (512, windows)


@pytest.mark.parametrize(
    ("chunks", "context"),
    [
        ({"chunk_size": 256, "local_size": 8, "original_max_position_embeddings": 128}, 128),
        ({"chunk_size": 256, "local_size": 8, "original_max_position_embeddings": 512}, 256),
        ({"chunk_size": 256}, 256),
        ({"chunk_size": 1024}, 512),
        ({}, 512),
        (None, 512),
    ],
)
def test_a_context_ends_where_dual_chunk_attention_would_begin(chunks, context, caplog):
    config = config_from_hf(hf("qwen2", dual_chunk_attention_config=chunks))
    assert config.max_position_embeddings == config.longest_context == context
    assert ("dual_chunk_attention_config" in caplog.text) == (context < 512)


@pytest.mark.parametrize(
    ("windows", "window"), [((), None), ((None, 8), None), ((8, 8), 8), ((8, 16), 16), ((None, None), None)]
)
def test_the_model_has_a_window_only_if_every_layer_has_one(windows, window):
    config = replace(config_from_hf(hf()), windows=windows)
    assert config.window == window
    assert len(config.windows) == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["sliding_attention"]}, "windows: 1 values, expected one for each of 2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types is 'chunked_attention'"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": False},
            "layer_types has 'sliding_attention', which needs a sliding_window with use_sliding_window",
        ),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "which needs a sliding_window"),
        ({"sliding_window": 0}, "sliding window is 0"),
        ({"sliding_window": "128"}, "sliding window is '128'"),
    ],
)
def test_windows_that_make_no_sense_are_refused(fields, named):
    with pytest.raises(ModelError, match=named):
        config_from_hf(hf("qwen2", **{**SLIDING, **fields}))


def test_gguf_names_the_window_of_all_layers_of_a_llama():
    def windows(metadata):
        return config_from_gguf(metadata, vocab_size=100, tied=True).windows

    assert windows(GGUF) == (None, None)
    assert windows({**GGUF, "llama.attention.sliding_window": 0}) == (None, None)
    assert windows({**GGUF, "llama.attention.sliding_window": 128}) == (128, 128)
    qwen2 = {key.replace("llama", "qwen2"): value for key, value in GGUF.items()} | {"general.architecture": "qwen2"}
    assert windows({**qwen2, "qwen2.attention.sliding_window": 512}) == (512, 512)  # hides nothing
    with pytest.raises(ModelError, match=r"qwen2\.attention\.sliding_window is 511"):
        windows({**qwen2, "qwen2.attention.sliding_window": 511})


def test_eos_ids_are_the_union_of_all_sources():
    config = config_from_hf(hf(eos_token_id=2), {"eos_token_id": [2, 7]})
    assert config.eos_token_ids == (2, 7)
    assert config_from_hf(hf(eos_token_id=None)).eos_token_ids == ()
    keys = {"eos_token_id": 2, "eot_token_id": 7, "eom_token_id": 5}
    metadata = {**GGUF, **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}}
    assert config_from_gguf(metadata, vocab_size=100, tied=True).eos_token_ids == (2, 5, 7)


def test_gguf_control_tokens_that_are_ends_by_their_names_end_a_sequence():
    tokens = ["a", "<|end_of_text|>", "<|eot_id|>", "</s>", "<|eom_id|>", "<|im_start|>"]
    # Only control tokens (3): a text token or one that is user-defined (4) may be part of an answer.
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 3, 3, 1, 3, 3]}
    assert config_from_gguf({**GGUF, **metadata}, vocab_size=6, tied=True).eos_token_ids == (1, 2, 4)
    named = {**metadata, "tokenizer.ggml.eos_token_id": 5}
    assert config_from_gguf({**GGUF, **named}, vocab_size=6, tied=True).eos_token_ids == (1, 2, 4, 5)


@pytest.mark.parametrize("value", [2.0, "2", True, -1, {"a": 1}, [2, None], ["</s>", 2], [[2]]])
def test_end_ids_that_are_none_are_refused_with_their_source(value):
    for config, generation in ((hf(eos_token_id=value), {}), (hf(), {"eos_token_id": value})):
        where = "generation_config.json: eos_token_id" if generation else "eos_token_id"
        with pytest.raises(ModelError, match=f"^{where} is .*token id"):
            config_from_hf(config, generation)
    with pytest.raises(ModelError, match=r"^tokenizer\.ggml\.eot_token_id is .*token id"):
        config_from_gguf({**GGUF, "tokenizer.ggml.eot_token_id": value}, vocab_size=6, tied=True)


def test_gguf_vocabulary_is_the_table_s_not_the_metadata_s():
    config = config_from_gguf(GGUF, vocab_size=100, tied=True)
    assert config.vocab_size == 100
    assert config.head_dim == 16


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture is 'gemma3'.*allowed: llama, qwen2, qwen3"),
        ({"llama.attention.value_length": 8}, "attention.value_length is 8"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.attention.head_count_kv": [2, 4]}, r"num_kv_heads is \[2, 4\]"),
        (
            {"llama.attention.sliding_window": 128, "llama.attention.sliding_window_pattern": [True, False]},
            "sliding_window is 128.*window of all layers",
        ),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.attention.causal": False}, r"llama\.attention\.causal is False.*allowed: True"),
        ({"llama.attention.scale": 0.5}, r"llama\.attention\.scale is 0\.5.*allowed: 0, 0\.25"),
        ({"llama.attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping is 30"),
        ({"llama.logit_scale": 0.25}, "logit_scale is 0.25"),
        ({"llama.residual_scale": 0.22}, "residual_scale is 0.22"),
        ({"llama.embedding_scale": 12.0}, "embedding_scale is 12"),
    ],
)
def test_gguf_that_can_not_be_computed_is_refused(fields, named):
    with pytest.raises(ModelError, match=named):
        config_from_gguf({**GGUF, **fields}, vocab_size=100, tied=True)


def test_gguf_keys_that_say_what_is_computed_anyway_are_no_obstacle():
    scale = float(np.float32(16**-0.5))
    plain = {"attention.causal": True, "attention.scale": scale, "logit_scale": 1.0, "residual_scale": 0.0}
    metadata = {**GGUF, **{f"llama.{name}": value for name, value in plain.items()}}
    assert config_from_gguf(metadata, vocab_size=100, tied=True) == config_from_gguf(GGUF, vocab_size=100, tied=True)


def test_what_transformers_does_not_follow_either_is_not_followed_with_a_warning(caplog):
    code = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    assert config_from_hf(hf(sliding_window=128, auto_map=code, is_causal=True)) == config_from_hf(hf())
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "auto_map" in caplog.text and "sliding_window is 128" in caplog.text


WRONG = [None, "x", "", [], [None], [1, "x"], {}, {"a": 1}, 1.5, 0.5, -1, 0, 1, True, 10**30, 1e300, math.nan, math.inf]
HF_FIELDS = [*HF, "head_dim", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings", "quantization_config",
             "eos_token_id", "bos_token_id", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
             "use_sliding_window", "sliding_window", "layer_types", "max_window_layers", "per_layer_config",
             "dual_chunk_attention_config", "original_max_position_embeddings", "is_causal", "auto_map"]  # fmt: skip
ROPE_FIELDS = ["rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate",
               "attention_factor", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_no_value_of_any_field_raises_anything_but_a_model_error(family):
    windows = {"use_sliding_window": True, "sliding_window": 4}
    rope = dict.fromkeys(("factor", "low_freq_factor"), 2.0) | {
        "high_freq_factor": 8.0,
        "mscale": 1,
        "mscale_all_dim": 1,
    }
    rope_fields = [*ROPE_FIELDS, "rope_theta"]
    for value in WRONG:
        for name in HF_FIELDS:
            with contextlib.suppress(ModelError):
                config_from_hf(hf(family, **{**windows, name: value}), {"eos_token_id": value})
        for kind, name in itertools.product(("linear", "llama3", "yarn"), rope_fields):
            with contextlib.suppress(ModelError):
                config = config_from_hf(hf(family, rope_scaling={"rope_type": kind, **rope, name: value}))
                if config.head_dim < 1000:
                    inverse_frequencies(config.rope, config.head_dim)
                assert config.longest_context >= config.max_position_embeddings


def test_no_value_of_any_gguf_key_raises_anything_but_a_model_error():
    keys = [*GGUF, "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.eos_token_id", "split.count"]
    keys += [f"llama.attention.{name}" for name in ("key_length", "value_length", "sliding_window")]
    keys += [f"llama.rope.{name}" for name in ("freq_base", "scale_linear", "dimension_count", "scaling.type")]
    keys += [f"llama.rope.scaling.{name}" for name in ("factor", "original_context_length", "attn_factor")]
    keys += [f"llama.rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow", "ext_factor")]
    tokens = {"tokenizer.ggml.tokens": ["a", "</s>"], "tokenizer.ggml.token_type": [1, 3]}
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    for value, key in itertools.product(WRONG, keys):
        with contextlib.suppress(ModelError):
            config = config_from_gguf({**GGUF, **tokens, **yarn, key: value}, vocab_size=100, tied=True)
            if config.head_dim < 1000:
                inverse_frequencies(config.rope, config.head_dim)


def test_gguf_missing_key_is_named():
    for key in GGUF:
        if key not in ("llama.vocab_size", "llama.attention.head_count_kv"):
            with pytest.raises(ModelError, match=key.replace(".", r"\.")):
                config_from_gguf({k: v for k, v in GGUF.items() if k != key}, vocab_size=100, tied=True)


@pytest.mark.parametrize("module", ["config", "loading", "layout"])
def test_loading_needs_no_jax(module):
    code = f"import jaxoverlap.model.{module}, sys; sys.exit('jax' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
