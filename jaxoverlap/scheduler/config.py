"""The scheduler's sizes and limits."""

from __future__ import annotations

from dataclasses import dataclass

from jaxoverlap.request import RequestLimits


def sizes(smallest: int, largest: int, *, factor: int = 2) -> tuple[int, ...]:
    """From the smallest on, each `factor` times the one before, and the largest whatever it is."""
    found = []
    while smallest < largest:
        found.append(smallest)
        smallest *= factor
    return (*found, largest)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Everything the scheduler does not decide itself. Times in seconds.

    Attributes:
      limits: what a single request may be (context, page size, pages of the pool).
      max_running: rows of the row table, ≥ 1.
      max_batched_tokens: prompt tokens in a step at most, ≥ 1.
      max_prefill_rows: prompts that share a step at most, ≥ 1.
      mixed_steps: prompt chunks and decoding rows share steps; else a step is one or the other.
      max_mixed_tokens: prompt tokens in a step with decoding rows at most, ≥ 1.
      context_per_token: a prompt token at position p counts as about ``1 + p / context_per_token`` of
        max_mixed_tokens, since its attention reads all before it (`policy.chunk_cost`); None counts each as 1.
      max_prefill_streak: prefill steps between two decode steps at most, where they are not mixed; None leaves it
        to `max_decode_wait`.
      max_decode_wait: where steps are not mixed, no prefill step starts once a decoding row has waited so long.
      max_prompt_wait: once the first in the queue has waited so long, younger rows that had their turn make room;
        infinity never preempts for those who wait.
      headroom: tokens that an admission is good for at least, before the row may be preempted; doubled by each of the
        first three preemptions.
      prefix_cache: keep the KV of what was computed, for prompts that begin with it.
      cache_aware_order: admit the longest cached prefix first, as long as the first in the queue has not waited
        `max_prompt_wait`.
      window: no token's attention reaches further back, in any layer; pages before it are freed. None keeps all.
      max_queue: requests that may wait without having run; None is no limit.
      deterministic: every step has one and the same shape, so that no result depends on who else is in it.
      stuck_after: a running request without progress for so long is ended with an error.
    """

    limits: RequestLimits
    max_running: int
    max_batched_tokens: int
    max_prefill_rows: int = 16
    mixed_steps: bool = True
    max_mixed_tokens: int = 64
    context_per_token: float | None = None
    max_prefill_streak: int | None = None
    max_decode_wait: float = 0.3
    max_prompt_wait: float = 2.0
    headroom: int = 64
    prefix_cache: bool = True
    cache_aware_order: bool = False
    window: int | None = None
    max_queue: int | None = None
    deterministic: bool = False
    stuck_after: float = 60.0

    @property
    def pages_per_row(self) -> int:
        return -(-self.limits.max_model_len // self.limits.page_size)

    @property
    def mixed_budget(self) -> int:
        return min(self.max_mixed_tokens, self.max_batched_tokens)

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Prompt tokens that steps with decoding rows are compiled for. Small ones are for chunks far into a prompt."""
        return sizes(8, self.mixed_budget, factor=4)

    @property
    def max_mixed_chunks(self) -> int:
        """Prompts in a step with decoding rows: each costs a row of logits, so not as many as there are tokens.
        Two at least, so that one can go on beside a long one."""
        return min(self.max_prefill_rows, self.mixed_budget, max(2, self.mixed_budget // 16))

    @property
    def frees_window(self) -> bool:
        """Pages before the window are freed; a row with such holes can't be cached."""
        return self.window is not None and not self.prefix_cache
