"""Where each tensor of a checkpoint goes. Imports no jax.

The engine keeps few, fused arrays: every argument array costs host time at every dispatch.

    embedding   [V, hidden]           also computes the logits when tied
    norms       [L, 2, hidden]        float32; before attention, before the MLP
    qk_norms    [L, 2, D]             float32; q, k (qwen3)
    final_norm  [hidden]              float32
    layers_i    qkv [(H + 2K) D, hidden], o [hidden, H D], gate_up [2 F, hidden], down [hidden, F]
    lm_head     [V, hidden]           unless tied

Kernels are shown in the orientation of `OUT_AXIS` 0, which is how checkpoints store them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxoverlap.model.config import ModelConfig

# The axis of a kernel that runs over output features: 0 is [out, in], 1 is [in, out].
# `Linear` in layers.py contracts the other one; nothing else knows.
OUT_AXIS = 0

Path = tuple[str, ...]
Weights = dict[str, Any]


@dataclass(frozen=True)
class Slot:
    """One array of the engine: where it is in the tree, its shape, and whether it stays float32."""

    path: Path
    shape: tuple[int, ...]
    is_norm: bool = False


@dataclass(frozen=True)
class Placement:
    """One tensor of a checkpoint: its name and shape there, and the region of a slot it fills."""

    name: str
    shape: tuple[int, ...]
    path: Path
    region: tuple[slice | int, ...]
    transposed: bool = False

    def write(self, target: np.ndarray, tensor: np.ndarray) -> None:
        """Converts `tensor` to the target's dtype while copying it into its region."""
        source = tensor.T if self.transposed else tensor
        target[self.region] = source if source.dtype == target.dtype else source.astype(target.dtype)


def slots(config: ModelConfig) -> Iterator[Slot]:
    """All arrays of a model; dict trees are keyed by their paths below "params"."""
    c = config
    yield Slot(("embedding",), (c.vocab_size, c.hidden_size))
    yield Slot(("norms",), (c.num_layers, 2, c.hidden_size), is_norm=True)
    if c.qk_norm:
        yield Slot(("qk_norms",), (c.num_layers, 2, c.head_dim), is_norm=True)
    yield Slot(("final_norm",), (c.hidden_size,), is_norm=True)
    for layer in range(c.num_layers):
        for linear, out_size, in_size, bias in _linears(c):
            yield Slot((f"layers_{layer}", linear, "kernel"), _kernel_shape(out_size, in_size))
            if bias:
                yield Slot((f"layers_{layer}", linear, "bias"), (out_size,))
    if not c.tie_word_embeddings:
        yield Slot(("lm_head", "kernel"), _kernel_shape(c.vocab_size, c.hidden_size))


def placements(config: ModelConfig) -> Iterator[Placement]:
    """Every tensor a checkpoint must hold, by its Hugging Face name; together they fill all slots."""
    c = config
    hidden = c.hidden_size
    yield Placement("model.embed_tokens.weight", (c.vocab_size, hidden), ("embedding",), (slice(None),))
    yield Placement("model.norm.weight", (hidden,), ("final_norm",), (slice(None),))
    if not c.tie_word_embeddings:
        yield from _linear("lm_head", ("lm_head",), 0, c.vocab_size, hidden, bias=False)
    parts = {
        "qkv": [("self_attn.q_proj", c.q_size), ("self_attn.k_proj", c.kv_size), ("self_attn.v_proj", c.kv_size)],
        "o": [("self_attn.o_proj", hidden)],
        "gate_up": [("mlp.gate_proj", c.intermediate_size), ("mlp.up_proj", c.intermediate_size)],
        "down": [("mlp.down_proj", hidden)],
    }
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}"
        yield Placement(f"{prefix}.input_layernorm.weight", (hidden,), ("norms",), (layer, 0))
        yield Placement(f"{prefix}.post_attention_layernorm.weight", (hidden,), ("norms",), (layer, 1))
        if c.qk_norm:
            yield Placement(f"{prefix}.self_attn.q_norm.weight", (c.head_dim,), ("qk_norms",), (layer, 0))
            yield Placement(f"{prefix}.self_attn.k_norm.weight", (c.head_dim,), ("qk_norms",), (layer, 1))
        for linear, _, in_size, bias in _linears(c):
            start = 0
            for part, rows in parts[linear]:
                yield from _linear(f"{prefix}.{part}", (f"layers_{layer}", linear), start, rows, in_size, bias)
                start += rows


def tree(leaves: Iterator[tuple[Path, Any]]) -> Weights:
    """Nests leaves by their paths, under flax's "params"."""
    root: dict[str, Any] = {}
    for path, leaf in leaves:
        node = root
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return {"params": root}


def _linears(config: ModelConfig) -> list[tuple[str, int, int, bool]]:
    """The fused linear maps of a layer: name, output size, input size, bias."""
    c = config
    return [
        ("qkv", c.q_size + 2 * c.kv_size, c.hidden_size, c.qkv_bias),
        ("o", c.hidden_size, c.q_size, c.o_bias),
        ("gate_up", 2 * c.intermediate_size, c.hidden_size, c.mlp_bias),
        ("down", c.hidden_size, c.intermediate_size, c.mlp_bias),
    ]


def _kernel_shape(out_size: int, in_size: int) -> tuple[int, int]:
    return (out_size, in_size) if OUT_AXIS == 0 else (in_size, out_size)


def _linear(name: str, path: Path, start: int, rows: int, in_size: int, bias: bool) -> Iterator[Placement]:
    """The weight (and bias) of one checkpoint projection: output features [start, start + rows) of a fused one."""
    span = slice(start, start + rows)
    region = (span, slice(None)) if OUT_AXIS == 0 else (slice(None), span)
    yield Placement(f"{name}.weight", (rows, in_size), (*path, "kernel"), region, transposed=OUT_AXIS == 1)
    if bias:
        yield Placement(f"{name}.bias", (rows,), (*path, "bias"), (span,))
