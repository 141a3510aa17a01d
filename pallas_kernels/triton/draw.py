"""draw_tokens: temperature, top-k, top-p, min-p and the draw as one kernel for any k, without a sort.

    grid (B,)   a program: a row, whose logits it reads again and again, from the L2 cache

What top-k and top-p leave is "logits at or above a threshold". A threshold is found in 16 passes, two bits of a float
each; a row that asks for neither spends none. Then two passes for the draw: in which block of ids it falls, and where
there. Sums are taken in one order throughout, so they are monotone in their terms, also rounded.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.triton.common import call, plt
from pallas_kernels.tuning import power_of_two

BLOCK = 4096
_BELOW_ONE = 1 - 2**-23
_SMALLEST = 2.0**-126
"""The smallest float32 that nothing takes for 0."""
_LOWEST = -(2**31)


def _kernel(
    logits_ref,
    highest_ref,
    temperature_ref,
    top_k_ref,
    top_p_ref,
    min_p_ref,
    uniform_ref,
    draws_ref,
    token_ref,
    *,
    block,
) -> None:
    row = pl.program_id(0)
    vocab = logits_ref.shape[1]
    blocks = pl.cdiv(vocab, block)
    highest, temperature = highest_ref[row], temperature_ref[row]
    inside = lax.iota(jnp.int32, block)

    def scaled(index: jax.Array) -> jax.Array:
        ids = index * block + inside
        logits = plt.load(logits_ref.at[row, ids], mask=ids < vocab, other=float("-inf"))
        # The highest is subtracted first, so that a tiny temperature can't overflow.
        return (logits - highest) / temperature

    def threshold(
        amount: Callable[[jax.Array, jax.Array], jax.Array], wanted: jax.Array, is_on: jax.Array
    ) -> jax.Array:
        """The highest order at or above which the amounts come to what is wanted; the lowest where it is off."""

        def narrow(turn: jax.Array, low: jax.Array) -> jax.Array:
            unit = lax.shift_left(jnp.int32(1), 30 - 2 * turn)
            above = [low + unit * many for many in (1, 2, 3)]

            def add(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                x = scaled(index)
                order = _ordered_bits(x)
                each = amount(x, order)
                return tuple(
                    total + jnp.where(order >= bound, each, 0.0).sum() for total, bound in zip(sums, above, strict=True)
                )

            sums = lax.fori_loop(0, blocks, add, (jnp.float32(0),) * 3)
            for bound, total in zip(above, sums, strict=True):
                low = jnp.where(total >= wanted, bound, low)
            return low

        return lax.fori_loop(jnp.int32(0), jnp.where(is_on, jnp.int32(16), jnp.int32(0)), narrow, jnp.int32(_LOWEST))

    @pl.when(draws_ref[row] != 0)
    def _() -> None:
        top_k, top_p, min_p = top_k_ref[row], top_p_ref[row], min_p_ref[row]
        lowest = threshold(lambda x, order: jnp.ones_like(x), top_k.astype(jnp.float32), top_k > 0)

        def kept(x: jax.Array, order: jax.Array) -> jax.Array:
            return jnp.where(order >= lowest, jnp.exp(x), 0.0)

        def total(weights: Callable[[jax.Array], jax.Array], many: Any) -> jax.Array:
            return lax.fori_loop(
                jnp.int32(0), many, lambda index, so_far: so_far + weights(index).sum(), jnp.float32(0)
            )

        def all_kept(index: jax.Array) -> jax.Array:
            x = scaled(index)
            return kept(x, _ordered_bits(x))

        limited = top_p < 1.0
        # Never 0, which the empty set has too: the highest is always kept.
        mass = jnp.maximum(top_p * total(all_kept, jnp.where(limited, jnp.int32(blocks), jnp.int32(0))), _SMALLEST)
        nucleus = threshold(kept, mass, limited)

        def weights(index: jax.Array) -> jax.Array:
            x = scaled(index)
            order = _ordered_bits(x)
            weight = jnp.where(order >= nucleus, kept(x, order), 0.0)
            return jnp.where(weight >= min_p, weight, 0.0)

        whole = total(weights, jnp.int32(blocks))
        # uniform * whole can round up to the whole, which no cumulated weight exceeds.
        target = jnp.minimum(uniform_ref[row] * whole, whole * _BELOW_ONE)

        def find(index: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            so_far, block_found, before = found
            now = so_far + weights(index).sum()
            here = (block_found < 0) & (now > target)
            return now, jnp.where(here, index, block_found), jnp.where(here, so_far, before)

        start = (jnp.float32(0), jnp.int32(-1), jnp.float32(0))
        _, block_found, before = lax.fori_loop(0, blocks, find, start)
        block_found = jnp.maximum(block_found, 0)  # weights of a row without a highest logit are NaN: none is found
        there = weights(block_found)

        def set_bit(turn: jax.Array, below: jax.Array) -> jax.Array:
            candidate = below | (jnp.int32(block // 2) >> turn)
            cumulated = before + jnp.where(inside < candidate, there, 0.0).sum()
            return jnp.where(cumulated <= target, candidate, below)

        below = lax.fori_loop(0, block.bit_length() - 1, set_bit, jnp.int32(0))
        token_ref[row] = jnp.minimum(block_found * block + below, vocab - 1)


def _ordered_bits(values: jax.Array) -> jax.Array:
    """float32 → int32 with the same order."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def draw_tokens(
    logits: jax.Array,
    highest: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    uniform: jax.Array,
    draws: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.draw_tokens`."""
    num_rows, vocab = logits.shape
    return call(
        functools.partial(_kernel, block=min(BLOCK, power_of_two(vocab))),
        name="draw_tokens",
        grid=(num_rows,),
        out_shape=jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        num_warps=8,
        num_stages=1,
        interpret=interpret,
    )(logits, highest, temperature, top_k, top_p, min_p, uniform, draws.astype(jnp.int32))
