"""The decoder with plain causal attention over one sequence: no pages, no batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoverlap.model.config import ModelConfig
from jaxoverlap.model.decoder import Decoder


def dense_attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None = None) -> jax.Array:
    """q [T, H, D], k and v [T, K, D] → [T, H, D]; every token sees itself and those before it, `window` in all."""
    tokens, heads, head_dim = q.shape
    k, v = (jnp.repeat(x, heads // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("thd,shd->hts", q, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))
    seen = causal if window is None else causal & ~jnp.tril(causal, -window)
    scores = jnp.where(seen, scores, -jnp.inf)
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores, axis=-1), v).astype(q.dtype)


def dense_logits(config: ModelConfig, weights: Any, token_ids: Any) -> np.ndarray:
    """float32 [T, V] for one sequence; compiles once for each model and length."""
    ids = np.asarray(token_ids, np.int32)
    run = _compiled(config, weights["params"]["embedding"].dtype)
    return np.asarray(run(weights, ids, np.arange(len(ids), dtype=np.int32)))


@functools.cache
def _compiled(config: ModelConfig, dtype: Any) -> Any:
    decoder = Decoder(config, dtype)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return dense_attend(layer, q, k, v, config.windows[layer])

    @jax.jit
    def run(weights: Any, token_ids: jax.Array, positions: jax.Array) -> Any:
        hidden = decoder.apply(weights, token_ids, positions, attend)
        return decoder.apply(weights, hidden, method=Decoder.logits)

    return run
