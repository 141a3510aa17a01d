"""Log-probabilities, ranks and alternatives, for the rows that ask, as a few words each: never a vocabulary.

    words of one token    [0] logprob   [1] rank   [2 … K+1] ids of the K most probable   [K+2 … 2K+1] their logprobs

K is `MAX_TOP_LOGPROBS`; ids that a smaller vocabulary lacks are `NO_ID`. float32 values travel as the int32 with the
same bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxoverlap.sampling_params import MAX_TOP_LOGPROBS

SCORE_WORDS = 2 + 2 * MAX_TOP_LOGPROBS
NO_ID = -1
_BLOCK = 8
"""Rows whose alternatives are found together."""


def score_tokens(logits: jax.Array, tokens: jax.Array, num_top: jax.Array) -> jax.Array:
    """How probable tokens were.

    Args:
      logits: float32 [B, V], the model's own.
      tokens: int32 [B].
      num_top: int32 [B]; below 0 asks for nothing, 0 for the token only, more for `MAX_TOP_LOGPROBS` alternatives.

    Returns:
      int32 [B, SCORE_WORDS]; zeros where nothing was asked for. Costs nothing where nobody asks; alternatives
      cost those who want them.
    """
    asked = num_top >= 0

    def score() -> jax.Array:
        total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
        rank = jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32) + 1
        words = jnp.zeros((len(tokens), SCORE_WORDS), dtype=jnp.int32)
        words = words.at[:, 0].set(_bits(chosen[:, 0] - total)).at[:, 1].set(rank)
        words = _add_alternatives(words, logits, total, num_top > 0)
        return jnp.where(asked[:, None], words, 0)

    return jax.lax.cond(jnp.any(asked), score, lambda: jnp.zeros((tokens.shape[0], SCORE_WORDS), dtype=jnp.int32))


def _add_alternatives(words: jax.Array, logits: jax.Array, total: jax.Array, wanted: jax.Array) -> jax.Array:
    """A few rows at a time, those that want them first."""
    count = logits.shape[0]
    width = min(_BLOCK, count)
    k = min(MAX_TOP_LOGPROBS, logits.shape[-1])
    order = jnp.nonzero(wanted, size=count + width, fill_value=count)[0]

    def add(index: jax.Array, words: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice(order, (index * width,), (width,))
        block = logits.at[rows].get(mode="fill", fill_value=0)
        values, ids = jax.lax.top_k(block, k)
        logprobs = values - total.at[rows].get(mode="fill", fill_value=0)[:, None]
        ids = jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, MAX_TOP_LOGPROBS - k)), constant_values=NO_ID)
        words = words.at[rows, 2 : 2 + MAX_TOP_LOGPROBS].set(ids, mode="drop")
        first = 2 + MAX_TOP_LOGPROBS
        return words.at[rows, first : first + k].set(_bits(logprobs), mode="drop")

    blocks = (jnp.sum(wanted, dtype=jnp.int32) + width - 1) // width
    return jax.lax.fori_loop(0, blocks, add, words)


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
