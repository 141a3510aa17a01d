"""Slow, obvious oracles: gather whole page tables, build the whole score matrix, mask.

Same arguments as the public functions, no `implementation`. They cost
rows x table width, whatever the true lengths are: for tests only.
"""

import jax
import jax.numpy as jnp


def write_kv(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Flatten the pool to [N*S, K, D] and scatter one line per slot."""

    def write(pool: jax.Array, x: jax.Array) -> jax.Array:
        n, s, *line = pool.shape
        flat = pool.reshape(n * s, *line)
        return flat.at[slots].set(x.astype(pool.dtype), mode="drop").reshape(pool.shape)

    return write(k_pages, k), write(v_pages, v)


def _gather(pool: jax.Array, page_table: jax.Array, page_offset: int, group: int) -> jax.Array:
    """[R, C] page ids -> float32 [R, C*S, H, D], each KV head repeated for its `group`."""
    rows, width = page_table.shape
    _, size, heads, dim = pool.shape
    x = jnp.take(pool, page_table + page_offset, axis=0, mode="clip").astype(jnp.float32)
    return jnp.repeat(x.reshape(rows, width * size, heads, dim), group, axis=2)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
    """q [T, H, D], k and v [T, X, H, D], seen [T, X] -> float32 [T, H, D]; zeros where none is seen."""
    k = jnp.where(seen[:, :, None, None], k, 0.0)
    v = jnp.where(seen[:, :, None, None], v, 0.0)
    scores = jnp.einsum("thd,txhd->thx", q.astype(jnp.float32), k, precision="highest") * scale
    scores = jnp.where(seen[:, None, :], scores, -jnp.inf)
    some = seen.any(axis=1)[:, None, None]
    weights = jax.nn.softmax(jnp.where(some, scores, 0.0), axis=-1)
    out = jnp.einsum("thx,txhd->thd", weights, v, precision="highest")
    return jnp.where(some, out, 0.0)


def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    *,
    page_offset: int,
    scale: float,
) -> jax.Array:
    """One query per row over its first `seq_lens` positions."""
    group = q.shape[1] // k_pages.shape[2]
    k = _gather(k_pages, page_table, page_offset, group)
    v = _gather(v_pages, page_table, page_offset, group)
    seen = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :] < seq_lens[:, None]
    return _attend(q, k, v, seen, scale).astype(q.dtype)


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
) -> jax.Array:
    """Each token is a decode of its own row, over the positions up to its own."""
    token = jnp.arange(q.shape[0], dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right").astype(jnp.int32)
    real = row < seq_lens.shape[0]
    row = jnp.where(real, row, 0)
    # Tokens from here to the end of the chunk have positions seq_len-1, seq_len-2, ...
    visible = jnp.where(real, seq_lens[row] - (cu_q_lens[row + 1] - token) + 1, 0)
    return decode_attention(q, k_pages, v_pages, page_table[row], visible, page_offset=page_offset, scale=scale)
