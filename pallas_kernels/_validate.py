"""Checks at trace time: a wrong shape or dtype raises ValueError before XLA sees it.

Inside a jitted step JAX does not raise: gathers clamp and scatters drop. What
depends on shapes and dtypes alone is therefore checked here, once per trace and
at no cost per step. Values (ids, lengths) are the caller's to guarantee.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.pages import Pages, QuantizedPages

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
MAX_SLOTS = 2**31 - 1


def _fail(name: str, x: Pages, allowed: str) -> None:
    raise ValueError(f"{name}: got {x.dtype}{list(x.shape)}, allowed is {allowed}")


def _floats(**arrays: jax.Array) -> None:
    for name, x in arrays.items():
        if x.dtype not in FLOATS:
            _fail(name, x, "float32, bfloat16 or float16")


def _int32(ndim: int, **arrays: jax.Array) -> None:
    for name, x in arrays.items():
        if x.dtype != jnp.int32 or x.ndim != ndim:
            _fail(name, x, f"int32 of rank {ndim}")


def check_pools(k_pages: Pages, v_pages: Pages) -> None:
    """Both pools are [N, S, K, D] of one dtype, with N*S addressable in int32."""
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if isinstance(pages, QuantizedPages):
            _check_quantized(name, pages)
        elif pages.dtype not in FLOATS:
            _fail(name, pages, "float32, bfloat16, float16 or QuantizedPages")
    if len(k_pages.shape) != 4 or 0 in k_pages.shape:
        _fail("k_pages", k_pages, "[N, S, K, D], no axis empty")
    if v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        _fail("v_pages", v_pages, f"that of k_pages, {k_pages.dtype}{list(k_pages.shape)}")
    if k_pages.shape[0] * k_pages.shape[1] > MAX_SLOTS:
        # The last int32 must stay free: it is the out-of-range slot that drops a write.
        _fail("k_pages", k_pages, f"N*S <= {MAX_SLOTS}, so that a slot fits int32")


def _check_quantized(name: str, pages: QuantizedPages) -> None:
    codes, scales = pages.codes, pages.scales
    if codes.dtype not in (jnp.int8, jnp.uint8):
        _fail(f"{name}.codes", codes, "int8, or uint8 for the bits of float8_e4m3fn")
    if scales.dtype != jnp.float32 or scales.shape != (codes.shape[0], *codes.shape[2:0:-1]):
        _fail(f"{name}.scales", scales, f"float32 [N, K, S], from codes {list(codes.shape)} [N, S, K, D]")


def check_write(k_pages: Pages, v_pages: Pages, k: jax.Array, v: jax.Array, slots: jax.Array) -> None:
    check_pools(k_pages, v_pages)
    _floats(k=k, v=v)
    _int32(1, slots=slots)
    want = (slots.shape[0], *k_pages.shape[2:])
    for name, x in (("k", k), ("v", v)):
        if x.shape != want:
            _fail(name, x, f"{list(want)}, from slots [T] and k_pages [N, S, K, D]")


def check_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    page_table: jax.Array,
    seq_lens: jax.Array,
    page_offset: int,
    window: int | None,
    softcap: float | None,
) -> None:
    check_pools(k_pages, v_pages)
    _floats(q=q)
    _int32(2, page_table=page_table)
    _int32(1, seq_lens=seq_lens)
    pages, _, kv_heads, head_dim = k_pages.shape
    if q.ndim != 3 or q.shape[2] != head_dim:
        _fail("q", q, f"rank 3 with head dim {head_dim}, that of k_pages")
    if q.shape[1] == 0 or q.shape[1] % kv_heads:
        _fail("q", q, f"a number of heads that is a multiple of the {kv_heads} KV heads")
    if page_table.shape[1] == 0 or page_table.shape[0] != seq_lens.shape[0]:
        _fail("page_table", page_table, f"[{seq_lens.shape[0]}, C >= 1], one row per seq_lens entry")
    if not isinstance(page_offset, int) or not 0 <= page_offset < pages:
        raise ValueError(f"page_offset: got {page_offset!r}, allowed is a Python int in [0, {pages})")
    if window is not None and not (isinstance(window, int) and 1 <= window <= MAX_SLOTS):
        raise ValueError(f"window: got {window!r}, allowed is None or a Python int in [1, {MAX_SLOTS}]")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"softcap: got {softcap!r}, allowed is None or a positive number")


def check_decode(
    q: jax.Array, k_pages: Pages, page_table: jax.Array, arrivals: jax.Array | None, out: jax.Array | None
) -> None:
    rows = page_table.shape[0]
    if out is None and q.shape[0] != rows:
        _fail("q", q, f"{rows} rows, those of page_table")
    if out is not None and q.shape[0] < rows:
        _fail("q", q, f"at least {rows} rows, those of page_table")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype):
        _fail("out", out, f"that of q, {q.dtype}{list(q.shape)}")
    if arrivals is not None:
        _int32(2, arrivals=arrivals)
        if arrivals.shape != (rows, k_pages.shape[2]):
            _fail("arrivals", arrivals, f"int32[{rows}, {k_pages.shape[2]}], rows and KV heads")


def check_rope(
    qkv: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    cos: jax.Array,
    sin: jax.Array,
    slots: jax.Array,
    qk_norms: jax.Array | None,
) -> int:
    """Returns the number of query heads."""
    check_pools(k_pages, v_pages)
    _floats(qkv=qkv)
    _int32(1, slots=slots)
    tokens, (_, _, kv_heads, dim) = slots.shape[0], k_pages.shape
    if dim % 2:
        _fail("k_pages", k_pages, "[N, S, K, D] with an even D, whose halves rotate")
    heads = qkv.shape[-1] // dim - 2 * kv_heads
    if qkv.shape != (tokens, (heads + 2 * kv_heads) * dim) or heads <= 0 or heads % kv_heads:
        _fail("qkv", qkv, f"[{tokens}, (H + {2 * kv_heads}) * {dim}], H a multiple of the {kv_heads} KV heads")
    for name, x in (("cos", cos), ("sin", sin)):
        if x.shape != (tokens, dim // 2) or x.dtype != jnp.float32:
            _fail(name, x, f"float32[{tokens}, {dim // 2}]")
    if qk_norms is not None and (qk_norms.shape != (2, dim) or qk_norms.dtype != jnp.float32):
        _fail("qk_norms", qk_norms, f"float32[2, {dim}]")
    return heads


def check_extend(q: jax.Array, cu_q_lens: jax.Array, seq_lens: jax.Array, tokens: int | None) -> None:
    _int32(1, cu_q_lens=cu_q_lens)
    if cu_q_lens.shape[0] != seq_lens.shape[0] + 1:
        _fail("cu_q_lens", cu_q_lens, f"int32[{seq_lens.shape[0] + 1}], one more than seq_lens")
    if tokens is not None and not (isinstance(tokens, int) and 0 <= tokens <= q.shape[0]):
        raise ValueError(f"tokens: got {tokens!r}, allowed is None or a Python int in [0, {q.shape[0]}], those of q")
