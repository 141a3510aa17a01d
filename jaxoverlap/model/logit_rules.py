"""What a request wants done to its logits before a token is chosen: penalties, biases, ids that may not come.

The order is `apply_rules`'s. Everything is per row and by the row's own parameters; a row that asks for nothing
keeps its logits bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

IN_PROMPT = 0x8000
"""Bit of a count that says: the id is in the prompt. The other 15 count outputs, and stop at their highest."""

MOST_OUTPUTS = IN_PROMPT - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowRules:
    """Rules that need a place for each id of the vocabulary; there only once some request has asked for one of them.

    Attributes:
      counts: uint16 [R, V], outputs of each id, and `IN_PROMPT`. Only right in rows with a penalty.
      bias: float32 [R, V], to be added; minus infinity forbids an id. Only right in rows whose `has_bias` is set.
    """

    counts: jax.Array
    bias: jax.Array

    @classmethod
    def blank(cls, num_rows: int, vocab_size: int) -> RowRules:
        shape = (num_rows, vocab_size)
        return cls(jnp.zeros(shape, dtype=jnp.uint16), jnp.zeros(shape, dtype=jnp.float32))

    @classmethod
    def num_bytes(cls, num_rows: int, vocab_size: int) -> int:
        arrays = jax.tree.leaves(jax.eval_shape(lambda: cls.blank(num_rows, vocab_size)))
        return sum(array.size * array.dtype.itemsize for array in arrays)

    def seat(self, row: jax.Array, counts: jax.Array, bias: jax.Array) -> RowRules:
        """A row's new owner: uint16 [V] and float32 [V]."""
        return RowRules(self.counts.at[row].set(counts, mode="drop"), self.bias.at[row].set(bias, mode="drop"))

    def count(self, rows: jax.Array, tokens: jax.Array) -> RowRules:
        """One more output each; rows out of range are dropped."""
        now = self.counts.at[rows, tokens].get(mode="fill", fill_value=0)
        more = jnp.where(now & MOST_OUTPUTS == MOST_OUTPUTS, now, now + 1)
        return RowRules(self.counts.at[rows, tokens].set(more, mode="drop"), self.bias)


def apply_rules(
    logits: jax.Array, rules: RowRules, rows: jax.Array, params: dict[str, jax.Array], allowed: jax.Array
) -> jax.Array:
    """Penalties, then bias, then what is allowed.

    Args:
      logits: float32 [B, V].
      rules: of all rows; rows: int32 [B], where to look.
      params: fields of `packing.ROW_PARAMS`, each [B].
      allowed: int32 [B, ceil(V / 32)], bit i % 32 of word i // 32 is set where id i may come.
    """
    counts = rules.counts.at[rows].get(mode="fill", fill_value=0)
    bias = rules.bias.at[rows].get(mode="fill", fill_value=0)
    logits = penalise(
        logits, counts, params["repetition_penalty"], params["presence_penalty"], params["frequency_penalty"]
    )
    # What is forbidden stays so, also where a penalty has overflowed to infinity.
    biased = jnp.where(bias > -jnp.inf, logits + bias, -jnp.inf)
    logits = jnp.where(params["has_bias"][:, None] != 0, biased, logits)
    # A fifth of the time that repeating each word 32 times takes on a CPU.
    bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    may_come = bits.reshape(allowed.shape[0], -1)[:, : logits.shape[-1]] != 0
    return jnp.where(may_come, logits, -jnp.inf)


def penalise(
    logits: jax.Array, counts: jax.Array, repetition: jax.Array, presence: jax.Array, frequency: jax.Array
) -> jax.Array:
    """Repetition (Keskar et al., 2019) once for each id seen; presence and frequency as in OpenAI's API.

    Args:
      logits: float32 [B, V]; counts: uint16 [B, V], see `IN_PROMPT`.
      repetition, presence, frequency: float32 [B]; 1, 0 and 0 are off.
    """
    outputs = (counts & MOST_OUTPUTS).astype(jnp.float32)
    repetition = jnp.where(counts > 0, repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    return logits - frequency[:, None] * outputs - jnp.where(outputs > 0, presence[:, None], 0.0)


def suppress(logits: jax.Array, ids: jax.Array, where: jax.Array) -> jax.Array:
    """Forbids ids, int32 [B, S] (negative ones are none), in the rows of a bool [B]."""

    column = jnp.where(where[:, None] & (ids >= 0), ids, logits.shape[-1])
    return logits.at[jnp.arange(logits.shape[0])[:, None], column].set(-jnp.inf, mode="drop")
