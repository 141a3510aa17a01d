"""The shapes a step may have. Warm-up compiles all of them, and run time picks among them: the same function.

    number of executables = decode buckets + prefill buckets + mixed buckets
                          ≤ (log2(max_running) + 2) + (log2(max_batched_tokens / min_prefill_tokens) + 2)
                            + log4(max_running) * (log4(max_mixed_tokens / 8) + 2)

(deterministic: 1), and of the second half of a step, which chooses the tokens, at most ``2 (log4(max_running) + 2)``.

Mixed steps are there while prompts come in, so they make do with coarser buckets. Their decoding rows come in powers
of four, downward from the limit, and no fewer than four where there may be more. Their prompt tokens come in powers of
four from 8 on; the scheduler cuts chunks far into a prompt to these (`SchedulerConfig.mixed_sizes`).

The context is in no shape: attention follows the true lengths with loops whose bounds are data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxoverlap.scheduler.config import SchedulerConfig, sizes
from jaxoverlap.scheduler.plan import StepPlan

MIN_PREFILL_TOKENS = 16
"""Prompt tokens of the smallest prefill step, unless another number is asked for."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Static sizes of one compiled step.

    Attributes:
      prefill_tokens: T, prompt tokens, packed.
      prefill_rows: R, prompts they belong to.
      decode_rows: B, rows with one token each.
      sample_rows: rows of the second half, at least R + B: there are few sizes of it, since it compiles slowly.
    """

    prefill_tokens: int
    prefill_rows: int
    decode_rows: int
    sample_rows: int

    def __str__(self) -> str:
        if self.prefill_tokens == 0:
            return f"decode {self.decode_rows}"
        prefill = f"prefill {self.prefill_tokens}"
        return f"{prefill} + decode {self.decode_rows}" if self.decode_rows else prefill


def row_multiple(attention: str) -> int:
    """Beside kernels decoding rows come in eights: cuBLASLt would pad each product on its own, and cut its result."""
    return 1 if attention == "xla" else 8


class Buckets:
    """Each twice the one before up to a limit, and the limit itself whatever it is; four times in mixed steps.

    Decoding rows, and those of the second half, are such numbers rounded up to multiples of `row_multiple`. Prompt
    tokens of steps without decoding rows begin at `min_prefill_tokens`.
    """

    def __init__(
        self, config: SchedulerConfig, row_multiple: int = 1, *, min_prefill_tokens: int = MIN_PREFILL_TOKENS
    ) -> None:
        self._only = _only_shape(config, row_multiple) if config.deterministic else None
        self._chunks = min(config.max_prefill_rows, config.max_running)
        self._mixed_chunks = min(config.max_mixed_chunks, config.max_running)
        self.decode_rows = _multiples(sizes(1, config.max_running), row_multiple)
        self.prefill_tokens = sizes(min_prefill_tokens, config.max_batched_tokens)
        self.mixed_tokens = config.mixed_sizes if config.mixed_steps and config.max_running > 1 else ()
        self.mixed_rows = _multiples(_every_other(sizes(4, config.max_running)), row_multiple)
        beside = self._mixed_chunks if self.mixed_tokens else 0
        most = max(self._chunks, self.decode_rows[-1] + beside)
        self.sample_rows = _multiples(_every_other(sizes(1, most)), row_multiple)

    def __iter__(self) -> Iterator[StepShape]:
        if self._only is not None:
            yield self._only
            return
        for tokens in self.prefill_tokens:
            yield self._shape(tokens, 0)
        for rows in self.decode_rows:
            yield self._shape(0, rows)
        for tokens in self.mixed_tokens:
            for rows in self.mixed_rows:
                yield self._shape(tokens, rows)

    def shape_of(self, plan: StepPlan) -> StepShape:
        """The smallest shape that holds a plan."""
        if self._only is not None:
            return self._only
        tokens, rows = plan.num_prefill_tokens, len(plan.decode_rows)
        if not rows:
            return self._shape(_smallest(tokens, self.prefill_tokens), 0)
        if not tokens:
            return self._shape(0, _smallest(rows, self.decode_rows))
        return self._shape(_smallest(tokens, self.mixed_tokens), _smallest(rows, self.mixed_rows))

    def _shape(self, tokens: int, decode_rows: int) -> StepShape:
        prompts = min(tokens, self._mixed_chunks if decode_rows else self._chunks)
        return StepShape(tokens, prompts, decode_rows, _smallest(prompts + decode_rows, self.sample_rows))


def _only_shape(config: SchedulerConfig, row_multiple: int) -> StepShape:
    """Holds every plan. A multiple of 16 tokens: kernels of matrix products treat what is left over differently."""
    rows = round_up(config.max_running, row_multiple)
    prompts = min(config.max_prefill_rows, config.max_batched_tokens)
    tokens = round_up(config.max_batched_tokens + rows, 16) - rows
    return StepShape(tokens, prompts, rows, round_up(prompts + rows, 16))


def _every_other(found: tuple[int, ...]) -> tuple[int, ...]:
    """Downward from the largest."""
    return found[::-2][::-1]


def _multiples(found: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """Each rounded up, and once."""
    return tuple(dict.fromkeys(round_up(size, multiple) for size in found))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _smallest(value: int, found: tuple[int, ...]) -> int:
    return next(size for size in found if size >= value)
