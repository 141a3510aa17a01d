"""The first half of a step: ``(weights, kv, state, packed) → (kv, state, ready, hidden)``, one dispatch.

    packed ──► seat chunks, add pages ──► tokens, positions, slots ──► decoder + paged attention
                        ▲                        ▲                               │
                  row state  ◄── `sample`: next token, length, finished ◄── logits of each row's last token

A row that the device knows to be finished (or that is padding) is a no-op: its slot and its row index are out
of range, so its KV write and its state update are dropped, and its output is void.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxoverlap.model.config import ModelConfig
from jaxoverlap.model.decoder import Decoder
from jaxoverlap.model.scores import SCORE_WORDS, score_tokens
from jaxoverlap.runtime.buckets import StepShape
from jaxoverlap.runtime.packing import PackedStep, read_row_params, unpack
from jaxoverlap.runtime.row_state import KVPages, RowState
from jaxoverlap.runtime.sample_step import ReadyToSample
from pallas_kernels import decode_attention, extend_attention, write_kv

_SCORED_TOGETHER = 16
"""Prompt tokens whose logits exist at once."""


@dataclass(frozen=True)
class DeviceStep:
    """Everything about a step that is known before it is compiled.

    Attributes:
      config, dtype: the model.
      num_rows, pages_per_row: R and C of the row state.
      num_pages: P, pages of one layer; page_size: positions in a page.
      max_prompt_tokens: in any step; every step pads to it what `score_prompt` reads, which so has one shape.
      attention: implementation in `pallas_kernels`.
      deterministic: prompt tokens attend as decoding rows do, so that it does not matter which of them a token is in.
    """

    config: ModelConfig
    dtype: Any
    num_rows: int
    pages_per_row: int
    num_pages: int
    page_size: int
    max_prompt_tokens: int
    attention: str = "xla"
    deterministic: bool = False

    def __call__(
        self, shape: StepShape, weights: Any, kv: KVPages, state: RowState, packed: jax.Array
    ) -> tuple[KVPages, RowState, ReadyToSample, jax.Array]:
        """Runs one step of a static shape with T prompt tokens, R prompts and B decoding rows.

        Returns:
          The pool; the row state; what `sample` needs of the R + B rows; and the last hidden states of the prompt
          tokens, [max_prompt_tokens, hidden_size] ([0, …] of a step without any), for `score_prompt`.
        """
        step = unpack(packed, shape, self.pages_per_row)
        state = self._add_pages(self._seat_chunks(state, step), step)
        prompts, decodes = self._prompt_tokens(step), self._decode_tokens(state, step)
        attention = _PagedAttention(self, kv, step, prompts, decodes, state)
        decoder = Decoder(self.config, self.dtype)
        hidden = decoder.apply(
            weights, _join(prompts.token_ids, decodes.token_ids), _join(prompts.positions, decodes.positions), attention
        )
        assert isinstance(hidden, jax.Array)
        last_of_chunk = jnp.maximum(step.cu_q_lens[1:] - 1, 0)
        last_hidden = _join(hidden[: shape.prefill_tokens][last_of_chunk], hidden[shape.prefill_tokens :])
        logits = decoder.apply(weights, last_hidden, method=Decoder.logits)
        assert isinstance(logits, jax.Array)
        missing = (0, self.max_prompt_tokens - shape.prefill_tokens if shape.prefill_tokens else 0)
        prompt_hidden = jnp.pad(hidden[: shape.prefill_tokens], (missing, (0, 0)))
        return attention.kv, state, self._ready(shape, state, step, logits), prompt_hidden

    def score_prompt(self, weights: Any, hidden: jax.Array, targets: jax.Array, num_top: jax.Array) -> jax.Array:
        """Scores the token that follows each of T prompt tokens; a few at a time, so that no [T, V] ever exists.

        Args (T is max_prompt_tokens):
          hidden: [T, hidden_size].
          targets, num_top: int32 [T], see `score_tokens`.

        Returns:
          int32 [T, SCORE_WORDS].
        """
        decoder = Decoder(self.config, self.dtype)
        width = min(_SCORED_TOGETHER, len(targets))
        blocks = -(-len(targets) // width)
        padding = blocks * width - len(targets)

        def split(array: jax.Array, fill: int = 0) -> jax.Array:
            widths = [(0, padding)] + [(0, 0)] * (array.ndim - 1)
            return jnp.pad(array, widths, constant_values=fill).reshape(blocks, width, *array.shape[1:])

        def score(block: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            def of_logits() -> jax.Array:
                logits = decoder.apply(weights, block[0], method=Decoder.logits)
                assert isinstance(logits, jax.Array)
                return score_tokens(logits, block[1], block[2])

            nothing = jnp.zeros((width, SCORE_WORDS), dtype=jnp.int32)
            return jax.lax.cond(jnp.any(block[2] >= 0), of_logits, lambda: nothing)

        words = jax.lax.map(score, (split(hidden), split(targets), split(num_top, -1)))
        return words.reshape(blocks * width, SCORE_WORDS)[: len(targets)]

    def _seat_chunks(self, state: RowState, step: PackedStep) -> RowState:
        """Every chunk sets its row up anew; only the first needs it, and the others change nothing."""
        rows = step.chunk_rows
        params = read_row_params(step.row_params)
        ends = step.chunk_starts + step.cu_q_lens[1:] - step.cu_q_lens[:-1]
        return replace(
            state,
            seq_len=state.seq_len.at[rows].set(ends, mode="drop"),
            num_outputs=state.num_outputs.at[rows].set(params["num_outputs"], mode="drop"),
            finished=state.finished.at[rows].set(False, mode="drop"),
            page_table=state.page_table.at[rows].set(step.page_tables, mode="drop"),
            params=state.params.at[rows].set(step.row_params, mode="drop"),
        )

    def _add_pages(self, state: RowState, step: PackedStep) -> RowState:
        """A new page goes where the row's next position is, unless the row has finished."""
        finished = state.finished.at[step.decode_rows].get(mode="fill", fill_value=True)
        column = state.seq_len.at[step.decode_rows].get(mode="fill", fill_value=0) // self.page_size
        wanted = (step.new_pages < self.num_pages) & ~finished
        column = jnp.where(wanted, column, self.pages_per_row)
        return replace(state, page_table=state.page_table.at[step.decode_rows, column].set(step.new_pages, mode="drop"))

    def _prompt_tokens(self, step: PackedStep) -> _Tokens:
        index = jnp.arange(step.token_ids.shape[0], dtype=jnp.int32)
        chunk = jnp.searchsorted(step.cu_q_lens[1:], index, side="right").astype(jnp.int32)
        start = step.chunk_starts.at[chunk].get(mode="fill", fill_value=0)
        positions = start + index - step.cu_q_lens.at[chunk].get(mode="fill", fill_value=0)
        pages = step.page_tables.at[chunk, positions // self.page_size].get(mode="fill", fill_value=self.num_pages)
        return _Tokens(step.token_ids, positions, pages * self.page_size + positions % self.page_size)

    def _decode_tokens(self, state: RowState, step: PackedStep) -> _Tokens:
        rows = step.decode_rows
        finished = state.finished.at[rows].get(mode="fill", fill_value=True)
        positions = state.seq_len.at[rows].get(mode="fill", fill_value=0)
        pages = state.page_table.at[rows, positions // self.page_size].get(mode="fill", fill_value=self.num_pages)
        slots = jnp.where(finished, self.no_slot, pages * self.page_size + positions % self.page_size)
        return _Tokens(state.last_token.at[rows].get(mode="fill", fill_value=0), positions, slots)

    @property
    def no_slot(self) -> int:
        return self.num_pages * self.page_size

    def _ready(self, shape: StepShape, state: RowState, step: PackedStep, logits: jax.Array) -> ReadyToSample:
        rows = _join(step.chunk_rows, step.decode_rows)
        finished = state.finished.at[rows].get(mode="fill", fill_value=True)
        decoded = jnp.ones_like(step.decode_rows)
        # A chunk's row already has its new length; a decoding row grows by the token it has just run.
        seq_len = state.seq_len.at[rows].get(mode="fill", fill_value=0) + _join(step.chunk_rows * 0, decoded)
        publishes = _join(step.publishes, decoded).astype(bool) & ~finished
        padding = (0, shape.sample_rows - len(rows))
        return ReadyToSample(
            logits=jnp.pad(logits, (padding, (0, 0))),
            rows=jnp.pad(rows, padding, constant_values=self.num_rows),
            publishes=jnp.pad(publishes, padding),
            seq_len=jnp.pad(seq_len, padding),
        )


@dataclass(frozen=True)
class _Tokens:
    """token_ids, positions, slots: int32 [n]. A slot is that of layer 0; one outside the layer drops the write."""

    token_ids: jax.Array
    positions: jax.Array
    slots: jax.Array


class _PagedAttention:
    """Called once per layer while the step is traced; `kv` is the pool as the layers so far have left it."""

    def __init__(
        self, step: DeviceStep, kv: KVPages, packed: PackedStep, prompts: _Tokens, decodes: _Tokens, state: RowState
    ) -> None:
        self.kv = kv
        self._step, self._packed = step, packed
        self._slots = _join(prompts.slots, decodes.slots)
        self._num_prompt_tokens = len(prompts.token_ids)
        self._chunk_ends = packed.chunk_starts + packed.cu_q_lens[1:] - packed.cu_q_lens[:-1]
        rows = packed.decode_rows
        self._decode_tables = state.page_table.at[rows].get(mode="fill", fill_value=step.num_pages)
        finished = state.finished.at[rows].get(mode="fill", fill_value=True)
        self._decode_lens = jnp.where(finished, 0, decodes.positions + 1)
        if step.deterministic:
            self._make_prompt_tokens_rows(prompts)

    def _make_prompt_tokens_rows(self, prompts: _Tokens) -> None:
        chunk = jnp.searchsorted(self._packed.cu_q_lens[1:], jnp.arange(self._num_prompt_tokens), side="right")
        tables = self._packed.page_tables.at[chunk].get(mode="fill", fill_value=self._step.num_pages)
        lens = jnp.where(prompts.slots < self._step.no_slot, prompts.positions + 1, 0)
        self._decode_tables = _join(tables, self._decode_tables)
        self._decode_lens = _join(lens, self._decode_lens)
        self._num_prompt_tokens = 0

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        step, packed, split = self._step, self._packed, self._num_prompt_tokens
        in_layer = step.num_pages * step.page_size
        slots = jnp.where(self._slots < in_layer, self._slots + layer * in_layer, step.config.num_layers * in_layer)
        self.kv = KVPages(*write_kv(self.kv.k, self.kv.v, k, v, slots, implementation=step.attention))
        options: dict[str, Any] = {
            "page_offset": layer * step.num_pages,
            "scale": step.config.head_dim**-0.5,
            "window": step.config.windows[layer],
            "implementation": step.attention,
        }
        outputs = []
        if split:
            outputs.append(
                extend_attention(
                    q[:split],
                    self.kv.k,
                    self.kv.v,
                    packed.page_tables,
                    packed.cu_q_lens,
                    self._chunk_ends,
                    **options,
                )
            )
        if split < len(q):
            outputs.append(
                decode_attention(q[split:], self.kv.k, self.kv.v, self._decode_tables, self._decode_lens, **options)
            )
        return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)


def _join(first: jax.Array, second: jax.Array) -> jax.Array:
    """Concatenates, and costs nothing when one part is empty."""
    if first.shape[0] == 0:
        return second
    return first if second.shape[0] == 0 else jnp.concatenate([first, second])
