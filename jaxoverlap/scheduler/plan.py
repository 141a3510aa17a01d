"""What passes between the scheduler and the device, and nothing else.

    StepPlan    planned: frozen arrays and a snapshot of who is who     scheduler → runner
    StepResult  what the device says, by plan order                      runner → scheduler
    StepOutput  committed: what the step meant                          scheduler → everyone

A plan is never changed after `Scheduler.plan` returned it, and its arrays are its own: the device may read
them in place while the host is two steps further. Named tuples, since several are made for each step, and a frozen
dataclass takes three times as long.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxoverlap.request import Request


class RowStatus(enum.IntEnum):
    """What the device says of a row after a step; it decides end by id and by length itself.

    Up to `LENGTH` there is a token.
    """

    RUNNING = 0
    STOP = 1  # the token is one of the row's stop ids
    LENGTH = 2  # the output limit is reached
    BAD_LOGITS = 3  # NaN or infinite logits: no token could be chosen
    VOID = 4  # nothing published: an intermediate chunk, or a row that had already finished
    NO_TOKEN = 5  # the request's own rules leave no token to choose


class PrefillChunk(NamedTuple):
    """Consecutive tokens of one request whose KV is to be written in one step.

    Attributes:
      request: its fixed fields (parameters, seed, limits) set up the device's row; its outputs are not read.
      row: the request's line in the row table.
      start: position of the first token, i.e. the length already written or launched (``cached_len``).
      token_ids: int32 [extend_len].
      num_outputs: outputs that the request had before (more than 0 after a preemption).
      publishes: the chunk ends the prompt, so the step samples the row's next token.
      page_table: int32 [pages], the row's pages up to the end of this chunk.
    """

    request: Request
    row: int
    start: int
    token_ids: np.ndarray
    num_outputs: int
    publishes: bool
    page_table: np.ndarray

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def scores_prompt(self) -> bool:
        """Some of the prompt's log-probabilities come of this chunk, and are asked for."""
        return self.request.needs_prompt_scores and self.start < self.request.prompt_len - 1

    @property
    def predicted_ids(self) -> np.ndarray:
        """The prompt tokens that this chunk's tokens predict: those from ``start + 1`` on, int32 [≤ extend_len]."""
        return self.request.prompt_ids[self.start + 1 : self.end + 1]


class StepPlan(NamedTuple):
    """One step: prefill chunks, then decoding rows. All arrays follow that order.

    Attributes:
      step_id: 0, 1, 2, … in launch order; steps are committed in the same order.
      chunks: at most one per row.
      decode_rows: int [D], distinct rows that decode one token each.
      decode_new_pages: int32 [D], the page that the row's next position starts, or `no_page`.
      rows, generations, request_ids: int [len(chunks) + D], who the results belong to.
      ends: int32 [len(chunks) + D], how far the row is written when the step is done.
      no_page: an id just outside the pool, so that the device drops a write to it.
      constrained: int [n], indices into `rows` of those that must follow a grammar.
      is_scored: some row asks for log-probabilities.
    """

    step_id: int
    chunks: tuple[PrefillChunk, ...]
    decode_rows: np.ndarray
    decode_new_pages: np.ndarray
    rows: np.ndarray
    generations: np.ndarray
    request_ids: np.ndarray
    ends: np.ndarray
    no_page: int
    constrained: np.ndarray
    is_scored: bool

    @classmethod
    def of_nothing(cls, no_page: int) -> StepPlan:
        """A step without rows."""
        none = np.zeros(0, dtype=np.int32)
        return cls(-1, (), none, none, none, none, none, none, no_page, none, False)

    @property
    def is_constrained(self) -> bool:
        """The step is launched in two halves, and the second needs to know what may be said."""
        return len(self.constrained) > 0

    def seal(self) -> None:
        """Makes every array read-only: the device may read it in place until the step is done."""
        mine = (self.decode_rows, self.decode_new_pages, self.rows, self.generations, self.request_ids, self.ends)
        for array in mine:
            array.setflags(write=False)
        for chunk in self.chunks:
            chunk.token_ids.setflags(write=False)
            chunk.page_table.setflags(write=False)

    @property
    def num_prefill_tokens(self) -> int:
        return sum([len(chunk.token_ids) for chunk in self.chunks])

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + len(self.decode_rows)


class StepResult(NamedTuple):
    """What the device says of a plan's rows, in the plan's order.

    Attributes:
      outcomes: int32 [rows, 2], token and `RowStatus`.
      scores: int32 [rows, SCORE_WORDS] as `jaxoverlap.model.scores` has it, if the plan is scored.
      prompt_scores: the same for each prompt token, [≥ prefill tokens, SCORE_WORDS], if a chunk asks for it.
    """

    outcomes: np.ndarray
    scores: np.ndarray | None = None
    prompt_scores: np.ndarray | None = None


class StepOutput(NamedTuple):
    """What was committed: one new token each for `requests`, and who is finished (by a token, abort or error).

    A turn that commits several steps has all their tokens here, in order; step_id is that of the last.
    """

    step_id: int | None
    requests: Sequence[Request]
    token_ids: Sequence[int]
    finished: Sequence[Request]

    @classmethod
    def joined(cls, outputs: Sequence[StepOutput]) -> StepOutput:
        if len(outputs) == 1:
            return outputs[0]
        return cls(
            outputs[-1].step_id if outputs else None,
            [request for output in outputs for request in output.requests],
            [token_id for output in outputs for token_id in output.token_ids],
            [request for output in outputs for request in output.finished],
        )
