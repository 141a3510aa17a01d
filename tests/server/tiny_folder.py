"""A llama of two layers with random weights, as a folder that the real engine loads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.fakes import VOCAB_SIZE
from tests.toy_tokenizer import EOS_ID, TEMPLATE, make_tokenizer

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED_FORWARD = 32, 4, 2, 2, 48


def write_tiny_model(folder: Path) -> Path:
    """Its tokens are the toy's 97 characters."""
    rng = np.random.default_rng(3)

    def matrix(rows: int, columns: int) -> np.ndarray:
        # Larger than a real model's, so that contexts matter and greedy tokens are no near-ties.
        return rng.normal(0, 0.4, (rows, columns)).astype(np.float32)

    head_size = HIDDEN // HEADS
    tensors = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN), "lm_head.weight": matrix(VOCAB_SIZE, HIDDEN)}
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * head_size, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * head_size, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
            "mlp.up_proj": (FEED_FORWARD, HIDDEN),
            "mlp.down_proj": (HIDDEN, FEED_FORWARD),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": EOS_ID,
    }
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    return folder
