"""What every layer needs to know of a step's tokens, and attention over the pages they are in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxoverlap.model.config import ModelConfig
from jaxoverlap.runtime.row_state import KVPages
from pallas_kernels import decode_attention, extend_attention, rope_and_write_kv, write_kv


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepTokens:
    """A step's T tokens, those of R prompts first and then those of B decoding rows, which attend one by one.

    In a deterministic engine all of them do, each with its row's page table: B is the number of tokens there.

    Attributes:
      positions: int32 [T].
      slots: int32 [T], where a token's KV goes in any layer; one outside of the layer drops the write.
      cu_q_lens: int32 [R + 1], the prompts' boundaries among the tokens; chunk_ends: int32 [R], their lengths so far.
      chunk_tables: int32 [R, C]; decode_tables: int32 [B, C].
      decode_lens: int32 [B], 0 for rows that have finished.
      rows, seq_len: int32 [R + B'], see `ReadyToSample`; B' decoding rows.
    """

    positions: jax.Array
    slots: jax.Array
    cu_q_lens: jax.Array
    chunk_ends: jax.Array
    chunk_tables: jax.Array
    decode_tables: jax.Array
    decode_lens: jax.Array
    rows: jax.Array
    seq_len: jax.Array


class PagedAttention:
    """Of a stage's layers. Called once for each while the step is traced; `kv` is the pool as they have left it so far.

    Args:
      config: the stage's.
      num_pages: P, pages of one layer.
      implementation: `implementation` and `interpret` of `pallas_kernels`.
    """

    def __init__(
        self, config: ModelConfig, kv: KVPages, tokens: StepTokens, *, num_pages: int, implementation: dict[str, Any]
    ) -> None:
        self.kv = kv
        self._config, self._tokens, self._num_pages = config, tokens, num_pages
        self._page_size = kv.k.shape[1]
        self._num_prompt_tokens = len(tokens.positions) - len(tokens.decode_lens)
        self._arrivals = jnp.zeros((len(tokens.decode_lens), config.num_kv_heads), dtype=jnp.int32)
        self._implementation = implementation

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """q [T, H, D], k and v [T, K, D], rotated; returns [T, H, D]."""
        self.kv = KVPages(*write_kv(self.kv.k, self.kv.v, k, v, self._slots_of(layer), **self._implementation))
        return self._attend(layer, q)

    def packed(
        self, layer: int, qkv: jax.Array, cos_sin: tuple[jax.Array, jax.Array], qk_norms: jax.Array | None
    ) -> jax.Array:
        """qkv [T, (H + 2K) D], as it comes from the product; returns [T, H, D]."""
        cos, sin = (phases.squeeze(1) for phases in cos_sin)
        q, k_pages, v_pages = rope_and_write_kv(
            qkv,
            self.kv.k,
            self.kv.v,
            cos,
            sin,
            self._slots_of(layer),
            qk_norms,
            norm_eps=self._config.norm_eps,
            **self._implementation,
        )
        self.kv = KVPages(k_pages, v_pages)
        return self._attend(layer, q)

    def _slots_of(self, layer: int) -> jax.Array:
        slots, in_layer = self._tokens.slots, self._num_pages * self._page_size
        nowhere = self._config.num_layers * in_layer
        return jnp.where(slots < in_layer, slots + layer * in_layer, nowhere)

    def _attend(self, layer: int, q: jax.Array) -> jax.Array:
        tokens, prompt_tokens = self._tokens, self._num_prompt_tokens
        options: dict[str, Any] = {
            "page_offset": layer * self._num_pages,
            "scale": self._config.head_dim**-0.5,
            "window": self._config.windows[layer],
            **self._implementation,
        }
        pages, out = (self.kv.k, self.kv.v), None
        if prompt_tokens:
            chunks = tokens.chunk_tables, tokens.cu_q_lens, tokens.chunk_ends
            out = extend_attention(q, *pages, *chunks, tokens=prompt_tokens, **options)
        if prompt_tokens < len(q):
            rows = tokens.decode_tables, tokens.decode_lens, self._arrivals
            out, self._arrivals = decode_attention(q, *pages, *rows, out=out, **options)
        assert out is not None
        return out
