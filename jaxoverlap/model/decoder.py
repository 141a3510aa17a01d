"""The decoder: llama, mistral, qwen2 and qwen3 as one flax module.

Attention is not here. The caller passes `attend`, which writes k and v into its pages and returns
the attention output; it is called once per layer, in order, while the step is traced, so it may
carry trace-time state from layer to layer. Layers are therefore plainly unrolled. With `packed_attend`
it takes the QKV product as it is, and norms and rotates it too: on a GPU that is one kernel with the write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxoverlap.model import layout
from jaxoverlap.model.config import ModelConfig
from jaxoverlap.model.rope import inverse_frequencies

Attend = Callable[..., jax.Array]

FEW_TOKENS = 32
"""Up to so many, a CPU's products are turned; see `contract`."""


def matmul_precision(dtype: Any) -> jax.lax.Precision:
    """Precision for matrix products on `dtype`.

    A GPU computes float32 products in TF32 (about 1e-3) unless told otherwise; who asks for
    float32 means it. bfloat16 is left alone.
    """
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else jax.lax.Precision.DEFAULT


class Linear(nn.Module):
    """A linear map stored in the orientation of `layout.OUT_AXIS`.

    Attributes:
      shape: (output size, input size).
      dtype: of the weights and of the computation.
      use_bias: adds a bias `[out]`.
      out_dtype: of the result; `dtype` if not given. Products accumulate in float32 where it is wider.
    """

    shape: tuple[int, int]
    dtype: Any
    use_bias: bool = False
    out_dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] → [..., out]."""
        out_size, in_size = self.shape
        shape = (out_size, in_size) if layout.OUT_AXIS == 0 else (in_size, out_size)
        kernel = self.param("kernel", nn.initializers.normal(0.02), shape, self.dtype)
        y = contract(x, kernel, 1 - layout.OUT_AXIS, self.out_dtype or self.dtype)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (out_size,), self.dtype)
        return y


class Layer(nn.Module):
    """One decoder layer: attention and gated MLP, each behind a norm and added to the stream."""

    config: ModelConfig
    dtype: Any
    packed_attend: bool = False

    def setup(self) -> None:
        c = self.config
        self.qkv = Linear((c.q_size + 2 * c.kv_size, c.hidden_size), self.dtype, c.qkv_bias)
        self.o = Linear((c.hidden_size, c.q_size), self.dtype, c.o_bias)
        self.gate_up = Linear((2 * c.intermediate_size, c.hidden_size), self.dtype, c.mlp_bias)
        self.down = Linear((c.hidden_size, c.intermediate_size), self.dtype, c.mlp_bias)

    def __call__(
        self,
        x: jax.Array,
        norms: jax.Array,
        qk_norms: jax.Array | None,
        cos_sin: tuple[jax.Array, jax.Array],
        attend: Attend,
    ) -> jax.Array:
        """[T, hidden] → [T, hidden]; `norms` [2, hidden], `qk_norms` [2, D] or None, float32."""
        c = self.config
        qkv = self.qkv(rms_norm(x, norms[0], c.norm_eps))
        if self.packed_attend:
            attended = attend(qkv, cos_sin, qk_norms)
        else:
            attended = attend(*self._queries_keys_values(qkv, qk_norms, cos_sin))
        x = x + self.o(attended.reshape(len(x), c.q_size))
        gate, up = jnp.split(self.gate_up(rms_norm(x, norms[1], c.norm_eps)), 2, axis=1)
        return x + self.down(nn.silu(gate) * up)

    def _queries_keys_values(
        self, qkv: jax.Array, qk_norms: jax.Array | None, cos_sin: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        c, tokens = self.config, len(qkv)
        q, k, v = jnp.split(qkv, [c.q_size, c.q_size + c.kv_size], axis=1)
        q = q.reshape(tokens, c.num_heads, c.head_dim)
        k = k.reshape(tokens, c.num_kv_heads, c.head_dim)
        v = v.reshape(tokens, c.num_kv_heads, c.head_dim)
        if qk_norms is not None:
            q = rms_norm(q, qk_norms[0], c.norm_eps)
            k = rms_norm(k, qk_norms[1], c.norm_eps)
        return rotate(q, *cos_sin), rotate(k, *cos_sin), v


class Decoder(nn.Module):
    """A whole model; its weights are what `load_model`, `abstract_weights` and `random_weights` give.

    Use it with `decoder.apply(weights, token_ids, positions, attend)` and
    `decoder.apply(weights, hidden, method=decoder.logits)`; of a model in stages (`model.stages`) with
    `method=decoder.embed` and, for each stage, `method=decoder.run_layers` instead of the first.

    Attributes:
      config: the model's shape.
      dtype: of weights (norms excepted: float32) and activations; float32 or bfloat16.
      packed_attend: `attend` takes `(layer, qkv, cos_sin, qk_norms)`, see `__call__`.
    """

    config: ModelConfig
    dtype: Any
    packed_attend: bool = False

    def setup(self) -> None:
        c = self.config
        ones = nn.initializers.ones
        embedding_shape = (c.vocab_size, c.hidden_size)
        self.embedding = self.param("embedding", nn.initializers.normal(0.02), embedding_shape, self.dtype)
        self.norms = self.param("norms", ones, (c.num_layers, 2, c.hidden_size), jnp.float32)
        if c.qk_norm:
            self.qk_norms = self.param("qk_norms", ones, (c.num_layers, 2, c.head_dim), jnp.float32)
        self.final_norm = self.param("final_norm", ones, (c.hidden_size,), jnp.float32)
        self.layers = [Layer(c, self.dtype, self.packed_attend) for _ in range(c.num_layers)]
        if not c.tie_word_embeddings:
            self.lm_head = Linear((c.vocab_size, c.hidden_size), self.dtype, out_dtype=jnp.float32)

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """Runs all layers over a step's tokens.

        Args:
          token_ids: int32 [T]; ids outside the vocabulary (padding) read a row of zeros.
          positions: int32 [T], each token's position in its own sequence.
          attend: `attend(layer, q [T, H, D], k [T, K, D], v [T, K, D]) -> [T, H, D]`, all in `dtype`,
            q and k rotated, q not scaled by D ** -0.5. Packed, it is
            `attend(layer, qkv [T, (H + 2K) D], (cos, sin) [T, 1, D/2] each, qk_norms [2, D] or None) -> [T, H, D]`.

        Returns:
          [T, hidden] in `dtype`, before the final norm: take the rows that need logits, then call `logits`.
        """
        return self.run_layers(self.embed(token_ids), positions, attend)

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """int32 [T] → [T, hidden] in `dtype`, what the first layer takes."""
        return jnp.take(self.embedding, token_ids, axis=0, mode="fill", fill_value=0)

    def run_layers(self, x: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """[T, hidden] → [T, hidden]; the rest is as in `__call__`."""
        c = self.config
        cos_sin = rope_phases(positions, c)
        for index, layer in enumerate(self.layers):
            qk_norms = self.qk_norms[index] if c.qk_norm else None
            x = layer(x, self.norms[index], qk_norms, cos_sin, _bind(attend, index))
        return x

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[n, hidden] from `__call__` → float32 [n, V], after the final norm."""
        x = rms_norm(hidden, self.final_norm, self.config.norm_eps)
        if self.config.tie_word_embeddings:
            return contract(x, self.embedding, 1, jnp.float32)
        return self.lm_head(x)


def abstract_weights(config: ModelConfig, dtype: Any) -> layout.Weights:
    """The weights as `jax.ShapeDtypeStruct`s: enough to compile a step without a checkpoint."""
    return layout.tree(
        (slot.path, jax.ShapeDtypeStruct(slot.shape, jnp.float32 if slot.is_norm else dtype))
        for slot in layout.slots(config)
    )


def random_weights(config: ModelConfig, dtype: Any, seed: int = 0) -> layout.Weights:
    """Seeded random NumPy weights for tests and benchmarks: norms near 1, the rest of size 0.02."""
    rng = np.random.default_rng(seed)

    def draw(slot: layout.Slot) -> np.ndarray:
        values = rng.standard_normal(slot.shape, np.float32)
        return 1 + np.float32(0.1) * values if slot.is_norm else (np.float32(0.02) * values).astype(dtype)

    return layout.tree((slot.path, draw(slot)) for slot in layout.slots(config))


def contract(x: jax.Array, kernel: jax.Array, axis: int, out_dtype: Any) -> jax.Array:
    """The product of the last axis of `x` [T, in] with one axis of a matrix: [T, out].

    With few tokens a CPU multiplies the other way round, for the library's tiles are long in the first operand's
    direction: the products of a decode step take 0.6 of the time at 4 to 16 rows, 0.8 at 32, and more from 64 on.
    """

    def product(left: jax.Array, left_axis: int, right: jax.Array, right_axis: int) -> jax.Array:
        return jax.lax.dot_general(
            left,
            right,
            (((left_axis,), (right_axis,)), ((), ())),
            precision=matmul_precision(kernel.dtype),
            preferred_element_type=out_dtype,
        )

    def plain(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return product(x, 1, kernel, axis)

    def turned(x: jax.Array, kernel: jax.Array) -> jax.Array:
        # Without the barrier XLA turns it back.
        return jax.lax.optimization_barrier(product(kernel, axis, x, 1)).T

    if 1 < len(x) <= FEW_TOKENS:
        return jax.lax.platform_dependent(x, kernel, cpu=turned, default=plain)
    return plain(x, kernel)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis; computes in float32, returns the dtype of `x`."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps) * scale).astype(x.dtype)


def rope_phases(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [T, 1, D/2] each."""
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    factor = config.rope.attention_factor
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [T, heads, D] by its phases: dimension i against i + D/2, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _bind(attend: Attend, layer: int) -> Attend:
    return lambda *arguments: attend(layer, *arguments)
