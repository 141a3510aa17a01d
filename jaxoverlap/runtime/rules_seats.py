"""Which rows have penalties or biases, and the memory for them: there from the first request on that wants it."""

from __future__ import annotations

import numpy as np

from jaxoverlap.id_arrays import TokenBiases, TokenIds
from jaxoverlap.model.logit_rules import IN_PROMPT, MOST_OUTPUTS, RowRules
from jaxoverlap.runtime.executables import Executables, Rare
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.plan import PrefillChunk, StepPlan


class RulesSeats:
    """`rules` is None as long as nobody has needed it."""

    def __init__(self, executables: Executables, num_rows: int, vocab_size: int) -> None:
        self.rules: RowRules | None = None
        self._executables, self._vocab_size = executables, vocab_size
        self._in_use = np.zeros(num_rows, dtype=bool)

    def seat(self, plan: StepPlan) -> bool:
        """Sets up the rows that get their first token in this step. Returns whether the step needs rules."""
        for chunk in plan.chunks:
            if chunk.publishes:
                sampling = chunk.request.sampling
                self._in_use[chunk.row] = sampling.has_penalty or sampling.has_bias
                if self._in_use[chunk.row]:
                    self._seat(chunk)
        needed = plan.is_constrained or bool(self._in_use[plan.rows].any())
        if needed:
            self._make()
        return needed

    def _make(self) -> RowRules:
        if self.rules is None:
            self.rules = self._executables[Rare.BLANK_RULES]()
        assert self.rules is not None
        return self.rules

    def _seat(self, chunk: PrefillChunk) -> None:
        known = chunk.request.extend_ids
        assert known is not None and len(known) == chunk.end
        counts = token_counts(known, chunk.request.prompt_len, self._vocab_size)
        bias = bias_of(chunk.request.sampling, self._vocab_size)
        counts.flags.writeable = bias.flags.writeable = False  # the device may read them in place
        self.rules = self._executables[Rare.SEAT_RULES](self._make(), np.int32(chunk.row), counts, bias)


def token_counts(known_ids: np.ndarray, prompt_len: int, vocab_size: int) -> np.ndarray:
    """uint16 [V] as in `RowRules.counts`, of a prompt and the outputs that follow it."""
    outputs = np.bincount(known_ids[prompt_len:], minlength=vocab_size)
    counts = np.minimum(outputs, MOST_OUTPUTS).astype(np.uint16)
    counts[known_ids[:prompt_len]] |= np.uint16(IN_PROMPT)
    return counts


def bias_of(sampling: SamplingParams, vocab_size: int) -> np.ndarray:
    """float32 [V] as in `RowRules.bias`."""
    if sampling.allowed_token_ids is None:
        bias = np.zeros(vocab_size, dtype=np.float32)
    else:
        bias = np.full(vocab_size, -np.inf, dtype=np.float32)
        bias[TokenIds.of(sampling.allowed_token_ids).array] = 0.0
    if sampling.logit_bias is not None:
        biases = TokenBiases.of(sampling.logit_bias)
        bias[biases.ids] += biases.numbers.astype(np.float32)
    bias[TokenIds.of(sampling.banned_token_ids).array] = -np.inf
    return bias
