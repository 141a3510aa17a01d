"""extend_attention: tiles of a chunk's queries against the row's context, causal.

    grid (tiles, K)      a program: up to QUERIES // G tokens of one row, the G queries each has of a KV head

The queries of a tile are packed densely whatever G is. Blocks of keys that every query sees need no mask and
come first; those on the diagonal follow. With a window all are masked, and the loop begins at the window of the
first query. Tokens that are padding are one more row, of length 0.

Sources: FlashAttention-2 (Dao 2023, arXiv:2307.08691); queries of one KV head packed into a tile, FlashInfer
(Ye et al. 2025, arXiv:2501.01005).
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.pages import Pages
from pallas_kernels.tiling import tile_map
from pallas_kernels.triton.common import (
    Context,
    Scores,
    Softmax,
    attend,
    call,
    cdiv,
    div,
    no_weight,
    plt,
    problem_of,
    rem,
)
from pallas_kernels.tuning import Tiling, power_of_two, tiling


@dataclass(frozen=True)
class Tiles:
    """Everything about a launch that is known before it is compiled."""

    queries: int
    group: int
    dim: int
    block: int
    dtype: Any
    page_offset: int
    window: int | None
    scores: Scores

    @property
    def width(self) -> int:
        """Tokens in a tile."""
        return self.queries // self.group


def _kernel(
    q_ref, k_ref, v_ref, table_ref, cu_ref, lens_ref, row_ref, first_ref, position_ref, out_ref, *, tiles: Tiles
) -> None:
    tile, head = pl.program_id(0), pl.program_id(1)
    row, first, position = row_ref[tile], first_ref[tile], position_ref[tile]
    length = lens_ref[row]
    query = lax.iota(jnp.int32, tiles.queries)
    offset, member = div(query, tiles.group), rem(query, tiles.group)
    lanes = lax.iota(jnp.int32, power_of_two(tiles.dim))
    own = (offset < tiles.width) & (first + offset < cu_ref[row + 1])
    real = own[:, None] & (lanes < tiles.dim)[None, :]
    where = ((first + offset)[:, None], (head * tiles.group + member)[:, None], lanes[None, :])
    q = plt.load(q_ref.at[where], mask=real, other=0.0).astype(tiles.dtype)
    context = Context(k_ref, v_ref, table_ref, row, head, tiles.page_offset, tiles.block, tiles.dtype)

    at = position + offset
    end = jnp.minimum(position + tiles.width, length)  # at most 0 for padding
    lowest = jnp.int32(0) if tiles.window is None else jnp.maximum(position - (tiles.window - 1), 0)

    def unmasked(index: jax.Array, state: Softmax) -> Softmax:
        _, k, v = context.load(index)
        return attend(state, q, k, v, None, tiles.scores)

    def masked(index: jax.Array, state: Softmax) -> Softmax:
        positions, k, v = context.load(index, lowest, end)
        distance = at[:, None] - positions[None, :]
        seen = distance >= 0
        if tiles.window is not None:
            seen &= distance < tiles.window
        return attend(state, q, k, v, seen, tiles.scores)

    state = no_weight(tiles.queries, len(lanes))
    middle = div(lowest, tiles.block)
    if tiles.window is None:
        # Every query sees what the first one does.
        middle = jnp.minimum(div(jnp.maximum(position + 1, 0), tiles.block), cdiv(jnp.maximum(end, 0), tiles.block))
        state = lax.fori_loop(0, middle, unmasked, state)
    _, total, acc = lax.fori_loop(middle, cdiv(jnp.maximum(end, 0), tiles.block), masked, state)
    result = acc / jnp.where(total > 0, total, 1.0)[:, None]
    plt.store(out_ref.at[where], result.astype(out_ref.dtype), mask=real)


def extend_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    page_table: jax.Array,
    cu_q_lens: jax.Array,
    seq_lens: jax.Array,
    *,
    page_offset: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    interpret: bool = False,
    tuned: Tiling | None = None,
) -> jax.Array:
    """See `pallas_kernels.extend_attention`."""
    tokens, heads, dim = q.shape
    kv_heads = k_pages.shape[2]
    group = heads // kv_heads
    problem = problem_of("extend_attention", q, k_pages, 1, page_table.shape[1] * k_pages.shape[1])
    tuned = tuned or tiling(problem)
    scores, dtype = Scores(scale, softcap), jnp.dtype(problem.dtype)
    tiles = Tiles(tuned.queries, group, dim, tuned.block, dtype, page_offset, window, scores)
    cu_q_lens = jnp.append(cu_q_lens, jnp.int32(tokens))
    seq_lens = jnp.append(seq_lens, jnp.int32(0))
    _, row, first, position = tile_map(cu_q_lens, seq_lens, tokens, tiles.width)
    return call(
        functools.partial(_kernel, tiles=tiles),
        name="extend_attention",
        grid=(len(row), kv_heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        interpret=interpret,
    )(q, k_pages, v_pages, page_table, cu_q_lens, seq_lens, row, first, position)
