"""Configurations: what is read, what is assumed, and what is refused rather than ignored."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import transformers

from jaxoverlap.errors import ModelError
from jaxoverlap.model.config import FAMILIES, config_from_gguf, config_from_hf

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
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"num_key_value_heads": 3}, "num_kv_heads is 3.*divide the 4"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"rms_norm_eps": None}, "norm_eps is None"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None"),
        ({"eos_token_id": [-1]}, "eos_token_ids holds -1"),
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
    ("family", "fields"),
    [
        ("mistral", {"sliding_window": 128}),
        ("qwen2", SLIDING),
        ("qwen3", SLIDING),
        ("qwen3", {**SLIDING, "max_window_layers": 9, "layer_types": ["full_attention", "sliding_attention"]}),
    ],
)
def test_an_active_sliding_window_is_refused_unless_the_context_fits(family, fields):
    with pytest.raises(ModelError, match=r"sliding_window is 128.*not supported in this build.*\(now 512\)"):
        config_from_hf(hf(family, **fields))
    config = config_from_hf(hf(family, **fields), max_context=128)
    assert (config.max_position_embeddings, config.sliding_window) == (128, 128)
    with pytest.raises(ModelError, match="sliding_window"):
        config_from_hf(hf(family, **fields), max_context=129)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"sliding_window": 128}),  # transformers' llama knows no window
        ("mistral", {"sliding_window": None}),
        ("qwen2", {**SLIDING, "use_sliding_window": False}),
        ("qwen2", {**SLIDING, "max_window_layers": 2}),
        ("qwen3", {**SLIDING, "layer_types": ["full_attention", "full_attention"]}),
    ],
)
def test_an_inactive_sliding_window_is_no_obstacle(family, fields):
    config = config_from_hf(hf(family, **fields))
    assert (config.max_position_embeddings, config.sliding_window) == (512, None)


def test_max_context_never_raises_the_limit():
    assert config_from_hf(hf(), max_context=9999).max_position_embeddings == 512


def test_eos_ids_are_the_union_of_all_sources():
    config = config_from_hf(hf(eos_token_id=2), {"eos_token_id": [2, 7]}, tokenizer_eos_ids=[9])
    assert config.eos_token_ids == (2, 7, 9)
    assert config_from_hf(hf(eos_token_id=None)).eos_token_ids == ()
    keys = {"eos_token_id": 2, "eot_token_id": 7, "eom_token_id": 5}
    metadata = {**GGUF, **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}}
    assert config_from_gguf(metadata, vocab_size=100, tied=True).eos_token_ids == (2, 5, 7)


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
        ({"llama.attention.sliding_window": 128}, "sliding_window is 128"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    ],
)
def test_gguf_that_can_not_be_computed_is_refused(fields, named):
    with pytest.raises(ModelError, match=named):
        config_from_gguf({**GGUF, **fields}, vocab_size=100, tied=True)


def test_gguf_missing_key_is_named():
    for key in GGUF:
        if key not in ("llama.vocab_size", "llama.attention.head_count_kv"):
            with pytest.raises(ModelError, match=key.replace(".", r"\.")):
                config_from_gguf({k: v for k, v in GGUF.items() if k != key}, vocab_size=100, tied=True)


@pytest.mark.parametrize("module", ["config", "loading", "layout"])
def test_loading_needs_no_jax(module):
    code = f"import jaxoverlap.model.{module}, sys; sys.exit('jax' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
