"""What a pool of KV pages is: a plain array, or codes of 8 bits with a scale for each position and KV head.

A position's scale is its own: it is written once, with the position, from the D numbers of one KV head, so it depends
on no neighbour, on no chunk and on no calibration, and what is written never changes. Symmetric and linear for int8;
for float8 (e4m3, Micikevicius et al. 2022, arXiv:2209.05433) the scale puts the largest number at the largest code.
Per-token scales of the KV cache: KIVI (Liu et al. 2024, arXiv:2402.02750) for values, here for keys too.

Kernels multiply scores and weights by the scales, not keys and values: codes are exact in bfloat16.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
LARGEST = {jnp.dtype(jnp.int8): 127.0, FLOAT8: 448.0}
"""The largest code of each dtype."""

QUANTIZED = tuple(str(dtype) for dtype in LARGEST)

_SMALLEST = 1e-30  # numbers below are written as 0; their scale would be no normal float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedPages:
    """A pool whose numbers are `code * scale`.

    Attributes:
      codes: [N, S, K, D], int8, or uint8 for the bits of float8 e4m3: XLA's CPU back end would widen an array of float8
        to write into it, and so copy the pool.
      scales: float32 [N, K, S], never negative; NaN where a number was NaN or infinite. A page's scales of one KV head
        lie together, because that is what a program reads.
    """

    codes: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, S, K, D], as of a plain pool."""
        return self.codes.shape

    @property
    def dtype(self) -> Any:
        """int8 or float8_e4m3fn."""
        return FLOAT8 if self.codes.dtype == jnp.uint8 else jnp.dtype(self.codes.dtype)


Pages = jax.Array | QuantizedPages
"""[N, S, K, D] numbers."""


def abstract(shape: tuple[int, ...], dtype: Any) -> Any:
    """`Pages` of `jax.ShapeDtypeStruct`, [N, S, K, D] in a float dtype, int8 or float8_e4m3fn."""
    dtype = jnp.dtype(dtype)
    if dtype not in LARGEST:
        return jax.ShapeDtypeStruct(shape, dtype)
    pages, size, kv_heads, _ = shape
    codes = jax.ShapeDtypeStruct(shape, jnp.uint8 if dtype == FLOAT8 else dtype)
    return QuantizedPages(codes, jax.ShapeDtypeStruct((pages, kv_heads, size), jnp.float32))  # type: ignore[arg-type]


def is_addressable(pages: Any) -> bool:
    """Whether Triton kernels reach all of a pool, abstract or not.

    Pallas counts offsets in elements, with a sign, and takes 64 bits for them from an array of more than 2**32 bytes
    on. So those of one byte, from 2**31 of them to 2**32, would have offsets that are negative.
    """
    return all(leaf.size <= 2**31 or leaf.size * leaf.dtype.itemsize > 2**32 for leaf in jax.tree.leaves(pages))


def num_bytes(pages: Any) -> int:
    """Of a tree of pools, abstract or not."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """x [..., D] → codes [..., D] as in `QuantizedPages`, scales float32 [...]. Runs inside of kernels too.

    The nearest code, so a number is off by at most `scale / 2` in int8, and in float8 by 1/16 of itself or, where it
    is small, by `scale * 2**-10`. Numbers beyond the largest code saturate; a number that is NaN or infinite makes the
    scale NaN, and with it all that is computed from these codes.
    """
    dtype, x = jnp.dtype(dtype), x.astype(jnp.float32)
    size = jnp.abs(x)
    # A GPU's maximum would drop NaN.
    largest = jnp.where(size < jnp.inf, size, jnp.inf).max(axis=-1)
    limit = LARGEST[dtype]
    scales = jnp.where(largest < jnp.inf, jnp.maximum(largest, _SMALLEST) / limit, jnp.nan)
    scaled = jnp.clip(x / scales[..., None], -limit, limit)
    if dtype == FLOAT8:
        return lax.bitcast_convert_type(scaled.astype(FLOAT8), jnp.uint8), scales
    return jnp.floor(scaled + 0.5).astype(dtype), scales


def decoded(codes: jax.Array, dtype: Any) -> jax.Array:
    """Codes as numbers, without their scales; exact in bfloat16, float16 and float32."""
    if codes.dtype == jnp.uint8:
        codes = lax.bitcast_convert_type(codes, FLOAT8)
    return codes.astype(dtype)


def dequantize(pages: QuantizedPages) -> jax.Array:
    """The whole pool in float32, [N, S, K, D]: for tests and comparisons."""
    return decoded(pages.codes, jnp.float32) * pages.scales.swapaxes(1, 2)[..., None]


def quantized(pages: jax.Array, dtype: Any) -> QuantizedPages:
    """The whole pool, float [N, S, K, D], quantised: for tests and comparisons."""
    codes, scales = quantize(pages, dtype)
    return QuantizedPages(codes, scales.swapaxes(1, 2))


def read(pages: Pages, page: jax.Array, offset: jax.Array, head: int | slice = slice(None)) -> jax.Array:
    """Positions at [page, offset], int32 [...], in bounds → float32 [..., K, D], or [..., D] of one KV head."""

    def get(array: jax.Array, *at: Any) -> jax.Array:
        return array.at[at].get(mode="promise_in_bounds")

    if not isinstance(pages, QuantizedPages):
        return get(pages, page, offset, head).astype(jnp.float32)
    codes, scales = get(pages.codes, page, offset, head), get(pages.scales, page, head, offset)
    return decoded(codes, jnp.float32) * scales[..., None]


def write(pages: Pages, page: jax.Array, offset: jax.Array, x: jax.Array) -> Pages:
    """x [T, K, D] at [page, offset], int32 [T]; out of bounds is dropped."""
    if not isinstance(pages, QuantizedPages):
        return pages.at[page, offset].set(x.astype(pages.dtype), mode="drop")
    codes, scales = quantize(x, pages.dtype)
    return QuantizedPages(
        pages.codes.at[page, offset].set(codes, mode="drop"),
        pages.scales.at[page, :, offset].set(scales, mode="drop"),
    )
