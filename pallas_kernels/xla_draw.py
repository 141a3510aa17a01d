"""The draw of tokens in plain XLA.

No sort: XLA's sort of a vocabulary takes 10 ms a row on a CPU and tens of kernels on a GPU. The set that
top-k, top-p and min-p leave is always "logits at or above a threshold", and the threshold is found by bisection
over the bits of a float (32 passes, exact). The draw is by inverse transform, the index found by bisection too.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_TOP_BIT = 0x80000000


def draw_tokens(
    logits: jax.Array,
    highest: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    uniform: jax.Array,
    draws: jax.Array,
) -> jax.Array:
    """See `pallas_kernels.draw_tokens`."""
    temperature = jnp.where(draws, temperature, 1.0)
    # The highest is subtracted first, so that a tiny temperature can't overflow.
    scaled = (logits - highest[:, None]) / temperature[:, None]
    order = _ordered_bits(scaled)
    keep = order >= _top_k_threshold(order, top_k, draws)[:, None]
    weights = jnp.where(keep, jnp.exp(scaled), 0.0)
    threshold = _top_p_threshold(order, weights, top_p, draws)
    weights = jnp.where(order >= threshold[:, None], weights, 0.0)
    # The most probable token has weight 1 and is never dropped by min-p ≤ 1.
    weights = jnp.where(weights >= min_p[:, None], weights, 0.0)
    return _inverse_transform(weights, uniform)


def _ordered_bits(values: jax.Array) -> jax.Array:
    """float32 → uint32 with the same order, so that a threshold can be built bit by bit."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >= jnp.uint32(_TOP_BIT), ~bits, bits | jnp.uint32(_TOP_BIT))


def _highest_threshold(holds: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """The largest uint32 per row for which a condition, true at 0 and monotone, still holds."""

    def set_bit(index: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(_TOP_BIT) >> index.astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, threshold)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(num_rows, dtype=jnp.uint32))


def _top_k_threshold(order: jax.Array, top_k: jax.Array, draws: jax.Array) -> jax.Array:
    """Order of the k-th highest; 0, which keeps all, where top-k is off."""
    limited = draws & (top_k > 0)

    def search() -> jax.Array:
        def at_least_k_remain(threshold: jax.Array) -> jax.Array:
            return jnp.sum(order >= threshold[:, None], axis=-1, dtype=jnp.int32) >= top_k

        return jnp.where(limited, _highest_threshold(at_least_k_remain, order.shape[0]), jnp.uint32(0))

    return jax.lax.cond(jnp.any(limited), search, lambda: jnp.zeros(order.shape[0], dtype=jnp.uint32))


def _top_p_threshold(order: jax.Array, weights: jax.Array, top_p: jax.Array, draws: jax.Array) -> jax.Array:
    """Order of the last token of the nucleus; 0 where top-p is off."""
    limited = draws & (top_p < 1.0)

    def search() -> jax.Array:
        # Never 0, which the empty set has too: the highest is always kept.
        mass = jnp.maximum(top_p * jnp.sum(weights, axis=-1), jnp.finfo(jnp.float32).tiny)

        def mass_remains(threshold: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(order >= threshold[:, None], weights, 0.0), axis=-1) >= mass

        return jnp.where(limited, _highest_threshold(mass_remains, order.shape[0]), jnp.uint32(0))

    return jax.lax.cond(jnp.any(limited), search, lambda: jnp.zeros(order.shape[0], dtype=jnp.uint32))


def _inverse_transform(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The smallest id whose cumulated weight exceeds ``uniform * total``.

    Sums are monotone in their terms, also rounded, so the id found always has a positive weight.
    """
    vocab_size = weights.shape[-1]
    ids = jnp.arange(vocab_size, dtype=jnp.int32)
    total = jnp.sum(weights, axis=-1)
    # uniform * total can round up to total, which no cumulated weight exceeds.
    target = jnp.minimum(uniform * total, jnp.nextafter(total, jnp.float32(0.0)))
    num_bits = max(1, (vocab_size - 1).bit_length())

    def set_bit(index: jax.Array, below: jax.Array) -> jax.Array:
        candidate = below | (jnp.int32(1 << (num_bits - 1)) >> index)
        cumulated = jnp.sum(jnp.where(ids < candidate[:, None], weights, 0.0), axis=-1)
        return jnp.where(cumulated <= target, candidate, below)

    found = jax.lax.fori_loop(0, num_bits, set_bit, jnp.zeros(weights.shape[0], dtype=jnp.int32))
    return jnp.minimum(found, vocab_size - 1)
