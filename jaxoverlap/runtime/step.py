"""The first half of a step: ``(weights, kv, state, packed) → (kv, state, ready, hidden)``.

    packed ──► seat chunks, add pages ──► tokens, positions, slots ──► decoder + paged attention
                        ▲                        ▲                               │
                  row state  ◄── `sample`: next token, length, finished ◄── logits of each row's last token

A row that the device knows to be finished (or that is padding) is a no-op: its slot and its row index are out
of range, so its KV write and its state update are dropped, and its output is void.

It is made of functions: `begin`, one for each stage of the model, and `finish`. On a GPU all of them are compiled as
one, which is one dispatch and one CUDA graph. On a CPU each is compiled alone, and equal stages once: a step of 30
layers then compiles in a quarter of the time, and a few dispatches more are little beside a CPU's step.
On a GPU there is one stage, and so one pool; more where kernels can not address that pool (`stages_for_pool`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxoverlap.model.config import ModelConfig
from jaxoverlap.model.decoder import Decoder
from jaxoverlap.model.scores import SCORE_WORDS, score_tokens
from jaxoverlap.model.stages import split_config, stage_sizes
from jaxoverlap.runtime.buckets import StepShape
from jaxoverlap.runtime.packing import PackedStep, read_row_params, unpack
from jaxoverlap.runtime.paged_attention import PagedAttention, StepTokens
from jaxoverlap.runtime.row_state import KVPages, RowState
from jaxoverlap.runtime.sample_step import ReadyToSample

_SCORED_TOGETHER = 16
"""Prompt tokens whose logits exist at once."""


@dataclass(frozen=True)
class StepFunctions:
    """The functions that a step of some shape is made of; called, it is that step.

    Attributes:
      begin: ``(weights, state, packed) → (state, hidden, tokens)``.
      stages: ``(weights, kv, hidden, tokens) → (kv, hidden)`` of each.
      finish: ``(weights, hidden, tokens) → (ready, hidden)``.
    """

    begin: Callable[..., Any]
    stages: tuple[Callable[..., Any], ...]
    finish: Callable[..., Any]

    def __call__(
        self, weights: Sequence[Any], kv: Sequence[KVPages], state: RowState, packed: Any
    ) -> tuple[tuple[KVPages, ...], RowState, ReadyToSample, jax.Array | None]:
        """Weights and pools are of each stage.

        Returns:
          The pools; the row state; what `sample` needs of the R + B rows; and the last hidden states of all tokens,
          prompts first, [max_step_tokens, hidden_size] (None of a step without prompts), for `score_prompt`.
        """
        state, hidden, tokens = self.begin(weights[0], state, packed)
        pools = []
        for run, stage_weights, pool in zip(self.stages, weights, kv, strict=True):
            pool, hidden = run(stage_weights, pool, hidden, tokens)
            pools.append(pool)
        ready, hidden = self.finish(weights[0], hidden, tokens)
        return tuple(pools), state, ready, hidden


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
      max_stages: functions, and pools, that the layers are divided into at most.
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
    max_stages: int = 1

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return stage_sizes(self.config.num_layers, self.max_stages)

    @cached_property
    def stages(self) -> tuple[ModelConfig, ...]:
        return split_config(self.config, self.stage_sizes)

    @property
    def is_one_function(self) -> bool:
        """Whether all of a step is compiled together, however many stages it has: see above."""
        return self.attention != "xla" or len(self.stages) == 1

    @property
    def drawing(self) -> dict[str, Any]:
        """Who draws tokens, for `pallas_kernels.draw_tokens`."""
        return {"implementation": self.attention, "interpret": self.interpret}

    @property
    def packed_attend(self) -> bool:
        """XLA's back ends fuse the rotation with what is around it; kernels have it inside."""
        return self.attention != "xla"

    def functions(self, shape: StepShape) -> StepFunctions:
        """Of a static shape with T prompt tokens, R prompts and B decoding rows."""
        stages = tuple(partial(self.run_stage, stage) for stage in self.stages)
        return StepFunctions(partial(self.begin, shape), stages, partial(self.finish, shape))

    def begin(
        self, shape: StepShape, weights: Any, state: RowState, packed: jax.Array
    ) -> tuple[RowState, jax.Array, StepTokens]:
        """What comes before the layers; returns the row state, the embedded tokens, and what is to be known of them."""
        step = unpack(packed, shape, self.pages_per_row)
        state = self._add_pages(self._seat_chunks(state, step), step)
        prompts, decodes = self._prompt_tokens(step), self._decode_tokens(state, step)
        hidden = self._decoder.apply(weights, _join(prompts.token_ids, decodes.token_ids), method=Decoder.embed)
        assert isinstance(hidden, jax.Array)
        return state, hidden, self._tokens(state, step, prompts, decodes)

    def run_stage(
        self, stage: ModelConfig, weights: Any, kv: KVPages, hidden: jax.Array, tokens: StepTokens
    ) -> tuple[KVPages, jax.Array]:
        """The layers of one stage, on its pool."""
        attention = PagedAttention(
            stage,
            kv,
            tokens,
            num_pages=self.num_pages,
            implementation={"implementation": self.attention, "interpret": self.interpret},
        )
        attend = attention.packed if self.packed_attend else attention
        decoder = Decoder(stage, self.dtype, self.packed_attend)
        hidden = decoder.apply(weights, hidden, tokens.positions, attend, method=Decoder.run_layers)  # type: ignore[assignment]
        return attention.kv, hidden

    def finish(
        self, shape: StepShape, weights: Any, hidden: jax.Array, tokens: StepTokens
    ) -> tuple[ReadyToSample, jax.Array | None]:
        """What comes behind the layers."""
        last_of_chunk = jnp.maximum(tokens.cu_q_lens[1:] - 1, 0)
        last_hidden = _join(hidden[: shape.prefill_tokens][last_of_chunk], hidden[shape.prefill_tokens :])
        if self.packed_attend:  # on a GPU rows more cost the product little, and to pad its result costs a copy of it
            last_hidden = _pad_rows(last_hidden, shape.sample_rows)
        logits = self._decoder.apply(weights, last_hidden, method=Decoder.logits)
        assert isinstance(logits, jax.Array)
        ready = ReadyToSample(
            logits=_pad_rows(logits, shape.sample_rows),
            rows=_pad_rows(tokens.rows, shape.sample_rows, self.num_rows),
            seq_len=_pad_rows(tokens.seq_len, shape.sample_rows),
        )
        return ready, _pad_rows(hidden, self.max_step_tokens) if shape.prefill_tokens else None

    def score_prompt(self, weights: Any, hidden: jax.Array, targets: jax.Array, num_top: jax.Array) -> jax.Array:
        """Scores the token that follows each of T tokens; a few at a time, so that no [T, V] ever exists.

        Args (T is max_step_tokens):
          hidden: [T, hidden_size].
          targets, num_top: int32 [T], see `score_tokens`.

        Returns:
          int32 [T, SCORE_WORDS].
        """
        decoder = Decoder(self.stages[0], self.dtype)
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
        return replace(
            state,
            seq_len=state.seq_len.at[rows].set(_chunk_ends(step), mode="drop"),
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

    @property
    def _decoder(self) -> Decoder:
        """Of what is before and behind the layers, which all stages have."""
        return Decoder(self.stages[0], self.dtype, self.packed_attend)

    def _tokens(self, state: RowState, step: PackedStep, prompts: _Tokens, decodes: _Tokens) -> StepTokens:
        rows = step.decode_rows
        finished = state.finished.at[rows].get(mode="fill", fill_value=True)
        decode_tables = state.page_table.at[rows].get(mode="fill", fill_value=self.num_pages)
        decode_lens = jnp.where(finished, 0, decodes.positions + 1)
        if self.deterministic:
            tables, lens = self._prompt_tokens_as_rows(step, prompts)
            decode_tables, decode_lens = _join(tables, decode_tables), _join(lens, decode_lens)
        return StepTokens(
            positions=_join(prompts.positions, decodes.positions),
            slots=_join(prompts.slots, decodes.slots),
            cu_q_lens=step.cu_q_lens,
            chunk_ends=_chunk_ends(step),
            # Not those of the input: a kernel's argument that is a piece of another array is a copy.
            chunk_tables=state.page_table.at[step.chunk_rows].get(mode="fill", fill_value=self.num_pages),
            decode_tables=decode_tables,
            decode_lens=decode_lens,
            **self._rows_to_sample(state, step),
        )

    def _prompt_tokens_as_rows(self, step: PackedStep, prompts: _Tokens) -> tuple[jax.Array, jax.Array]:
        chunk = _chunk_of(step, jnp.arange(len(prompts.token_ids), dtype=jnp.int32))
        tables = step.page_tables.at[chunk].get(mode="fill", fill_value=self.num_pages)
        return tables, jnp.where(prompts.slots < self.no_slot, prompts.positions + 1, 0)

    def _rows_to_sample(self, state: RowState, step: PackedStep) -> dict[str, jax.Array]:
        rows = _join(step.chunk_rows, step.decode_rows)
        finished = state.finished.at[rows].get(mode="fill", fill_value=True)
        decoded = jnp.ones_like(step.decode_rows)
        # A chunk's row already has its new length; a decoding row grows by the token it has just run.
        seq_len = state.seq_len.at[rows].get(mode="fill", fill_value=0) + _join(step.chunk_rows * 0, decoded)
        publishes = _join(step.publishes, decoded).astype(bool) & ~finished
        return {"rows": jnp.where(publishes, rows, self.num_rows), "seq_len": seq_len}


@dataclass(frozen=True)
class _Tokens:
    """token_ids, positions, slots: int32 [n]. A slot is that of layer 0; one outside the layer drops the write."""

    token_ids: jax.Array
    positions: jax.Array
    slots: jax.Array


def _chunk_of(step: PackedStep, tokens: jax.Array) -> jax.Array:
    """The chunk of each of a step's prompt tokens; that of padding is out of range. By comparing, without a loop."""
    return jnp.searchsorted(step.cu_q_lens[1:], tokens, side="right", method="compare_all").astype(jnp.int32)


def _chunk_ends(step: PackedStep) -> jax.Array:
    """int32 [R], the positions of each chunk's row that are written after this step."""
    return step.chunk_starts + step.cu_q_lens[1:] - step.cu_q_lens[:-1]


def _pad_rows(array: jax.Array, rows: int, fill: int = 0) -> jax.Array:
    """More of the first axis."""
    widths = [(0, rows - len(array))] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, widths, constant_values=fill)


def _join(first: jax.Array, second: jax.Array) -> jax.Array:
    """Concatenates, and costs nothing when one part is empty."""
    if first.shape[0] == 0:
        return second
    return first if second.shape[0] == 0 else jnp.concatenate([first, second])
