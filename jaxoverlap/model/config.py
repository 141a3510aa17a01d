"""What a decoder-only model looks like, resolved once and frozen. Imports no jax.

Two parsers build it: `config_from_hf` from the JSON files of a Hugging Face folder and
`config_from_gguf` from GGUF metadata. Both refuse whatever this build does not compute exactly,
naming the field, its value and what is allowed: a field that is silently ignored shows only as
bad text, often after hundreds of tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxoverlap.errors import ModelError
from jaxoverlap.model.fields import flag, positive, required_int, token_ids, unsupported
from jaxoverlap.model.rope import RopeConfig, rope_from_gguf, rope_from_hf

logger = logging.getLogger(__name__)

_MAX_LAYERS = 10_000
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

_FAMILY_OF_ARCHITECTURE = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_FAMILY_OF_GGUF = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# What transformers assumes when config.json leaves a field out.
_HF_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the llama family.

    Attributes:
      family: one of `FAMILIES`.
      vocab_size: rows of the embedding table (a tokenizer may know fewer tokens).
      hidden_size: width of the residual stream.
      num_layers: decoder layers (L).
      num_heads: query heads (H).
      num_kv_heads: key/value heads (K); divides `num_heads`.
      head_dim: width of one head (D); not always hidden_size / num_heads.
      intermediate_size: width of the gated MLP.
      norm_eps: epsilon of every RMS norm.
      rope: rotary embedding.
      tie_word_embeddings: the embedding table computes the logits; there is no lm_head.
      qkv_bias, o_bias, mlp_bias: which projections carry a bias.
      qk_norm: q and k are RMS-normalised per head before rope (qwen3).
      max_position_embeddings: the model's own context, prompt and output together; `longest_context` may be more.
      eos_token_ids: the ids that the model's configuration calls ends, ascending; its tokenizer may know another.
      bos_token_id: id that begins a sequence, if the model names one.
      windows: for each layer the number of positions that a token sees, its own included; None is all of
        them. Left out: all layers see all.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        """Raises ModelError if the sizes contradict each other."""
        if self.family not in FAMILIES:
            raise unsupported("model family", self.family, FAMILIES)
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"{name} is {value!r}; it must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_kv_heads is {self.num_kv_heads}; it must divide the {self.num_heads} query heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rope needs an even number")
        positive("norm_eps", self.norm_eps)
        token_ids("eos_token_ids", self.eos_token_ids)
        if len(token_ids("bos_token_id", self.bos_token_id)) != 1 and self.bos_token_id is not None:
            raise ModelError(f"bos_token_id is {self.bos_token_id!r}; it must be one token id")
        if self.rope.frequency_factors and len(self.rope.frequency_factors) != self.head_dim // 2:
            raise ModelError(
                f"rope frequency factors: {len(self.rope.frequency_factors)} values, "
                f"expected head_dim / 2 = {self.head_dim // 2}"
            )
        object.__setattr__(self, "windows", self.windows or (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ModelError(f"windows: {len(self.windows)} values, expected one for each of {self.num_layers} layers")
        for window in self.windows:
            if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
                raise ModelError(f"sliding window is {window!r}; it must be a positive integer")

    @property
    def window(self) -> int | None:
        """Positions that any layer still reads back from a token, its own included; None where a layer reads all."""
        limited = [window for window in self.windows if window is not None]
        return max(limited) if len(limited) == self.num_layers else None

    @property
    def longest_context(self) -> int:
        """Positions that the rotary embedding allows: `max_position_embeddings`, or what it is stretched to."""
        return self.rope.stretched(self.max_position_embeddings)

    @property
    def q_size(self) -> int:
        """Rows of the query projection, H * D."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key (or value) projection, K * D."""
        return self.num_kv_heads * self.head_dim


def config_from_hf(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Reads config.json (and generation_config.json) of a Hugging Face folder.

    Args:
      config: content of config.json.
      generation_config: content of generation_config.json, if there is one; of it the ids that end a sequence are
        taken here.

    Raises:
      ModelError: a field is missing or holds what this build does not support.
    """
    family = _hf_family(config)
    defaults = _HF_DEFAULTS[family]

    def get(name: str) -> Any:
        return config[name] if name in config else defaults.get(name)

    hidden_size = required_int(config, "hidden_size")
    num_heads = required_int(config, "num_attention_heads")
    num_layers = required_int(config, "num_hidden_layers", _MAX_LAYERS)
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise unsupported("hidden_act", activation, ["silu"])
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise unsupported("quantization_config", method, ["none (bfloat16, float16, float32 weights)", "GGUF files"])
    if config.get("per_layer_config"):
        raise unsupported("per_layer_config", config["per_layer_config"], ["none: all layers are alike"])
    if config.get("is_causal", True) is not True:
        raise unsupported("is_causal", config["is_causal"], ["true: a token sees those before it"])
    if isinstance(config.get("auto_map"), Mapping) and "AutoModelForCausalLM" in config["auto_map"]:
        logger.warning("auto_map: code that comes with a model is not run; it is computed as any %s", family)
    attention_bias = flag(config, "attention_bias") and family in ("llama", "qwen3")
    context = required_int({**defaults, **config}, "max_position_embeddings")
    sources = {"eos_token_id": config, "generation_config.json: eos_token_id": generation_config or {}}
    end_ids = {token_id for name, source in sources.items() for token_id in token_ids(name, source.get("eos_token_id"))}
    return ModelConfig(
        family=family,
        vocab_size=required_int(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads if get("num_key_value_heads") is None else get("num_key_value_heads"),
        head_dim=hidden_size // num_heads if get("head_dim") is None else get("head_dim"),
        intermediate_size=required_int(config, "intermediate_size"),
        norm_eps=positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        rope=rope_from_hf(config, context),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=flag(config, "mlp_bias") and family == "llama",
        qk_norm=family == "qwen3",
        max_position_embeddings=_hf_context(config, context),
        eos_token_ids=tuple(sorted(end_ids)),
        bos_token_id=config.get("bos_token_id"),
        windows=_hf_windows(family, config, get("sliding_window"), num_layers),
    )


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    vocab_size: int,
    tied: bool,
    biases: Iterable[str] = (),
    frequency_factors: tuple[float, ...] = (),
) -> ModelConfig:
    """Reads GGUF metadata; what GGUF leaves to the tensors comes as arguments.

    Args:
      metadata: key to value, as in the file's header.
      vocab_size: rows of `token_embd.weight`; the metadata's own number may be larger.
      tied: there is no `output.weight`.
      biases: which of "qkv", "o", "mlp" carry biases.
      frequency_factors: content of `rope_freqs.weight`, `[D/2]`; empty without that tensor.

    Raises:
      ModelError: a key is missing or holds what this build does not support.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FAMILY_OF_GGUF:
        raise unsupported("general.architecture", architecture, _FAMILY_OF_GGUF)

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    hidden_size = required_int(metadata, key("embedding_length"))
    num_heads = required_int(metadata, key("attention.head_count"))
    head_dim = hidden_size // num_heads
    if key("attention.key_length") in metadata:
        head_dim = required_int(metadata, key("attention.key_length"))
    if metadata.get(key("attention.value_length"), head_dim) != head_dim:
        raise unsupported(key("attention.value_length"), metadata[key("attention.value_length")], [head_dim])
    if metadata.get(key("rope.dimension_count"), head_dim) != head_dim:
        raise unsupported(key("rope.dimension_count"), metadata[key("rope.dimension_count")], [head_dim])
    for name, allowed in {**_GGUF_COMPUTED, "attention.scale": (0, max(head_dim, 1) ** -0.5)}.items():
        if not any(_is_about(metadata.get(key(name), value), value) for value in allowed):
            raise unsupported(key(name), metadata[key(name)], allowed)
    if key("attention.layer_norm_rms_epsilon") not in metadata:
        raise ModelError(f"{key('attention.layer_norm_rms_epsilon')} is missing")
    biases = set(biases)
    context = required_int(metadata, key("context_length"))
    num_layers = required_int(metadata, key("block_count"), _MAX_LAYERS)
    return ModelConfig(
        family=_FAMILY_OF_GGUF[architecture],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=metadata.get(key("attention.head_count_kv"), num_heads),
        head_dim=head_dim,
        intermediate_size=required_int(metadata, key("feed_forward_length")),
        norm_eps=metadata[key("attention.layer_norm_rms_epsilon")],
        rope=rope_from_gguf(metadata, architecture, context, frequency_factors),
        tie_word_embeddings=tied,
        qkv_bias="qkv" in biases,
        o_bias="o" in biases,
        mlp_bias="mlp" in biases,
        qk_norm=architecture == "qwen3",
        max_position_embeddings=context,
        eos_token_ids=_gguf_end_ids(metadata),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        windows=_gguf_windows(metadata, architecture, context, num_layers),
    )


# Keys that change what is computed, in the words of other architectures: the values under which this build computes it.
_GGUF_COMPUTED: dict[str, tuple[float, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "use_parallel_residual": (False,),
}


def _is_about(given: Any, value: float) -> bool:
    return isinstance(given, int | float) and math.isclose(given, value, rel_tol=1e-5)


def _hf_family(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise unsupported("architectures", architectures, ["a list of names"])
    for architecture in architectures:
        if not isinstance(architecture, str) or architecture not in _FAMILY_OF_ARCHITECTURE:
            raise unsupported("architectures", architecture, _FAMILY_OF_ARCHITECTURE)
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise unsupported("model_type", model_type, FAMILIES)
    if any(_FAMILY_OF_ARCHITECTURE[name] != model_type for name in architectures):
        raise ModelError(f"model_type is {model_type!r} but architectures is {list(architectures)!r}")
    return model_type


def _hf_windows(family: str, config: Mapping[str, Any], window: int | None, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window; every family has its own switch, and llama has no windows."""
    if family == "llama" and window is not None:
        logger.warning("sliding_window is %r and not used: a llama sees all positions", window)
    if family == "llama" or (family != "mistral" and not flag(config, "use_sliding_window")):
        window = None
    layer_types = config.get("layer_types")
    if layer_types is None:
        full = 0 if window is None or family == "mistral" else config.get("max_window_layers", 28)
        if not isinstance(full, int):
            raise ModelError(f"max_window_layers is {full!r}; it must be an integer")
        return tuple(None if layer < full else window for layer in range(num_layers))
    if not isinstance(layer_types, list):
        raise ModelError(f"layer_types is {layer_types!r}; it must be a list")
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise unsupported("layer_types", layer_type, ["full_attention", "sliding_attention"])
    if window is None and "sliding_attention" in layer_types:
        if family == "llama":
            raise unsupported("layer_types", "sliding_attention", ["full_attention in a llama"])
        switch = "" if family == "mistral" else " with use_sliding_window"
        raise ModelError(f"layer_types has 'sliding_attention', which needs a sliding_window{switch}")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _hf_context(config: Mapping[str, Any], named: int) -> int:
    """The model's context: what it names, unless it is meant to attend otherwise from some position on."""
    chunks = config.get("dual_chunk_attention_config")
    if not chunks:
        return named
    if not isinstance(chunks, Mapping):
        raise ModelError(f"dual_chunk_attention_config is {chunks!r}; it must be an object")
    plain = required_int(chunks, "chunk_size")
    if chunks.get("original_max_position_embeddings"):
        plain = min(plain, required_int(chunks, "original_max_position_embeddings"))
    if plain < named:
        logger.warning(
            "dual_chunk_attention_config: not supported in this build; the model's context is %s instead of %s, up to "
            "where it is plain attention",
            plain,
            named,
        )
    return min(plain, named)


def _gguf_windows(
    metadata: Mapping[str, Any], architecture: str, context: int, num_layers: int
) -> tuple[int | None, ...]:
    """The one window of all layers, which llama (and so mistral) means by the key."""
    name = f"{architecture}.attention.sliding_window"
    window = required_int(metadata, name) if metadata.get(name) else None
    of_all_layers = architecture == "llama" and f"{name}_pattern" not in metadata
    if window is not None and window < context and not of_all_layers:
        raise unsupported(name, window, ["the window of all layers of a llama", f"{context} and more"])
    return (window,) * num_layers


_GGUF_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")
_GGUF_CONTROL = 3
_GGUF_END_TOKENS = frozenset(
    """
    </s> <|endoftext|> <|end_of_text|> <|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn>
    <end_of_utterance> <EOT> _<EOT>
    """.split()  # noqa: SIM905
)
"""Control tokens that are ends by their names, as in llama.cpp: most files name only one end by its id."""


def _gguf_end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = [f"tokenizer.ggml.{name}" for name in _GGUF_END_KEYS]
    ids = {token_id for key in keys for token_id in token_ids(key, metadata.get(key))}
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list):
        # What is wrong with these lists is the tokenizer's to say.
        named = enumerate(zip(tokens, kinds, strict=False))
        ids.update(i for i, (token, kind) in named if kind == _GGUF_CONTROL and token in _GGUF_END_TOKENS)
    return tuple(sorted(ids))
