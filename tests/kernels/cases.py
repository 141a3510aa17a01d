"""Pools, page tables and slots that the kernel tests share."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.shapes import Heads

OUT_OF_RANGE = 2**30


@dataclass(frozen=True)
class Case:
    """Pools of `layers` layers with every row's pages scattered in permuted order."""

    heads: Heads
    lengths: tuple[int, ...]
    page_size: int
    pages: int  # P, of one layer
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: jax.Array
    page_offset: int

    @property
    def seq_lens(self) -> jax.Array:
        return jnp.asarray(self.lengths, jnp.int32)

    @property
    def scale(self) -> float:
        return self.heads.dim**-0.5

    def queries(self, count: int, seed: int = 1, dtype: object = None) -> jax.Array:
        shape = (count, self.heads.heads, self.heads.dim)
        values = np.random.default_rng(seed).standard_normal(shape, np.float32)
        return jnp.asarray(values.astype(dtype or self.k_pages.dtype))

    def live(self, lowest: list[int]) -> np.ndarray:
        """bool [N, S]: the positions that some row of this layer may read, from its `lowest` on."""
        table, live = np.asarray(self.page_table), np.zeros(self.k_pages.shape[:2], bool)
        for row, length in enumerate(self.lengths):
            x = np.arange(lowest[row], length)
            live[table[row, x // self.page_size] + self.page_offset, x % self.page_size] = True
        return live

    def with_stale(self, value: float, lowest: list[int] | None = None) -> "Case":
        """The same case with `value` in every position that no row may read."""
        stale = ~self.live(lowest or [0] * len(self.lengths))
        k, v = (np.array(pool) for pool in (self.k_pages, self.v_pages))
        k[stale], v[stale] = value, value
        return replace(self, k_pages=jnp.asarray(k), v_pages=jnp.asarray(v))

    def outside_window(self, window: int, chunks: tuple[int, ...] | None = None) -> "Case":
        """NaN before the window of each chunk's first query (decode: of the last), and page ids of anything there."""
        chunks = chunks or (1,) * len(self.lengths)
        lowest = [max(length - chunk - window + 1, 0) for length, chunk in zip(self.lengths, chunks, strict=True)]
        table = np.array(self.page_table)
        anything = np.resize([OUT_OF_RANGE, self.pages, -1, 0, -OUT_OF_RANGE], table.shape[1])
        for row, position in enumerate(lowest):
            freed = position // self.page_size
            table[row, :freed] = anything[:freed]
        return replace(self.with_stale(np.nan, lowest), page_table=jnp.asarray(table))


def make(
    heads: Heads,
    lengths: tuple[int, ...],
    *,
    page_size: int = 16,
    dtype: jnp.dtype = jnp.float32,
    layers: int = 2,
    layer: int = 1,
    spare: int = 2,
) -> Case:
    rng = np.random.default_rng(0)
    counts = [-(-n // page_size) for n in lengths]
    width = max(counts) + spare
    pages = sum(counts) + 3
    order, table, at = rng.permutation(pages), np.full((len(lengths), width), OUT_OF_RANGE), 0
    for row, count in enumerate(counts):
        table[row, :count] = order[at : at + count]
        table[row, count : count + 1] = order[0]  # a valid page that belongs to someone else
        at += count
    shape = (layers * pages, page_size, heads.kv_heads, heads.dim)
    k, v = (jnp.asarray(rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))) for _ in range(2))
    return Case(
        heads, tuple(lengths), page_size, pages, k, v,
        jnp.asarray(table, jnp.int32), layer * pages,
    )  # fmt: skip


TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def assert_close(got: jax.Array, want: jax.Array) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    tolerance = TOLERANCE[str(want.dtype)]
    got, want = (np.asarray(x).astype(np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


ROW_TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


def assert_rows_close(got: jax.Array, want: jax.Array) -> None:
    """Every vector along the last axis is off by no more than a share of its own largest number."""
    assert got.dtype == want.dtype and got.shape == want.shape
    tolerance = ROW_TOLERANCE[str(want.dtype)]
    got, want = (np.asarray(x).astype(np.float32) for x in (got, want))
    off, size = np.abs(got - want).max(axis=-1), np.abs(want).max(axis=-1)
    assert (off <= tolerance * size).all(), f"off by {np.nanmax(off / np.maximum(size, 1e-30)):.1e} of a row's largest"
