"""The compiled functions of an engine: all of them are compiled in warm-up, none after it.

step shape                     first half of a step                          one for each shape of `Buckets`, see `step`
rows, with or without rules    second half of a step                         two for each bucket of rows
prompt tokens                  log-probabilities of a prompt, when asked     one for each bucket of prompt tokens
seat, blank                    penalties and biases of a row, when asked
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoverlap.model.config import ModelConfig
from jaxoverlap.model.logit_rules import RowRules
from jaxoverlap.runtime.buckets import Buckets, StepShape
from jaxoverlap.runtime.packing import packed_size
from jaxoverlap.runtime.row_state import KVPages, RowState
from jaxoverlap.runtime.sample_step import ReadyToSample, sample
from jaxoverlap.runtime.step import DeviceStep, StepFunctions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampleShape:
    num_rows: int
    with_rules: bool

    def __str__(self) -> str:
        return f"sample {self.num_rows}" + (" with rules" if self.with_rules else "")


class Rare(enum.StrEnum):
    """Functions of one shape, run for requests that ask for something special."""

    SCORE_PROMPT = "log-probabilities of prompts"
    BLANK_RULES = "blank rules"
    SEAT_RULES = "rules of a row"


Shape = StepShape | SampleShape | Rare


@dataclass(frozen=True)
class CompiledStep:
    """The first half of a step.

    Attributes:
      run: ``(weights, kv, state, packed) → (kv, state, ready, hidden)``.
      calls: the executables that it runs, in order.
    """

    run: Callable[..., Any]
    calls: tuple[jax.stages.Compiled, ...]

    def __call__(self, *arguments: Any) -> Any:
        return self.run(*arguments)

    @property
    def aliased_bytes(self) -> int:
        """Of results that are where an argument was."""
        return sum(call.memory_analysis().alias_size_in_bytes for call in self.calls)  # type: ignore[union-attr]

    @property
    def temporary_bytes(self) -> int:
        """At most, beside arguments and results."""
        return max(call.memory_analysis().temp_size_in_bytes for call in self.calls)  # type: ignore[union-attr]


def mask_words(vocab_size: int) -> int:
    """32-bit words that hold a bit for each id."""
    return -(-vocab_size // 32)


class Executables:
    """Compiled functions by shape.

    Attributes:
      compiles_after_ready: functions that had to be compiled while serving; anything but 0 is a bug.
    """

    def __init__(
        self,
        step: DeviceStep,
        buckets: Buckets,
        weights: tuple[Any, ...],
        kv: tuple[KVPages, ...],
        state: RowState,
    ) -> None:
        self.compiles_after_ready = 0
        self._step, self._buckets = step, buckets
        # Shapes only: the arrays themselves are donated and replaced all the time.
        self._weights, self._kv, self._state = jax.tree.map(_abstract, (weights, kv, state))
        self._device = state.last_token.sharding
        self._compiled: dict[Shape, CompiledStep | jax.stages.Compiled] = {}
        self._ready = False

    def __iter__(self) -> Iterator[Shape]:
        """All there can be, the slowest to compile first."""
        shapes = list(self._buckets)
        yield from shapes
        for rows in sorted({shape.sample_rows for shape in shapes}):
            yield SampleShape(rows, with_rules=False)
            yield SampleShape(rows, with_rules=True)
        yield from Rare

    def __getitem__(self, shape: Shape) -> Any:
        if shape not in self._compiled:
            if self._ready:
                self.compiles_after_ready += 1
                logger.warning("'%s' was compiled after warm-up; this is a bug", shape)
            self._compiled[shape] = self._compile(shape)
        return self._compiled[shape]

    def compile_all(self, progress: Callable[[Any, int], Any]) -> None:
        """Tracing is Python and compiling is not: two at a time take a quarter less."""
        shapes = [shape for shape in self if shape not in self._compiled]
        pool = ThreadPoolExecutor(max_workers=2)
        try:
            compiled = pool.map(self._compile, shapes)
            for shape in progress(shapes, len(shapes)):
                self._compiled[shape] = next(compiled)
        finally:
            pool.shutdown(cancel_futures=True)

    def seal(self) -> None:
        """From now on, compiling is a bug."""
        self._ready = True

    def clear(self) -> None:
        self._compiled = {}

    def _compile(self, shape: Shape) -> CompiledStep | jax.stages.Compiled:
        step, state = self._step, self._state
        if isinstance(shape, StepShape):
            return self._compile_step(shape) if step.is_one_function else self._compile_stages(shape)
        if isinstance(shape, SampleShape):
            ready = self._ready_to_sample(shape.num_rows)
            choose = partial(sample, drawing=step.drawing)
            if not shape.with_rules:
                return jax.jit(choose, donate_argnums=(0,)).lower(state, ready).compile()
            allowed = self._array((shape.num_rows, mask_words(step.config.vocab_size)), jnp.int32)
            second_half = jax.jit(choose, donate_argnums=(0, 2))
            return second_half.lower(state, ready, self._rules(), allowed).compile()
        if shape == Rare.SCORE_PROMPT:
            hidden = self._array((step.max_step_tokens, step.config.hidden_size), step.dtype)
            per_token = self._array((step.max_step_tokens,), jnp.int32)
            return jax.jit(step.score_prompt).lower(self._weights[0], hidden, per_token, per_token).compile()
        if shape == Rare.BLANK_RULES:
            blank = partial(RowRules.blank, step.num_rows, step.config.vocab_size)
            return jax.jit(blank, out_shardings=self._device).lower().compile()
        row, vocab = self._array((), jnp.int32), (step.config.vocab_size,)
        seat = jax.jit(RowRules.seat, donate_argnums=(0,))
        return seat.lower(self._rules(), row, self._array(vocab, jnp.uint16), self._array(vocab, jnp.float32)).compile()

    def _compile_step(self, shape: StepShape) -> CompiledStep:
        """As one executable."""
        first_half = jax.jit(self._step.functions(shape), donate_argnums=(1, 2))
        lowered = first_half.lower(self._weights, self._kv, self._state, self._packed(shape))
        compiled = lowered.compile(self._step.compiler_options)
        return CompiledStep(compiled, (compiled,))

    def _compile_stages(self, shape: StepShape) -> CompiledStep:
        """As one for what is before the layers, for each kind of stage, and for what is behind them."""

        def compiled(function: Any, arguments: tuple[Any, ...], donated: tuple[int, ...]) -> tuple[Any, Any]:
            lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
            return lowered.compile(self._step.compiler_options), jax.tree.map(self._like, lowered.out_info)

        functions, weights = self._step.functions(shape), self._weights
        begin, (_, hidden, tokens) = compiled(functions.begin, (weights[0], self._state, self._packed(shape)), (1,))
        of_kind: dict[ModelConfig, jax.stages.Compiled] = {}
        for stage, run, own_weights, kv in zip(self._step.stages, functions.stages, weights, self._kv, strict=True):
            if stage not in of_kind:
                of_kind[stage], _ = compiled(run, (own_weights, kv, hidden, tokens), (1, 2))
        finish, _ = compiled(functions.finish, (weights[0], hidden, tokens), ())
        stages = tuple(of_kind[stage] for stage in self._step.stages)
        return CompiledStep(StepFunctions(begin, stages, finish), (begin, *stages, finish))

    def _packed(self, shape: StepShape) -> Any:
        return self._array((packed_size(shape, self._step.pages_per_row),), jnp.int32)

    def _ready_to_sample(self, num_rows: int) -> ReadyToSample:
        return ReadyToSample(
            logits=self._array((num_rows, self._step.config.vocab_size), jnp.float32),
            rows=self._array((num_rows,), jnp.int32),
            seq_len=self._array((num_rows,), jnp.int32),
        )

    def _rules(self) -> RowRules:
        shape = (self._step.num_rows, self._step.config.vocab_size)
        return RowRules(self._array(shape, jnp.uint16), self._array(shape, jnp.float32))

    def _like(self, array: Any) -> Any:
        return self._array(array.shape, array.dtype)

    def _array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._device)


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(array), array.dtype, sharding=getattr(array, "sharding", None))
