"""Does the simulator find what it is there for? One deliberate fault at a time, and a few lives from the first seed on.

Each fault is what some engine once did, or what one careless line in ours would do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from jaxoverlap.cache.prefix_cache import PrefixCache
from jaxoverlap.cache.row_memory import RowMemory
from jaxoverlap.request import Request
from jaxoverlap.scheduler.planner import Planner
from jaxoverlap.scheduler.row_table import RowTable
from jaxoverlap.scheduler.scheduler import Scheduler
from jaxoverlap.scheduler.state import SchedulerState
from tests.simulator import fails, script_of

LIVES = range(300)
Patch = Callable[[type, str, object], None]
FAULTS: dict[str, Callable[[Patch], None]] = {}


def fault(inject: Callable[[Patch], None]) -> Callable[[Patch], None]:
    FAULTS[inject.__name__.replace("_", " ")] = inject
    return inject


# -------------------------------------------------------------------- rows, steps in flight


@fault
def a_row_is_reused_while_a_step_names_it(patch):
    def retire(self):
        rows = self.state.rows
        for row in np.flatnonzero(rows.leaving).tolist():
            self.state.retire(row, self._clock())

    patch(Scheduler, "retire", retire)


@fault
def a_result_is_given_to_whoever_has_the_row_now(patch):
    """The same, and neither the row table nor commit notices."""
    a_row_is_reused_while_a_step_names_it(patch)
    give_back, commit = RowTable.give_back, Scheduler.commit

    def give_back_at_once(self, row):
        self.last_step[row] = -1
        give_back(self, row)

    def commit_by_row(self, plan, result):
        rows = self.state.rows
        free = np.array([rows.requests[row] is None for row in plan.rows], dtype=bool)
        generations, ids = rows.generation[plan.rows], rows.request_ids[plan.rows]
        owners = np.where(free, plan.generations, generations), np.where(free, plan.request_ids, ids)
        return commit(self, plan._replace(generations=owners[0], request_ids=owners[1]), result)

    patch(RowTable, "give_back", give_back_at_once)
    patch(RowTable, "check_integrity", lambda self: None)
    patch(Scheduler, "commit", commit_by_row)


@fault
def a_grammar_is_not_told_what_a_preempted_row_has_said(patch):
    advance = Scheduler._advance

    def advance_unless_it_leaves(self, request):
        if not self.state.rows.leaving[request.row]:
            advance(self, request)

    patch(Scheduler, "_advance", advance_unless_it_leaves)


@fault
def pages_are_freed_when_a_row_leaves_and_not_when_it_retires(patch):
    leave = SchedulerState.leave

    def leave_and_free(self, request):
        leave(self, request)
        memory, row = self.memory, request.row
        memory.pool.free(memory.page_table[row][memory.is_own[row]])
        memory.is_own[row] = False

    patch(SchedulerState, "leave", leave_and_free)
    patch(RowMemory, "_cache_pages", lambda self, row, tokens, **past_copies: None)
    patch(RowMemory, "check_integrity", lambda self: None)


@fault
def the_arrays_of_a_launched_step_are_written_again(patch):
    plan_decode, buffer = Planner._plan_decode, np.empty(64, np.int32)

    def into_one_buffer(self, decoding):
        rows, pages = plan_decode(self, decoding)
        buffer[: len(rows)] = rows
        return buffer[: len(rows)], pages

    patch(Planner, "_plan_decode", into_one_buffer)


@fault
def a_chunk_in_the_middle_of_a_prompt_publishes(patch):
    plan_chunk = Planner._plan_chunk
    patch(Planner, "_plan_chunk", lambda self, *given: plan_chunk(self, *given)._replace(publishes=True))


@fault
def the_device_is_not_told_of_a_new_page(patch):
    plan_decode = Planner._plan_decode

    def without_pages(self, decoding):
        rows, pages = plan_decode(self, decoding)
        return rows, np.full_like(pages, self._state.memory.no_page)

    patch(Planner, "_plan_decode", without_pages)


@fault
def deadlines_are_not_looked_at_before_a_launch(patch):
    patch(SchedulerState, "overdue", lambda self, now: [])


# -------------------------------------------------------------------- preemption


@fault
def a_preempted_request_starts_again_without_its_outputs(patch):
    patch(Request, "known_ids", lambda self: self.prompt_ids)


@fault
def a_token_in_flight_at_preemption_is_thrown_away_and_counted(patch):
    commit, plan_chunk = Scheduler.commit, Planner._plan_chunk
    thrown: dict[int, int] = {}

    def throwing_away(self, plan, result):
        rows = self.state.rows
        preempted = rows.leaving & ~rows.finished
        for row in plan.rows[preempted[plan.rows]].tolist():
            thrown[id(rows.requests[row])] = 1
        rows.generation[preempted] += 1
        output = commit(self, plan, result)
        rows.generation[preempted] -= 1
        return output

    def counting(self, request, *given):
        chunk = plan_chunk(self, request, *given)
        return chunk._replace(num_outputs=chunk.num_outputs + thrown.get(id(request), 0))

    patch(Scheduler, "commit", throwing_away)
    patch(Planner, "_plan_chunk", counting)


@fault
def a_token_in_flight_at_preemption_comes_twice(patch):
    retire = SchedulerState.retire

    def twice(self, row, now):
        request = self.rows.requests[row]
        if not self.rows.finished[row] and request.output_ids:
            request.output_ids.append(request.output_ids[-1])
        retire(self, row, now)

    patch(SchedulerState, "retire", twice)


# -------------------------------------------------------------------- memory


@fault
def a_page_that_is_not_full_is_not_counted(patch):
    patch(SchedulerState, "pages_for", lambda self, length: length // self.config.limits.page_size)


@fault
def the_last_page_of_a_row_is_not_returned(patch):
    release = RowMemory.release

    def forgetful(self, row):
        self.is_own[row, max(0, self.num_pages[row] - 1)] = False
        release(self, row)

    patch(RowMemory, "release", forgetful)


@fault
def a_promise_is_not_counted_when_others_are_admitted(patch):
    patch(RowMemory, "num_unpromised", RowMemory.num_available)


@fault
def a_page_leaves_the_window_one_token_too_early(patch):
    drop_before = RowMemory.drop_before
    patch(RowMemory, "drop_before", lambda self, row, position: drop_before(self, row, position + 1))


@fault
def the_page_table_is_rewritten_where_another_copy_is_cached(patch):
    cache_pages = RowMemory.cache_pages

    def one_copy(self, row, tokens):
        cache_pages(self, row, tokens)
        node = self._nodes[row]
        for key in self.cache.keys(tokens, node.depth) if self.prefix_cache_enabled else ():
            if self.cache.child(node, key) is None:
                break
            column = node.depth
            own = self.page_table[row, column : column + 1].copy()
            node, _ = self.cache.advance(node, key, -1)
            self.page_table[row, column], self.is_own[row, column] = node.page, False
            self._nodes[row] = node
            self.pool.free(own)

    patch(RowMemory, "cache_pages", one_copy)


# -------------------------------------------------------------------- prefix cache


@fault
def tokens_that_no_committed_step_has_written_are_cached(patch):
    retire = SchedulerState.retire

    def too_much(self, row, now):
        self.rows.written_len[row] = self.rows.requests[row].committed_len
        retire(self, row, now)

    patch(SchedulerState, "retire", too_much)


@fault
def the_last_page_that_matches_is_not_locked(patch):
    lock, unlock, advance = PrefixCache.lock, PrefixCache.unlock, PrefixCache.advance

    def advance_behind(self, node, key, page):
        lock(self, node)
        child, taken = advance(self, node, key, page)
        unlock(self, child)
        unlock(self, node.parent or node)
        lock(self, node)
        return child, taken

    patch(PrefixCache, "advance", advance_behind)
    patch(PrefixCache, "lock", lambda self, node: lock(self, node.parent or node))
    patch(PrefixCache, "unlock", lambda self, node: unlock(self, node.parent or node))
    patch(RowMemory, "check_integrity", lambda self: None)


@fault
def a_page_that_is_read_is_evicted(patch):
    take_evicted = PrefixCache.take_evicted

    def regardless(self, count):
        read = sorted((node for node in self.nodes() if node.holds), key=lambda node: node.depth)
        for node in read:
            self._unlocked[node] = None
            self._unlocked.move_to_end(node, last=False)
        pages = take_evicted(self, count)
        for node in read:
            self._unlocked.pop(node, None)
        return pages

    patch(PrefixCache, "take_evicted", regardless)


@fault
def the_whole_prompt_is_taken_from_the_cache(patch):
    seat = RowMemory.seat
    patch(RowMemory, "seat", lambda self, row, tokens, *given: seat(self, row, np.append(tokens, tokens[-1:]), *given))


@fault
def the_salt_is_ignored(patch):
    seat = RowMemory.seat
    patch(RowMemory, "seat", lambda self, row, tokens, salt, promised: seat(self, row, tokens, None, promised))


@fault
def a_page_is_found_by_its_own_tokens_and_not_by_all_before_it(patch):
    def match(self, tokens, salt):
        keys, nodes = list(self.keys(tokens, 0)), [node for node in self.nodes() if node.salt == salt]
        found = next((node for key in keys for node in nodes if node.key[1] == key), None)
        return found or original(self, tokens, salt)

    original = PrefixCache.match
    patch(PrefixCache, "match", match)


@pytest.mark.parametrize("name", FAULTS)
def test_a_deliberate_fault_is_found(name, monkeypatch):
    FAULTS[name](monkeypatch.setattr)
    seed = next((seed for seed in LIVES if fails(script_of(seed))), None)
    assert seed is not None, f"{len(LIVES)} lives and nobody noticed"
    monkeypatch.undo()
    assert fails(script_of(seed)) is None, f"seed {seed} fails without the fault"
