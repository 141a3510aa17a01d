"""The scheduler: decides what the device does next, and what its results mean. No jax, no I/O, no waiting.

Rules of its state machine:

* `add` puts a request into the queue. It must have passed `RequestLimits`: then it will finish.
* `plan` admits from the queue, preempts where memory or patience ends, and freezes the next step (`Planner`).
* `commit` takes the result of the oldest uncommitted plan. A token counts only if its row still belongs to the
  owner it was launched for and that owner is not finished; of a preempted row it counts.
* A request finishes in `_finish` and nowhere else: by a committed token, `stop`, `abort`, `fail`, its deadline or the
  scan for stuck ones.
* `retire` takes back the rows that are leaving and that no uncommitted plan names, and nothing else frees. The
  request of a preempted row returns to the queue here, when all its tokens are known.

Why an accepted request always finishes: alone it fits into the pool; the oldest of the highest priority is never
preempted; and everybody else can be made to leave once it has used what it was promised.

An illegal call raises and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from jaxoverlap.errors import DeadlineError, EngineError, InvalidRequestError, JaxOverlapError, QueueFullError
from jaxoverlap.outputs import FinishReason
from jaxoverlap.request import Request, RequestStatus
from jaxoverlap.scheduler.config import SchedulerConfig
from jaxoverlap.scheduler.plan import RowStatus, StepOutput, StepPlan, StepResult
from jaxoverlap.scheduler.planner import Planner
from jaxoverlap.scheduler.scores import commit_prompt_scores, commit_scores
from jaxoverlap.scheduler.snapshot import MemorySnapshot
from jaxoverlap.scheduler.state import Counters, SchedulerState

_LENGTH = RowStatus.LENGTH.value
"""A plain integer: numpy takes 6 µs to see that a member of an enum is one."""
_PAUSE = 1.0
"""Seconds between two turns that count for patience at most: beyond them the caller was away or the step was slow, and
nobody is stuck for that."""


class Scheduler:
    """See the module's rules. `clock` gives seconds."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.state = SchedulerState(config)
        self._planner = Planner(self.state)
        self._clock = clock
        self._newly_finished: list[Request] = []
        self._last_turn = -np.inf
        self._next_scan = self._last_progress = 0.0

    # ---------------------------------------------------------------- state

    def now(self) -> float:
        """Seconds on the scheduler's clock."""
        return self._clock()

    @property
    def counters(self) -> Counters:
        return self.state.counters

    @property
    def num_waiting(self) -> int:
        return self.state.num_waiting

    @property
    def num_running(self) -> int:
        return len(self.state.running)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.state.running) or self.state.num_waiting > 0

    @property
    def has_news(self) -> bool:
        """Requests finished without a step (aborted), not yet handed out by `commit` or `take_news`."""
        return bool(self._newly_finished)

    @property
    def queue_is_full(self) -> bool:
        limit = self.config.max_queue
        return limit is not None and self.state.waiting.num_fresh + len(self.state.held) >= limit

    def memory_snapshot(self) -> MemorySnapshot:
        """Who has which page now."""
        return MemorySnapshot.of(self.state)

    def flush_cache(self) -> int:
        """Empties the prefix cache, but for what running requests read. Returns the number of pages."""
        return self.state.memory.flush()

    # ---------------------------------------------------------------- add, stop, abort

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          QueueFullError: as many wait as may. The samples of a prompt come in with the first of them.
        """
        if self.state.find(request.request_id) is not None:
            raise ValueError(f"request_id: {request.request_id} is already in use")
        if self.queue_is_full and request.leader is None:
            raise QueueFullError(
                f"max_queue: {self.config.max_queue} requests are waiting already; try again when some have started"
            )
        request.arrival_time = self._clock()
        self.state.enqueue(request, request.arrival_time)
        self.state.set_deadline(request)

    def stop(self, request_id: int) -> bool:
        """Ends a request whose text has come to a stop string. False when it is not here (any more)."""
        return self._end_early(request_id, FinishReason.STOP_STRING, None)

    def abort(self, request_id: int) -> bool:
        """Ends a request wherever it is. False when it is not here (any more)."""
        return self._end_early(request_id, FinishReason.ABORTED, None)

    def fail(self, request_id: int, error: JaxOverlapError) -> bool:
        """As `abort`, with an error for the caller."""
        return self._end_early(request_id, FinishReason.ERROR, error)

    def _end_early(self, request_id: int, reason: FinishReason, error: JaxOverlapError | None) -> bool:
        request = self.state.find(request_id)
        if request is None:
            return False
        self._finish(request, reason, error=error)
        return True

    # ---------------------------------------------------------------- plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to launch now."""
        now = self._clock()
        for request in self.state.overdue(now):
            where = "running" if request.row is not None else "waiting"
            error = DeadlineError(f"timeout: the request was still {where} after its {request.timeout:g} s")
            self._finish(request, FinishReason.ERROR, error=error)
        self.state.patience += min(now - self._last_turn, _PAUSE)
        if self.state.patience >= self._next_scan:
            self._end_stuck(self.state.patience)
        plan = self._planner.plan(now)
        if plan is not None or not self.has_unfinished:
            self._last_progress = self.state.patience
        self._last_turn = now
        return plan

    def _end_stuck(self, now: float) -> None:
        """A request that makes no progress though others or time do is a bug; it must not hang its caller. `now` is of
        `SchedulerState.patience`."""
        rows, limit = self.state.rows, self.config.stuck_after
        self._next_scan = now + limit / 8
        idle = (rows.request_ids >= 0) & ~rows.leaving & ~rows.in_flight
        if now - self._last_progress <= limit:
            # As long as others go on, a prompt may be set aside for more urgent ones, a row may lack a page, and where
            # steps are not mixed rows that decode may have to wait for prompts.
            idle[[request.row for request in self.state.prefilling.values()]] = False
            may_go = self.config.mixed_steps & (rows.planned_len < self.state.memory.allocated_len)
            idle &= may_go | ~rows.decoding
        for row in np.flatnonzero(idle & (now - rows.last_progress > limit)).tolist():
            self._fail_as_stuck(rows.requests[row], now - rows.last_progress[row])
        head = self.state.waiting.head()
        if head is not None and not self.state.running and now - self._last_progress > limit:
            self._fail_as_stuck(head, now - self._last_progress)

    def _fail_as_stuck(self, request: Request, seconds: float) -> None:
        memory = self.state.memory
        error = EngineError(
            f"request {request.request_id} made no progress for {seconds:.0f} s ({request.status}, "
            f"{len(request.output_ids)} outputs; {memory.num_available} of {memory.pool.num_pages} pages available, "
            f"{memory.num_unpromised} not promised): this is a bug"
        )
        self._finish(request, FinishReason.ERROR, error=error)

    # ---------------------------------------------------------------- commit, finish, retire

    def allowed_tokens(self, plan: StepPlan) -> np.ndarray:
        """What the rows of a constrained plan may say, once everything before it is committed: int32 [rows, words],
        a set bit for each id that may come; all of them for rows that follow no grammar."""
        words = -(-self.config.limits.vocab_size // 32)
        allowed = np.full((len(plan.rows), words), -1, dtype=np.int32)
        table = self.state.rows
        for index in plan.constrained.tolist():
            row = plan.rows[index]
            if table.finished[row]:  # by what was committed meanwhile: its token is nobody's
                continue
            request: Request = table.requests[row]
            assert request.constraint is not None
            request.constraint.fill_mask(allowed[index])
            self._end_if_constraint_failed(request)
        return allowed

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Takes a step's result.

        Raises:
          EngineError: a plan out of order, committed twice, or a result of another shape.
        """
        rows = self.state.rows
        if plan.step_id != rows.committed_step + 1:
            raise EngineError(f"step {plan.step_id} committed, but {rows.committed_step + 1} is the oldest in flight")
        outcomes = result.outcomes
        if outcomes.shape != (len(plan.rows), 2):
            raise EngineError(f"step {plan.step_id}: result of shape {outcomes.shape} for {len(plan.rows)} rows")
        rows.committed_step = plan.step_id
        status = outcomes[:, 1]
        now = self._clock()
        rows.last_progress[plan.rows] = self._last_progress = self.state.patience
        alive = rows.generation[plan.rows] == plan.generations
        if plan.chunks:
            self._commit_chunks(plan, alive.tolist(), status.tolist(), now)
            if result.prompt_scores is not None:
                commit_prompt_scores(plan, alive, result.prompt_scores)
        eventful = np.count_nonzero(status) > 0
        good = alive & (status <= _LENGTH) if eventful else alive
        named, ends, tokens = plan.rows, plan.ends, outcomes[:, 0]
        if 0 in good.tobytes():  # numpy takes 20 times as long to say so
            named, ends, tokens = named[good], ends[good], tokens[good]
        rows.written_len[named] = ends
        requests: list[Request] = rows.requests[named].tolist()
        token_ids: list[int] = tokens.tolist()
        for request, token_id in zip(requests, token_ids, strict=True):
            request.output_ids.append(token_id)
        if result.scores is not None:
            commit_scores(requests, token_ids, result.scores[good])
        if plan.is_constrained:
            for index in plan.constrained[good[plan.constrained]].tolist():
                if status[index] != RowStatus.STOP:
                    self._advance(rows.requests[plan.rows[index]])
        if eventful:
            for row, is_alive, code in zip(plan.rows.tolist(), alive.tolist(), status.tolist(), strict=True):
                if is_alive and not rows.finished[row]:
                    self._finish_as_device_says(rows.requests[row], code)
        return StepOutput(plan.step_id, requests, token_ids, self.take_news())

    def _advance(self, request: Request) -> None:
        constraint = request.constraint
        assert constraint is not None
        constraint.advance(request.output_ids[-1])
        if not self._end_if_constraint_failed(request) and constraint.is_complete:
            self._finish(request, FinishReason.GRAMMAR_COMPLETE)

    def _end_if_constraint_failed(self, request: Request) -> bool:
        assert request.constraint is not None
        problem = request.constraint.error
        if problem is not None:
            asked = request.sampling.structured_output
            self._finish(request, FinishReason.ERROR, error=InvalidRequestError("structured_output", asked, problem))
        return problem is not None

    def take_news(self) -> list[Request]:
        """Requests finished since the last call, in the order in which they finished."""
        news, self._newly_finished = self._newly_finished, []
        return news

    def _commit_chunks(self, plan: StepPlan, alive: list[bool], statuses: list[int], now: float) -> None:
        rows = self.state.rows
        for chunk, is_alive, status in zip(plan.chunks, alive, statuses, strict=False):
            request = chunk.request
            if not is_alive or status == RowStatus.BAD_LOGITS:
                continue
            rows.written_len[chunk.row] = chunk.end
            if not rows.leaving[chunk.row]:
                assert request.extend_ids is not None
                self.state.memory.cache_pages(chunk.row, request.extend_ids[: chunk.end])
            if status <= _LENGTH and request.first_token_time is None:
                request.first_token_time = now
                self.state.release_samples(request, now)

    def _finish_as_device_says(self, request: Request, status: int) -> None:
        if status in (RowStatus.RUNNING, RowStatus.VOID):
            return
        if status == RowStatus.LENGTH:
            self._finish(request, FinishReason.LENGTH)
        elif status == RowStatus.STOP:
            token_id = request.output_ids[-1]
            by_caller = token_id in request.sampling.stop_token_ids
            self._finish(request, FinishReason.STOP_TOKEN if by_caller else FinishReason.EOS, matched=token_id)
        elif status == RowStatus.NO_TOKEN:
            rules = f"its rules leave no token to choose at position {request.committed_len}"
            self._finish(request, FinishReason.ERROR, error=InvalidRequestError("sampling_params", None, rules))
        else:
            position = request.committed_len
            self.counters.bad_rows += 1
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
            self.state.leave_queue(request)
        else:
            self.state.leave(request)
            self.state.rows.finish(request.row)
            del self.state.running[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.matched_token_id = matched
        request.error = error
        request.finish_time = self._clock()
        self._newly_finished.append(request)
        self.state.release_samples(request, request.finish_time)

    def retire(self) -> None:
        """Takes back leaving rows that no step in flight names, and pages that fell out of a window."""
        rows = self.state.rows
        if 1 in rows.leaving.tobytes():
            for row in (rows.leaving & ~rows.in_flight).nonzero()[0].tolist():
                self.state.retire(row, self._clock())
        if self.config.frees_window:
            self._drop_out_of_window()

    def _drop_out_of_window(self) -> None:
        """The next step that is not committed reads from ``written_len - window + 1`` on, at the earliest."""
        rows, memory, window = self.state.rows, self.state.memory, self.config.window
        assert window is not None
        first = np.maximum(rows.written_len - window + 1, 0)
        for row in ((first // memory.page_size > memory.first_page) & ~rows.leaving).nonzero()[0].tolist():
            memory.drop_before(row, int(first[row]))

    # ---------------------------------------------------------------- proof

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant does not hold. Cheap enough for every step of a test."""
        self.state.check_integrity()
