"""Paged KV writes and attention for an inference engine.

Pools are flat over layers: `k_pages` and `v_pages` are [N, S, K, D] with N = L*P
pages of S positions. A layer is reached by adding `layer * P` to a page id, never
by slicing the pool, so a donated pool is never copied.

    write_kv            new keys and values into their slots
    decode_attention    one query per row
    extend_attention    ragged, causal prefill chunks

`implementation` names who computes it; it is never swapped silently. This build
has "xla" only. Wrong shapes and dtypes raise ValueError while tracing.

Axis letters: B, R rows; T tokens; H, K query and KV heads; D head dim; S page size;
C page-table width.
"""

import jax

from pallas_kernels import _validate, xla
from pallas_kernels.errors import IMPLEMENTATIONS, ImplementationNotAvailable

__all__ = [
    "IMPLEMENTATIONS",
    "ImplementationNotAvailable",
    "decode_attention",
    "extend_attention",
    "write_kv",
]


def _require(implementation: str) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: got {implementation!r}, allowed is {IMPLEMENTATIONS}")
    if implementation != "xla":
        raise ImplementationNotAvailable(f"implementation {implementation!r} is not in this build; 'xla' is")


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Write T new keys and values into the pools; in place where the pools are donated.

    Args:
      k_pages, v_pages: [N, S, K, D], float32, bfloat16 or float16.
      k, v: [T, K, D], cast to the dtype of the pools.
      slots: int32 [T], global slot `page_id * S + offset` with the layer's offset in
        page_id. N*S and above drops the write. Never negative; slots below N*S are
        distinct. N*S stays below 2**31, so a slot never overflows.

    Returns:
      (k_pages, v_pages), every other slot bit-identical.
    """
    _require(implementation)
    _validate.check_write(k_pages, v_pages, k, v, slots)
    return xla.write_kv(k_pages, v_pages, k, v, slots)


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
    implementation: str = "xla",
) -> jax.Array:
    """Attention of one query per row over its pages.

    Args:
      q: [B, H, D]. Query head h reads KV head h // (H // K).
      k_pages, v_pages: [N, S, K, D]; the current token is already written.
      page_table: int32 [B, C], page ids without the layer's offset. Entries past a
        row's length or wholly before its window may hold anything.
      seq_lens: int32 [B], positions to attend to, the current one included; at most
        C*S. 0 marks a padded or finished row.
      page_offset: Python int added to every page id, `layer * P`.
      scale: multiplies q.k before the softmax.
      window: positions that a query sees, its own included: the query at p sees
        max(0, p - window + 1) to p. What lies before is never read, so its pages may be
        freed and reused; cost follows min(length, window). None: no limit.

    Returns:
      [B, H, D] in q's dtype; zeros for rows of length 0. Softmax in float32.
    """
    _require(implementation)
    _validate.check_attention(q, k_pages, v_pages, page_table, seq_lens, page_offset, window)
    _validate.check_decode(q, page_table)
    return xla.decode_attention(
        q, k_pages, v_pages, page_table, seq_lens, page_offset=page_offset, scale=scale, window=window
    )


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
    implementation: str = "xla",
) -> jax.Array:
    """Causal attention of ragged prefill chunks, packed one after the other.

    Args:
      q: [T, H, D]; row r owns tokens cu_q_lens[r] to cu_q_lens[r+1]. Its last query
        sits at position seq_lens[r]-1 and each query sees the positions up to its own.
      k_pages, v_pages: [N, S, K, D]; the chunks are already written.
      page_table: int32 [R, C], page ids without the layer's offset. Entries past a
        row's length or wholly before the window of its first query may hold anything.
      cu_q_lens: int32 [R+1], non-decreasing from 0. Tokens past its end are padding.
      seq_lens: int32 [R], length of each row with this chunk; at least its chunk.
      page_offset, scale, window: as in decode_attention, for each query at its own position.

    Returns:
      [T, H, D] in q's dtype; zeros for padding. Softmax in float32.
    """
    _require(implementation)
    _validate.check_attention(q, k_pages, v_pages, page_table, seq_lens, page_offset, window)
    _validate.check_extend(cu_q_lens, seq_lens)
    return xla.extend_attention(
        q, k_pages, v_pages, page_table, cu_q_lens, seq_lens, page_offset=page_offset, scale=scale, window=window
    )
