"""decode_attention: one query per row, its context split among programs (split-K).

    grid (B, K, splits)      a program: the G queries of a KV head, some blocks of their context

A row's blocks are divided evenly among as many programs as pay off; the others return at once. One program
stores its result directly. Several store theirs with the logarithm of its sum of weights (LSE), and the one that
arrives last, by an atomic counter, adds them up in the order of the context: so there is no second kernel, and the
result does not depend on who was last. It leaves the counter at 0 for the next layer.

Sources: split-K with an LSE combine, Flash-Decoding (Dao et al. 2023); the last-arriving program that finishes
the sum, the threadFenceReduction sample of CUDA and stream-K (Osama et al. 2023, arXiv:2301.03598).
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.pages import Pages
from pallas_kernels.triton.common import (
    FLOOR,
    LOG2_E,
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
)
from pallas_kernels.tuning import SPLIT_POSITIONS, Tiling, power_of_two, tiling

COMBINED_TOGETHER = 8192  # numbers that the last program adds up at once


@dataclass(frozen=True)
class Tiles:
    """Everything about a launch that is known before it is compiled."""

    group: int
    dim: int
    queries: int
    block: int
    dtype: Any
    splits: int
    page_offset: int
    window: int | None
    scores: Scores
    interpret: bool
    first: int  # of q's tokens, the first row's

    def token(self, row: jax.Array) -> jax.Array:
        """Where a row's query and result are."""
        return row + self.first

    @property
    def lanes(self) -> int:
        return power_of_two(self.dim)


def _kernel(q_ref, k_ref, v_ref, table_ref, lens_ref, *refs: Any, tiles: Tiles) -> None:
    row, head, split = (pl.program_id(axis) for axis in range(3))
    length = lens_ref[row]
    lowest = jnp.maximum(length - (length if tiles.window is None else tiles.window), 0)
    first = div(lowest, tiles.block)
    blocks = cdiv(length, tiles.block) - first
    least = max(1, SPLIT_POSITIONS // tiles.block) if tiles.splits > 1 else 1
    per_split = jnp.maximum(cdiv(blocks, tiles.splits), least)
    active = cdiv(blocks, per_split)  # 0 for a row of length 0

    group = lax.iota(jnp.int32, tiles.queries)
    lanes = lax.iota(jnp.int32, tiles.lanes)
    heads = head * tiles.group + group
    real = (group < tiles.group)[:, None] & (lanes < tiles.dim)[None, :]
    where = (tiles.token(row), heads[:, None], lanes[None, :])
    q = plt.load(q_ref.at[where], mask=real, other=0.0).astype(tiles.dtype)
    context = Context(k_ref, v_ref, table_ref, row, head, tiles.page_offset, tiles.block, tiles.dtype)

    def step(index: jax.Array, state: Softmax) -> Softmax:
        positions, k, v = context.load(index, lowest, length)
        seen = (positions >= lowest) & (positions < length)
        return attend(state, q, k, v, seen[None, :], tiles.scores)

    begin = first + split * per_split
    end = jnp.minimum(begin + per_split, first + blocks)
    state = lax.fori_loop(begin, end, step, no_weight(len(group), len(lanes)))

    # Before the results are the arrays that some of them are written into.
    out_ref, *shared_refs = refs[-1:] if tiles.splits == 1 else refs[-4:]

    @pl.when((active <= 1) & (split == 0))
    def _() -> None:
        _, total, acc = state
        result = acc / jnp.where(total > 0, total, 1.0)[:, None]
        plt.store(out_ref.at[where], result.astype(out_ref.dtype), mask=real)

    if tiles.splits > 1:

        @pl.when((active > 1) & (split < active))
        def _() -> None:
            _combine(state, row, head, split, active, out_ref, *shared_refs, tiles=tiles)


def _combine(
    state: Softmax,
    row: jax.Array,
    head: jax.Array,
    split: jax.Array,
    active: jax.Array,
    out_ref: Any,
    partial_ref: Any,
    lse_ref: Any,
    arrivals_ref: Any,
    *,
    tiles: Tiles,
) -> None:
    """Stores a split's part; the last to arrive adds all of them up."""
    top, total, acc = state
    group = lax.iota(jnp.int32, len(top))
    lanes = lax.iota(jnp.int32, tiles.lanes)
    real = (group < tiles.group)[:, None] & (lanes < tiles.dim)[None, :]
    where = (row, head, split, group[:, None], lanes[None, :])
    plt.store(partial_ref.at[where], acc / total[:, None], mask=real)
    plt.store(lse_ref.at[row, head, split, group], top + jnp.log(total) * LOG2_E, mask=group < tiles.group)
    if not tiles.interpret:
        plt.debug_barrier()  # all threads have stored before one of them, which releases to the GPU, says so
    arrived = plt.atomic_add(arrivals_ref, (row, head), jnp.int32(1))

    @pl.when(arrived == active - 1)
    def _() -> None:
        arrivals_ref[row, head] = jnp.int32(0)
        group = lax.iota(jnp.int32, power_of_two(tiles.group))
        splits = lax.iota(jnp.int32, power_of_two(tiles.splits))

        def lses(splits: jax.Array) -> jax.Array:
            mask = (splits < active)[:, None] & (group < tiles.group)[None, :]
            return plt.load(lse_ref.at[row, head, splits[:, None], group[None, :]], mask=mask, other=FLOOR)

        top = lses(splits).max(axis=0)
        width = max(1, min(COMBINED_TOGETHER // (len(group) * len(lanes)), len(splits)))

        def add(index: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            some = index * width + lax.iota(jnp.int32, width)
            weights = jnp.exp2(lses(some) - top[None, :])
            mask = (some < active)[:, None, None] & (group < tiles.group)[None, :, None]
            mask &= (lanes < tiles.dim)[None, None, :]
            where = (row, head, some[:, None, None], group[None, :, None], lanes[None, None, :])
            part = plt.load(partial_ref.at[where], mask=mask, other=0.0)
            return sums[0] + weights.sum(axis=0), sums[1] + (weights[:, :, None] * part).sum(axis=0)

        zeros = jnp.zeros((len(group),), jnp.float32), jnp.zeros((len(group), len(lanes)), jnp.float32)
        total, acc = lax.fori_loop(0, cdiv(active, width), add, zeros)
        heads = head * tiles.group + group
        real = (group < tiles.group)[:, None] & (lanes < tiles.dim)[None, :]
        result = (acc / total[:, None]).astype(out_ref.dtype)
        plt.store(out_ref.at[tiles.token(row), heads[:, None], lanes[None, :]], result, mask=real)


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
    interpret: bool = False,
    tuned: Tiling | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.decode_attention`; arrivals is int32 [B, K] zeros, and comes back as zeros."""
    (rows,), (tokens, heads, dim) = seq_lens.shape, q.shape
    _, size, kv_heads, _ = k_pages.shape
    group = heads // kv_heads
    capacity = page_table.shape[1] * size
    problem = problem_of("decode_attention", q, k_pages, rows, capacity if window is None else min(capacity, window))
    tuned = tuned or tiling(problem)
    splits, dtype = tuned.splits, jnp.dtype(problem.dtype)
    scores, first = Scores(scale, softcap), tokens - rows
    tiles = Tiles(group, dim, tuned.queries, tuned.block, dtype, splits, page_offset, window, scores, interpret, first)
    options: dict[str, Any] = {
        "name": "decode_attention",
        "grid": (rows, kv_heads, splits),
        "num_warps": tuned.num_warps,
        "num_stages": tuned.num_stages,
        "interpret": interpret,
    }
    arguments = (q, k_pages, v_pages, page_table, seq_lens)
    shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    in_place = {} if out is None else {0: out}  # by index of the result
    if splits > 1:
        shapes += [
            jax.ShapeDtypeStruct((rows, kv_heads, splits, group, dim), jnp.float32),
            jax.ShapeDtypeStruct((rows, kv_heads, splits, group), jnp.float32),
            jax.ShapeDtypeStruct(arrivals.shape, jnp.int32),
        ]
        in_place[3] = arrivals
    count = len(jax.tree.leaves(arguments))
    aliases = {count + index: result for index, result in enumerate(in_place)}
    kernel = functools.partial(_kernel, tiles=tiles)
    results = call(kernel, out_shape=shapes, input_output_aliases=aliases, **options)(*arguments, *in_place.values())
    return results[0], arrivals if splits == 1 else results[3]
