"""Slow, obvious oracles: gather whole page tables, build the whole score matrix, mask.

Same arguments as the public functions, no `implementation`. They cost
rows x table width, whatever the true lengths are: for tests only.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def write_kv(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Flatten the pool to [N*S, K, D] and scatter one line per slot."""

    def write(pool: jax.Array, x: jax.Array) -> jax.Array:
        n, s, *line = pool.shape
        flat = pool.reshape(n * s, *line)
        return flat.at[slots].set(x.astype(pool.dtype), mode="drop").reshape(pool.shape)

    return write(k_pages, k), write(v_pages, v)


def _gather(pool: jax.Array, pages: jax.Array, lowest: jax.Array, length: jax.Array, group: int) -> jax.Array:
    """One row: page ids [C] -> float32 [C*S, H, D], zeros outside [lowest, length), heads repeated `group` times."""
    x = jnp.take(pool, pages, axis=0, mode="clip").astype(jnp.float32)
    x = x.reshape(-1, *pool.shape[2:])
    position = jnp.arange(x.shape[0], dtype=jnp.int32)
    readable = (position >= lowest) & (position < length)
    return jnp.repeat(jnp.where(readable[:, None, None], x, 0.0), group, axis=1)


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, scale: float, softcap: float | None
) -> jax.Array:
    """q [T, H, D], k and v [X, H, D], seen [T, X] -> float32 [T, H, D]; zeros where nothing is seen."""
    scores = jnp.einsum("thd,xhd->thx", q.astype(jnp.float32), k, precision="highest") * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    weights = jax.nn.softmax(jnp.where(seen[:, None, :], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("thx,xhd->thd", weights, v, precision="highest")
    return jnp.where(seen.any(axis=1)[:, None, None], out, 0.0)


def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    *,
    page_offset: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Extend with one query per row."""
    cu_q_lens = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
    options: dict[str, Any] = {"page_offset": page_offset, "scale": scale, "window": window, "softcap": softcap}
    return extend_attention(q, k_pages, v_pages, page_table, cu_q_lens, seq_lens, **options)


def extend_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    cu_q_lens: jax.Array,
    seq_lens: jax.Array,
    *,
    page_offset: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Every row against every token, masked down to the row's own tokens and their past."""
    group = q.shape[1] // k_pages.shape[2]
    window = page_table.shape[1] * k_pages.shape[1] if window is None else window
    token = jnp.arange(q.shape[0], dtype=jnp.int32)

    def row(r: jax.Array) -> jax.Array:
        pages = page_table[r] + page_offset
        first_query = seq_lens[r] - (cu_q_lens[r + 1] - cu_q_lens[r])
        k, v = (_gather(pool, pages, first_query - window + 1, seq_lens[r], group) for pool in (k_pages, v_pages))
        own = (token >= cu_q_lens[r]) & (token < cu_q_lens[r + 1])
        position = seq_lens[r] - (cu_q_lens[r + 1] - token)
        distance = position[:, None] - jnp.arange(k.shape[0], dtype=jnp.int32)[None, :]
        past = (distance >= 0) & (distance < window)
        # Rows own disjoint tokens and leave zeros elsewhere, so their results add up.
        return _attend(q, k, v, own[:, None] & past, scale, softcap)

    rows = jax.lax.map(row, jnp.arange(page_table.shape[0], dtype=jnp.int32))
    return rows.sum(axis=0).astype(q.dtype)


def draw_error(
    token: int, logits: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> float:
    """How far a uniform number is from the place of the token that it drew among the cumulated weights, as a share of
    them all: by a sort, in float64. Infinite where the token should not have been left."""
    weights = _weights_left(logits, temperature, top_k, top_p, min_p)
    if not weights[token] > 0:
        return float("inf")
    below, whole = weights[:token].sum(), weights.sum()
    wanted = uniform * whole
    return float(max(below - wanted, wanted - below - weights[token], 0.0) / whole)


def _weights_left(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """float64 [V], what each id weighs after all limits."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    weights = np.exp(scaled)
    ranked = np.sort(scaled)[::-1]
    if top_k > 0:
        weights[scaled < ranked[min(top_k, len(ranked)) - 1]] = 0
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        last = order[np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum() * (1 - 1e-7))]
        weights[weights < weights[last]] = 0
    weights[weights < min_p] = 0
    return weights
