"""Plain XLA: the CPU path, and the oracle of the GPU kernels.

One idea carries both attentions. Work is cut into tiles of queries; a tile walks
its context in blocks of positions with an online softmax, in a loop over what the tile
sees: up to its true length, and from its window on. So cost follows the lengths while
shapes do not: one executable serves any context up to C*S, and there is no context
bucket to compile.

What makes it fast on XLA's CPU back end:

- Positions, not pages, are gathered, each one [K, D] contiguous. A position past the
  row's end or before its window is clamped to one it sees, so stale memory is never
  read: no mask over keys and values, no NaN from a page that was never written or has
  been freed, any page size.
- Decode has too few queries per KV head for a batched product over heads, whose
  operands would have to be transposed first. The queries are spread block-diagonally
  over all heads instead, and a row's block is one [H, K*D] x [K*D, X] product. The
  zeros cost less than the transposes (measured on the dots alone; within noise in a step).
- Extend has queries enough for one plain product per KV head; a batched one over heads would be
  transposed first, and take a sixth to a third more. XLA gives a product to several cores only
  if it is large, so far into a prompt blocks are long (two cores, at 5,900: 0.6 of the time);
  what is left is walked in short ones.
- What depends on lengths alone (order, tile map) is computed from the step's
  arguments, so that layers in one jitted function share it.

Sources: online softmax over blocks, FlashAttention (Dao et al. 2022,
arXiv:2205.14135) after Milakov and Gimelshein (arXiv:1805.02867); page tables,
PagedAttention (Kwon et al. 2023, arXiv:2309.06180).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pages import Pages, read, write
from pallas_kernels.tiling import blocks, tile_map

DECODE_ROWS = 8  # rows in a decode tile
DECODE_BLOCK = 64  # positions per iteration
EXTEND_QUERIES = 64  # tokens in an extend tile
EXTEND_BLOCKS = 512, 128  # positions per iteration: as long as there are so many, and then
NARROW_TILE = 16  # up to so many tokens, a block's products cost less than the rest of it: blocks are longer
NARROW_BLOCKS = 2048, 256
LONG_CONTEXT = 4  # long blocks that a page table must have room for: a second loop takes a third longer to compile

_FLOOR = float(jnp.finfo(jnp.float32).min)


def write_kv(k_pages: Pages, v_pages: Pages, k: jax.Array, v: jax.Array, slots: jax.Array) -> tuple[Pages, Pages]:
    """Scatter by [page, offset]. Flattening the pool to index it by slot copies it when T is 1."""
    size = jnp.int32(k_pages.shape[1])
    at = (lax.div(slots, size), lax.rem(slots, size))
    return write(k_pages, *at, k), write(v_pages, *at, v)


def _rows(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, size, axis=0)


def _locate(
    table: jax.Array, positions: jax.Array, page_offset: int, pages: int, size: int
) -> tuple[jax.Array, jax.Array]:
    """Page and offset of positions [w, X] through page tables [w, C]."""
    page = jnp.take_along_axis(table, lax.div(positions, jnp.int32(size)), axis=1, mode="clip")
    # Only a row of length 0 can reach an invalid id; its result is dropped later.
    page = jnp.clip(page + jnp.int32(page_offset), 0, pages - 1)
    return page, lax.rem(positions, jnp.int32(size))


def _lowest_visible(positions: jax.Array, window: int | None) -> jax.Array:
    """The lowest position that a query at each of `positions` sees."""
    return jnp.zeros_like(positions) if window is None else jnp.maximum(positions - jnp.int32(window - 1), 0)


def _capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    return scores if softcap is None else jnp.tanh(scores / softcap) * softcap


def _precision(*operands: Any) -> lax.Precision:
    """Of products on what came in these dtypes: a GPU makes TF32 of float32 unless told otherwise."""
    return lax.Precision.HIGHEST if any(x.dtype == jnp.float32 for x in operands) else lax.Precision.DEFAULT


def _online(
    state: tuple[jax.Array, jax.Array, jax.Array], scores: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One step of the softmax: the new maximum, sum, rescaled accumulator and weights."""
    top, total, acc = state
    new = jnp.maximum(top, scores.max(axis=-1))
    weights = jnp.exp(scores - new[..., None])
    shrink = jnp.exp(top - new)
    return new, total * shrink + weights.sum(axis=-1), acc * shrink[..., None], weights


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
) -> tuple[jax.Array, Pages, Pages]:
    """The same sums in the same order as the kernel's, each rounded to qkv's dtype where it rounds."""
    tokens = len(qkv)
    _, _, kv_heads, dim = k_pages.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q, k, v = jnp.split(qkv.reshape(tokens, heads + 2 * kv_heads, dim), [heads, heads + kv_heads], axis=1)
    if qk_norms is not None:
        q, k = _rms_norm(q, qk_norms[0], norm_eps), _rms_norm(k, qk_norms[1], norm_eps)
    return _rotate(q, cos, sin), *write_kv(k_pages, v_pages, _rotate(k, cos, sin), v, slots)


def _rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + eps) * scale).astype(x.dtype)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [T, heads, D] by its phases [T, D/2]: dimension i against i + D/2, in float32."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def decode_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    page_table: jax.Array,
    seq_lens: jax.Array,
    *,
    out: jax.Array | None = None,
    page_offset: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Rows in tiles of DECODE_ROWS, sorted by what they see so that a tile's rows end together."""
    if out is not None:
        first = len(q) - len(seq_lens)
        options: dict[str, Any] = {"page_offset": page_offset, "scale": scale, "window": window, "softcap": softcap}
        rows_out = decode_attention(q[first:], k_pages, v_pages, page_table, seq_lens, **options)
        return lax.dynamic_update_slice_in_dim(out, rows_out, first, axis=0)
    rows, heads, dim = q.shape
    pages, size, kv_heads, _ = k_pages.shape
    group, wide, block = heads // kv_heads, kv_heads * dim, DECODE_BLOCK
    precision = _precision(q, k_pages)
    tile = min(DECODE_ROWS, rows)
    tiles = -(-rows // tile)

    spread = jnp.eye(kv_heads, dtype=jnp.float32)[:, None, :, None]  # [K, 1, K, 1]
    q32 = (q.astype(jnp.float32) * scale).reshape(rows, kv_heads, group, 1, dim)
    q32 = (q32 * spread[None]).reshape(rows, heads, wide)
    if tiles > 1:
        order = jnp.argsort(_lowest_visible(seq_lens - 1, window) - seq_lens)
        # Filler rows of the last tile repeat row 0 with length 0.
        order = jnp.pad(order, (0, tiles * tile - rows))
        real = jnp.arange(tiles * tile, dtype=jnp.int32) < rows
        q32, page_table = q32[order], page_table[order]
        lengths = jnp.where(real, seq_lens[order], 0)
    else:
        order, lengths = None, seq_lens

    def run(start: jax.Array, out: jax.Array) -> jax.Array:
        q_tile, table, length = (_rows(x, start, tile) for x in (q32, page_table, lengths))
        last = jnp.maximum(length - 1, 0)[:, None]
        # Every row walks its own interval: neighbours of other lengths see other positions.
        lowest = _lowest_visible(length - 1, window)

        def step(j: jax.Array, state: tuple) -> tuple:
            positions = lowest[:, None] + (j * block + jnp.arange(block, dtype=jnp.int32))[None, :]
            at = _locate(table, jnp.minimum(positions, last), page_offset, pages, size)
            keys = read(k_pages, *at).reshape(tile, block, wide)
            scores = _capped(jnp.einsum("whd,wxd->whx", q_tile, keys, precision=precision), softcap)
            scores = jnp.where((positions < length[:, None])[:, None, :], scores, _FLOOR)
            top, total, acc, weights = _online(state, scores)
            values = read(v_pages, *at).reshape(tile, block, wide)
            return top, total, acc + jnp.einsum("whx,wxd->whd", weights, values, precision=precision)

        init = (
            jnp.full((tile, heads), _FLOOR, jnp.float32),
            jnp.zeros((tile, heads), jnp.float32),
            jnp.zeros((tile, heads, wide), jnp.float32),
        )
        _, total, acc = lax.fori_loop(0, blocks((length - lowest).max(), block), step, init)
        # The diagonal blocks are the result; the others mixed heads that do not belong together.
        acc = acc.reshape(tile, kv_heads, group, kv_heads, dim)
        acc = jnp.stack([acc[:, i, :, i] for i in range(kv_heads)], axis=1)
        acc = acc.reshape(tile, heads, dim) / total[..., None]
        acc = jnp.where((length > 0)[:, None, None], acc, 0.0).astype(q.dtype)
        return lax.dynamic_update_slice_in_dim(out, acc, start, axis=0)

    out = jnp.zeros((tiles * tile, heads, dim), q.dtype)
    if order is None:
        return run(jnp.int32(0), out)
    out = lax.fori_loop(0, tiles, lambda t, out: run(t * tile, out), out)
    return out[jnp.argsort(order[:rows])]


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
) -> jax.Array:
    """Tiles of up to EXTEND_QUERIES tokens of one row each, in token order."""
    lines, heads, dim = q.shape
    pages, size, kv_heads, _ = k_pages.shape
    tokens = lines if tokens is None else tokens
    group, width = heads // kv_heads, min(EXTEND_QUERIES, max(tokens, 1))
    precision = _precision(q, k_pages)
    long, short = EXTEND_BLOCKS if width > NARROW_TILE else NARROW_BLOCKS
    count, row_of, first_of, position_of = tile_map(cu_q_lens, seq_lens, tokens, width)
    # A tile may reach past the last token.
    q32 = jnp.pad(q.astype(jnp.float32) * scale, ((0, width), (0, 0), (0, 0)))

    def run(t: jax.Array, out: jax.Array) -> jax.Array:
        row, first, position = row_of[t], first_of[t], position_of[t]
        length = seq_lens[row]
        table = _rows(page_table, row, 1)
        q_tile = _rows(q32, first, width).reshape(width, kv_heads, group, dim)
        q_tile = q_tile.transpose(1, 2, 0, 3).reshape(kv_heads, group * width, dim)
        own = position + jnp.arange(width, dtype=jnp.int32)
        lowest = _lowest_visible(position, window)

        def walk(block: int, begin: jax.Array, end: jax.Array, states: tuple) -> tuple:
            """Blocks of so many positions, from block `begin` up to `end`."""

            def step(j: jax.Array, states: tuple) -> tuple:
                positions = j * block + jnp.arange(block, dtype=jnp.int32)
                inside = jnp.clip(positions, lowest, length - 1)[None, :]
                at = _locate(table, inside, page_offset, pages, size)
                seen = positions[None, :] <= own[:, None]
                if window is not None:
                    seen &= positions[None, :] >= _lowest_visible(own, window)[:, None]
                seen = jnp.tile(seen, (group, 1))
                new = []
                for head, state in enumerate(states):
                    keys, values = read(k_pages, *at, head)[0], read(v_pages, *at, head)[0]
                    scores = _capped(jnp.matmul(q_tile[head], keys.T, precision=precision), softcap)
                    scores = jnp.where(seen, scores, _FLOOR)
                    top, total, acc, weights = _online(state, scores)
                    new.append((top, total, acc + jnp.matmul(weights, values, precision=precision)))
                return tuple(new)

            return lax.fori_loop(begin, end, step, states)

        init = (
            jnp.full(group * width, _FLOOR, jnp.float32),
            jnp.zeros(group * width, jnp.float32),
            jnp.zeros((group * width, dim), jnp.float32),
        )
        visible, states = jnp.minimum(position + width, length), (init,) * kv_heads
        rest = lax.div(lowest, jnp.int32(short))
        if page_table.shape[1] * size >= LONG_CONTEXT * long:
            end = lax.div(visible, jnp.int32(long))
            states = walk(long, lax.div(lowest, jnp.int32(long)), end, states)
            rest = jnp.maximum(rest, end * (long // short))
        states = walk(short, rest, blocks(visible, short), states)
        acc = jnp.stack([acc / total[:, None] for _, total, acc in states]).reshape(kv_heads, group, width, dim)
        acc = acc.transpose(2, 0, 1, 3).reshape(width, heads, dim).astype(q.dtype)
        # Where a tile runs over its chunk, the next tile or the last line overwrites the excess.
        return lax.dynamic_update_slice_in_dim(out, acc, first, axis=0)

    out = jnp.zeros((lines + width, heads, dim), q.dtype)
    out = lax.fori_loop(0, count, run, out)[:lines]
    real = jnp.arange(lines, dtype=jnp.int32) < cu_q_lens[-1]
    return jnp.where(real[:, None, None], out, jnp.zeros((), q.dtype))
