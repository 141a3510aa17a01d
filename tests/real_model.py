"""The embedded model as transformers computes it: the oracle of tests, and the peer in benchmarks."""

from __future__ import annotations

import gguf
import numpy as np
import torch
import transformers

from jaxoverlap.model.default_model import default_model_path


def transformers_model():
    """transformers' llama filled by the gguf package's own reader (transformers' GGUF loading needs accelerate)."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    hf_names = {names.get_name(name, (".weight",)): name for name, _ in model.named_parameters()}
    with torch.no_grad():
        for tensor in gguf.GGUFReader(default_model_path()).tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
                rows = np.arange(values.shape[0]).reshape(-1, 32, 2)  # pairs side by side → halves
                values = values[np.concatenate([rows[..., 0], rows[..., 1]], axis=1).ravel()]
            model.get_parameter(hf_names.pop(tensor.name)).copy_(torch.tensor(values))
    assert not hf_names
    return model
