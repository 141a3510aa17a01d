"""decode_attention: one query per row, its context split among the programs of a cluster (split-K).

    grid (B, K), cluster (splits,)      a program: the G queries of a KV head, some blocks of their context

A program is a warpgroup that loads and one that computes. The G queries are the first of the 64 rows of a wgmma; the
rest hold whatever follows in memory, and nobody looks at them. A row's blocks are divided evenly among as many
programs as pay off. One stores its result directly. Several write theirs and the logarithm of its sum of weights
(LSE) to memory, meet at a barrier of the cluster, and the first adds them up: in the order of the context, with no
counter to clear and no second kernel.

Sources: split-K with an LSE combine, Flash-Decoding (Dao et al. 2023).
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic.common import (
    FLOOR,
    Scores,
    Softmax,
    along_rows,
    attend,
    call,
    fence,
    no_weight,
    normalized,
    take,
)
from pallas_kernels.mosaic.stream import ROWS, Blocks, Stream, flat, plgpu, tiled
from pallas_kernels.pages import Pages
from pallas_kernels.tiling import blocks as blocks_of

BLOCK = 64
BUFFER_BYTES = {64: 80 * 1024, 256: 160 * 1024}
"""Of keys and values on their way, up to a head dim: two programs share a multiprocessor, or one has it to itself where
its registers are too many for that."""
PROGRAMS = 2 * 132  # two for each multiprocessor of an H200
SPLIT_POSITIONS = 256  # fewer are not worth a program of their own
MAX_SPLITS = 8  # a cluster that every Hopper GPU can place


@dataclass(frozen=True)
class Tiles:
    """Everything about a launch that is known before it is compiled."""

    group: int
    splits: int
    window: int | None
    blocks: Blocks
    scores: Scores
    first: int  # of q's tokens, the first row's

    @property
    def padded_group(self) -> int:
        """Rows of a part: so many that 128 threads have equal shares of it."""
        return -(-self.group // 8) * 8


def num_splits(rows: int, kv_heads: int, capacity: int, window: int | None) -> int:
    """Programs for the longest context there can be: enough to fill a GPU, none with too little to do."""
    longest = capacity if window is None else min(capacity, window)
    useful = min(-(-PROGRAMS // (rows * kv_heads)), -(-longest // SPLIT_POSITIONS), MAX_SPLITS)
    return 1 << (max(1, useful).bit_length() - 1)


def _kernel(q_ref, k_ref, v_ref, table_ref, lens_ref, out_ref, *part_refs: Any, tiles: Tiles, **scratch: Any) -> None:
    row, head, warpgroup = (lax.axis_index(name) for name in ("row", "head", "warpgroup"))
    split = lax.axis_index("split") if tiles.splits > 1 else jnp.int32(0)
    blocks, group = tiles.blocks, tiles.group
    length = lens_ref[row]
    lowest = jnp.int32(0) if tiles.window is None else jnp.maximum(length - tiles.window, 0)
    first = lax.div(lowest, jnp.int32(blocks.size))
    count = blocks_of(length, blocks.size) - first
    least = SPLIT_POSITIONS // blocks.size if tiles.splits > 1 else 1
    per_split = jnp.maximum(blocks_of(count, tiles.splits), least)
    active = lax.div(count + per_split - 1, per_split)  # 0 for a row of length 0
    begin = jnp.minimum(split * per_split, count)

    (keys, values), staging = scratch["memory"] if tiles.splits > 1 else (scratch["memory"], None)
    barriers = {name: scratch[name] for name in blocks.barriers}
    stretch = {"first": first + begin, "count": jnp.minimum(per_split, count - begin)}
    stream = Stream(blocks, keys, values, **barriers, **stretch, lowest=lowest, length=length)
    q, q_here, rows = scratch["q"], scratch["q_here"], scratch["rows"]
    where = row + tiles.first, pl.ds(head * group, group)

    @pl.when(warpgroup == 1)
    def _() -> None:
        plgpu.copy_gmem_to_smem(q_ref.at[where], rows.at[pl.ds(0, group)], q_here)
        stream.load(k_ref, v_ref, table_ref, row, head)

    @pl.when(warpgroup == 0)
    def _() -> None:
        def seen(position: jax.Array) -> jax.Array:
            return (position >= lowest) & (position < length)

        def step(index: jax.Array, state: Softmax) -> Softmax:
            options: dict[str, Any] = {
                "whole": ~stream.is_ragged(index),
                "consumer": 0,
                "weights_ref": scratch.get("weights"),
            }
            return attend(stream, index, state, q, tiles.scores, seen, **options)

        plgpu.barrier_wait(q_here)
        take(rows, q)
        state = lax.fori_loop(0, stream.count, step, no_weight(blocks.dim))
        result_at = out_ref.at[where]

        @pl.when((active <= 1) & (split == 0))
        def _() -> None:
            _store(normalized(state), rows, result_at)

        if tiles.splits > 1:

            @pl.when(active > 1)
            def _() -> None:
                parts = tuple(ref.at[row, head] for ref in part_refs)
                _combine(state, split, parts, result_at, staging, scratch["everyone"], tiles)


def _store(x: jax.Array, staging: Any, at: Any) -> None:
    """The first rows of x to memory, by way of `staging`."""
    staging[...] = x.astype(staging.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging.at[pl.ds(0, at.shape[0])], at)
    plgpu.wait_smem_to_gmem(0)


def _combine(
    state: Softmax,
    split: jax.Array,
    parts: tuple[Any, Any],
    result_at: Any,
    staging: Any,
    everyone: Any,
    tiles: Tiles,
) -> None:
    """Writes a split's part; the first adds all of them up.

    parts: float32 [splits, G in eights, D], results and LSEs; these are repeated along D, so that all arrays are
    alike when they are added up.
    """
    part_staging, sum_staging = staging
    top, total = state[:2]
    lse = jnp.where(total > 0, top + jnp.log2(jnp.where(total > 0, total, 1.0)), FLOOR)
    _store(normalized(state), part_staging, parts[0].at[split])
    _store(along_rows(lse, tiles.blocks.dim), part_staging, parts[1].at[split])
    fence()
    plgpu.barrier_arrive(everyone)
    plgpu.barrier_wait(everyone)
    fence()

    @pl.when(split == 0)
    def _() -> None:
        lses = [parts[1][split] for split in range(tiles.splits)]
        top = functools.reduce(jnp.maximum, lses)
        weights = [jnp.exp2(lse - top) for lse in lses]
        acc = sum(weight * parts[0][split] for split, weight in enumerate(weights))
        _store(acc / sum(weights), sum_staging, result_at)


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
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.decode_attention`."""
    (rows,), (tokens, heads, dim) = seq_lens.shape, q.shape
    _, size, kv_heads, _ = k_pages.shape
    splits = num_splits(rows, kv_heads, page_table.shape[1] * size, window)
    buffers = next(size for most, size in BUFFER_BYTES.items() if dim <= most)
    stages = max(2, buffers // (2 * BLOCK * dim * 2))
    blocks = Blocks.of(k_pages, page_offset, BLOCK, stages, consumers=1)
    tiles = Tiles(heads // kv_heads, splits, window, blocks, Scores(scale, softcap), tokens - rows)

    scratch: dict[str, Any] = {
        "rows": plgpu.SMEM((ROWS, dim), q.dtype),
        "q": tiled((ROWS, dim), blocks.dtype),
        "q_here": plgpu.Barrier(),
        "memory": blocks.shapes,
        **blocks.barriers,
    }
    # A reference that goes in is written in place.
    given = [] if out is None else [jax.new_ref(out)]
    out_type = [jax.ShapeDtypeStruct(q.shape, q.dtype)] if out is None else []
    options: dict[str, Any] = {}
    if splits > 1:
        part = jax.ShapeDtypeStruct((rows, kv_heads, splits, tiles.padded_group, dim), jnp.float32)
        out_type += [part, part]
        staging = plgpu.SMEM((ROWS, dim), jnp.float32), plgpu.SMEM((tiles.padded_group, dim), q.dtype)
        scratch["memory"] = plgpu.RefUnion(blocks.shapes, staging)
        scratch["everyone"] = plgpu.ClusterBarrier(collective_axes=("split",))
        options = {"cluster": (splits,), "cluster_names": ("split",)}
    if interpret:
        scratch["weights"] = tiled((ROWS, BLOCK), blocks.dtype)

    results = call(
        functools.partial(_kernel, tiles=tiles),
        name="decode_attention",
        grid=(rows, kv_heads),
        grid_names=("row", "head"),
        num_threads=2,
        out_type=out_type,
        scratch_types=scratch,
        interpret=interpret,
        **options,
    )(q, flat(k_pages), flat(v_pages), page_table, seq_lens, *given)
    return given[0][...] if given else results[0]
