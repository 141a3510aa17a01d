"""The overlap loop: launch step n+1 before step n has been read back.

    turn        host                                          device
    k           plan k · launch k · wait k-1 · commit k-1     k-1 ······· k ···
    k+1         plan k+1 · launch k+1 · wait k · commit k     k ········· k+1 ·

`lookahead` is how many launched steps may stay unread at the end of a turn. 0 is the serial engine: the same
loop, which then reads each step right after its launch.
"""

from __future__ import annotations

from time import perf_counter

from jaxoverlap.observe.step_times import StepTimes, StepTimesLog
from jaxoverlap.runtime.result_queue import ResultQueue, Runner
from jaxoverlap.scheduler.plan import StepOutput
from jaxoverlap.scheduler.scheduler import Scheduler


class OverlapLoop:
    """One turn at a time; who calls `turn` owns the scheduler and may add and abort between turns."""

    def __init__(self, scheduler: Scheduler, runner: Runner, lookahead: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.lookahead = lookahead
        self.in_flight = ResultQueue()
        self.times = StepTimesLog()

    @property
    def has_work(self) -> bool:
        """Something is unfinished, in flight or not yet handed out."""
        return self.scheduler.has_unfinished or len(self.in_flight) > 0 or self.scheduler.has_news

    def turn(self) -> StepOutput:
        """Launches at most one step and commits at most one."""
        scheduler, in_flight = self.scheduler, self.in_flight

        started = perf_counter()
        plan = scheduler.plan()
        planned = perf_counter()
        if plan is not None:
            in_flight.push(plan, self.runner.launch(plan))
        launched = committing = perf_counter()
        if len(in_flight) > self.lookahead or (plan is None and in_flight):
            oldest, result = in_flight.pop()
            committing = perf_counter()
            output = scheduler.commit(oldest, result)
        else:
            output = StepOutput(None, (), (), scheduler.take_news())
        scheduler.retire()

        self.times.add(
            StepTimes(
                plan=planned - started,
                launch=launched - planned,
                wait=committing - launched,
                commit=perf_counter() - committing,
                launched_rows=0 if plan is None else len(plan.rows),
                launched_tokens=0 if plan is None else plan.num_tokens,
            )
        )
        return output
