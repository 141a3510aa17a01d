"""Planning: from who is where to the next step. Decides who decodes, which chunks run, who gets in, who gives way."""

from __future__ import annotations

import numpy as np

from jaxoverlap.request import Request
from jaxoverlap.scheduler.plan import PrefillChunk, StepPlan
from jaxoverlap.scheduler.policy import (
    PromptView,
    StepView,
    choose_sharers,
    choose_step,
    choose_victims,
    chunk_cost,
    chunk_len,
    order_by_prefix,
)
from jaxoverlap.scheduler.state import SchedulerState

_NOBODY = (-1, 0, 0)
_NO_ROWS = np.empty(0, dtype=np.intp)
_LOOK_AHEAD = 32
"""Requests of the queue among which `cache_aware_order` chooses."""
_TRIES = 1 / 32
"""Of `max_prompt_wait`, between two attempts to make room."""


class Planner:
    """Makes plans, one after the other."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._mixed_sizes = state.config.mixed_sizes
        self._no_new_pages = np.full(state.rows.num_rows, state.memory.no_page, dtype=np.int32)
        self._no_new_pages.setflags(write=False)  # plans have views of it
        self._next_step_id = 0
        self._prefill_streak = 0
        self._last_decode = -np.inf
        self._refused = _NOBODY  # a request, and how many pages were not enough for it
        self._next_try = -np.inf
        self._room_for: Request | None = None  # rows were preempted for it, so it gets what came free
        self._favourite: tuple[tuple[int, int, int], Request] | None = None  # by its prefix, and when that was so

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to launch now."""
        state, config = self._state, self._state.config
        can_prefill = bool(state.prefilling) or self._admit(now)  # which may take rows from those that decode
        decoding = state.rows.decoding.nonzero()[0].copy()  # it gives a view of an array that can be written to
        view = StepView(
            can_prefill=can_prefill,
            can_decode=len(decoding) > 0,
            prefill_streak=self._prefill_streak,
            decode_waited=now - self._last_decode,
        )
        kind = choose_step(
            view,
            mixed_steps=config.mixed_steps,
            max_prefill_streak=config.max_prefill_streak,
            max_decode_wait=config.max_decode_wait,
        )
        decode_rows, new_pages = self._plan_decode(decoding) if kind.decode else (_NO_ROWS, _NO_ROWS)
        # When every decoding row has to sit out for want of a page, prompts must go on, or nobody would.
        prefill = kind.prefill or (view.can_prefill and not len(decode_rows))
        chunks = self._plan_chunks(now, beside_decode=len(decode_rows) > 0) if prefill else ()
        if not chunks and not len(decode_rows):
            return None
        if kind.decode or not view.can_decode:
            self._last_decode, self._prefill_streak = now, 0
        else:
            self._prefill_streak += 1
        return self._freeze(chunks, decode_rows, new_pages)

    # ---------------------------------------------------------------- decoding rows

    def _plan_decode(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One token for each of `chosen`, all decoding rows, but for those that have to sit out. Returns who goes, and
        the new pages: whole columns at once, since nearly all rows need nothing else."""
        rows, memory = self._state.rows, self._state.memory
        growing = (rows.decoding & (rows.planned_len == memory.allocated_len)).nonzero()[0]
        goes = rows.decoding
        if len(growing):
            without = self._rows_without_page(growing)
            goes = rows.decoding.copy()  # of those that are left when room has been made
            goes[without] = False
            growing, chosen = growing[goes[growing]], chosen[goes[chosen]]
        new_pages = self._no_new_pages[: len(chosen)]
        if len(growing):
            new_pages = new_pages.copy()
            new_pages[chosen.searchsorted(growing)] = memory.grow_by_one(growing)
        rows.planned_len += goes
        rows.decoding &= rows.planned_len < rows.max_len
        return chosen, new_pages

    def _rows_without_page(self, growing: np.ndarray) -> np.ndarray:
        """Rows that can't have the page they need now, after making room; they sit this step out.

        Promised pages are there. Who is beyond its promise takes what is left over, the oldest first.
        """
        state, memory = self._state, self._state.memory
        beyond = growing[memory.num_pages[growing] >= memory.promised[growing]]
        left_over = memory.num_unpromised
        if len(beyond) <= left_over:
            return _NO_ROWS
        short = len(beyond) - left_over - state.pages_on_their_way()
        if short > 0:
            for row in choose_victims(state.running_views(), short):
                state.leave(state.rows.requests[row])
        requests: list[Request] = state.rows.requests.tolist()
        by_age = sorted(
            (row for row in beyond.tolist() if not state.rows.leaving[row]),
            key=lambda row: (requests[row].priority, requests[row].request_id),
        )
        # What a victim was promised is already left over; its pages come when it retires.
        return np.array(by_age[memory.num_unpromised :], dtype=np.intp)

    # ---------------------------------------------------------------- prompts

    def _plan_chunks(self, now: float, *, beside_decode: bool) -> tuple[PrefillChunk, ...]:
        """Fills the token budget: prompts under way first, then new ones; the last is cut to fit.

        Of prompts under way the more urgent go first, and equals share (`choose_sharers`): the shorter are served
        first, so that what they do not need is left for the longer. As a rule there is one; more when a prompt was let
        in beside it.
        """
        config, prefilling = self._state.config, self._state.prefilling
        budget: float = config.mixed_budget if beside_decode else config.max_batched_tokens
        most = config.max_mixed_chunks if beside_decode else config.max_prefill_rows
        per_token = config.context_per_token if beside_decode else None
        if self._head_is_pressing(now, may_share=len(prefilling) < most):
            self._admit(now)
        under_way = list(prefilling.values())
        chunks: list[PrefillChunk] = []
        while budget >= 1 and len(chunks) < most:
            if not under_way:
                if not self._admit(now):
                    break
                under_way.append(next(reversed(prefilling.values())))
            sharers = self._sharers(under_way, budget, per_token, is_first=not chunks)
            if not sharers:
                break
            request = sharers[0]
            under_way.remove(request)
            sizes = self._mixed_sizes if len(sharers) == 1 and not chunks else ()
            chunk = self._plan_chunk(request, max(1.0, budget / len(sharers)), per_token, sizes)
            chunks.append(chunk)
            budget -= chunk_cost(len(chunk.token_ids), chunk.start, per_token)
        return tuple(chunks)

    def _sharers(
        self, under_way: list[Request], budget: float, context_per_token: float | None, *, is_first: bool
    ) -> list[Request]:
        """Who shares the budget, of the most urgent; somebody does if nobody has had any of it."""
        urgent = min(request.priority for request in under_way)
        equals = [request for request in under_way if request.priority == urgent]
        views = [self._prompt_view(request) for request in equals]
        chosen = choose_sharers(views, budget, context_per_token)
        if not chosen and is_first:
            chosen = [min(range(len(equals)), key=lambda index: views[index].last_step)]
        return [equals[index] for index in chosen]

    def _prompt_view(self, request: Request) -> PromptView:
        rows, row = self._state.rows, request.row
        assert row is not None and request.extend_ids is not None
        start = int(rows.planned_len[row])
        return PromptView(len(request.extend_ids) - start, start, int(rows.last_step[row]))

    def _head_is_pressing(self, now: float, *, may_share: bool) -> bool:
        """The first in the queue should not wait until the prompts under way are through."""
        under_way = self._state.prefilling.values()
        head = self._state.waiting.head() if under_way else None
        if head is None:
            return False
        more_urgent = all(head.priority < request.priority for request in under_way)
        return more_urgent or (may_share and now - head.waiting_since >= self._state.config.max_prompt_wait)

    def _plan_chunk(
        self, request: Request, budget: float, context_per_token: float | None, sizes: tuple[int, ...]
    ) -> PrefillChunk:
        state, rows, row = self._state, self._state.rows, request.row
        tokens = request.extend_ids
        assert row is not None and tokens is not None
        start = int(rows.planned_len[row])
        end = start + chunk_len(len(tokens) - start, start, budget, context_per_token, sizes)
        state.memory.grow(row, end)
        rows.planned_len[row] = end
        publishes = end == len(tokens)
        if publishes:
            del state.prefilling[request.request_id]
            rows.decoding[row] = end < request.max_len
        state.counters.computed_tokens += end - start
        return PrefillChunk(
            request=request,
            row=row,
            start=start,
            token_ids=tokens[start:end].copy(),
            num_outputs=len(request.output_ids),
            publishes=publishes,
            page_table=state.memory.page_table[row, : state.memory.num_pages[row]].copy(),
        )

    # ---------------------------------------------------------------- admission

    def _admit(self, now: float) -> bool:
        """Lets the next request of the queue in, if there is room; makes some if it has waited too long."""
        state = self._state
        if not len(state.waiting):
            return False
        free_row = bool(state.rows.free_rows)
        request = self._next_in_queue(now) if free_row else state.waiting.head()
        assert request is not None
        left_over, cached = state.memory.num_unpromised, state.memory.cache.num_pages
        refused_id, not_enough, cached_then = self._refused
        hopeless = refused_id == request.request_id and left_over <= not_enough and cached == cached_then
        if free_row and not hopeless:
            if state.take_row(request, now):
                self._refused, self._room_for = _NOBODY, None
                return True
            self._refused = (request.request_id, left_over, cached)
        wait = state.config.max_prompt_wait
        if now - request.waiting_since >= wait and now >= self._next_try:
            self._next_try = now + _TRIES * wait  # looking at every row is not for every step
            self._make_room(request, now)
        return False

    def _next_in_queue(self, now: float) -> Request | None:
        state, config = self._state, self._state.config
        head, favoured = state.waiting.head(), self._room_for
        if head is None:
            return None
        if favoured is not None and favoured.request_id in state.waiting and favoured.priority <= head.priority:
            return favoured
        if not config.cache_aware_order or head.num_preemptions:
            return head
        head_waited = now - head.waiting_since
        if head_waited >= config.max_prompt_wait:
            return head
        # To match so many prompts is not for every step.
        then = head.request_id, len(state.waiting), state.memory.cache.num_pages
        if self._favourite is None or self._favourite[0] != then:
            candidates = [r for r in state.waiting.first(_LOOK_AHEAD) if r.priority == head.priority]
            cached = (state.memory.cache.match(r.prompt_ids[:-1], r.cache_salt).depth for r in candidates)
            first = order_by_prefix(cached, head_waited, config.max_prompt_wait)[0]
            self._favourite = then, candidates[first]
        favourite = self._favourite[1]
        return favourite if favourite.request_id in state.waiting else head

    def _make_room(self, request: Request, now: float) -> None:
        """Preempts for a request that has waited too long: rows that had their turn, and so long at least."""
        state = self._state
        promised = state.pages_for(state.promise_to(request))
        reuse = not request.needs_prompt_scores
        pages = state.memory.shortage(request.known_ids(), request.cache_salt, promised, reuse=reuse)
        pages -= state.pages_on_their_way()
        rows = 0 if state.rows.free_rows or np.count_nonzero(state.rows.leaving) else 1
        views = state.running_views(running_until=now - state.config.max_prompt_wait)
        victims = choose_victims(views, pages, rows=rows, at_least_priority=request.priority)
        enough = sum(view.pages for view in views if view.row in victims) >= pages and len(victims) >= rows
        if not enough:
            self._room_for = None  # what room there is, others may have
            return  # half of it is of no use, and would cost the victims their place
        for row in victims:
            state.leave(state.rows.requests[row])
        self._room_for = request

    # ---------------------------------------------------------------- freeze

    def _freeze(
        self, chunks: tuple[PrefillChunk, ...], decode_rows: np.ndarray, decode_new_pages: np.ndarray
    ) -> StepPlan:
        table, rows = self._state.rows, decode_rows
        if chunks:
            rows = np.concatenate([np.array([chunk.row for chunk in chunks], dtype=np.intp), decode_rows])
        constrained, is_scored = _NO_ROWS, False
        if table.constrained or table.scored:  # few requests ask for either
            named = rows.tolist()
            constrained = np.array([i for i, row in enumerate(named) if row in table.constrained], dtype=np.intp)
            is_scored = not table.scored.isdisjoint(named)
        table.last_step[rows] = self._next_step_id
        plan = StepPlan(
            step_id=self._next_step_id,
            chunks=chunks,
            decode_rows=decode_rows,
            decode_new_pages=decode_new_pages,
            rows=rows,
            generations=table.generation[rows],
            request_ids=table.request_ids[rows],
            ends=table.planned_len[rows],
            no_page=self._state.memory.no_page,
            constrained=constrained,
            is_scored=is_scored,
        )
        self._next_step_id += 1
        plan.seal()
        return plan
