"""What the step log keeps of a plan, taken at its launch. A few microseconds, whatever the number of rows."""

from __future__ import annotations

from jaxoverlap.observe.step_log import ChunkRecord, FinishRecord, StepRecord
from jaxoverlap.request import Request
from jaxoverlap.scheduler.plan import StepPlan
from jaxoverlap.scheduler.scheduler import Scheduler


def record_of(plan: StepPlan, scheduler: Scheduler, *, turn: int, in_flight: int) -> StepRecord:
    """Of the plan that the scheduler has just made."""
    state = scheduler.state
    memory, table, rows = state.memory, state.rows, plan.rows
    num_pages = memory.num_pages[rows]
    chunks: tuple[ChunkRecord, ...] = ()
    if plan.chunks:
        chunks = tuple(
            ChunkRecord(chunk.request.request_id, chunk.start, chunk.end, chunk.publishes, chunk.page_table)
            for chunk in plan.chunks
        )
    return StepRecord(
        turn,
        plan.step_id,
        rows,
        plan.generations,
        plan.request_ids,
        chunks,
        plan.decode_new_pages,
        memory.last_page[plan.decode_rows],
        table.written_len[rows],
        plan.ends,
        num_pages,
        memory.page_size,
        plan.no_page,
        scheduler.num_running,
        scheduler.num_waiting,
        memory.pool.num_pages - memory.num_available,
        in_flight,
    )


def finish_of(request: Request) -> FinishRecord:
    assert request.finish_reason is not None
    return FinishRecord(
        request.request_id,
        request.finish_reason.value,
        request.arrival_time,
        request.admit_time,
        request.first_token_time,
        request.finish_time,
    )
