"""A context as blocks that stream through shared memory.

The last warpgroup of a program loads: TMA copies a block of keys and one of values, piece by piece where pages are
smaller, into the next free of a few buffers. Barriers say what has arrived and what is free again.

TMA masks nothing. Where a block reaches beyond what its row sees, its pieces come from a page that the row does see,
so no id and no memory outside the row's own pages matters; and values beyond, which may be NaN, are blanked in shared
memory before they meet their weights of zero.

Where pools are codes of 8 bits, TMA brings codes and scales to buffers of their own, and the loading warpgroup makes
bfloat16 of the codes, which holds them exactly: a wgmma has operands of one dtype. Scales stay beside them.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.pages import Pages, QuantizedPages, decoded

plgpu: Any = mosaic_gpu  # it has names that older versions of jax lack
ROWS = 64  # of a wgmma, so of a warpgroup

WGMMA, CODES = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_8BIT
PER_ROW, PER_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
WIDE = 64  # columns of a tile of shared memory, at most
NARROWEST = 32  # bytes of a swizzle
LINE = 32  # float32 numbers from one place that TMA can write to, to the next
STAGES_OF_CODES = {64: (2, 8), 128: (2, 4), 256: (1, 2)}
"""Blocks of 64 in shared memory at a time, up to a head dim: of numbers, and of codes."""


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as TMA writes and wgmma reads it: tiles of 8 rows, swizzled as wide as the last axis allows."""
    width = math.gcd(shape[-1], WIDE)
    swizzle = width * jnp.dtype(dtype).itemsize
    swizzled = () if swizzle < NARROWEST else (plgpu.SwizzleTransform(swizzle),)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), *swizzled))


def flat(pages: Pages) -> Pages:
    """Slots of a pool side by side: numbers or codes [N*S, K, D]. Scales stay [N, K, S]."""
    size, *rest = pages.shape[0] * pages.shape[1], *pages.shape[2:]
    if isinstance(pages, QuantizedPages):
        return QuantizedPages(pages.codes.reshape(size, *rest), pages.scales)
    return pages.reshape(size, *rest)


class Buffers(NamedTuple):
    """Where blocks of keys, or of values, are in shared memory.

    numbers: [stages, size, D], as wgmma reads them.
    scales: float32 [stages, size], theirs; this and what follows for pools of codes only.
    codes: [landings, size, D], as they come.
    code_scales: float32 [landings, pieces, at least `piece`], as they come.
    """

    numbers: Any
    scales: Any = None
    codes: Any = None
    code_scales: Any = None


@dataclass(frozen=True)
class Blocks:
    """How a context is cut into blocks, and what of shared memory they take.

    Attributes:
      page_size, dim: of the pools; page_offset: added to page ids.
      dtype: of products, which is that of the pools or, of codes, bfloat16.
      codes: dtype of codes, int8 or uint8 as in `QuantizedPages`; None of other pools.
      size: positions in a block; blocks begin at its multiples.
      stages: blocks in shared memory at a time; landings: of codes, beside these.
      consumers: warpgroups that compute.
    """

    page_size: int
    dim: int
    dtype: Any
    codes: Any
    page_offset: int
    size: int
    stages: int
    landings: int
    consumers: int

    @classmethod
    def of(cls, pages: Pages, page_offset: int, size: int, stages: int, consumers: int) -> "Blocks":
        """Of a pool; of one of codes, stages are those of `STAGES_OF_CODES`."""
        _, page_size, _, dim = pages.shape
        if not isinstance(pages, QuantizedPages):
            return cls(page_size, dim, pages.dtype, None, page_offset, size, stages, 0, consumers)
        stages, landings = next(both for most, both in STAGES_OF_CODES.items() if dim <= most)
        dtype = jnp.dtype(jnp.bfloat16)
        return cls(page_size, dim, dtype, pages.codes.dtype, page_offset, size, stages, landings, consumers)

    @property
    def piece(self) -> int:
        """Positions that one copy brings: as many as a block and a page have in common."""
        return math.gcd(self.page_size, self.size)

    @property
    def pieces(self) -> int:
        return self.size // self.piece

    @property
    def shapes(self) -> tuple[Buffers, Buffers]:
        buffers = Buffers(tiled((self.stages, self.size, self.dim), self.dtype))
        if self.codes is not None:
            scales = plgpu.SMEM((self.stages, self.size), jnp.float32)
            codes = tiled((self.landings, self.size, self.dim), self.codes)
            code_scales = plgpu.SMEM((self.landings, self.pieces, max(self.piece, LINE)), jnp.float32)
            buffers = Buffers(buffers.numbers, scales, codes, code_scales)
        return buffers, buffers

    @property
    def barriers(self) -> dict[str, Any]:
        coded = self.codes is not None
        arrived = plgpu.Barrier(num_arrivals=1 if coded else self.pieces, num_barriers=self.stages)
        barriers: dict[str, Any] = {
            "keys_here": arrived,
            "values_here": arrived,
            "free": plgpu.Barrier(num_arrivals=self.consumers, num_barriers=self.stages),
            "all_consumers": plgpu.Barrier(num_arrivals=self.consumers),
        }
        if coded:  # codes and scales, of keys and of values
            barriers["codes_here"] = plgpu.Barrier(num_arrivals=4 * self.pieces, num_barriers=self.landings)
        return barriers


@dataclass(frozen=True)
class Stream:
    """A stretch of one row's context, on its way through shared memory.

    Attributes:
      keys, values: in shared memory; the barriers are those of `Blocks`.
      first, count: the first block and how many.
      lowest, length: what somebody sees lies in [lowest, length).
    """

    blocks: Blocks
    keys: Buffers
    values: Buffers
    keys_here: Any
    values_here: Any
    free: Any
    all_consumers: Any
    first: jax.Array
    count: jax.Array
    lowest: jax.Array
    length: jax.Array
    codes_here: Any = None

    def start(self, index: jax.Array) -> jax.Array:
        """The first position of a block."""
        return (self.first + index) * self.blocks.size

    def is_ragged(self, index: jax.Array) -> jax.Array:
        """Whether a block reaches beyond what is seen."""
        start = self.start(index)
        return (start < self.lowest) | (start + self.blocks.size > self.length)

    def slot(self, index: jax.Array) -> jax.Array:
        return lax.rem(index, jnp.int32(self.blocks.stages))

    def landing(self, index: jax.Array) -> jax.Array:
        return lax.rem(index, jnp.int32(self.blocks.landings))

    def seen(self, position: jax.Array) -> jax.Array:
        """Whether somebody sees a position."""
        return (position >= self.lowest) & (position < self.length)

    def load(self, k_pool: Any, v_pool: Any, table_ref: Any, row: jax.Array, head: jax.Array) -> None:
        """What the loading warpgroup does; the pools are references, as `flat` leaves them."""
        blocks, size = self.blocks, jnp.int32(self.blocks.page_size)
        pages = lax.div(self.lowest, size), lax.div(jnp.maximum(self.length - 1, 0), size)
        sides = (k_pool, self.keys, self.keys_here), (v_pool, self.values, self.values_here)

        def bring(index: jax.Array, piece: jax.Array, _: None = None) -> None:
            offset = piece * blocks.piece
            position = self.start(index) + offset
            page = table_ref[row, jnp.clip(lax.div(position, size), *pages)] + blocks.page_offset
            at = lax.rem(position, size)
            here, there = pl.ds(page * size + at, blocks.piece), pl.ds(offset, blocks.piece)
            for pool, buffers, arrived in sides:
                if blocks.codes is None:
                    slot = self.slot(index)
                    plgpu.copy_gmem_to_smem(pool.at[here, head], buffers.numbers.at[slot, there], arrived.at[slot])
                    continue
                landing = self.landing(index)
                landed, scales = self.codes_here.at[landing], pool.scales.at[page, head, pl.ds(at, blocks.piece)]
                line = buffers.code_scales.at[landing, piece, pl.ds(0, blocks.piece)]
                plgpu.copy_gmem_to_smem(pool.codes.at[here, head], buffers.codes.at[landing, there], landed)
                plgpu.copy_gmem_to_smem(scales, line, landed)

        def bring_all(index: jax.Array, _: None = None) -> None:
            lax.fori_loop(0, blocks.pieces, functools.partial(bring, index), None)

        def fill(index: jax.Array, _: None) -> None:
            if blocks.codes is not None:
                plgpu.barrier_wait(self.codes_here.at[self.landing(index)])
            slot = self.slot(index)
            pl.when(index >= blocks.stages)(lambda: plgpu.barrier_wait(self.free.at[slot]))
            if blocks.codes is None:
                bring_all(index)
                return
            self.make_numbers(index)
            pl.when(index + blocks.landings < self.count)(lambda: bring_all(index + blocks.landings))

        def drain(index: jax.Array, _: None) -> None:
            plgpu.barrier_wait(self.free.at[self.slot(index)])

        if blocks.codes is not None:
            lax.fori_loop(0, jnp.minimum(self.count, blocks.landings), bring_all, None)
        lax.fori_loop(0, self.count, fill, None)
        lax.fori_loop(jnp.maximum(self.count - blocks.stages, 0), self.count, drain, None)

    def make_numbers(self, index: jax.Array) -> None:
        """Makes bfloat16 of a block of codes that has landed. Its scales become zeros where nobody sees."""
        blocks, slot, landing = self.blocks, self.slot(index), self.landing(index)
        width = math.gcd(blocks.dim, WIDE)

        def line_up(piece: jax.Array, _: None) -> None:
            here = pl.ds(piece * blocks.piece, blocks.piece)
            position = plgpu.broadcasted_iota(jnp.int32, (blocks.piece,), 0, layout=PER_COLUMN)
            seen = self.seen(position + self.start(index) + piece * blocks.piece)
            for buffers in (self.keys, self.values):
                line = buffers.code_scales.at[landing, piece, pl.ds(0, blocks.piece)]
                scales = plgpu.load(line, layout=PER_COLUMN, optimized=False)
                buffers.scales.at[slot, here][...] = jnp.where(seen, scales, 0.0)

        lax.fori_loop(0, blocks.pieces, line_up, None)
        for buffers, arrived in ((self.keys, self.keys_here), (self.values, self.values_here)):
            for row, column in itertools.product(range(0, blocks.size, ROWS), range(0, blocks.dim, width)):
                part = pl.ds(row, ROWS), pl.ds(column, width)
                codes = plgpu.load(buffers.codes.at[landing, *part], layout=CODES, optimized=False)
                if blocks.codes == jnp.uint8:  # a GPU makes nothing but float16 of float8
                    codes = decoded(codes, jnp.float16)
                buffers.numbers.at[slot, *part][...] = codes.astype(blocks.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(arrived.at[slot])

    def blank(self, index: jax.Array, consumer: jax.Array | int) -> None:
        """Makes zeros of the values of a block that nobody sees; every consumer calls it."""
        start, values = self.start(index), self.values.numbers.at[self.slot(index)]

        def write() -> None:
            width = math.gcd(self.blocks.dim, WIDE)  # little at a time: the accumulator is in registers as well
            for first in range(0, self.blocks.size, ROWS):
                position = plgpu.broadcasted_iota(jnp.int32, (ROWS, width), 0, layout=WGMMA) + start + first
                seen = self.seen(position)
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
