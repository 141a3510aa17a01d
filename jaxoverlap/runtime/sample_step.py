"""The second half of a step: from logits to the next token of each row, and into the row state.

    (state, ready[, rules, allowed])  →  (state, output, scores[, rules])

It is a dispatch of its own so that the allowed tokens of a row whose text must follow a grammar can be decided while
the first half runs. Steps without such rows launch both halves at once. The variant with `rules` is used in steps
with rows that have penalties, biases or a grammar; the plain one does not even take the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxoverlap.model.logit_rules import RowRules, apply_rules, suppress
from jaxoverlap.model.sampling import SamplingRows, choose_tokens, most_probable, usable
from jaxoverlap.model.scores import score_tokens
from jaxoverlap.runtime.packing import read_row_params
from jaxoverlap.runtime.row_state import RowState
from jaxoverlap.scheduler.plan import RowStatus


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReadyToSample:
    """What the first half leaves on the device: B rows, prompts first, then those that decode.

    Attributes:
      logits: float32 [B, V], of each row's last token.
      rows: int32 [B]; out of range where no token is to be published: chunks that do not end their prompt, finished
        rows and padding.
      seq_len: int32 [B], positions written, those of this step included.
    """

    logits: jax.Array
    rows: jax.Array
    seq_len: jax.Array


def sample(
    state: RowState,
    ready: ReadyToSample,
    rules: RowRules | None = None,
    allowed: jax.Array | None = None,
    *,
    drawing: dict[str, Any] | None = None,
) -> tuple[RowState, jax.Array, jax.Array, RowRules | None]:
    """Chooses and publishes tokens.

    Args:
      state: R rows.
      ready: B rows.
      rules, allowed: see `apply_rules`; both or none.
      drawing: `implementation` and `interpret` of `pallas_kernels.draw_tokens`; None is plain XLA.

    Returns:
      state; output, int32 [B, 2]: token and `RowStatus`; scores, int32 [B, SCORE_WORDS]; rules.
    """
    rows = ready.rows
    publishes = rows < state.last_token.shape[0]
    params = read_row_params(state.params.at[rows].get(mode="fill", fill_value=0))
    num_outputs = state.num_outputs.at[rows].get(mode="fill", fill_value=0)
    logits = ready.logits
    if rules is not None:
        assert allowed is not None
        logits = apply_rules(logits, rules, rows, params, allowed)
    sampling = SamplingRows(
        temperature=params["temperature"],
        top_k=params["top_k"],
        top_p=params["top_p"],
        min_p=params["min_p"],
        seed=params["seed"],
        sample_index=params["sample_index"],
        position=ready.seq_len,
    )
    draws = publishes & ~sampling.greedy
    too_early = publishes & (num_outputs < params["min_outputs"])
    tokens, highest = jax.lax.cond(
        jnp.any(draws | too_early),
        lambda: choose_tokens(suppress(logits, params["stop_ids"], too_early), sampling, draws, **(drawing or {})),
        lambda: most_probable(logits),
    )
    scores = score_tokens(ready.logits, tokens, jnp.where(publishes, params["top_logprobs"], -1))

    num_outputs = num_outputs + 1
    status = jnp.where(num_outputs >= params["max_outputs"], RowStatus.LENGTH, RowStatus.RUNNING)
    status = jnp.where(jnp.any(tokens[:, None] == params["stop_ids"], axis=-1), RowStatus.STOP, status)
    status = jnp.where(highest > -jnp.inf, status, RowStatus.NO_TOKEN)
    # Rules make no NaN of sound logits, but a repetition penalty can make infinity of one.
    sound = usable(ready.logits)
    status = jnp.where(sound & (highest < jnp.inf), status, RowStatus.BAD_LOGITS)
    # A chunk that does not end its prompt has logits too, and what has led to bad ones must not be cached.
    status = jnp.where(publishes | ~sound, status, RowStatus.VOID).astype(jnp.int32)

    state = replace(
        state,
        last_token=state.last_token.at[rows].set(tokens, mode="drop"),
        seq_len=state.seq_len.at[rows].set(ready.seq_len, mode="drop"),
        num_outputs=state.num_outputs.at[rows].set(num_outputs, mode="drop"),
        finished=state.finished.at[rows].set(status != RowStatus.RUNNING, mode="drop"),
    )
    if rules is not None:
        rules = rules.count(rows, tokens)
    return state, jnp.stack([tokens, status], axis=-1), scores, rules
