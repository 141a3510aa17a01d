"""The shapes a step may have. Warm-up compiles all of them, and run time picks among them: the same function.

    number of executables = decode buckets + prefill buckets
                          ≤ (log2(max_running) + 2) + (log2(max_batched_tokens / 16) + 2)

The context is in no shape: attention follows the true lengths with loops whose bounds are data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
        return f"prefill {self.prefill_tokens}"


class Buckets:
    """Powers of two up to a limit, and the limit itself whatever it is."""

    def __init__(self, max_running: int, max_batched_tokens: int, max_prefill_rows: int) -> None:
        self.max_prefill_rows = min(max_prefill_rows, max_running)
        self.decode_rows = _sizes(1, max_running)
        self.prefill_tokens = _sizes(min(_SMALLEST_PREFILL, max_batched_tokens), max_batched_tokens)

    def __iter__(self) -> Iterator[StepShape]:
        for tokens in self.prefill_tokens:
            yield self._prefill_shape(tokens)
        for rows in self.decode_rows:
            yield StepShape(0, 0, rows)

    def shape_of(self, plan: StepPlan) -> StepShape:
        """The smallest shape that holds a plan."""
        if plan.chunks:
            return self._prefill_shape(_round_up(plan.num_prefill_tokens, self.prefill_tokens))
        return StepShape(0, 0, _round_up(len(plan.decode_rows), self.decode_rows))

    def _prefill_shape(self, tokens: int) -> StepShape:
        return StepShape(tokens, min(tokens, self.max_prefill_rows), 0)


def _sizes(smallest: int, largest: int) -> list[int]:
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


def _round_up(value: int, sizes: list[int]) -> int:
    return next(size for size in sizes if size >= value)
