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
from pallas_kernels import decode_attention, extend_attention, rope_and_write_kv, write_kv

_SCORED_TOGETHER = 16
"""Prompt tokens whose logits exist at once."""


@dataclass(frozen=True)
class DeviceStep:
    """Everything about a step that is known before it is compiled.

    Attributes:
      config, dtype: the model.
      num_rows, pages_per_row: R and C of the row state.
      num_pages: P, pages of one layer; page_size: positions in a page.
      max_step_tokens: of steps with prompts, with the rows that decode beside them; every step pads to it what
        `score_prompt` reads, which so has one shape.
      attention: implementation in `pallas_kernels`; interpret: run its kernels without a GPU, slowly.
      deterministic: prompt tokens attend as decoding rows do, so that it does not matter which of them a token is in.
    """

    config: ModelConfig
    dtype: Any
    num_rows: int
    pages_per_row: int
    num_pages: int
    page_size: int
    max_step_tokens: int
    attention: str = "xla"
    interpret: bool = False
    deterministic: bool = False

    @property
    def drawing(self) -> dict[str, Any]:
        """Who draws tokens, for `pallas_kernels.draw_tokens`."""
        return {"implementation": self.attention, "interpret": self.interpret}

    def __call__(
        self, shape: StepShape, weights: Any, kv: KVPages, state: RowState, packed: jax.Array
    ) -> tuple[KVPages, RowState, ReadyToSample, jax.Array | None]:
        """Runs one step of a static shape with T prompt tokens, R prompts and B decoding rows.

        Returns:
          The pool; the row state; what `sample` needs of the R + B rows; and the last hidden states of all tokens,
          prompts first, [max_step_tokens, hidden_size] (None of a step without prompts), for `score_prompt`.
        """
        step = unpack(packed, shape, self.pages_per_row)
        state = self._add_pages(self._seat_chunks(state, step), step)
        prompts, decodes = self._prompt_tokens(step), self._decode_tokens(state, step)
        attention = _PagedAttention(self, kv, step, prompts, decodes, state)
        # XLA's back ends fuse the rotation with what is around it; kernels have it inside.
        packed_attend = self.attention != "xla"
        decoder = Decoder(self.config, self.dtype, packed_attend)
        hidden = decoder.apply(
            weights,
            _join(prompts.token_ids, decodes.token_ids),
            _join(prompts.positions, decodes.positions),
            attention.packed if packed_attend else attention,
        )
        assert isinstance(hidden, jax.Array)
        last_of_chunk = jnp.maximum(step.cu_q_lens[1:] - 1, 0)
        last_hidden = _join(hidden[: shape.prefill_tokens][last_of_chunk], hidden[shape.prefill_tokens :])
        if packed_attend:  # on a GPU rows more cost the product little, and to pad its result costs a copy of it
            last_hidden = _pad_rows(last_hidden, shape.sample_rows)
        logits = decoder.apply(weights, last_hidden, method=Decoder.logits)
        assert isinstance(logits, jax.Array)
        ready = self._ready(shape, state, step, logits)
        if not shape.prefill_tokens:
            return attention.kv, state, ready, None
        return attention.kv, state, ready, _pad_rows(hidden, self.max_step_tokens)

    def score_prompt(self, weights: Any, hidden: jax.Array, targets: jax.Array, num_top: jax.Array) -> jax.Array:
        """Scores the token that follows each of T tokens; a few at a time, so that no [T, V] ever exists.

        Args (T is max_step_tokens):
          hidden: [T, hidden_size].
          targets, num_top: int32 [T], see `score_tokens`.

        Returns:
          int32 [T, SCORE_WORDS].
        """
        decoder = Decoder(self.config, self.dtype)
        width = min(_SCORED_TOGETHER, len(targets))
        blocks = -(-len(targets) // width)

        def split(array: jax.Array, fill: int = 0) -> jax.Array:
            return _pad_rows(array, blocks * width, fill).reshape(blocks, width, *array.shape[1:])

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
        chunk = _chunk_of(step, index)
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
    def compiler_options(self) -> dict[str, Any] | None:
        """XLA's, beside kernels. On a GPU its products come from cuBLASLt, which adds to the residual stream on the
        way; those that XLA would write itself need another kernel for that and, where they are split, one more."""
        if self.attention == "xla":
            return None
        # What is interpreted takes minutes to optimise, and is slow anyway.
        return {"xla_backend_optimization_level": 0} if self.interpret else {"xla_gpu_enable_triton_gemm": False}

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
        return ReadyToSample(
            logits=_pad_rows(logits, shape.sample_rows),
            rows=_pad_rows(jnp.where(publishes, rows, self.num_rows), shape.sample_rows, self.num_rows),
            seq_len=_pad_rows(seq_len, shape.sample_rows),
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
        # Not those of the input: a kernel's argument that is a piece of another array is a copy.
        self._chunk_tables = state.page_table.at[packed.chunk_rows].get(mode="fill", fill_value=step.num_pages)
        rows = packed.decode_rows
        self._decode_tables = state.page_table.at[rows].get(mode="fill", fill_value=step.num_pages)
        finished = state.finished.at[rows].get(mode="fill", fill_value=True)
        self._decode_lens = jnp.where(finished, 0, decodes.positions + 1)
        if step.deterministic:
            self._make_prompt_tokens_rows(prompts)
        self._arrivals = jnp.zeros((len(self._decode_lens), step.config.num_kv_heads), dtype=jnp.int32)
        self._implementation: dict[str, Any] = {"implementation": step.attention, "interpret": step.interpret}

    def _make_prompt_tokens_rows(self, prompts: _Tokens) -> None:
        chunk = _chunk_of(self._packed, jnp.arange(self._num_prompt_tokens, dtype=jnp.int32))
        tables = self._packed.page_tables.at[chunk].get(mode="fill", fill_value=self._step.num_pages)
        lens = jnp.where(prompts.slots < self._step.no_slot, prompts.positions + 1, 0)
        self._decode_tables = _join(tables, self._decode_tables)
        self._decode_lens = _join(lens, self._decode_lens)
        self._num_prompt_tokens = 0

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """q [T, H, D], k and v [T, K, D], rotated; returns [T, H, D]."""
        self.kv = KVPages(*write_kv(self.kv.k, self.kv.v, k, v, self._slots_of(layer), **self._implementation))
        return self._attend(layer, q)

    def packed(
        self, layer: int, qkv: jax.Array, cos_sin: tuple[jax.Array, jax.Array], qk_norms: jax.Array | None
    ) -> jax.Array:
        """qkv [T, (H + 2K) D], as it comes from the product; returns [T, H, D]."""
        cos, sin = (phases.squeeze(1) for phases in cos_sin)
        q, k_pages, v_pages = rope_and_write_kv(
            qkv,
            self.kv.k,
            self.kv.v,
            cos,
            sin,
            self._slots_of(layer),
            qk_norms,
            norm_eps=self._step.config.norm_eps,
            **self._implementation,
        )
        self.kv = KVPages(k_pages, v_pages)
        return self._attend(layer, q)

    def _slots_of(self, layer: int) -> jax.Array:
        in_layer = self._step.num_pages * self._step.page_size
        nowhere = self._step.config.num_layers * in_layer
        return jnp.where(self._slots < in_layer, self._slots + layer * in_layer, nowhere)

    def _attend(self, layer: int, q: jax.Array) -> jax.Array:
        step, packed, prompt_tokens = self._step, self._packed, self._num_prompt_tokens
        options: dict[str, Any] = {
            "page_offset": layer * step.num_pages,
            "scale": step.config.head_dim**-0.5,
            "window": step.config.windows[layer],
            **self._implementation,
        }
        pages, out = (self.kv.k, self.kv.v), None
        if prompt_tokens:
            chunks = self._chunk_tables, packed.cu_q_lens, self._chunk_ends
            out = extend_attention(q, *pages, *chunks, tokens=prompt_tokens, **options)
        if prompt_tokens < len(q):
            rows = self._decode_tables, self._decode_lens, self._arrivals
            out, self._arrivals = decode_attention(q, *pages, *rows, out=out, **options)
        assert out is not None
        return out


def _chunk_of(step: PackedStep, tokens: jax.Array) -> jax.Array:
    """The chunk of each of a step's prompt tokens; that of padding is out of range. By comparing, without a loop."""
    return jnp.searchsorted(step.cu_q_lens[1:], tokens, side="right", method="compare_all").astype(jnp.int32)


def _pad_rows(array: jax.Array, rows: int, fill: int = 0) -> jax.Array:
    """More of the first axis."""
    widths = [(0, rows - len(array))] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, widths, constant_values=fill)


def _join(first: jax.Array, second: jax.Array) -> jax.Array:
    """Concatenates, and costs nothing when one part is empty."""
    if first.shape[0] == 0:
        return second
    return first if second.shape[0] == 0 else jnp.concatenate([first, second])
