"""The shapes a step may have. Warm-up compiles all of them, and run time picks among them: the same function.

    number of executables = decode buckets + prefill buckets + mixed buckets
                          ≤ (log2(max_running) + 2) + (log2(max_batched_tokens / 16) + 2)
                            + log4(max_running) * (log4(max_mixed_tokens / 8) + 2)

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

_SMALLEST_PREFILL = 16


@dataclass(frozen=True, slots=True)
class StepShape:
    """Static sizes of one compiled step.

    Attributes:
      prefill_tokens: T, prompt tokens, packed.
      prefill_rows: R, prompts they belong to.
      decode_rows: B, rows with one token each.
    """

    prefill_tokens: int
    prefill_rows: int
    decode_rows: int

    def __str__(self) -> str:
        if self.prefill_tokens == 0:
            return f"decode {self.decode_rows}"
        prefill = f"prefill {self.prefill_tokens}"
        return f"{prefill} + decode {self.decode_rows}" if self.decode_rows else prefill


class Buckets:
    """Powers of two up to a limit, and the limit itself whatever it is; of four in steps that are mixed."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._chunks = min(config.max_prefill_rows, config.max_running)
        self._mixed_chunks = min(config.max_mixed_chunks, config.max_running)
        self.decode_rows = sizes(1, config.max_running)
        self.prefill_tokens = sizes(_SMALLEST_PREFILL, config.max_batched_tokens)
        self.mixed_tokens = config.mixed_sizes if config.mixed_steps and config.max_running > 1 else ()
        self.mixed_rows = _every_other(sizes(4, config.max_running))

    def __iter__(self) -> Iterator[StepShape]:
        for tokens in self.prefill_tokens:
            yield self._prefill_shape(tokens, 0)
        for rows in self.decode_rows:
            yield StepShape(0, 0, rows)
        for tokens in self.mixed_tokens:
            for rows in self.mixed_rows:
                yield self._prefill_shape(tokens, rows)

    def shape_of(self, plan: StepPlan) -> StepShape:
        """The smallest shape that holds a plan."""
        tokens, rows = plan.num_prefill_tokens, len(plan.decode_rows)
        if not rows:
            return self._prefill_shape(_round_up(tokens, self.prefill_tokens), 0)
        if not tokens:
            return StepShape(0, 0, _round_up(rows, self.decode_rows))
        return self._prefill_shape(_round_up(tokens, self.mixed_tokens), _round_up(rows, self.mixed_rows))

    def _prefill_shape(self, tokens: int, decode_rows: int) -> StepShape:
        return StepShape(tokens, min(tokens, self._mixed_chunks if decode_rows else self._chunks), decode_rows)


def _every_other(found: tuple[int, ...]) -> tuple[int, ...]:
    """Downward from the largest."""
    return found[::-2][::-1]


def _round_up(value: int, found: tuple[int, ...]) -> int:
    return next(size for size in found if size >= value)
