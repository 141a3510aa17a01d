"""The scheduler: decides what the device does next, and what its results mean. No jax, no I/O, no waiting.

Rules of its state machine:

* `add` puts a request into the queue. It must have passed `RequestLimits`: then it will finish.
* `plan` admits from the queue (first come, first served) and freezes the next step. A request is admitted when
  a row is free and the pages it may need at the most are neither owned nor promised to others; so a running
  row never lacks a page, and an accepted request always finishes.
* `commit` takes the result of the oldest uncommitted plan. A token counts only if its row still belongs to the
  owner it was launched for and that owner is not finished.
* A request finishes in `_finish` and nowhere else: by a committed token, by `abort`, or by `fail`.
* `retire` returns rows and pages, the only place that frees. It takes finished rows that no uncommitted plan names.

An illegal call raises and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxoverlap.cache.page_pool import PagePool
from jaxoverlap.errors import EngineError, JaxOverlapError
from jaxoverlap.request import FinishReason, Request, RequestLimits, RequestStatus
from jaxoverlap.scheduler.plan import PrefillChunk, RowStatus, StepOutput, StepPlan
from jaxoverlap.scheduler.policy import PolicyView, prefill_is_next
from jaxoverlap.scheduler.row_table import RowTable

_NO_ROWS = np.empty(0, dtype=np.int32)
_FINISHING = (RowStatus.STOP, RowStatus.LENGTH, RowStatus.BAD_LOGITS)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Sizes and limits.

    Attributes:
      limits: what a single request may be (context, page size, pages of the pool).
      max_running: rows of the row table, ≥ 1.
      max_batched_tokens: prompt tokens in a step at most, ≥ 1.
      max_prefill_rows: prompts that share a prefill step at most, ≥ 1.
      max_prefill_streak: prefill steps between two decode steps at most, ≥ 1.
    """

    limits: RequestLimits
    max_running: int
    max_batched_tokens: int
    max_prefill_rows: int = 16
    max_prefill_streak: int = 4


class Scheduler:
    """See the module's rules. `clock` gives seconds and is read for the requests' timestamps only."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        limits = config.limits
        self.config = config
        self.pool = PagePool(limits.num_pages)
        self.rows = RowTable(config.max_running, -(-limits.max_model_len // limits.page_size), no_page=limits.num_pages)
        self._clock = clock
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, Request] = {}
        self._prefilling: dict[int, Request] = {}
        self._newly_finished: list[Request] = []
        self._outstanding_pages = 0  # promised to running rows and not yet theirs
        self._next_step_id = 0
        self._next_commit_id = 0
        self._prefill_streak = 0

    # ---------------------------------------------------------------- state

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def has_news(self) -> bool:
        """Requests finished without a step (aborted), not yet handed out by `commit` or `take_news`."""
        return bool(self._newly_finished)

    # ---------------------------------------------------------------- add, abort

    def add(self, request: Request) -> None:
        if request.request_id in self._waiting or request.request_id in self._running:
            raise ValueError(f"request_id: {request.request_id} is already in use")
        request.arrival_time = self._clock()
        self._waiting[request.request_id] = request

    def abort(self, request_id: int) -> bool:
        """Ends a request wherever it is. False when it is not here (any more)."""
        return self._end_early(request_id, FinishReason.ABORTED, None)

    def fail(self, request_id: int, error: JaxOverlapError) -> bool:
        """As `abort`, with an error for the caller."""
        return self._end_early(request_id, FinishReason.ERROR, error)

    def _end_early(self, request_id: int, reason: FinishReason, error: JaxOverlapError | None) -> bool:
        request = self._waiting.get(request_id) or self._running.get(request_id)
        if request is None:
            return False
        self._finish(request, reason, error=error)
        return True

    # ---------------------------------------------------------------- plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to launch now."""
        can_decode = bool(self.rows.decoding.any())
        view = PolicyView(self._can_prefill(), can_decode, self._prefill_streak)
        if prefill_is_next(view, self.config.max_prefill_streak):
            self._prefill_streak += 1
            return self._freeze(self._plan_chunks(), _NO_ROWS, _NO_ROWS)
        if can_decode:
            self._prefill_streak = 0
            return self._freeze((), *self._plan_decode())
        return None

    def _can_prefill(self) -> bool:
        if self._prefilling:
            return True
        return bool(self._waiting) and self._is_admissible(next(iter(self._waiting.values())))

    def _is_admissible(self, request: Request) -> bool:
        unpromised = self.pool.num_free - self._outstanding_pages
        return bool(self.rows.free_rows) and self._pages_needed(request) <= unpromised

    def _pages_needed(self, request: Request) -> int:
        return self.config.limits.pages_for(request.prompt_len, request.max_tokens)

    def _admit(self, request: Request) -> None:
        del self._waiting[request.request_id]
        pages = self._pages_needed(request)
        request.row = self.rows.take(request, pages)
        request.status = RequestStatus.RUNNING
        request.admit_time = self._clock()
        self._outstanding_pages += pages
        self._running[request.request_id] = self._prefilling[request.request_id] = request

    def _plan_chunks(self) -> tuple[PrefillChunk, ...]:
        """Fills the token budget: prompts under way first, then new ones; the last is cut to fit."""
        budget = self.config.max_batched_tokens
        chunks: list[PrefillChunk] = []
        for request in list(self._prefilling.values()):
            if budget == 0 or len(chunks) == self.config.max_prefill_rows:
                return tuple(chunks)
            chunks.append(self._plan_chunk(request, budget))
            budget -= len(chunks[-1].token_ids)
        while budget and self._waiting and len(chunks) < self.config.max_prefill_rows:
            request = next(iter(self._waiting.values()))
            if not self._is_admissible(request):
                break
            self._admit(request)
            chunks.append(self._plan_chunk(request, budget))
            budget -= len(chunks[-1].token_ids)
        return tuple(chunks)

    def _plan_chunk(self, request: Request, budget: int) -> PrefillChunk:
        rows, row = self.rows, request.row
        assert row is not None
        start = int(rows.planned_len[row])
        end = min(request.prompt_len, start + budget)
        missing = -(-end // self.config.limits.page_size) - int(rows.num_pages[row])
        rows.add_pages(row, self._allocate(missing))
        rows.planned_len[row] = end
        publishes = end == request.prompt_len
        if publishes:
            del self._prefilling[request.request_id]
            rows.planned_outputs[row] += 1
            rows.decoding[row] = rows.planned_outputs[row] < rows.max_outputs[row]
        return PrefillChunk(
            request=request,
            row=row,
            start=start,
            token_ids=request.prompt_ids[start:end].copy(),
            num_outputs=len(request.output_ids),
            publishes=publishes,
            page_table=rows.pages_of(row),
        )

    def _plan_decode(self) -> tuple[np.ndarray, np.ndarray]:
        """One token for every decoding row: whole arrays at once, since nearly all rows need nothing else."""
        rows = self.rows
        chosen = np.flatnonzero(rows.decoding).astype(np.int32)
        page_index = rows.planned_len[chosen] // self.config.limits.page_size
        new_pages = np.full(len(chosen), rows.no_page, dtype=np.int32)
        starts_page = page_index == rows.num_pages[chosen]
        if starts_page.any():
            growing = chosen[starts_page]
            pages = self._allocate(len(growing))
            new_pages[starts_page] = pages
            rows.page_table[growing, page_index[starts_page]] = pages
            rows.num_pages[growing] += 1
        rows.planned_len[chosen] += 1
        rows.planned_outputs[chosen] += 1
        rows.decoding[chosen] = rows.planned_outputs[chosen] < rows.max_outputs[chosen]
        return chosen, new_pages

    def _allocate(self, count: int) -> np.ndarray:
        self._outstanding_pages -= count
        return self.pool.allocate(count)

    def _freeze(
        self, chunks: tuple[PrefillChunk, ...], decode_rows: np.ndarray, decode_new_pages: np.ndarray
    ) -> StepPlan:
        chunk_rows = np.fromiter((chunk.row for chunk in chunks), dtype=np.int32, count=len(chunks))
        rows = np.concatenate([chunk_rows, decode_rows])
        self.rows.in_flight[rows] += 1
        plan = StepPlan(
            step_id=self._next_step_id,
            chunks=chunks,
            decode_rows=decode_rows,
            decode_new_pages=decode_new_pages,
            rows=rows,
            generations=self.rows.generation[rows],
            request_ids=self.rows.request_ids[rows],
            no_page=self.rows.no_page,
        )
        self._next_step_id += 1
        plan.seal()
        return plan

    # ---------------------------------------------------------------- commit, finish, retire

    def commit(self, plan: StepPlan, result: np.ndarray) -> StepOutput:
        """Takes a step's result, int32 [len(plan.rows), 2]: token and `RowStatus` of each row.

        Raises:
          EngineError: a plan out of order, committed twice, or a result of another shape.
        """
        if plan.step_id != self._next_commit_id:
            raise EngineError(f"step {plan.step_id} committed, but step {self._next_commit_id} is the oldest in flight")
        if result.shape != (len(plan.rows), 2):
            raise EngineError(f"step {plan.step_id}: result of shape {result.shape} for {len(plan.rows)} rows")
        self._next_commit_id += 1
        rows = self.rows
        rows.in_flight[plan.rows] -= 1
        status = result[:, 1]
        counts = (
            (status != RowStatus.VOID)
            & (rows.generation[plan.rows] == plan.generations)
            & (rows.request_ids[plan.rows] == plan.request_ids)
            & ~rows.finished[plan.rows]
        )
        if plan.chunks:
            self._stamp_first_tokens(plan, counts)
        good = counts & (status != RowStatus.BAD_LOGITS)
        requests: list[Request] = rows.requests[plan.rows[good]].tolist()
        token_ids: list[int] = result[good, 0].tolist()
        for request, token_id in zip(requests, token_ids, strict=True):
            request.output_ids.append(token_id)
        for index in np.flatnonzero(counts & np.isin(status, _FINISHING)).tolist():
            self._finish_as_device_says(rows.requests[plan.rows[index]], RowStatus(int(status[index])))
        return StepOutput(plan.step_id, requests, token_ids, self.take_news())

    def take_news(self) -> list[Request]:
        """Requests finished since the last call, in the order in which they finished."""
        news, self._newly_finished = self._newly_finished, []
        return news

    def _stamp_first_tokens(self, plan: StepPlan, counts: np.ndarray) -> None:
        now = self._clock()
        for chunk, counted in zip(plan.chunks, counts.tolist(), strict=False):
            if counted and chunk.request.first_token_time is None:
                chunk.request.first_token_time = now

    def _finish_as_device_says(self, request: Request, status: RowStatus) -> None:
        if status == RowStatus.LENGTH:
            self._finish(request, FinishReason.LENGTH)
        elif status == RowStatus.STOP:
            token_id = request.output_ids[-1]
            by_caller = token_id in request.sampling.stop_token_ids
            self._finish(request, FinishReason.STOP_TOKEN if by_caller else FinishReason.EOS, matched=token_id)
        else:
            position = request.committed_len
            error = EngineError(f"NaN or infinite logits at position {position}: no token could be chosen")
            self._finish(request, FinishReason.ERROR, error=error)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        matched: int | None = None,
        error: JaxOverlapError | None = None,
    ) -> None:
        assert request.status != RequestStatus.FINISHED, f"request {request.request_id} finished twice"
        if request.row is None:
            del self._waiting[request.request_id]
        else:
            del self._running[request.request_id]
            self._prefilling.pop(request.request_id, None)
            rows, row = self.rows, request.row
            rows.decoding[row] = False
            rows.finished[row] = True
            self._outstanding_pages -= int(rows.promised_pages[row] - rows.num_pages[row])
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.matched_token_id = matched
        request.error = error
        request.finish_time = self._clock()
        self._newly_finished.append(request)

    def retire(self) -> None:
        """Frees the rows and pages of finished requests that no step in flight names."""
        rows = self.rows
        for row in np.flatnonzero(rows.finished & (rows.in_flight == 0)).tolist():
            self.pool.free(rows.pages_of(row))
            rows.requests[row].row = None
            rows.give_back(row)

    # ---------------------------------------------------------------- proof

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant does not hold. Cheap enough for every step of a test."""
        rows = self.rows
        taken = np.array([request is not None for request in rows.requests])
        in_table = np.arange(rows.page_table.shape[1]) < rows.num_pages[:, None]
        assert (rows.page_table[~in_table] == rows.no_page).all(), "a page beyond its row's count"
        self.pool.check_integrity(rows.page_table[in_table])
        assert sorted(rows.free_rows) == np.flatnonzero(~taken).tolist(), "row pool and rows disagree"
        assert not (rows.decoding & (rows.finished | ~taken)).any(), "a finished or free row would decode"
        assert (rows.in_flight >= 0).all() and not rows.in_flight[~taken].any(), "a free row is in flight"
        growing = taken & ~rows.finished
        outstanding = int((rows.promised_pages - rows.num_pages)[growing].sum())
        assert outstanding == self._outstanding_pages <= self.pool.num_free, "promised pages are not there"
        assert (rows.num_pages <= rows.promised_pages).all(), "a row has more pages than it was promised"
        assert (rows.planned_outputs <= rows.max_outputs).all(), "more tokens planned than allowed"
        assert (rows.planned_len <= rows.num_pages * self.config.limits.page_size).all(), "a position has no page"
        assert len(self._running) == int(growing.sum()), "running requests and rows disagree"
        if not self.has_unfinished and not rows.in_flight.any() and not rows.finished.any():
            assert self.pool.num_free == self.pool.num_pages and rows.num_running == 0, "idle, but not all is back"
