"""write_kv, and rope_and_write_kv: what lies between the QKV product and attention, as one kernel.

    write_kv             grid (T,)      a program: the K heads of a token, keys and values
    rope_and_write_kv    grid (T, K)    a program: of a token, a key, a value and the G queries that read them

The pools are aliased: what is not written is not touched. A slot out of range masks the store.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.pages import Pages
from pallas_kernels.triton.common import call, div, plt, rem, store_line
from pallas_kernels.tuning import power_of_two


def _place(slots_ref: Any, pool_ref: Any, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Page, offset, and whether they are in the pool."""
    pages, size = pool_ref.shape[:2]
    slot = slots_ref[token]
    return div(slot, size), rem(slot, size), slot < pages * size


def _write_kernel(k_ref, v_ref, slots_ref, _k_in, _v_in, k_pages_ref, v_pages_ref) -> None:
    token = pl.program_id(0)
    _, _, kv_heads, dim = k_pages_ref.shape
    page, offset, kept = _place(slots_ref, k_pages_ref, token)
    heads = lax.iota(jnp.int32, power_of_two(kv_heads))
    lanes = lax.iota(jnp.int32, power_of_two(dim))[None, :]
    real = heads < kv_heads
    for x_ref, pool_ref in ((k_ref, k_pages_ref), (v_ref, v_pages_ref)):
        x = plt.load(x_ref.at[token, heads[:, None], lanes], mask=real[:, None] & (lanes < dim), other=0.0)
        store_line(pool_ref, page, offset, heads, x, real & kept)


def write_kv(
    k_pages: Pages, v_pages: Pages, k: jax.Array, v: jax.Array, slots: jax.Array, *, interpret: bool = False
) -> tuple[Pages, Pages]:
    """See `pallas_kernels.write_kv`."""
    if not len(slots):
        return k_pages, v_pages
    return call(
        _write_kernel,
        name="write_kv",
        grid=slots.shape,
        out_shape=_like((k_pages, v_pages)),
        input_output_aliases=_aliases((k, v, slots), (), (k_pages, v_pages)),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(k, v, slots, k_pages, v_pages)


def _rope_kernel(qkv_ref, cos_ref, sin_ref, slots_ref, *refs: Any, heads: int, norm_eps: float | None) -> None:
    """refs: norms if there is an eps; the pools as they come in; q, and the pools as they go out."""
    q_ref, k_pages_ref, v_pages_ref = refs[-3:]
    token, head = pl.program_id(0), pl.program_id(1)
    _, _, kv_heads, dim = k_pages_ref.shape
    group, half = heads // kv_heads, dim // 2
    lanes = lax.iota(jnp.int32, power_of_two(dim))
    other = rem(lanes + half, dim)  # the dimension that rotates with this one
    in_head = lanes < dim
    phase = rem(lanes, half)
    cos = plt.load(cos_ref.at[token, phase], mask=in_head, other=0.0)
    sin = plt.load(sin_ref.at[token, phase], mask=in_head, other=0.0)
    sin = jnp.where(lanes < half, -sin, sin)

    def rotated(heads: jax.Array, mask: jax.Array, norm: int) -> jax.Array:
        """Heads of qkv at [n, 1], rotated: [n, Dp]."""
        x = plt.load(qkv_ref.at[token, heads * dim + lanes[None, :]], mask=mask, other=0.0)
        y = plt.load(qkv_ref.at[token, heads * dim + other[None, :]], mask=mask, other=0.0)
        if norm_eps is not None:
            wide = x.astype(jnp.float32)
            shrink = lax.rsqrt((wide * wide).sum(axis=1) / dim + norm_eps)[:, None]
            x = _scaled(x, shrink, plt.load(refs[0].at[norm, lanes], mask=in_head, other=0.0))
            y = _scaled(y, shrink, plt.load(refs[0].at[norm, other], mask=in_head, other=0.0))
        return (x.astype(jnp.float32) * cos[None, :] + y.astype(jnp.float32) * sin[None, :]).astype(qkv_ref.dtype)

    members = lax.iota(jnp.int32, power_of_two(group))[:, None]
    real = (members < group) & in_head[None, :]
    queries = head * group + members
    plt.store(q_ref.at[token, queries, lanes[None, :]], rotated(queries, real, 0), mask=real)

    page, offset, kept = _place(slots_ref, k_pages_ref, token)
    one = jnp.zeros((1, 1), jnp.int32)
    k = rotated(one + heads + head, in_head[None, :], 1)
    v = plt.load(
        qkv_ref.at[token, (one + heads + kv_heads + head) * dim + lanes[None, :]], mask=in_head[None, :], other=0.0
    )
    for pool_ref, x in ((k_pages_ref, k), (v_pages_ref, v)):
        store_line(pool_ref, page, offset, jnp.full((1,), head), x, jnp.full((1,), kept))


def _scaled(x: jax.Array, shrink: jax.Array, scale: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * shrink * scale[None, :]).astype(x.dtype)


def rope_and_write_kv(
    qkv: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    cos: jax.Array,
    sin: jax.Array,
    slots: jax.Array,
    qk_norms: jax.Array | None = None,
    *,
    norm_eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, Pages, Pages]:
    """See `pallas_kernels.rope_and_write_kv`."""
    tokens = len(slots)
    _, _, kv_heads, dim = k_pages.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = jax.ShapeDtypeStruct((tokens, heads, dim), qkv.dtype)
    if not tokens:
        return jnp.zeros(q.shape, q.dtype), k_pages, v_pages
    arguments = (qkv, cos, sin, slots) if qk_norms is None else (qkv, cos, sin, slots, qk_norms)
    eps = None if qk_norms is None else norm_eps
    return call(
        functools.partial(_rope_kernel, heads=heads, norm_eps=eps),
        name="rope_and_write_kv",
        grid=(tokens, kv_heads),
        out_shape=(q, *_like((k_pages, v_pages))),
        input_output_aliases=_aliases(arguments, (q,), (k_pages, v_pages)),
        num_warps=1,
        num_stages=1,
        interpret=interpret,
    )(*arguments, k_pages, v_pages)


def _like(pools: tuple[Pages, Pages]) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pools)


def _aliases(arguments: tuple, results: tuple, pools: tuple[Pages, Pages]) -> dict[int, int]:
    """The pools come in after the arguments and go out after the results, in place."""
    return {len(arguments) + index: len(results) + index for index in range(len(jax.tree.leaves(pools)))}
