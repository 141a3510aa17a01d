"""What the Triton kernels share: tiles, masked loads and stores of KV pages, and the softmax in base 2.

Triton's registers hold powers of two, memory does not: head dims and groups are stored as they
are, and lanes beyond them are masked when they are loaded and stored.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.pages import Pages, QuantizedPages, decoded, quantize
from pallas_kernels.tuning import Problem, power_of_two

with warnings.catch_warnings():
    # Deprecated from jax 0.11 on without a date of removal; the one way to GPUs older than Hopper.
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas import triton as plt

LOG2_E = math.log2(math.e)
FLOOR = -1e30  # finite, because the difference of two infinities is NaN

Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""Maximum [M] and sum [M] of the weights, accumulator [M, Dp]; all float32."""


def dtype_of_products(q: jax.Array, pages: Pages) -> Any:
    """What q, keys, weights and values are multiplied in: the pool's, and for 8-bit codes bfloat16 at least."""
    if not isinstance(pages, QuantizedPages):
        return pages.dtype
    return jnp.dtype(jnp.float32 if q.dtype == jnp.float32 else jnp.bfloat16)


def problem_of(kernel: str, q: jax.Array, pages: Pages, rows: int, longest: int) -> Problem:
    _, size, kv_heads, dim = pages.shape
    dtypes = str(dtype_of_products(q, pages)), str(jnp.dtype(pages.dtype))
    return Problem(kernel, q.shape[1] // kv_heads, kv_heads, dim, *dtypes, size, rows, longest)


def cdiv(a: jax.Array, b: jax.Array | int) -> jax.Array:
    """Ceiling of a / b for a >= 0, b > 0. `//` would spend instructions on negative numbers."""
    return div(a + (b - 1), b)


def div(a: jax.Array, b: jax.Array | int) -> jax.Array:
    return lax.div(a, jnp.full_like(a, b) if isinstance(b, int) else b)


def rem(a: jax.Array, b: int) -> jax.Array:
    return lax.rem(a, jnp.full_like(a, b))


def call(kernel: Any, *, name: str, num_warps: int, num_stages: int, interpret: bool, **options: Any) -> Any:
    """`pallas_call` on whole arrays. Without compiler_params the back end would depend on jax's version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        params = plt.CompilerParams(num_warps=num_warps, num_stages=num_stages)
    return pl.pallas_call(kernel, name=name, compiler_params=params, interpret=interpret, **options)


class Lines(NamedTuple):
    """Keys or values of a block: numbers [X, Dp]; their scales, float32 [X], if they are codes."""

    numbers: jax.Array
    scales: jax.Array | None


@dataclass(frozen=True)
class Scores:
    """How a query and a key make a weight: 2 ** (softcap(scale * q.k) * log2(e))."""

    scale: float
    softcap: float | None

    def __call__(self, q: jax.Array, k: Lines) -> jax.Array:
        """q [M, Dp], k [X, Dp] -> float32 [M, X], to be taken as exponents of 2."""
        products = dot(q, k.numbers, 1)
        if k.scales is not None:
            products *= k.scales[None, :]
        if self.softcap is None:
            return products * (self.scale * LOG2_E)
        return jnp.tanh(products * (self.scale / self.softcap)) * (self.softcap * LOG2_E)


def dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """The product of a's last axis with one of b, in float32; TF32 is no float32."""
    dims = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def no_weight(queries: int, lanes: int) -> Softmax:
    """The softmax over nothing."""
    zeros = jnp.zeros((queries,), jnp.float32)
    return zeros + FLOOR, zeros, jnp.zeros((queries, lanes), jnp.float32)


def attend(state: Softmax, q: jax.Array, k: Lines, v: Lines, seen: jax.Array | None, scores: Scores) -> Softmax:
    """Adds a block of keys and values; `seen` broadcasts to [M, X]. k and v are zeros where nobody sees them."""
    top, total, acc = state
    logits = scores(q, k)
    if seen is not None:
        logits = jnp.where(seen, logits, FLOOR)
    new = jnp.maximum(top, logits.max(axis=1))
    weights = jnp.exp2(logits - new[:, None])
    shrink = jnp.exp2(top - new)
    total = total * shrink + weights.sum(axis=1)
    if v.scales is not None:
        weights *= v.scales[None, :]
    return new, total, acc * shrink[:, None] + dot(weights.astype(v.numbers.dtype), v.numbers, 0)


@dataclass(frozen=True)
class Context:
    """The keys and values of one row and one KV head, by position.

    Attributes:
      k_ref, v_ref: [N, S, K, D], `Pages` of references; table_ref: int32 [rows, C].
      row, head: int32 scalars.
      page_offset: added to page ids.
      block: positions in a block; blocks begin at its multiples.
      dtype: of products, see `dtype_of_products`.
    """

    k_ref: Any
    v_ref: Any
    table_ref: Any
    row: jax.Array
    head: jax.Array
    page_offset: int
    block: int
    dtype: Any

    def load(
        self, index: jax.Array, lowest: jax.Array | None = None, end: jax.Array | None = None
    ) -> tuple[jax.Array, Lines, Lines]:
        """Block `index`: positions [X], k and v. What is outside [lowest, end) is not read, but zeros."""
        _, size, _, dim = self.k_ref.shape
        positions = index * self.block + lax.iota(jnp.int32, self.block)
        inside = None if lowest is None or end is None else (positions >= lowest) & (positions < end)
        if size % self.block == 0:  # one page holds the block
            page = self.table_ref[self.row, div(index * self.block, size)]
            pages = jnp.full((self.block,), page, jnp.int32)
        elif inside is None:
            pages = plt.load(self.table_ref.at[self.row, div(positions, size)])
        else:
            pages = plt.load(self.table_ref.at[self.row, div(positions, size)], mask=inside, other=0)
        pages, offsets = pages + self.page_offset, rem(positions, size)
        lanes = lax.iota(jnp.int32, power_of_two(dim))
        mask = (lanes < dim)[None, :] if inside is None else inside[:, None] & (lanes < dim)[None, :]

        def lines(ref: Any) -> Lines:
            codes_ref: Any = ref.codes if isinstance(ref, QuantizedPages) else ref
            where = (pages[:, None], offsets[:, None], self.head, lanes[None, :])
            numbers = plt.load(codes_ref.at[where], mask=mask, other=0)
            if not isinstance(ref, QuantizedPages):
                return Lines(numbers, None)
            other = None if inside is None else 0.0
            scales_ref: Any = ref.scales
            scales = plt.load(scales_ref.at[pages, self.head, offsets], mask=inside, other=other)
            return Lines(decoded(numbers, self.dtype), scales)

        return positions, lines(self.k_ref), lines(self.v_ref)


def store_line(ref: Any, page: jax.Array, offset: jax.Array, heads: jax.Array, x: jax.Array, mask: jax.Array) -> None:
    """Writes x [n, Dp], zeros where masked, of KV heads [n] to a position; in `Pages` of references."""
    dim, codes_ref = ref.shape[3], ref
    lanes = lax.iota(jnp.int32, power_of_two(dim))[None, :]
    if isinstance(ref, QuantizedPages):
        scales_ref: Any = ref.scales
        codes_ref = ref.codes
        x, scales = quantize(x, ref.dtype)
        plt.store(scales_ref.at[page, heads, offset], scales, mask=mask)
    where = (page, offset, heads[:, None], lanes)
    plt.store(codes_ref.at[where], x.astype(codes_ref.dtype), mask=mask[:, None] & (lanes < dim))
