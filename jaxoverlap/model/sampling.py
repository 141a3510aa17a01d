"""Choosing one token per row from its logits, on the device, each row by its own parameters.

The most probable token here, the draw among others by `pallas_kernels.draw_tokens`. A row's draw depends on its seed,
its sample index and its position only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxoverlap.sampling_params import GREEDY_BELOW
from pallas_kernels import draw_tokens

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


def choose_tokens(
    logits: jax.Array, rows: SamplingRows, draws: jax.Array, **implementation: Any
) -> tuple[jax.Array, jax.Array]:
    """One token per row.

    Args:
      logits: float32 [B, V].
      rows: each row's parameters.
      draws: bool [B], whose token is drawn; the others get their most probable one. Drawing costs nothing where
        nobody draws.
      implementation: `implementation` and `interpret` of `draw_tokens`.

    Returns:
      As `most_probable`.
    """
    tokens, highest = most_probable(logits)

    def drawn() -> jax.Array:
        parameters = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
        return jnp.where(
            draws, draw_tokens(logits, highest, *parameters, _uniform(rows), draws, **implementation), tokens
        )

    return jax.lax.cond(jnp.any(draws), drawn, lambda: tokens), highest


def _uniform(rows: SamplingRows) -> jax.Array:
    """float32 [B] in [0, 1), by threefry keys folded from (seed, sample index, position)."""

    def one(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
        return jax.random.uniform(key, dtype=jnp.float32)

    return jax.vmap(one)(rows.seed, rows.sample_index, rows.position)
