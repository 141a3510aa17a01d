"""Paged KV writes and attention for an inference engine.

Pools are flat over layers: `k_pages` and `v_pages` are [N, S, K, D] with N = L*P
pages of S positions. A layer is reached by adding `layer * P` to a page id, never
by slicing the pool, so a donated pool is never copied. They are plain arrays, or `QuantizedPages`: codes of 8 bits
(int8 or float8) with a scale for each position and KV head, which writes make and attention undoes.

    write_kv             new keys and values into their slots
    rope_and_write_kv    the same from the QKV product, with queries and keys rotated on the way
    decode_attention     one query per row
    extend_attention     ragged, causal prefill chunks
    draw_tokens          a token for each row by temperature, top-k, top-p and min-p

`implementation` names who computes it; it is never swapped silently:

    "xla"       any device; the oracle of the others
    "triton"    Pallas kernels for NVIDIA GPUs from compute capability 8.0 on; anywhere with `interpret=True`,
                which is slow and for tests
    "mosaic"    attention by TMA and wgmma, for Hopper GPUs; pools are of 16 or 8 bits. Writes and draws are those of
                "triton". Interpreted, which is slower still, with races detected

`best_implementation` says which one a device and a shape call for, and why; `why_not` what speaks against one.
Wrong shapes and dtypes raise ValueError while tracing.

Axis letters: B, R rows; T tokens; H, K query and KV heads; D head dim; S page size;
C page-table width.
"""

from typing import Any, overload

import jax
import jax.numpy as jnp

from pallas_kernels import _validate, triton, xla, xla_draw
from pallas_kernels.choice import AttentionShape, Choice, best_implementation, unavailable, why_not
from pallas_kernels.errors import IMPLEMENTATIONS, ImplementationNotAvailable
from pallas_kernels.pages import Pages, QuantizedPages, is_addressable

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionShape",
    "Choice",
    "ImplementationNotAvailable",
    "Pages",
    "QuantizedPages",
    "best_implementation",
    "decode_attention",
    "draw_tokens",
    "extend_attention",
    "rope_and_write_kv",
    "why_not",
    "write_kv",
]


PALLAS = ("triton", "mosaic")


def _mosaic() -> Any:
    """Imported when it is asked for: older versions of jax, which have no need of it, can not."""
    from pallas_kernels import mosaic

    return mosaic


def _require(implementation: str, heads: int, k_pages: Pages, interpret: bool) -> None:
    if (missing := unavailable(implementation)) is not None:
        raise ImplementationNotAvailable(missing)
    _, size, kv_heads, dim = k_pages.shape
    reason = why_not(implementation, AttentionShape(heads, kv_heads, dim, size, k_pages.dtype))
    if reason is not None:
        raise ValueError(reason)
    if implementation in PALLAS and not is_addressable(k_pages):
        raise ValueError(
            f"k_pages: got {k_pages.dtype}{list(k_pages.shape)}, {implementation!r} takes at most 2**31 codes or more "
            "than 2**32: between them Pallas' offsets have too few bits. Divide the layers among several pools"
        )
    if interpret and implementation == "xla":
        raise ValueError("interpret: got True, allowed is False with implementation 'xla', which is no Pallas kernel")


def write_kv(
    k_pages: Pages,
    v_pages: Pages,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    implementation: str = "xla",
    interpret: bool = False,
) -> tuple[Pages, Pages]:
    """Write T new keys and values into the pools; in place where the pools are donated.

    Args:
      k_pages, v_pages: [N, S, K, D], float32, bfloat16 or float16, or both `QuantizedPages`.
      k, v: [T, K, D], cast to the dtype of the pools, or quantised (`pages.quantize`).
      slots: int32 [T], global slot `page_id * S + offset` with the layer's offset in
        page_id. N*S and above drops the write. Never negative; slots below N*S are
        distinct. N*S stays below 2**31, so a slot never overflows.

    Returns:
      (k_pages, v_pages), every other slot bit-identical.
    """
    _validate.check_write(k_pages, v_pages, k, v, slots)
    _require(implementation, k_pages.shape[2], k_pages, interpret)
    if implementation in PALLAS:
        return triton.write_kv(k_pages, v_pages, k, v, slots, interpret=interpret)
    return xla.write_kv(k_pages, v_pages, k, v, slots)


def rope_and_write_kv(
    qkv: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    cos: jax.Array,
    sin: jax.Array,
    slots: jax.Array,
    qk_norms: jax.Array | None = None,
    *,
    norm_eps: float = 0.0,
    implementation: str = "xla",
    interpret: bool = False,
) -> tuple[jax.Array, Pages, Pages]:
    """Everything between the QKV product and attention: rotated keys and the values are written into the pools.

    Rotary embedding (Su et al. 2021, arXiv:2104.09864) turns dimension i against i + D/2 in float32.

    Args:
      qkv: [T, (H + 2K) * D]: the heads of q, then of k, then of v. H follows from its width.
      k_pages, v_pages, slots: as in write_kv.
      cos, sin: float32 [T, D/2], of each token's angles.
      qk_norms: float32 [2, D], scales of a root-mean-square norm over each head of q and of k before the
        rotation; None for none. norm_eps is added to its mean square.

    Returns:
      q [T, H, D], rotated, in qkv's dtype; k_pages; v_pages.
    """
    heads = _validate.check_rope(qkv, k_pages, v_pages, cos, sin, slots, qk_norms)
    _require(implementation, heads, k_pages, interpret)
    arguments = (qkv, k_pages, v_pages, cos, sin, slots, qk_norms)
    if implementation in PALLAS:
        return triton.rope_and_write_kv(*arguments, norm_eps=norm_eps, interpret=interpret)
    return xla.rope_and_write_kv(*arguments, norm_eps=norm_eps)


@overload
def decode_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    page_table: jax.Array,
    seq_lens: jax.Array,
    arrivals: None = None,
    *,
    out: jax.Array | None = None,
    page_offset: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "xla",
    interpret: bool = False,
) -> jax.Array: ...
@overload
def decode_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    page_table: jax.Array,
    seq_lens: jax.Array,
    arrivals: jax.Array,
    *,
    out: jax.Array | None = None,
    page_offset: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "xla",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]: ...
def decode_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    page_table: jax.Array,
    seq_lens: jax.Array,
    arrivals: jax.Array | None = None,
    *,
    out: jax.Array | None = None,
    page_offset: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "xla",
    interpret: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of one query per row over its pages.

    Args:
      q: [B, H, D]; with `out` [T, H, D], of which the last B are the rows'. Query head h reads KV head h // (H // K).
      k_pages, v_pages: [N, S, K, D]; the current token is already written.
      page_table: int32 [B, C], page ids without the layer's offset. Entries past a
        row's length or wholly before its window may hold anything.
      seq_lens: int32 [B], positions to attend to, the current one included; at most
        C*S. 0 marks a padded or finished row.
      arrivals: int32 [B, K] zeros, by which the programs that share a row's context count each other. They come
        back as zeros, for the next layer: so a step clears them once. None: each call clears its own.
      out: [T, H, D] like q, what to write the result into: over its last B lines, and in place where nobody else
        needs it. So prompts and decoding rows share a step's queries and results, and nothing is cut or joined.
      page_offset: Python int added to every page id, `layer * P`.
      scale: multiplies q.k before the softmax.
      window: positions that a query sees, its own included: the query at p sees
        max(0, p - window + 1) to p. What lies before is never read, so its pages may be
        freed and reused; cost follows min(length, window). None: no limit.
      softcap: bounds the scaled scores, `softcap * tanh(score / softcap)`. None: no bound.

    Returns:
      Like q, in its dtype; zeros for rows of length 0. Softmax in float32. Over quantised pools "triton" multiplies
      in bfloat16, or in float32 where q is; "mosaic" always in bfloat16. With arrivals, (that, arrivals).
    """
    _validate.check_attention(q, k_pages, v_pages, page_table, seq_lens, page_offset, window, softcap)
    _validate.check_decode(q, k_pages, page_table, arrivals, out)
    _require(implementation, q.shape[1], k_pages, interpret)
    options: dict[str, Any] = {"page_offset": page_offset, "scale": scale, "window": window, "softcap": softcap}
    arguments = (q, k_pages, v_pages, page_table, seq_lens)
    if implementation == "triton":
        counters = jnp.zeros((len(seq_lens), k_pages.shape[2]), jnp.int32) if arrivals is None else arrivals
        result, counters = triton.decode_attention(*arguments, counters, out=out, interpret=interpret, **options)
        return result if arrivals is None else (result, counters)
    if implementation == "mosaic":
        result = _mosaic().decode_attention(*arguments, out=out, interpret=interpret, **options)
    else:
        result = xla.decode_attention(*arguments, out=out, **options)
    return result if arrivals is None else (result, arrivals)


def extend_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    page_table: jax.Array,
    cu_q_lens: jax.Array,
    seq_lens: jax.Array,
    *,
    tokens: int | None = None,
    page_offset: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "xla",
    interpret: bool = False,
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
      tokens: Python int, how many of q's tokens are in chunks at most; None: all of them. Tiles of "xla" are no larger.
      page_offset, scale, window, softcap: as in decode_attention, for each query at its own position.

    Returns:
      [T, H, D] in q's dtype; zeros for padding. Softmax in float32.
    """
    _validate.check_attention(q, k_pages, v_pages, page_table, seq_lens, page_offset, window, softcap)
    _validate.check_extend(q, cu_q_lens, seq_lens, tokens)
    _require(implementation, q.shape[1], k_pages, interpret)
    options: dict[str, Any] = {"page_offset": page_offset, "scale": scale, "window": window, "softcap": softcap}
    if implementation in PALLAS:
        kernels = triton if implementation == "triton" else _mosaic()
        options["interpret"] = interpret
        return kernels.extend_attention(q, k_pages, v_pages, page_table, cu_q_lens, seq_lens, **options)
    return xla.extend_attention(q, k_pages, v_pages, page_table, cu_q_lens, seq_lens, tokens=tokens, **options)


def draw_tokens(
    logits: jax.Array,
    highest: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    uniform: jax.Array,
    draws: jax.Array,
    *,
    implementation: str = "xla",
    interpret: bool = False,
) -> jax.Array:
    """Draw a token for each of B rows, by inverse transform from what its parameters leave; no sort, for any k.

    In this order, as in Hugging Face transformers: temperature; top-k; top-p (Holtzman et al. 2019, arXiv:1904.09751)
    of what top-k leaves; min-p (Nguyen et al. 2024, arXiv:2407.01082), relative to the most probable token. Ties with
    the last that is kept are kept too, and the most probable token is kept in any case.

    Args:
      logits: float32 [B, V]; minus infinity is never drawn.
      highest: float32 [B], their maxima; where one is not finite, the row's token means nothing, but is an id.
      temperature, top_p, min_p: float32 [B]; top_k: int32 [B], below 1 is off.
      uniform: float32 [B] in [0, 1).
      draws: bool [B].

    Returns:
      int32 [B]; what it has for rows that do not draw means nothing.
    """
    arguments = (logits, highest, temperature, top_k, top_p, min_p, uniform, draws)
    if implementation in PALLAS:
        return triton.draw_tokens(*arguments, interpret=interpret)
    if implementation != "xla" or interpret:
        raise ValueError(
            f"implementation: got {implementation!r}, allowed is 'xla'; or {PALLAS}, to be interpreted too"
        )
    return xla_draw.draw_tokens(*arguments)
