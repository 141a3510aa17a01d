"""Tiny random models made on the spot by transformers, on disk as safetensors or as GGUF. Needs torch."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 320
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

# Name → model type and what differs from `_COMMON`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32, "num_key_value_heads": 4}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama-llama3-rope": ("llama", {"head_dim": 32, "rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-yarn-rope": ("llama", {"head_dim": 32, "rope_parameters": YARN_ROPE}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("mistral", {"sliding_window": 24, "head_dim": 16}),
    "qwen2": ("qwen2", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}),
    "qwen2-window-of-a-layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen3-tied-biases": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-window-of-a-layer": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}

# What GGUF can't say: biases of o under llama and qwen3 exist as tensors; linear and yarn have their keys.
GGUF_MODELS = ["llama", "llama-tied", "llama-biases", "llama-wide-heads", "llama-theta", "llama-llama3-rope",
               "llama-linear-rope", "llama-yarn-rope", "mistral", "mistral-window", "qwen2", "qwen3"]  # fmt: skip

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and the cat sat on the mat while it's raining in 1984 and 2024",
    "def main(args):\n    return [x * 2 for x in args if x > 10]\n\n\nclass Thing:\n    pass\n",
    "Über Äpfel und Öl; naïve café, déjà vu! 日本語のテキスト、絵文字 🔥🔥",
] * 3


def make_model(name: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model in float32 with seeded weights; biases and norms are random too. Not to be changed."""
    if not overrides:
        return _plain_model(name, seed)
    return _make_model(name, seed, overrides)


@functools.cache
def _plain_model(name: str, seed: int) -> Any:
    return _make_model(name, seed, {})


def _make_model(name: str, seed: int, overrides: dict[str, Any]) -> Any:
    model_type, changes = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **{**_COMMON, **changes, **overrides})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in parameter_name else 0.15 * noise)
    return model


def save_folder(model: Any, folder: Path, *, shards: int = 1, config: dict[str, Any] | None = None) -> Path:
    """Saves as transformers does; `config` replaces fields of config.json (None removes one)."""
    total = sum(t.numel() * t.element_size() for t in model.parameters())
    model.save_pretrained(folder, max_shard_size=total if shards == 1 else total // shards + 4096)
    if config is not None:
        path = folder / "config.json"
        fields = {**json.loads(path.read_text()), **config}
        path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    return folder


def make_tokenizer(*, bos: bool = False) -> tokenizers.Tokenizer:
    """A small byte-level BPE tokenizer with five special tokens and one user-defined token.

    It splits digits as SmolLM2's does; `bos` makes it put `<s>` before every text.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 8,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path, **config: Any) -> Path:
    """tokenizer.json and tokenizer_config.json; `config` adds fields to the latter (None leaves one out)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        **config,
    }
    fields = {key: value for key, value in fields.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def tokenizer_metadata(tokenizer: tokenizers.Tokenizer, pre: str = "smollm") -> dict[str, Any]:
    """The `tokenizer.*` keys llama.cpp's converter would write."""
    data = json.loads(tokenizer.to_str())
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    types = [1] * len(tokens)
    for added in data["added_tokens"]:
        types[added["id"]] = 3 if added["special"] else 4
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in data["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


_GGUF_STEMS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    """The tensors that llama.cpp's converter would write, by name, in float32."""
    config = model.config
    arch = "qwen" if config.model_type.startswith("qwen") else "llama"
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if arch == "llama" and (n := heads.get(name.split(".")[-2])):
            # convert_hf_to_gguf.py, LlamaModel.permute
            array = array.reshape(n, 2, array.shape[0] // n // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        stem, kind = name.rsplit(".", 1)
        layer = ""
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            layer = f"blk.{index}."
        tensors[f"{layer}{_GGUF_STEMS[stem]}.{kind}"] = np.ascontiguousarray(array)
    if config.rope_parameters["rope_type"] == "llama3":
        rotary = model.model.rotary_emb.inv_freq.numpy()
        head_dim = config.head_dim
        plain = 1.0 / config.rope_parameters["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
        tensors["rope_freqs.weight"] = (plain / rotary).astype(np.float32)
    return tensors


def gguf_metadata(model: Any) -> dict[str, Any]:
    """The architecture's keys; mistral is written as llama."""
    config = model.config
    arch = config.model_type if config.model_type.startswith("qwen") else "llama"
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": head_dim,
        "vocab_size": config.vocab_size,
    }
    if config.model_type == "mistral" and config.sliding_window is not None:
        values["attention.sliding_window"] = config.sliding_window
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    quantised: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A GGUF file; `quantised` stores single tensors in another type."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value) if isinstance(value, int) else writer.add_string(key, value)
    for name, array in tensors.items():
        if kind := (quantised or {}).get(name):
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_gguf(model: Any, path: Path) -> Path:
    """The whole model as one GGUF file, with a tokenizer."""
    return write_gguf(path, gguf_metadata(model) | tokenizer_metadata(make_tokenizer()), gguf_tensors(model))
