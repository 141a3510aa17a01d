"""What the Mosaic kernels share: a context as blocks that stream through shared memory, and the softmax over them.

The warpgroups of a program have different work. The last one loads: TMA copies a block of keys and one of values,
piece by piece where pages are smaller, into the next free of a few buffers. The others compute: scores and weighted
values are wgmma products of 64 rows, which are queries. Barriers say what has arrived and what is free again.

TMA masks nothing. Where a block reaches beyond what its row sees, its pieces come from a page that the row does see,
so no id and no memory outside the row's own pages matters; and values beyond, which may be NaN, are blanked in shared
memory before they meet their weights of zero.

Sources: warpgroups that load and that compute, FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608); softmax in
base 2 over blocks, FlashAttention-2 (Dao 2023, arXiv:2307.08691).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # both have names that older versions of jax lack
mgpu: Any = utils
LOG2_E = math.log2(math.e)
FLOOR = -1e30  # finite, because the difference of two infinities is NaN
ROWS = 64  # of a wgmma, so of a warpgroup

WGMMA = plgpu.Layout.WGMMA
PER_ROW = WGMMA.reduce(1)

Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""Maximum [64] and sum [64] of the weights, accumulator [64, D]; all float32."""


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as TMA writes and wgmma reads it: tiles of 8 rows, swizzled as wide as the last axis allows."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = next(width for width in (128, 64, 32) if shape[-1] * itemsize % width == 0)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def call(kernel: Any, *, name: str, interpret: bool, **options: Any) -> Any:
    """`plgpu.kernel`; interpreted, it watches for races."""
    return plgpu.kernel(
        kernel,
        kernel_name=name,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True, inline_mgpu="ignore") if interpret else None,
        **options,
    )


@dataclass(frozen=True)
class Scores:
    """How the product of a query and a key makes an exponent of 2: softcap(scale * q.k) * log2(e)."""

    scale: float
    softcap: float | None

    def __call__(self, products: jax.Array) -> jax.Array:
        if self.softcap is None:
            return products * (self.scale * LOG2_E)
        # tanh(x) by the power of 2 that is exact enough; the GPU's own tanh has 11 bits.
        power = jnp.exp2(products * (2 * LOG2_E * self.scale / self.softcap))
        return (1.0 - 2.0 / (power + 1.0)) * (self.softcap * LOG2_E)


@dataclass(frozen=True)
class Blocks:
    """How a context is cut into blocks, and what of shared memory they take.

    Attributes:
      page_size, dim, dtype: of the pools; page_offset: added to page ids.
      size: positions in a block; blocks begin at its multiples.
      stages: blocks in shared memory at a time.
      consumers: warpgroups that compute.
    """

    page_size: int
    dim: int
    dtype: Any
    page_offset: int
    size: int
    stages: int
    consumers: int

    @property
    def piece(self) -> int:
        """Positions that one copy brings: as many as a block and a page have in common."""
        return math.gcd(self.page_size, self.size)

    @property
    def pieces(self) -> int:
        return self.size // self.piece

    @property
    def shapes(self) -> tuple[Any, Any]:
        block = tiled((self.stages, self.size, self.dim), self.dtype)
        return block, block

    @property
    def barriers(self) -> dict[str, Any]:
        arrived = plgpu.Barrier(num_arrivals=self.pieces, num_barriers=self.stages)
        return {
            "keys_here": arrived,
            "values_here": arrived,
            "free": plgpu.Barrier(num_arrivals=self.consumers, num_barriers=self.stages),
            "all_consumers": plgpu.Barrier(num_arrivals=self.consumers),
        }


@dataclass(frozen=True)
class Stream:
    """A stretch of one row's context, on its way through shared memory.

    Attributes:
      keys, values: the buffers, [stages, size, D]; the barriers are those of `Blocks`.
      first, count: the first block and how many.
      lowest, length: what somebody sees lies in [lowest, length).
    """

    blocks: Blocks
    keys: Any
    values: Any
    keys_here: Any
    values_here: Any
    free: Any
    all_consumers: Any
    first: jax.Array
    count: jax.Array
    lowest: jax.Array
    length: jax.Array

    def start(self, index: jax.Array) -> jax.Array:
        """The first position of a block."""
        return (self.first + index) * self.blocks.size

    def is_ragged(self, index: jax.Array) -> jax.Array:
        """Whether a block reaches beyond what is seen."""
        start = self.start(index)
        return (start < self.lowest) | (start + self.blocks.size > self.length)

    def slot(self, index: jax.Array) -> jax.Array:
        return lax.rem(index, jnp.int32(self.blocks.stages))

    def load(self, k_ref: Any, v_ref: Any, table_ref: Any, row: jax.Array, head: jax.Array) -> None:
        """What the loading warpgroup does; k_ref and v_ref are pools of slots, [N*S, K, D]."""
        blocks, size = self.blocks, jnp.int32(self.blocks.page_size)
        pages = lax.div(self.lowest, size), lax.div(jnp.maximum(self.length - 1, 0), size)

        def bring(index: jax.Array, slot: jax.Array, piece: jax.Array, _: None) -> None:
            offset = piece * blocks.piece
            position = self.start(index) + offset
            page = table_ref[row, jnp.clip(lax.div(position, size), *pages)] + blocks.page_offset
            here, there = pl.ds(page * size + lax.rem(position, size), blocks.piece), pl.ds(offset, blocks.piece)
            plgpu.copy_gmem_to_smem(k_ref.at[here, head], self.keys.at[slot, there], self.keys_here.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[here, head], self.values.at[slot, there], self.values_here.at[slot])

        def fill(index: jax.Array, _: None) -> None:
            slot = self.slot(index)
            pl.when(index >= blocks.stages)(lambda: plgpu.barrier_wait(self.free.at[slot]))
            lax.fori_loop(0, blocks.pieces, functools.partial(bring, index, slot), None)

        def drain(index: jax.Array, _: None) -> None:
            plgpu.barrier_wait(self.free.at[self.slot(index)])

        lax.fori_loop(0, self.count, fill, None)
        lax.fori_loop(jnp.maximum(self.count - blocks.stages, 0), self.count, drain, None)

    def blank(self, index: jax.Array, consumer: jax.Array | int) -> None:
        """Makes zeros of the values of a block that nobody sees; every consumer calls it."""
        start, values = self.start(index), self.values.at[self.slot(index)]

        def write() -> None:
            width = math.gcd(self.blocks.dim, 64)  # little at a time: the accumulator is in registers as well
            for first in range(0, self.blocks.size, ROWS):
                position = plgpu.broadcasted_iota(jnp.int32, (ROWS, width), 0, layout=WGMMA) + start + first
                seen = (position >= self.lowest) & (position < self.length)
                for column in range(0, self.blocks.dim, width):
                    part = values.at[pl.ds(first, ROWS), pl.ds(column, width)]
                    x = plgpu.load(part, layout=WGMMA, optimized=False)
                    part[...] = jnp.where(seen, x, jnp.zeros((), part.dtype))
            plgpu.commit_smem()

        @pl.when(self.is_ragged(index))
        def _() -> None:
            if self.blocks.consumers == 1:
                write()
            else:
                pl.when(consumer == 0)(write)
                self.meet()

    def meet(self) -> None:
        """All consumers wait for each other."""
        plgpu.barrier_arrive(self.all_consumers)
        plgpu.barrier_wait(self.all_consumers)


@plgpu.inline_mgpu()
def fence(_: Any) -> None:
    """Orders memory between the programs of a cluster; its barriers order what is in shared memory only."""
    mgpu.inline_ptx("fence.acq_rel.cluster;", has_side_effects=True)


def take(rows: Any, q: Any) -> None:
    """Queries, as they came, into the tiles that wgmma reads. TMA would fill tiles from multiples of 8 rows only."""
    q[...] = plgpu.load(rows, layout=WGMMA, optimized=False).astype(q.dtype)
    plgpu.commit_smem()


def product(a: Any, b: Any) -> jax.Array:
    """a [64, X] by b [X, Y], both in shared memory."""

    def run(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def no_weight(dim: int) -> Softmax:
    """The softmax over nothing."""
    rows = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW)
    return rows + FLOOR, rows, plgpu.layout_cast(jnp.zeros((ROWS, dim), jnp.float32), WGMMA)


def along_rows(x: jax.Array, width: int) -> jax.Array:
    """[64] -> [64, width]."""
    return lax.broadcast_in_dim(x, (ROWS, width), (0,))


def attend(
    stream: Stream,
    index: jax.Array,
    state: Softmax,
    q: Any,
    scores: Scores,
    seen: Callable[[jax.Array], jax.Array],
    *,
    whole: jax.Array,
    consumer: jax.Array | int,
    weights_ref: Any,
) -> Softmax:
    """Adds a block of the stream.

    Args:
      q: [64, D] in shared memory.
      seen: from positions [64, X] to which of them a query sees.
      whole: every query sees the whole block.
      weights_ref: None where they go to wgmma in registers, which can not be interpreted; then [64, X] in
        shared memory.
    """
    top, total, acc = state
    slot, blocks = stream.slot(index), stream.blocks
    plgpu.barrier_wait(stream.keys_here.at[slot])
    logits = scores(product(q, stream.keys.at[slot].transpose((1, 0))))

    def masked() -> jax.Array:
        position = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=WGMMA) + stream.start(index)
        return jnp.where(seen(position), logits, FLOOR)

    logits = lax.cond(whole, lambda: logits, masked)
    new = jnp.maximum(top, logits.max(axis=1))
    weights = jnp.exp2(logits - along_rows(new, blocks.size))
    shrink = jnp.exp2(top - new)
    total = total * shrink + weights.sum(axis=1)
    acc = acc * along_rows(shrink, blocks.dim)
    weights = weights.astype(blocks.dtype)

    plgpu.barrier_wait(stream.values_here.at[slot])
    stream.blank(index, consumer)
    values = stream.values.at[slot]
    if weights_ref is None:
        acc = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, values))(plgpu.ACC.init(acc))
    else:
        weights_ref[...] = weights
        plgpu.commit_smem()
        acc = acc + product(weights_ref, values)
    plgpu.barrier_arrive(stream.free.at[slot])
    return new, total, acc


def normalized(state: Softmax) -> jax.Array:
    """[64, D]: weighted means; zeros where there was no weight."""
    _, total, acc = state
    return acc / along_rows(jnp.where(total > 0, total, 1.0), acc.shape[1])
