"""extend_attention: tiles of a chunk's queries against the row's context, causal.

    grid (tiles, K)      a program: some tokens of one row, the G queries each has of a KV head

A program is one or two warpgroups that compute, 64 queries each, and one that loads for all of them. The queries of
a tile are packed head by head, as many tokens as fit, in eights: 128 queries are 40 tokens where G is 3. Blocks that
every query sees need no mask and come first; those on the diagonal follow. With a window all are masked, and the
first is that of the window of the first query. Tokens that are padding are one more row, of length 0.

Sources: warpgroups that load and that compute, FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608); queries of one
KV head packed into a tile, FlashInfer (Ye et al. 2025, arXiv:2501.01005).
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic.common import (
    Scores,
    Softmax,
    attend,
    call,
    no_weight,
    normalized,
    store_lines,
    take,
)
from pallas_kernels.mosaic.stream import ROWS, WGMMA, Blocks, Stream, flat, plgpu, tiled
from pallas_kernels.pages import Pages, QuantizedPages
from pallas_kernels.tiling import blocks as blocks_of
from pallas_kernels.tiling import tile_map

WIDE_HEAD = 128  # beyond, registers and shared memory hold half as much
STAGES = 2
REGISTERS, REGISTERS_OF_CODES = (24, 240), (88, 208)
"""To load and to compute with, of three warpgroups that start with 168 each."""
EIGHT = 8  # queries that are stored together


@dataclass(frozen=True)
class Tiles:
    """Everything about a launch that is known before it is compiled."""

    group: int
    width: int
    window: int | None
    blocks: Blocks
    scores: Scores

    @property
    def packed(self) -> bool:
        """Whether results leave as they are packed, or tile by tile: TMA takes single lines of whole 128 bytes only."""
        return self.blocks.dim % 64 == 0


def consumers(head_dim: int) -> int:
    """Warpgroups that compute."""
    return 2 if head_dim <= WIDE_HEAD else 1


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    cu_ref,
    lens_ref,
    row_ref,
    first_ref,
    position_ref,
    out_ref,
    *,
    tiles: Tiles,
    **scratch: Any,
) -> None:
    tile, head, warpgroup = (lax.axis_index(name) for name in ("tile", "head", "warpgroup"))
    blocks, group, width = tiles.blocks, tiles.group, tiles.width
    row, first, position = row_ref[tile], first_ref[tile], position_ref[tile]
    own = jnp.clip(cu_ref[row + 1] - first, 0, width)  # tokens of this tile
    length = lens_ref[row]
    end = jnp.minimum(position + width, length)  # at most 0 for padding
    lowest = jnp.int32(0) if tiles.window is None else jnp.maximum(position - (tiles.window - 1), 0)
    first_block = lax.div(lowest, jnp.int32(blocks.size))
    count = jnp.where(own > 0, jnp.maximum(blocks_of(jnp.maximum(end, 0), blocks.size) - first_block, 0), 0)

    keys, values = scratch["memory"]
    loading, computing = REGISTERS if blocks.codes is None else REGISTERS_OF_CODES
    barriers = {name: scratch[name] for name in blocks.barriers}
    stream = Stream(blocks, keys, values, **barriers, first=first_block, count=count, lowest=lowest, length=length)

    @pl.when(warpgroup == blocks.consumers)
    def _() -> None:
        if blocks.consumers > 1:
            plgpu.set_max_registers(loading, action="decrease")

        @pl.when(count > 0)
        def _() -> None:
            for member in range(group):
                tokens, rows = pl.ds(first, width), pl.ds(member * width, width)
                queries = q_ref.at[tokens, head * group + member]
                plgpu.copy_gmem_to_smem(queries, scratch["rows"].at[rows], scratch["q_here"])

        stream.load(k_ref, v_ref, table_ref, row, head)

    @pl.when(warpgroup < blocks.consumers)
    def _() -> None:
        if blocks.consumers > 1:
            plgpu.set_max_registers(computing, action="increase")
        mine = pl.ds(warpgroup * ROWS, ROWS)
        rows, q = scratch["rows"].at[mine], scratch["q"].at[warpgroup]
        weights_ref = scratch["weights"].at[warpgroup] if "weights" in scratch else None

        @pl.when(count > 0)
        def _() -> None:
            plgpu.barrier_wait(scratch["q_here"])
            take(rows, q)

        def seen(key: jax.Array) -> jax.Array:
            query = plgpu.broadcasted_iota(jnp.int32, key.shape, 0, layout=WGMMA) + warpgroup * ROWS
            distance = position + lax.rem(query, jnp.full_like(query, width)) - key
            past = distance >= 0
            return past if tiles.window is None else past & (distance < tiles.window)

        def step(index: jax.Array, state: Softmax) -> Softmax:
            # Without a window, every query sees what the first one does.
            whole = (stream.start(index) + blocks.size <= position + 1) & (tiles.window is None)
            options: dict[str, Any] = {"whole": whole, "consumer": warpgroup, "weights_ref": weights_ref}
            return attend(stream, index, state, q, tiles.scores, seen, **options)

        state = lax.fori_loop(0, count, step, no_weight(blocks.dim))
        store_lines(rows, normalized(state).astype(rows.dtype))
        plgpu.commit_smem()
        start, stored = (first, own) if tiles.packed else (tile * width, jnp.where(own > 0, width, 0))
        for eight in range(ROWS // EIGHT):
            _store(eight, rows, warpgroup, head, start, stored, out_ref, tiles)
        plgpu.wait_smem_to_gmem(0)


def _store(
    eight: int,
    rows: Any,
    warpgroup: jax.Array,
    head: jax.Array,
    first: jax.Array,
    own: jax.Array,
    out_ref: Any,
    tiles: Tiles,
) -> None:
    """Eight tokens of one head to memory, at once or, where some belong to somebody else, one by one."""
    query, width = warpgroup * ROWS + eight * EIGHT, jnp.int32(tiles.width)
    member, skipped = lax.div(query, width), lax.rem(query, width)
    real = jnp.where(member < tiles.group, jnp.clip(own - skipped, 0, EIGHT), 0)
    member = head * tiles.group + member

    def store(count: int, token: jax.Array | int, _: None = None) -> None:
        lines = rows.at[pl.ds(eight * EIGHT + token, count)]
        plgpu.copy_smem_to_gmem(lines, out_ref.at[pl.ds(first + skipped + token, count), member])

    pl.when(real == EIGHT)(lambda: store(EIGHT, 0))
    if tiles.packed:
        pl.when(real < EIGHT)(lambda: lax.fori_loop(0, real, functools.partial(store, 1), None))


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
) -> jax.Array:
    """See `pallas_kernels.extend_attention`."""
    tokens, heads, dim = q.shape
    kv_heads = k_pages.shape[2]
    group = heads // kv_heads
    computing = consumers(dim)
    block = 128 if dim <= WIDE_HEAD and not isinstance(k_pages, QuantizedPages) else 64
    blocks = Blocks.of(k_pages, page_offset, block, STAGES, computing)
    width = min(computing * ROWS // group // EIGHT, -(-tokens // EIGHT)) * EIGHT
    tiles = Tiles(group, width, window, blocks, Scores(scale, softcap))
    cu_q_lens = jnp.append(cu_q_lens, jnp.int32(tokens))
    seq_lens = jnp.append(seq_lens, jnp.int32(0))
    _, row, first, position = tile_map(cu_q_lens, seq_lens, tokens, width)

    if tokens < width:
        q = jnp.pad(q, ((0, width - tokens), (0, 0), (0, 0)))
    scratch: dict[str, Any] = {
        "rows": plgpu.SMEM((computing * ROWS, dim), q.dtype),
        "q": tiled((computing, ROWS, dim), blocks.dtype),
        "q_here": plgpu.Barrier(num_arrivals=group),
        "memory": blocks.shapes,
        **blocks.barriers,
    }
    if interpret:
        scratch["weights"] = tiled((computing, ROWS, block), blocks.dtype)
    stored = tokens if tiles.packed else len(row) * width
    out = call(
        functools.partial(_kernel, tiles=tiles),
        name="extend_attention",
        grid=(len(row), kv_heads),
        grid_names=("tile", "head"),
        num_threads=computing + 1,
        out_type=jax.ShapeDtypeStruct((stored, heads, dim), q.dtype),
        scratch_types=scratch,
        interpret=interpret,
    )(q, flat(k_pages), flat(v_pages), page_table, cu_q_lens, seq_lens, row, first, position)
    return out if tiles.packed else out[_places(first, width, tokens)]


def _places(first: jax.Array, width: int, tokens: int) -> jax.Array:
    """Where the results of each token are, of those that left tile by tile."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    tile = jnp.sum(first[None, :] <= token[:, None], axis=1, dtype=jnp.int32) - 1
    return tile * width + token - first[tile]
