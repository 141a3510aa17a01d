"""What passes between the scheduler and the device, and nothing else.

    StepPlan    planned: frozen arrays and a snapshot of who is who     scheduler → runner
    (result)    int32 [rows, 2], token and `RowStatus`, by plan order   runner → scheduler
    StepOutput  committed: what the step meant                          scheduler → everyone

A plan is never changed after `Scheduler.plan` returned it, and its arrays are its own: the device may read
them in place while the host is two steps further.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, eq=False)
class PrefillChunk:
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


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step: prefill chunks, then decoding rows. All arrays follow that order.

    Attributes:
      step_id: 0, 1, 2, … in launch order; steps are committed in the same order.
      chunks: at most one per row.
      decode_rows: int [D], distinct rows that decode one token each.
      decode_new_pages: int32 [D], the page that the row's next position starts, or `no_page`.
      rows, generations, request_ids: int [len(chunks) + D], who the results belong to.
      no_page: an id just outside the pool, so that the device drops a write to it.
    """

    step_id: int
    chunks: tuple[PrefillChunk, ...]
    decode_rows: np.ndarray
    decode_new_pages: np.ndarray
    rows: np.ndarray
    generations: np.ndarray
    request_ids: np.ndarray
    no_page: int

    def seal(self) -> None:
        """Makes every array read-only: the device may read it in place until the step is done."""
        for array in (self.decode_rows, self.decode_new_pages, self.rows, self.generations, self.request_ids):
            array.setflags(write=False)
        for chunk in self.chunks:
            chunk.token_ids.setflags(write=False)
            chunk.page_table.setflags(write=False)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + len(self.decode_rows)


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What was committed: one new token each for `requests`, and who is finished (by a token, abort or error)."""

    step_id: int | None
    requests: Sequence[Request]
    token_ids: Sequence[int]
    finished: Sequence[Request]
