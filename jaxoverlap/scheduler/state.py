"""Who is where: the rows, their memory, the queue. Shared by the parts of the scheduler, and owned by it.

waiting ──take_row──► running (prefilling → decoding) ──leave──► leaving ──retire──► finished, or waiting again
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from jaxoverlap.cache.row_memory import RowMemory
from jaxoverlap.request import Request, RequestStatus
from jaxoverlap.scheduler.config import SchedulerConfig
from jaxoverlap.scheduler.policy import RunningView, promised_tokens
from jaxoverlap.scheduler.row_table import RowTable
from jaxoverlap.scheduler.samples import HeldSamples
from jaxoverlap.scheduler.waiting_queue import WaitingQueue

_DEADLINES = 1000
"""Of finished requests that are kept at least, so that looking for them is rare."""


@dataclass(slots=True)
class Counters:
    """Since the start.

    Attributes:
      admitted_tokens: tokens of requests when they were first admitted; cached_tokens: those found in the cache. What a
        preempted request finds again is its own, and says nothing of the cache's use.
      computed_tokens: prompt tokens launched; preemptions: rows taken from requests that were not finished.
      bad_rows: rows ended by NaN or infinite logits.
    """

    admitted_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    bad_rows: int = 0


class SchedulerState:
    """Moves that keep the parts in step with each other; what to move is decided elsewhere."""

    def __init__(self, config: SchedulerConfig) -> None:
        limits = config.limits
        self.config = config
        self.rows = RowTable(config.max_running)
        self.memory = RowMemory(
            config.max_running,
            config.pages_per_row,
            limits.num_pages,
            limits.page_size,
            prefix_cache=config.prefix_cache,
        )
        self.waiting = WaitingQueue()
        self.held = HeldSamples()
        self.running: dict[int, Request] = {}
        """With a row, unfinished; those about to lose the row included."""
        self.prefilling: dict[int, Request] = {}
        """Of the running, those whose known tokens are not all launched."""
        self.deadlines: list[tuple[float, int]] = []
        """A heap of times and request ids, those of finished requests among them."""
        self.counters = Counters()
        self.patience = 0.0
        """Seconds that have passed for who waits for progress; not while the caller was away."""

    def find(self, request_id: int) -> Request | None:
        return self.waiting.get(request_id) or self.running.get(request_id) or self.held.get(request_id)

    def enqueue(self, request: Request, now: float) -> None:
        request.status = RequestStatus.WAITING
        request.waiting_since = now
        if self.config.prefix_cache and self.held.must_wait(request):
            self.held.hold(request)
        else:
            self.waiting.push(request)

    def release_samples(self, leader: Request, now: float) -> None:
        """The leader's prompt is computed, or never will be."""
        for request in self.held.release(leader):
            self.enqueue(request, now)

    def leave_queue(self, request: Request) -> None:
        if request.request_id in self.held:
            self.held.remove(request)
        else:
            self.waiting.remove(request)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.held)

    def set_deadline(self, request: Request) -> None:
        if request.deadline is None:
            return
        heapq.heappush(self.deadlines, (request.deadline, request.request_id))
        if len(self.deadlines) > 2 * (self.num_waiting + len(self.running)) + _DEADLINES:
            self.deadlines = [entry for entry in self.deadlines if self.find(entry[1]) is not None]
            heapq.heapify(self.deadlines)

    def overdue(self, now: float) -> list[Request]:
        """Unfinished requests whose deadline has passed; each is named once."""
        found = []
        while self.deadlines and self.deadlines[0][0] <= now:
            request = self.find(heapq.heappop(self.deadlines)[1])
            if request is not None:
                found.append(request)
        return found

    def promise_to(self, request: Request) -> int:
        """KV positions to keep for a request if it is admitted now."""
        return promised_tokens(request.committed_len, request.max_len, self.config.headroom, request.num_preemptions)

    def pages_for(self, length: int) -> int:
        return -(-length // self.config.limits.page_size)

    def take_row(self, request: Request, now: float) -> bool:
        """Gives a waiting request a row and the cached prefix of its tokens; False if there is no room."""
        if not self.rows.free_rows:
            return False
        row, promised = self.rows.free_rows[-1], self.promise_to(request)
        tokens = request.known_ids()
        pages, reuse = self.pages_for(promised), not request.needs_prompt_scores
        cached = self.memory.seat(row, tokens, request.cache_salt, pages, reuse=reuse)
        if cached is None:
            return False
        self.waiting.remove(request)
        self.rows.take(row, request, cached, promised, self.patience)
        request.row = row
        request.extend_ids = tokens
        request.status = RequestStatus.RUNNING
        request.running_since = now
        if request.admit_time is None:
            request.admit_time = now
            request.cached_tokens = cached
            self.counters.admitted_tokens += len(tokens)
            self.counters.cached_tokens += cached
        self.running[request.request_id] = self.prefilling[request.request_id] = request
        return True

    def leave(self, request: Request) -> None:
        """A running request will not be planned any more; its row retires when nothing in flight names it."""
        row = request.row
        assert row is not None
        self.prefilling.pop(request.request_id, None)
        self.rows.decoding[row] = False
        self.rows.leaving[row] = True
        self.memory.stop_growing(row)

    def retire(self, row: int, now: float) -> None:
        """Takes a leaving row back, and sends its request to the queue unless it is finished.

        What committed steps have written stays in the prefix cache; not if it led to an error, for it may be bad.
        """
        request: Request = self.rows.requests[row]
        preempted = not self.rows.finished[row]
        written = 0 if request.error is not None else int(self.rows.written_len[row])
        self.memory.release(row, request.known_ids()[:written])
        self.rows.give_back(row)
        request.row = None
        request.extend_ids = None
        if preempted:
            del self.running[request.request_id]
            request.num_preemptions += 1
            self.counters.preemptions += 1
            self.enqueue(request, now)

    def running_views(self, *, running_until: float | None = None) -> list[RunningView]:
        """Possible victims. `running_until` counts a turn as had only by who was admitted before."""
        rows, views = self.rows, []
        for request in self.running.values():
            row = request.row
            assert row is not None and request.running_since is not None
            if rows.leaving[row]:
                continue
            used = rows.decoding[row] and rows.planned_len[row] >= rows.promised_len[row]
            long_enough = running_until is None or request.running_since <= running_until
            pages = self.memory.releasable(row)
            views.append(RunningView(row, request.priority, request.request_id, pages, bool(used and long_enough)))
        return views

    def pages_on_their_way(self) -> int:
        """Pages of rows that need no victim to come free: leaving, or launched to their last token."""
        rows = self.rows
        done = (rows.planned_len == rows.max_len) & (rows.request_ids >= 0)
        return sum(self.memory.releasable(row) for row in (rows.leaving | done).nonzero()[0].tolist())

    def check_integrity(self) -> None:
        rows, memory = self.rows, self.memory
        rows.check_integrity()
        memory.check_integrity()
        some = np.count_nonzero
        assert not some(rows.planned_len > memory.allocated_len), "a position has no page"
        unfinished = (rows.request_ids >= 0) & ~rows.finished
        assert len(self.running) == some(unfinished), "running requests and rows disagree"
        assert all(request.row is not None and not rows.leaving[request.row] for request in self.prefilling.values())
        assert all(request.row is None for request in self.waiting.first(1000)), "a waiting request has a row"
        assert all(self.held.must_wait(request) for request in self.held), "a sample waits for nothing"
        idle = not self.running and not self.num_waiting and not some(rows.leaving)
        if idle:
            assert memory.num_available == memory.pool.num_pages and rows.num_running == 0, "idle, but not all is back"
