"""Choosing one token per row from its logits, on the device, each row by its own parameters.

No sort: XLA's sort of a vocabulary takes 10 ms a row on a CPU and tens of kernels on a GPU. The set that
top-k, top-p and min-p leave is always "logits at or above a threshold", and the threshold is found by bisection
over the bits of a float (32 passes, exact). The draw is by inverse transform, the index found by bisection too.

A row's draw depends on its seed, its sample index and its position only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxoverlap.sampling_params import GREEDY_BELOW

_TOP_BIT = 0x80000000
_BLOCK = 128
"""Ids whose highest logit is found together."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of B rows.

    Attributes:
      temperature, top_p, min_p: float32 [B].
      top_k: int32 [B]; below 1 is off.
      seed: uint32 [B, 2], low and high word.
      sample_index, position: int32 [B]; position is that of the token to be chosen in its sequence.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    sample_index: jax.Array
    position: jax.Array

    @property
    def greedy(self) -> jax.Array:
        return (self.temperature < GREEDY_BELOW) | (self.top_k == 1)


def most_probable(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The id of the highest logit, the lowest one of equals.

    Args:
      logits: float32 [B, V].

    Returns:
      tokens: int32 [B]; those of rows that are not `usable` mean nothing.
      highest: float32 [B].
    """
    rows, vocab_size = logits.shape
    width = math.gcd(vocab_size, _BLOCK)
    # Half of argmax's time on a CPU: one plain reduction, and a block of each row once more.
    blocks = logits.reshape(rows, -1, width)
    tops = jnp.max(blocks, axis=-1)
    highest = jnp.max(tops, axis=-1)
    block = jnp.argmax(tops >= highest[:, None], axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * width + jnp.argmax(inside >= highest[:, None], axis=-1).astype(jnp.int32), highest


def usable(logits: jax.Array) -> jax.Array:
    """bool [B], False where a logit of float32 [B, V] is NaN or infinite, or all are minus infinity."""
    # A maximum does not tell: XLA's CPU back end drops NaN from it at some shapes ([50, 640] was one).
    return jnp.isfinite(jnp.max(jnp.where(logits < jnp.inf, logits, jnp.inf), axis=-1))


def choose_tokens(logits: jax.Array, rows: SamplingRows, draws: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token per row.

    Args:
      logits: float32 [B, V].
      rows: each row's parameters.
      draws: bool [B], whose token is drawn; the others get their most probable one. Drawing costs nothing where
        nobody draws.

    Returns:
      As `most_probable`.
    """
    tokens, highest = most_probable(logits)
    tokens = jax.lax.cond(
        jnp.any(draws),
        lambda: jnp.where(draws, _draw(logits, highest, rows, draws), tokens),
        lambda: tokens,
    )
    return tokens, highest


def _draw(logits: jax.Array, highest: jax.Array, rows: SamplingRows, draws: jax.Array) -> jax.Array:
    temperature = jnp.where(draws, rows.temperature, 1.0)
    # The highest is subtracted first, so that a tiny temperature can't overflow.
    scaled = (logits - highest[:, None]) / temperature[:, None]
    order = _ordered_bits(scaled)
    keep = order >= _top_k_threshold(order, rows, draws)[:, None]
    weights = jnp.where(keep, jnp.exp(scaled), 0.0)
    threshold = _top_p_threshold(order, weights, rows, draws)
    weights = jnp.where(order >= threshold[:, None], weights, 0.0)
    # The most probable token has weight 1 and is never dropped by min-p ≤ 1.
    weights = jnp.where(weights >= rows.min_p[:, None], weights, 0.0)
    return _inverse_transform(weights, _uniform(rows))


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


def _top_k_threshold(order: jax.Array, rows: SamplingRows, draws: jax.Array) -> jax.Array:
    """Order of the k-th highest; 0, which keeps all, where top-k is off."""
    limited = draws & (rows.top_k > 0)

    def search() -> jax.Array:
        def at_least_k_remain(threshold: jax.Array) -> jax.Array:
            return jnp.sum(order >= threshold[:, None], axis=-1, dtype=jnp.int32) >= rows.top_k

        return jnp.where(limited, _highest_threshold(at_least_k_remain, order.shape[0]), jnp.uint32(0))

    return jax.lax.cond(jnp.any(limited), search, lambda: jnp.zeros(order.shape[0], dtype=jnp.uint32))


def _top_p_threshold(order: jax.Array, weights: jax.Array, rows: SamplingRows, draws: jax.Array) -> jax.Array:
    """Order of the last token of the nucleus; 0 where top-p is off."""
    limited = draws & (rows.top_p < 1.0)

    def search() -> jax.Array:
        mass = rows.top_p * jnp.sum(weights, axis=-1)

        def mass_remains(threshold: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(order >= threshold[:, None], weights, 0.0), axis=-1) >= mass

        return jnp.where(limited, _highest_threshold(mass_remains, order.shape[0]), jnp.uint32(0))

    return jax.lax.cond(jnp.any(limited), search, lambda: jnp.zeros(order.shape[0], dtype=jnp.uint32))


def _uniform(rows: SamplingRows) -> jax.Array:
    """float32 [B] in [0, 1), by threefry keys folded from (seed, sample index, position)."""

    def one(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
        return jax.random.uniform(key, dtype=jnp.float32)

    return jax.vmap(one)(rows.seed, rows.sample_index, rows.position)


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
